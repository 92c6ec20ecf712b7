"""FP8 and LLM.int8 against their definitions, a scale at a time; what their layouts refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.compress.targets import Linear
from hone.model.linear_spec import Norm
from hone.model.quantized.layouts import layout_of


def matrix(rows: int = 256, columns: int = 160, dtype: torch.dtype = torch.float32, modules: tuple = ()) -> Matrix:
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weights[7] = 0
    weights[200, 3] = 100
    return Matrix("m", weights.to(dtype).float(), dtype, modules=modules)


@pytest.mark.parametrize(("strategy", "extent"), [("tensor", (256, 160)), ("channel", (1, 160)), ("block", (128, 128))])
def test_the_largest_weight_of_a_scale_becomes_448(strategy: str, extent: tuple[int, int]) -> None:
    made = matrix()
    QUANTIZERS.read({"kind": "fp8", "strategy": strategy, "scale_dtype": "float32"}).apply(made)
    by_hand = torch.empty_like(made.original)
    for top in range(0, 256, extent[0]):
        for left in range(0, 160, extent[1]):
            block = made.original[top : top + extent[0], left : left + extent[1]]
            largest = block.abs().max()
            scale = largest / 448 if largest > 0 else torch.tensor(1.0)
            by_hand[top : top + extent[0], left : left + extent[1]] = (block / scale).to(
                torch.float8_e4m3fn
            ).float() * scale
    assert torch.equal(made.weight, by_hand)
    codes = made.stored.codes.float()
    assert codes.abs().max() == 448 and torch.isfinite(codes).all()
    assert made.errors().weight < 0.04


def test_scales_of_bfloat16_do_not_overflow_codes() -> None:
    """A rounded-down scale takes the largest weight beyond 448, which e4m3fn would store as NaN."""
    made = matrix(dtype=torch.bfloat16)
    QUANTIZERS.read({"kind": "fp8"}).apply(made)
    assert made.stored.scales.dtype == torch.bfloat16
    assert torch.isfinite(made.stored.codes.float()).all()


def test_blocks_over_two_projections_name_all_of_them() -> None:
    """128 rows are two heads of 64; a layer with one key head has 64 rows of keys."""
    attention = "model.layers.3.self_attn"
    modules = ((f"{attention}.q_proj", 256), (f"{attention}.k_proj", 64), (f"{attention}.v_proj", 64))
    qkv = Linear("mixer.qkv", modules, 256, Norm("mixer_norm"))
    with pytest.raises(SpecError) as caught:
        QUANTIZERS.read({"kind": "fp8", "strategy": "block"}).check_linear("layers.3.mixer.qkv", qkv)
    assert caught.value.what == (
        "blocks of 128 rows do not divide the 64 rows of model.layers.3.self_attn.k_proj, and layers.3.mixer.qkv is one matrix "
        "of q_proj (256), k_proj (64), v_proj (64)"
    )
    assert caught.value.fix == (
        "use strategy=channel, one scale a row, or leave it unchanged: ignore=['lm_head', 'q_proj', 'k_proj', 'v_proj']"
    )
    QUANTIZERS.read({"kind": "fp8", "strategy": "channel"}).check_linear("layers.3.mixer.qkv", qkv)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "fp8"}, "layout fp8 stores blocks, not one scale per channel"),
        ({"strategy": "block", "scale_dtype": "float16"}, "layout fp8 stores float32 scales, not float16"),
    ],
)
def test_fp8_options_that_no_file_holds_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        QUANTIZERS.read({"kind": "fp8", **changes}).check("layers.0.mixer.qkv", 256, 256)


def test_blocks_must_divide_every_module(family_folder, compress) -> None:
    """transformers infers a block's size from the number of scales, and would read 192 rows as blocks of 96."""
    with pytest.raises(SpecError, match=r"cannot store .*gate_proj, 192 x 256: blocks of 128 x 128 must divide it"):
        sizes = {"hidden_size": 256, "intermediate_size": 192, "head_dim": 64}
        compress(family_folder("llama", **sizes), {"kind": "fp8", "strategy": "block"})


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
def test_formats_of_words_refuse_what_their_readers_do_not_take(layout: str, family_folder, compress) -> None:
    folder = family_folder("llama", hidden_size=80, intermediate_size=96, head_dim=20)
    with pytest.raises(SpecError, match=rf"layout {layout} cannot store .*q_proj, 80 x 80: rows and columns .* 32"):
        compress(folder, {"kind": "rtn", "layout": layout, "group_size": 0})
    with pytest.raises(SpecError, match="float16 scales, not bfloat16"):
        step = {"kind": "rtn", "layout": layout, "group_size": 32, "scale_dtype": "bfloat16"}
        QUANTIZERS.read(step).check("layers.0.mixer.qkv", 64, 64)
    with pytest.raises(SpecError, match=f"5 bits, strategy group, in {layout}"):
        QUANTIZERS.read({"kind": "rtn", "layout": layout, "group_size": 32, "bits": 5}).check("m", 64, 64)


def test_awq_has_one_group_size(family_folder, compress) -> None:
    step = {"kind": "rtn", "layout": "awq", "group_size": 64, "uneven": "nearest"}
    with pytest.raises(SpecError, match="awq stores all modules alike, but these have group sizes 48, 64"):
        compress(family_folder("llama"), step)
    made = compress(family_folder("llama"), step | {"layout": "gptq"})
    block = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    assert block["group_size"] == 64 and {"bits": 4, "group_size": 48} in block["dynamic"].values()


# LLM.int8


def test_llm_int8_rounds_a_row_to_127_steps_of_its_largest_weight() -> None:
    made = matrix(modules=(128, 64, 64))
    QUANTIZERS.read({"kind": "llm_int8"}).apply(made)
    largest = made.original.abs().amax(1)
    for row in (0, 7, 200, 255):
        step = largest[row].double() / 127
        wanted = torch.zeros(160) if row == 7 else (made.original[row].double() / step).round()
        assert torch.equal(made.stored.codes[row].double(), wanted.double())
    for rows in (slice(0, 128), slice(128, 192), slice(192, 256)):
        stored = made.stored.rows(rows)
        assert torch.equal(layout_of(stored.scheme).write(stored)["SCB"], largest[rows])


def test_llm_int8_is_what_bitsandbytes_makes_of_a_float16_weight() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    made = matrix(dtype=torch.float16)
    made.original[7, 0] = 1e-3  # bitsandbytes divides by the largest weight of a row, which must not be zero
    QUANTIZERS.read({"kind": "llm_int8"}).apply(made)
    codes, largest, _ = functional.int8_vectorwise_quant(made.original.half())
    written = layout_of(made.stored.scheme).write(made.stored)
    assert torch.equal(written["weight"], codes)
    assert torch.allclose(written["SCB"], largest, rtol=1e-3)


def test_llm_int8_writes_its_threshold_for_bitsandbytes(family_folder, compress, tmp_path: Path) -> None:
    made = compress(family_folder("llama"), {"kind": "llm_int8", "threshold": 5.0})
    block = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    assert block["load_in_8bit"] and not block["load_in_4bit"] and block["llm_int8_threshold"] == 5.0
    assert made.figures["relative_weight_error"].value < 0.02
    with pytest.raises(SpecError, match="float32 scales"):
        QUANTIZERS.read({"kind": "llm_int8", "scale_dtype": "float16"}).check("m", 64, 64)
