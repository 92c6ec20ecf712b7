"""Matrices of experts: each has the statistics of its own tokens, is compressed and stored by itself, and is read again."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.compress.calibration import Calibration, from_text
from hone.compress.capture import Flow
from hone.compress.matrix import Matrix
from hone.compress.quantizers.gptq import GPTQ
from hone.compress.statistics import LEAST_TOKENS
from hone.compress.targets import linears, select
from hone.model.hf import Checkpoint, load, save
from hone.model.linear import ExpertLinears, Experts
from hone.model.parallel.reading import LocalCheckpoint
from hone.model.quantized.dense import dequantized
from hone.parallel.group import Group
from hone.parallel.place import Place
from tests.compress.conftest import stopped_before
from tests.model.extensions.routed_model import NUM_EXPERTS, UNUSED

TOKENS = torch.arange(2 * 30).reshape(2, 30) * 7 % 250
ROWS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


pytestmark = pytest.mark.usefixtures("experts_line")


@pytest.fixture(scope="module")
def samples(experts_folder: Path, calibration_text: Path) -> Calibration:
    return from_text(calibration_text, experts_folder, num_sequences=16, seq_len=32, seed=0)


def inputs_of_experts(experts_folder: Path, tokens: np.ndarray, valid: Tensor | None = None) -> dict[str, list[Tensor]]:
    """The rows that each expert of layer 0 reads, by linear, routed by hand; of tokens that are `valid` alone."""
    model = load(experts_folder)
    layer = model.layers[0]
    kept: dict[str, Tensor] = {}
    layer.feed_forward.register_forward_pre_hook(lambda _, args: kept.update(x=args[0].flatten(0, 1)))
    with torch.no_grad():
        model(torch.from_numpy(tokens))
        x = kept["x"] if valid is None else kept["x"][valid]
        chosen = layer.feed_forward.router(x).softmax(-1).topk(2, -1).indices
        own = [x[(chosen == expert).any(-1)] for expert in range(NUM_EXPERTS)]
        gated = [
            (rows @ gate_up.T).chunk(2, -1)
            for rows, gate_up in zip(own, layer.feed_forward.gate_up.weight, strict=True)
        ]
        inner = [torch.nn.functional.silu(gate) * up for gate, up in gated]
    return {"gate_up": own, "down": inner}


def test_gptq_of_experts_is_one_of_each_on_its_own_tokens(experts_folder: Path, samples: Calibration, compress) -> None:
    made = compress(experts_folder, {"kind": "gptq", "group_size": 32})
    step = GPTQ(kind="gptq", group_size=32)
    packed, whole = load(made.folder).layers[0].feed_forward, load(experts_folder).layers[0].feed_forward
    for name, each in inputs_of_experts(experts_folder, samples.tokens).items():
        weights = packed.get_submodule(name).dequantize(torch.float32)
        assert isinstance(packed.get_submodule(name), ExpertLinears)
        for expert, rows in enumerate(each):
            alone = Matrix("", whole.get_submodule(name).weight[expert].detach(), torch.float32, modules=(32,) * 2)
            few = len(rows) < LEAST_TOKENS
            alone.statistics = {"hessian": torch.eye(rows.shape[1]) if few else rows.T @ rows / len(rows)}
            step.apply(alone)
            # The sums of H are in another order, which moves few weights to the next point of the grid.
            assert (weights[expert] - alone.weight).abs().gt(1e-6).float().mean() < 0.02
    rows = {row["name"]: row for row in map(json.loads, (made.folder / "layers.jsonl").read_text().splitlines())}
    seen = [rows[f"model.layers.0.feed_forward.down.{expert}"]["tokens"] for expert in range(NUM_EXPERTS)]
    assert seen == [len(one) for one in inputs_of_experts(experts_folder, samples.tokens)["down"]]
    assert sum(seen) == 2 * samples.num_tokens and seen[UNUSED] == 0
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value


def test_an_expert_without_tokens_is_compressed_as_without_calibration(experts_folder: Path, compress) -> None:
    nearest = compress(experts_folder, {"kind": "rtn", "group_size": 32, "scale": "search"}, name="nearest")
    made = compress(experts_folder, {"kind": "gptq", "group_size": 32})
    weights = [load(one.folder).layers[0].feed_forward.down.dequantize(torch.float32) for one in (nearest, made)]
    # Another code rounds them, so that a weight in the middle may fall the other way.
    assert (weights[1][UNUSED] - weights[0][UNUSED]).abs().gt(1e-6).float().mean() < 0.02
    assert not torch.allclose(weights[1][0], weights[0][0])
    rows = {row["name"]: row for row in map(json.loads, (made.folder / "layers.jsonl").read_text().splitlines())}
    row = rows[f"model.layers.0.feed_forward.gate_up.{UNUSED}"]
    assert row["tokens"] == 0 and row["error"] is None
    assert row["notes"] == ["an expert saw fewer than 16 calibration tokens: compressed as without calibration"]


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bytes(experts_folder: Path, compress) -> None:
    steps = [{"kind": "awq", "grid_size": 4}, {"kind": "gptq", "group_size": 32}]
    whole = compress(experts_folder, *steps, name="whole").folder
    with stopped_before(1):
        compress(experts_folder, *steps, name="stopped")
    again = compress(experts_folder, *steps, name="stopped").folder
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


@pytest.mark.parametrize("observer", ["min_max", pytest.param("cross_entropy", marks=pytest.mark.slow)])
def test_the_inputs_of_an_expert_without_tokens_have_the_range_of_all(
    observer: str, experts_folder: Path, calibration_text: Path, compress
) -> None:
    step = {"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_tensor", "observer": {"kind": observer}}
    made = Checkpoint(compress(experts_folder, step, calibration_text=str(calibration_text)).folder)
    scales = [
        float(made.tensor(f"model.layers.0.mlp.experts.{expert}.down_proj.input_scale"))
        for expert in range(NUM_EXPERTS)
    ]
    assert scales[UNUSED] == pytest.approx(max(scales), rel=1e-6 if observer == "min_max" else 0.5)
    assert torch.isfinite(load(made.folder)(TOKENS)).all()


@torch.no_grad()
def test_padding_is_no_token_of_an_expert(experts_folder: Path, samples: Calibration) -> None:
    owners = np.zeros(samples.tokens.shape, np.int32)
    owners[:, 20:] = 1
    owners[::2, 25:] = -1
    padded = Calibration(samples.tokens, owners, samples.source)
    source = Checkpoint(experts_folder).with_each_expert()
    flow = Flow(padded, 8, "cpu", torch.float32)
    flow.embed(source.build_ends())
    layer = source.build_layer(0)
    readers = {one.reads: [one.path] for one in linears(source.config, 0)}
    found = flow.statistics(layer, readers, {"meansquare"})
    count = sum(int(found[f"feed_forward.down.{expert}"]["tokens"]) for expert in range(NUM_EXPERTS))
    assert count == 2 * padded.num_tokens == 2 * int((owners >= 0).sum())
    # The router reads what all experts read, each token of it twice.
    total = sum(found[f"feed_forward.gate_up.{expert}"]["meansquare"] for expert in range(NUM_EXPERTS))
    torch.testing.assert_close(
        total, 2 * found["feed_forward.router"]["meansquare"], atol=1e-6, rtol=1e-4
    )  # other orders of sums


@pytest.mark.parametrize(
    "step",
    [
        {"kind": "rtn", "group_size": 32},
        pytest.param({"kind": "rtn", "group_size": 32, "symmetric": False}, marks=pytest.mark.slow),
        pytest.param({"kind": "fp8", "activations": "none"}, marks=pytest.mark.slow),
        {"kind": "fp8", "activations": "fp8_token"},
        pytest.param({"kind": "nvfp4"}, marks=pytest.mark.slow),
        pytest.param({"kind": "svd"}, marks=pytest.mark.slow),
    ],
)
def test_experts_are_stored_each_and_read_again(step: dict, experts_folder: Path, compress, tmp_path: Path) -> None:
    made = compress(experts_folder, step).folder
    model, stored = load(made), Checkpoint(made)
    assert any(name.startswith("model.layers.1.mlp.experts.3.gate_proj.") for name in stored.names())
    assert "model.layers.0.mlp.router.weight" in stored.names()
    logits = model(TOKENS)
    if step["kind"] != "svd":
        dense, x, ends = (
            dequantized(stored).build(),
            torch.randn(6, 32),
            torch.tensor([1, 1, 4, 6, 6], dtype=torch.int32),
        )
        for one, other in zip(model.layers, dense.layers, strict=True):
            packed, whole = one.feed_forward.down, other.feed_forward.down
            assert isinstance(packed, ExpertLinears) and isinstance(whole, Experts)
            close = {"atol": 1e-3, "rtol": 1e-3}  # weights are multiplied by their scales in 16 bits here or there
            torch.testing.assert_close(packed.dequantize(torch.float32), whole.weight, **close)
            close = close if step.get("activations") != "fp8_token" else {"atol": 0.2, "rtol": 0.2}
            torch.testing.assert_close(packed(x, ends), whole(x, ends), **close)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        save(model, tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(TOKENS), logits)


def test_a_pipeline_stage_reads_its_experts(experts_folder: Path, compress) -> None:
    folder, place = compress(experts_folder, {"kind": "rtn", "group_size": 32}).folder, Place(stage=1, num_stages=2)
    stage, whole = LocalCheckpoint(folder, place, Group(place)).build(), load(folder)
    for name in ROWS:
        own, wanted = (one.layers[-1].feed_forward.get_submodule(name) for one in (stage, whole))
        assert torch.equal(own.dequantize(torch.float32), wanted.dequantize(torch.float32))


@pytest.mark.parametrize(
    "step", [{"kind": "smoothquant", "inputs": "all"}, {"kind": "cross_layer_equalization"}, {"kind": "rotation"}]
)
def test_transforms_reach_every_expert_and_leave_the_result(
    step: dict, experts_folder: Path, calibration_text: Path, compress
) -> None:
    made = compress(experts_folder, step, calibration_text=str(calibration_text)).folder
    whole, changed = load(experts_folder), load(made)
    torch.testing.assert_close(changed(TOKENS), whole(TOKENS), atol=1e-4, rtol=1e-4)
    before, after = (model.layers[1].feed_forward.gate_up.weight for model in (whole, changed))
    assert all(not torch.allclose(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([{"kind": "gptaq", "group_size": 32}], "each may send it to other experts"),
        ([{"kind": "rtn", "group_size": 32}, {"kind": "eora", "rank": 4}], "eora writes an adapter, which cannot wrap"),
    ],
)
def test_what_cannot_be_done_to_experts_is_said_with_the_way_out(
    steps, says, experts_folder: Path, calibration_text, compress
) -> None:
    with pytest.raises(SpecError, match=says) as raised:
        compress(experts_folder, *steps, calibration_text=str(calibration_text))
    assert r"ignore=['lm_head', '\.experts\.']" in raised.value.fix


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_engines_in_which_quantized_experts_were_not_tried_are_refused(
    engine: str, experts_folder: Path, compress
) -> None:
    with pytest.raises(SpecError, match="quantized experts, which were not tried there"):
        compress(experts_folder, {"kind": "rtn", "group_size": 32}, engine=engine)


def test_a_router_is_compressed_only_where_it_is_named(experts_folder: Path) -> None:
    config = Checkpoint(experts_folder).config
    chosen = {one.path for one in select(config, [r"\.layers\."], ["lm_head"])[0]}
    assert chosen == {"mixer.qkv", "mixer.out"} | {
        f"feed_forward.{name}.{expert}" for name in ROWS for expert in range(NUM_EXPERTS)
    }
    assert [one.path for one in select(config, ["router"], ["lm_head"])[0]] == ["feed_forward.router"]
    some = select(config, [r"\.layers\."], ["lm_head", r"experts\.[1-9]"])[0]
    assert [one.path for one in some if one.expert is not None] == ["feed_forward.gate_up.0", "feed_forward.down.0"]
