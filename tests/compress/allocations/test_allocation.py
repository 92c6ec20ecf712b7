"""Bit allocation: the knapsack against every choice, budgets that are kept, losses against their definition, what is refused."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hone.base.errors import FitError, SpecError
from hone.base.run import Run
from hone.compress import ALLOCATIONS, STEPS
from hone.compress.allocations import energies
from hone.compress.allocations.base import read_bytes
from hone.compress.allocations.sensitivity import output_errors
from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.compress.engine.job import Job
from hone.compress.quantizers.rtn import RoundToNearest
from hone.compress.targets import select
from hone.model.folder import weights_bytes
from hone.model.hf import Checkpoint, load
from hone.solvers import knapsack
from tests.compress.conftest import perplexity
from tests.compress.written.test_export import transformers_logits

RTN = {"kind": "rtn", "bits": 4, "group_size": 32, "scale": "signed"}


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 10)), min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(0, 160),
    st.sampled_from([1, 7, 1000]),
)
def test_the_knapsack_is_the_best_of_all_choices(items: list, budget: int, unit: int) -> None:
    sizes = [[unit * size for size, _ in item] for item in items]
    losses = [[loss for _, loss in item] for item in items]
    possible = [
        sum(losses[item][option] for item, option in enumerate(options))
        for options in itertools.product(*(range(len(item)) for item in items))
        if sum(sizes[item][option] for item, option in enumerate(options)) <= budget * unit
    ]
    chosen = knapsack.choose(sizes, losses, budget * unit)
    if chosen is None:
        assert not possible
        return
    assert sum(sizes[item][option] for item, option in enumerate(chosen)) <= budget * unit
    assert sum(losses[item][option] for item, option in enumerate(chosen)) == pytest.approx(min(possible))


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 10)), min_size=1, max_size=4), min_size=1, max_size=5),
    st.floats(0, 30),
)
@settings(max_examples=40, deadline=None)
def test_the_fewest_bytes_within_a_loss_are_those_of_all_choices(items: list, most: float) -> None:
    sizes, losses = ([[one[place] for one in options] for options in items] for place in (0, 1))
    found = knapsack.smallest(sizes, losses, most)
    every = itertools.product(*(range(len(options)) for options in items))
    total = lambda table, choice: sum(row[one] for row, one in zip(table, choice, strict=True))  # noqa: E731
    fits = [total(sizes, choice) for choice in every if total(losses, choice) <= most]
    assert (found is None) == (not fits)
    if found is not None:
        assert total(losses, found) <= most
        # Choices that use the whole loss to a millionth may be given up for the solver's tolerance.
        sure = [
            total(sizes, choice)
            for choice in itertools.product(*(range(len(options)) for options in items))
            if total(losses, choice) <= most - 1e-4 * (most - sum(map(min, losses)))
        ]
        assert total(sizes, found) <= min(sure, default=math.inf) and total(sizes, found) >= min(fits)


def test_coarse_units_never_exceed_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "MOST_UNITS", 10)
    draw = torch.Generator().manual_seed(0)
    sizes = [sorted(torch.randint(1, 1000, (3,), generator=draw).tolist()) for _ in range(20)]
    losses = [sorted(torch.rand(3, generator=draw).tolist(), reverse=True) for _ in range(20)]
    chosen = knapsack.choose(sizes, losses, 9000)
    assert sum(sizes[item][option] for item, option in enumerate(chosen)) <= 9000
    assert sum(losses[item][option] for item, option in enumerate(chosen)) < sum(values[0] for values in losses)


@pytest.mark.parametrize(
    ("text", "value"), [("6GB", 6 * 10**9), ("5.5 GiB", 5.5 * 2**30), ("800", 800), ("2kb", 2000), ("1MiB", 2**20)]
)
def test_sizes_are_read(text: str, value: float) -> None:
    assert read_bytes(text) == value


@pytest.mark.parametrize("text", ["6 gigs", "GB", "-1GB", ""])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is no size"):
        ALLOCATIONS.read({"kind": "hessian", "model_bytes": text})


def test_errors_are_those_of_the_outputs() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(16, 64, generator=draw), torch.randn(200, 64, generator=draw)
    quantizers = {bits: RoundToNearest(bits=bits, group_size=32) for bits in (2, 4)}
    found = output_errors(weight, x.T @ x / 200, quantizers)
    for bits, one in quantizers.items():
        lost = (x @ (one.nearest(weight) - weight).T).square().sum() / (x @ weight.T).square().sum()
        assert found[bits] == pytest.approx(float(lost), rel=1e-4)


@pytest.mark.parametrize("kind", ["hessian", "kl", "fisher", "pairs"])
def test_the_budget_is_used_and_kept(kind: str, family_folder, compress, calibration_text: Path) -> None:
    """Every matrix has the bits that the state said, transformers reads the mixture, and the bytes are those planned."""
    pytest.importorskip("compressed_tensors")
    made = compress(
        family_folder("qwen2"),
        RTN,
        allocation={"kind": kind, "bits_per_weight": 5.5, "bits": (2, 3, 4, 8), "num_sequences": 4},
        calibration_text=str(calibration_text),
        name=kind,
    )
    rows = [json.loads(line) for line in (made.folder / "layers.jsonl").read_text().splitlines()]
    assert len({row["bits"] for row in rows}) > 1
    kept = made.folder / "sensitivities.json"
    assert kept.exists() == (kind in ("hessian", "kl"))  # what predicts no divergence is not kept
    for row, name in zip(rows, json.loads(kept.read_text())["matrices"] if kept.exists() else (), strict=False):
        measured = json.loads(kept.read_text())["matrices"][name]
        assert measured["weights"] == row["weights"] and len(measured["losses"]) == len(measured["bytes"]) == 4
    spent = sum(row["weights"] * (row["bits"] + 16 / 32) for row in rows) / sum(row["weights"] for row in rows)
    assert 5.0 < spent <= 5.5 + 0.05  # the shape of each matrix, 16 bytes, is beside its codes
    estimate = made.figures["model_bytes"].estimate
    assert weights_bytes(made.folder) <= estimate.value <= weights_bytes(made.folder) * (1 + estimate.tolerance)
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (load(made.folder)(tokens) - transformers_logits(made.folder, tokens)).abs().max() <= 1e-5
    assert made.techniques[-1]["slot"] == "bit allocation" and made.techniques[-1]["kind"] == kind
    memory = made.figures["memory_growth_bytes"].estimate.formula
    assert ("the whole model" in memory, "its backward pass" in memory) == (kind != "hessian", kind == "fisher")


def test_the_block_that_writes_most_of_the_hidden_states_gets_the_bits(
    family_folder, compress, calibration_text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(family_folder("qwen2"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("layers.0.mlp.down_proj", "layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"):
        tensors[f"model.{name}.weight"] *= 0.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    made = compress(
        folder,
        RTN,
        allocation={"kind": "hessian", "bits_per_weight": 5.0, "bits": (2, 3, 8), "num_sequences": 4},
        calibration_text=str(calibration_text),
    )
    rows = [json.loads(line) for line in (made.folder / "layers.jsonl").read_text().splitlines()]
    written = {row["bits"] for row in rows if row["name"].startswith("model.layers.1.feed_forward")}
    others = {row["bits"] for row in rows if not row["name"].startswith("model.layers.1.feed_forward")}
    assert min(written) > max(others)


def test_curvature_is_output_errors_weighted_by_squared_gradients(
    family_folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand in float64, for labels that are given."""
    checkpoint = Checkpoint(family_folder("qwen2"))
    tokens = np.random.default_rng(0).integers(0, 300, (8, 32))
    job = Job(
        checkpoint,
        (STEPS.read(RTN),),
        select(checkpoint.config, (r"\.layers\.",), ("lm_head",)),
        "cpu",
        torch.float32,
    )
    flow = Flow(Calibration(tokens, None, {}), 4, "cpu", torch.float32)
    allocation = ALLOCATIONS.read({"kind": "fisher", "bits_per_weight": 4, "bits": (3, 6), "gradient_sequences": 8})
    labels = torch.from_numpy(np.random.default_rng(1).integers(0, 300, (8, 32)))
    monkeypatch.setattr(energies, "drawn", lambda model, hidden, rows, piece, flow: labels[piece])
    found = allocation.losses(job, flow, Run(quiet=True))
    for path in ("mixer.qkv", "feed_forward.down"):
        model, ends = load(checkpoint.folder, "cpu", torch.float64), []
        linear = model.layers[1].get_submodule(path)
        linear.register_forward_hook(lambda _, args, out, ends=ends: ends.append((args[0], out)))
        logits = model(torch.from_numpy(tokens))
        ((x, y),) = ends
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, y)
        x, energy = x.detach().flatten(0, 1), gradient.flatten(0, 1).square().mean(0)
        for bits in (3, 6):
            rounder = RoundToNearest(bits=bits, group_size=32, scale="signed")
            change = rounder.nearest(linear.weight.data.float()).double() - linear.weight.data
            expected = 0.5 * float(((x @ change.T).square().mean(0) * energy).sum())
            assert found[f"layers.1.{path}"][bits] == pytest.approx(expected, rel=1e-3)


def test_labels_are_drawn_from_the_predictions() -> None:
    """Frequencies of 4,096 labels within four standard errors of the probabilities; padding has no label."""
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, -30.0])
    model = SimpleNamespace(head=lambda hidden: logits.expand(len(hidden), -1))
    ids = np.zeros((2, 2048), np.int32)
    ids[1, 2000:] = -1
    flow = Flow(Calibration(np.ones((2, 2048), np.int64), ids, {}), 2, "cpu", torch.float32)
    labels = energies.drawn(model, torch.zeros(2, 2048, 4), torch.zeros(2, 2048), slice(0, 2), flow)
    assert (labels[1, 2000:] == -100).all() and (labels[1, :2000] >= 0).all()
    kept = labels[labels >= 0]
    found = torch.bincount(kept, minlength=5) / len(kept)
    expected = logits.softmax(-1)
    assert ((found - expected).abs() <= 4 * (expected * (1 - expected) / len(kept)).sqrt() + 1e-9).all()


def test_divergence_is_that_of_the_model_with_one_matrix_rounded(family_folder) -> None:
    checkpoint = Checkpoint(family_folder("qwen2"))
    tokens = np.random.default_rng(0).integers(0, 300, (4, 32))
    steps = (STEPS.read(RTN),)
    job = Job(checkpoint, steps, select(checkpoint.config, (r"\.layers\.",), ("lm_head",)), "cpu", torch.float32)
    flow = Flow(Calibration(tokens, None, {}), 4, "cpu", torch.float32)
    allocation = ALLOCATIONS.read({"kind": "kl", "bits_per_weight": 4, "bits": (2, 3), "probe_sequences": 2})
    losses = allocation.losses(job, flow, Run(quiet=True))
    dense, given = load(checkpoint.folder), torch.from_numpy(tokens[:2])
    with torch.no_grad():
        expected = dense(given).log_softmax(-1)
        for path in ("mixer.qkv", "feed_forward.down"):
            model = load(checkpoint.folder)
            module = model.layers[1].get_submodule(path)
            module.weight.data = RoundToNearest(bits=3, group_size=32, scale="signed").nearest(module.weight.data)
            kl = (expected.exp() * (expected - model(given).log_softmax(-1))).sum(-1).mean()
            found = losses[f"layers.1.{path}"]
            assert found[3] == pytest.approx(float(kl), rel=1e-3)
            assert found[2] > found[3]


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"steps": [{"kind": "magnitude"}]}, SpecError, "no step quantizes"),
        ({"allocation": {"kind": "hessian"}}, SpecError, "has no budget"),
        ({"allocation": {"kind": "hessian", "bits_per_weight": 4, "model_bytes": "1GB"}}, SpecError, "not both"),
        ({"allocation": {"kind": "hessian", "bits_per_weight": 4, "bits": (4, 16)}}, SpecError, "from 2 to 8"),
        ({"allocation": {"kind": "kl", "bits_per_weight": 4, "bits": (4, 8)}}, SpecError, "probe_bits 3 is none"),
        ({"allocation": {"kind": "hessian", "bits_per_weight": 1.5}}, FitError, "2 bits a weight take"),
        ({"allocation": {"kind": "hessian", "model_bytes": "10KB"}}, FitError, "raise model_bytes"),
        ({"calibration_text": None}, SpecError, "hessian needs hessian"),
    ],
)
def test_misuse_is_named(fields: dict, error: type, words: str, family_folder, compress, calibration_text) -> None:
    values = {"allocation": {"kind": "hessian", "bits_per_weight": 4}, "calibration_text": str(calibration_text)}
    values |= fields
    steps = values.pop("steps", [RTN])
    with pytest.raises(error, match=words):
        compress(family_folder("llama"), *steps, **values)


@pytest.mark.slow
def test_mixed_bits_beat_the_same_bits_for_all_on_a_real_model(stories, compress) -> None:
    """Between 3 and 4 bits for all the loss lies a tenth of the way or more below the straight line from one to the other."""
    model, text, rows = stories
    options = {"calibration_text": str(text), "num_sequences": 40, "seq_len": 128}
    step = {"kind": "rtn", "group_size": 32, "uneven": "nearest"}

    def bytes_and_loss(name: str, bits: int, **more) -> tuple[float, float]:
        made = compress(model, {**step, "bits": bits}, name=name, **options, **more)
        return made.figures["model_bytes"].value, math.log(perplexity(made.folder, rows))

    (small, worst), (large, best) = bytes_and_loss("3", 3), bytes_and_loss("4", 4)
    size, loss = bytes_and_loss("mixed", 3, allocation={"kind": "kl", "bits_per_weight": 3.8})
    assert small < size < large
    line = worst + (best - worst) * (size - small) / (large - small)
    assert loss < line - 0.1 * (worst - best)


def test_pairs_are_what_two_rounded_matrices_lose_beyond_the_sum(family_folder) -> None:
    """Against a model whose two matrices are rounded by hand, and with bits of which the fewer have four times the error."""
    checkpoint = Checkpoint(family_folder("qwen2"))
    tokens = np.random.default_rng(0).integers(0, 300, (4, 32))
    targets = select(checkpoint.config, (r"\.layers\.",), ("lm_head",))
    job = Job(checkpoint, (STEPS.read(RTN),), targets, "cpu", torch.float32)
    flow = Flow(Calibration(tokens, None, {}), 4, "cpu", torch.float32)
    allocation = ALLOCATIONS.read({"kind": "pairs", "bits_per_weight": 4, "bits": (2, 3), "probe_sequences": 2})
    names = [
        f"layers.{index}.{one.path}"
        for index, linears in enumerate(targets)
        for one in linears
        if one.path != "lm_head"
    ]
    losses = {name: {2: 0.04, 3: 0.01} for name in names}
    found = allocation.pairs(losses, job, flow, Run(quiet=True))
    assert len(found) == len(names) * (len(names) - 1) // 2
    pair = ("layers.0.mixer.qkv", "layers.1.feed_forward.down")
    dense, model, given = load(checkpoint.folder), load(checkpoint.folder), torch.from_numpy(tokens[:2])
    with torch.no_grad():
        for name in pair:
            module = model.get_submodule(name)
            module.weight.data = RoundToNearest(bits=3, group_size=32, scale="signed").nearest(module.weight.data)
        expected = dense(given).log_softmax(-1)
        together = float((expected.exp() * (expected - model(given).log_softmax(-1))).sum(-1).mean())
    beyond = together - 0.02
    assert np.array(found[pair]) == pytest.approx(beyond * np.array([[4.0, 2.0], [2.0, 1.0]]), rel=1e-3, abs=1e-7)
