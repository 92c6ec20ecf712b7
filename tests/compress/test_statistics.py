"""Statistics of calibration inputs: what they are, that they are gathered once for each input; and steps that edit weights."""

from __future__ import annotations

import struct
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from hone.compress import PRUNERS
from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.compress.matrix import Matrix
from hone.compress.statistics import RANGES, STATISTICS, Samples
from hone.model.hf import Checkpoint, load
from hone.model.quantized.scheme import Scheme


@pytest.fixture
def flow(tiny_llama: Path) -> Flow:
    """Hidden states of 5 sequences of 8 tokens in front of the first layer; the last 3 tokens of each are padding."""
    tokens = np.arange(40).reshape(5, 8)
    owners = np.where(np.arange(8) < 5, 0, -1).astype(np.int32)[None].repeat(5, 0)
    made = Flow(Calibration(tokens, owners, {}), 2, "cpu", torch.float32, paired=True)
    ends = Checkpoint(tiny_llama).build_ends(dtype=torch.float32)
    made.embed_dense(ends)
    made.embed(ends)
    return made


def test_every_statistic_is_of_the_tokens_that_count(flow: Flow, tiny_llama: Path) -> None:
    layer = Checkpoint(tiny_llama).build_layer(0, dtype=torch.float32)
    flow.states += 0.1 * torch.randn(flow.states.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        x, dense = (layer.mixer_norm(states)[:, :5].flatten(0, 1) for states in (flow.states, flow.dense_states))
    found = flow.statistics(layer, {"mixer_norm": ["mixer.qkv"]}, STATISTICS | RANGES)["mixer.qkv"]
    expected = {
        "hessian": x.T @ x / len(x), "cross": (dense - x).T @ x / len(x), "mean": x.mean(0), "absmean": x.abs().mean(0), "absmax": x.abs().amax(0),
        "meansquare": x.square().mean(0),
        "samples": x,
        "tokens": torch.tensor([len(x)]),
        "extremes": torch.stack([torch.stack((part.min(), part.max())) for part in x.view(5, 5, -1).split(2)]),
        "histogram": histogram_by_hand(x),
    }  # fmt: skip
    assert found.keys() == expected.keys() == STATISTICS.keys() | RANGES.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-5), name


@pytest.mark.parametrize("columns", [1023, 1024, 1500, 2049])
def test_sums_of_products_are_whole_in_blocks(columns: int) -> None:
    """Several blocks, the last of them smaller; two batches."""
    x = torch.randn(6, columns, generator=torch.Generator().manual_seed(columns))
    gathered = STATISTICS["hessian"](columns, len(x), x.device)
    gathered.add(x[:4])
    gathered.add(x[4:])
    found = gathered.value()
    assert torch.allclose(found.double(), x.T.double() @ x.double() / len(x), atol=1e-5)


def histogram_by_hand(x: torch.Tensor) -> torch.Tensor:
    """Counts of the upper 16 bits of float32 numbers rounded to bfloat16, one number at a time."""
    counts = torch.zeros(1 << 16, dtype=torch.int64)
    for one in x.flatten().tolist():
        low, high = struct.pack("<f", float(torch.tensor(one).bfloat16()))[2:]
        counts[low | high << 8] += 1
    return counts


def test_histograms_do_not_depend_on_batches_or_their_order() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * 100
    whole, pieces = (RANGES["histogram"](8, 50, x.device) for _ in range(2))
    whole.add(x)
    for part in (*x[30:].split(7), x[:30]):
        pieces.add(part)
    assert torch.equal(whole.value(), pieces.value()) and int(whole.value().sum()) == x.numel()


def test_only_what_is_asked_for_is_gathered_and_once_for_each_input(flow: Flow, tiny_llama: Path, monkeypatch) -> None:
    layer = Checkpoint(tiny_llama).build_layer(0, dtype=torch.float32)
    made = []

    class Counted(STATISTICS["absmax"]):
        def __init__(self, *args) -> None:
            made.append(self)
            super().__init__(*args)

    monkeypatch.setitem(STATISTICS, "absmax", Counted)
    readers = {"mixer_norm": ["mixer.qkv", "mixer.out"], "feed_forward_norm": ["feed_forward.gate_up"]}
    found = flow.statistics(layer, readers, {"absmax"})
    assert len(made) == 2 and all(values.keys() == {"absmax"} for values in found.values())
    assert found["mixer.qkv"] is found["mixer.out"]


def test_samples_are_bounded_and_spread_over_all_tokens() -> None:
    x = torch.arange(3000.0)[:, None]
    samples = Samples(1, 3000, x.device)
    for part in x.split(700):
        samples.add(part)
    kept = samples.value().flatten()
    assert len(kept) == Samples.LIMIT and torch.equal(kept, torch.arange(512) * 3000 // 512 * 1.0)


def test_a_stored_form_is_the_weight_from_then_on() -> None:
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    matrix = Matrix("w", weight, torch.float32)
    matrix.current = weight * 0.5
    assert torch.equal(matrix.weight, weight * 0.5) and torch.equal(matrix.original, weight)
    matrix.prune(weight > 0)
    assert (matrix.weight[weight <= 0] == 0).all()
    scheme = Scheme(8, 0, "int-quantized")
    matrix.stored = scheme.quantize(matrix.weight, torch.full((4, 1), 0.1))
    assert torch.equal(matrix.weight, matrix.stored.codes.float() * 0.1)
    assert matrix.errors().zeros == int((matrix.stored.codes == 0).sum())


HALVE = '''
    """A step that edits the float weight, as someone new would add it."""
    from hone.compress.step import Step

    class Halve(Step):
        """Halves every weight."""

        def apply(self, matrix):
            matrix.current = matrix.current * 0.5
'''


@pytest.mark.slow
def test_what_a_step_edits_is_what_is_written_and_quantized(
    tiny_llama: Path, compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "someones_halve.py").write_text(textwrap.dedent(HALVE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(PRUNERS, "rows", {**PRUNERS.rows, "halve": "someones_halve:Halve"})
    eight = {"kind": "rtn", "bits": 8, "group_size": 0}
    before, dense = load(tiny_llama), load(compress(tiny_llama, {"kind": "halve"}, name="dense").folder)
    packed = load(compress(tiny_llama, {"kind": "halve"}, eight, name="packed").folder)
    for layer in range(2):
        whole = before.layers[layer].mixer.qkv.weight
        assert torch.equal(dense.layers[layer].mixer.qkv.weight, whole * 0.5)
        stored = packed.layers[layer].mixer.qkv.dequantize(torch.float32)
        assert (stored - whole * 0.5).norm() < 0.02 * whole.norm()
