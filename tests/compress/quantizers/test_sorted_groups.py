"""Groups of sorted columns: which column is in which group, codes against the sorted matrix solved as it is, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS
from hone.compress.matrix import Matrix
from hone.model.hf import load
from hone.model.quantized.dequantizing import Dequantizing
from tests.compress.written.test_export_loaders import SIZES, tensors_of

STEP = {"kind": "sorted_groups", "group_size": 32}


def matrix(spread: float = 1.0) -> Matrix:
    """Every fourth column is `spread` times as large; inputs are largest at other columns."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(48, 128, generator=generator)
    weights[:, ::4] *= spread
    inputs = torch.randn(512, 128, generator=generator)
    inputs[:, 1::4] *= 10
    return Matrix("m", weights, torch.float16, {"hessian": inputs.T @ inputs / 512})


@pytest.mark.parametrize(("by", "first"), [("weights", 0), ("inputs", 1), ("products", 1)])
def test_a_group_has_columns_of_one_size(by: str, first: int) -> None:
    made = matrix(spread=5.0)
    QUANTIZERS.read({**STEP, "by": by}).apply(made)
    assert made.stored is not None and made.stored.index is not None
    groups = [torch.nonzero(made.stored.index == group).flatten() for group in range(4)]
    assert groups[0].tolist() == list(range(first, 128, 4))
    assert all(len(one) == 32 for one in groups)


@pytest.mark.parametrize("compensate", [True, False])
def test_codes_are_those_of_the_sorted_matrix(compensate: bool) -> None:
    made = matrix(spread=5.0)
    QUANTIZERS.read({**STEP, "compensate": compensate}).apply(made)
    order = torch.argsort(made.original.norm(dim=0), descending=True)
    H = made.statistics["hessian"][order][:, order]
    plain = Matrix("m", made.original[:, order].contiguous(), torch.float16, {"hessian": H})
    solver = {"kind": "gptq"} if compensate else {"kind": "rtn", "scale": "search"}
    QUANTIZERS.read({**solver, "group_size": 32, "layout": "gptq"}).apply(plain)
    assert made.stored is not None and plain.stored is not None
    assert torch.equal(made.stored.codes[:, order], plain.stored.codes)
    assert torch.equal(made.weight[:, order], plain.weight)


def test_sorted_groups_round_columns_of_two_sizes_better() -> None:
    errors = {}
    for kind in ("sorted_groups", "gptq"):
        made = matrix(spread=8.0)
        QUANTIZERS.read({"kind": kind, "group_size": 32, "layout": "gptq"}).apply(made)
        errors[kind] = made.errors()
    assert errors["sorted_groups"].weight < 0.8 * errors["gptq"].weight
    assert errors["sorted_groups"].output < 0.8 * errors["gptq"].output


def test_pruned_weights_stay_zero() -> None:
    made = matrix()
    keep = torch.rand(made.original.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    made.prune(keep)
    QUANTIZERS.read(STEP).apply(made)
    assert bool((made.weight[~keep] == 0).all()) and bool((made.weight[keep] != 0).any())


def test_a_folder_says_desc_act_and_q_k_and_v_have_one_order(family_folder, compress) -> None:
    made = compress(family_folder("llama", **SIZES), STEP)
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    block = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    assert block["quant_method"] == "gptq" and block["desc_act"] is True and block["group_size"] == 32
    stored = tensors_of(made.folder)
    orders = [stored[f"model.layers.0.self_attn.{one}_proj.g_idx"] for one in "qkv"]
    assert torch.equal(orders[0], orders[1]) and torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], torch.arange(256, dtype=torch.int32) // 32)
    linears = [one for one in load(made.folder).modules() if isinstance(one, Dequantizing)]
    assert len(linears) == 8 and all(one.index is not None for one in linears)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "leaves no groups to sort"),
        ({"group_size": 96}, r"does not divide the 256 input features of m\n.*use one of .*, 256, or uneven=nearest"),
        ({"bits": 5}, r"5 bits, strategy group, in gptq, at m\n.*set kind=gptq with layout=pack-quantized"),
        ({"activations": "int8_token"}, "quantized activations in the layout gptq"),
    ],
)
def test_what_no_file_holds_is_refused(options: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        QUANTIZERS.read({**STEP, **options}).check("m", 256, 256)


def test_patterns_of_neighbours_are_refused() -> None:
    with pytest.raises(SpecError, match="pattern 2:4 is of neighbours"):
        QUANTIZERS.read({**STEP, "sparsity": 0.5, "pattern": "2:4"})
    with pytest.raises(SpecError, match="leave compensate out"):
        QUANTIZERS.read({**STEP, "sparsity": 0.5, "compensate": False})


def test_an_embedding_is_refused_by_name(family_folder, compress, calibration_text: Path) -> None:
    with pytest.raises(SpecError, match="layout gptq cannot store the embedding"):
        compress(family_folder("llama", **SIZES), STEP, targets=[r"\.layers\.", "embed_tokens"])
