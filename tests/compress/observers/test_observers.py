"""Observers: the ranges they choose, each against a plain second way to find it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress import QUANTIZERS, gradients
from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.compress.engine.job import Job
from hone.compress.observers import OBSERVERS
from hone.compress.statistics import RANGES
from hone.compress.targets import matrix_name, select
from hone.model.hf import Checkpoint, load
from hone.model.quantized.scheme import Activations
from hone.ops.rounding import ranges
from hone.ops.rounding.inputs import ACTIVATIONS, round_inputs, static_tensors

INT4 = Activations(4, dynamic=False, per="tensor")
INT8, ASYMMETRIC, FP8 = (ACTIVATIONS[name] for name in ("int8_tensor", "int8_tensor_asymmetric", "fp8_tensor"))


def batches() -> list[torch.Tensor]:
    """Four batches of bfloat16 values [16, 32] with heavy tails, to the right more than to the left."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, 32, generator=generator)
    x = x * (1 + 6 * (torch.rand(x.shape, generator=generator) < 0.004)) + 0.2
    return [*torch.where(x < 0, x * 0.5, x).bfloat16().float()]


def gathered() -> dict[str, torch.Tensor]:
    made = {name: RANGES[name](32, 64, torch.device("cpu")) for name in ("extremes", "histogram")}
    for part in batches():
        for statistic in made.values():
            statistic.add(part)
    return {name: statistic.value() for name, statistic in made.items()}


def error(x: torch.Tensor, activations, low: float, high: float) -> float:
    made = round_inputs(x.double(), activations, static_tensors(activations, low, high))
    return float((made.values * made.scales - x).square().sum())


def test_a_histogram_counts_values() -> None:
    values, counts = ranges.counted(gathered()["histogram"])
    expected, times = torch.stack(batches()).double().unique(return_counts=True)
    assert torch.equal(values, expected) and torch.equal(counts, times.double())


@pytest.mark.parametrize("activations", [INT8, ASYMMETRIC, FP8])
def test_min_max_and_moving_average(activations) -> None:
    parts = batches()
    low, high = OBSERVERS.read("min_max").range(gathered(), activations)
    assert (low, high) == (float(torch.stack(parts).min()), float(torch.stack(parts).max()))
    for momentum in (0.01, 0.5, 1.0):
        observer = OBSERVERS.read({"kind": "moving_average", "momentum": momentum})
        low, high = float(parts[0].min()), float(parts[0].max())
        for part in parts[1:]:
            low = (1 - momentum) * low + momentum * float(part.min())
            high = (1 - momentum) * high + momentum * float(part.max())
        assert observer.range(gathered(), activations) == pytest.approx((low, high))
    assert observer.range(gathered(), activations) == (float(parts[3].min()), float(parts[3].max()))


@pytest.mark.parametrize("percent", [100.0, 99.9, 99.0, 50.0])
def test_percentiles_are_those_of_numpy(percent: float) -> None:
    x = torch.stack(batches()).flatten().double().numpy()
    observer = OBSERVERS.read({"kind": "percentile", "percentile": percent})
    edge = float(np.percentile(np.abs(x), percent, method="inverted_cdf"))
    assert observer.range(gathered(), INT8) == (-edge, edge)
    sides = [float(np.percentile(x, 50 + sign * percent / 2, method="inverted_cdf")) for sign in (-1, 1)]
    assert observer.range(gathered(), ASYMMETRIC) == tuple(sides)


@pytest.mark.parametrize("activations", [INT4, INT8, ASYMMETRIC, FP8])
def test_mse_loses_least_of_the_ranges_it_tries(activations) -> None:
    x = torch.stack(batches())
    low, high = OBSERVERS.read("mse").range(gathered(), activations)
    found = error(x, activations, low, high)
    ends = [(float(x.min()) * ratio, float(x.max()) * ratio) for ratio in ranges.RATIOS]
    errors = [error(x, activations, *one) for one in ends]
    assert found <= min(errors) * (1 + 1e-9)
    if activations.symmetric:
        assert (low, high) == ends[errors.index(min(errors))]
    if activations is INT4:
        assert found < 0.5 * errors[0], "nothing was gained by clipping"


def naive_divergence(x: np.ndarray, edge: float, largest: float) -> float:
    """Of 8-bit integers on a symmetric range, from the numbers themselves, in loops."""
    width = 2 * largest / ranges.BINS
    counts = np.histogram(x, bins=ranges.BINS, range=(-largest, largest))[0].astype(float)
    centers = -largest + width * (np.arange(ranges.BINS) + 0.5)
    scale = np.float32(edge / 127.5)
    inside = [index for index, center in enumerate(centers) if -edge <= center <= edge]
    p = {index: counts[index] for index in inside}
    p[inside[0]] += counts[: inside[0]].sum()
    p[inside[-1]] += counts[inside[-1] + 1 :].sum()
    levels: dict[int, list[int]] = {}
    for index in inside:
        level = max(-128, min(127, round(float(centers[index] / scale))))
        if p[index] > 0:
            levels.setdefault(level, []).append(index)
    kept, total = sum(counts[index] for index in inside), sum(p.values())
    found = 0.0
    for bins in levels.values():
        q = sum(counts[index] for index in bins) / len(bins) / kept
        for index in bins:
            found += math.inf if q <= 0 else p[index] / total * math.log(p[index] / total / q)
    return found


def test_entropy_is_the_divergence_of_the_paper() -> None:
    x = np.random.default_rng(0).standard_t(4, 40_000)
    largest = float(np.abs(x).max())
    width = 2 * largest / ranges.BINS
    centers = torch.arange(ranges.BINS, dtype=torch.float64) * width + width / 2 - largest
    counts = torch.tensor(np.histogram(x, bins=ranges.BINS, range=(-largest, largest))[0]).double()
    for ratio in (1.0, 0.5, 0.2):
        ours = ranges.divergence(centers, counts, INT8, -largest * ratio, largest * ratio)
        assert ours == pytest.approx(naive_divergence(x, largest * ratio, largest), rel=1e-6)


def test_bins_spread_rounded_values_over_what_was_rounded_to_them() -> None:
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 8
    histogram = RANGES["histogram"](1, 1, x.device)
    histogram.add(x[:, None])
    centers, counts = ranges.bins(*ranges.counted(histogram.value()), -8.0, 8.0)
    assert float(counts.sum()) == pytest.approx(len(x)) and float(counts[centers < 0].sum()) == pytest.approx(0, abs=1)
    inside = counts[(centers > 0.1) & (centers < 7.9)]
    assert float(inside.min()) > 0.5 * float(inside.mean()), "bfloat16's gaps are empty bins"


@pytest.mark.parametrize("activations", [INT8, ASYMMETRIC, FP8])
def test_entropy_clips_outliers_and_keeps_the_rest(activations) -> None:
    x = torch.stack(batches())
    low, high = OBSERVERS.read("entropy").range(gathered(), activations)
    assert low <= 0 < high <= float(x.max()) * (1 + 1e-6)
    assert ((x >= low) & (x <= high)).float().mean() > 0.98
    if activations.number == "int":
        assert high < 0.8 * float(x.max())


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_constant_input_has_a_range(name: str) -> None:
    for value in (0.0, 2.5, -2.5):
        made = {one: RANGES[one](4, 4, torch.device("cpu")) for one in ("extremes", "histogram")}
        for statistic in made.values():
            statistic.add(torch.full((4, 4), value))
        statistics = {one: statistic.value() for one, statistic in made.items()}
        statistics["gradients"] = statistics["histogram"].double()
        for activations in (INT8, ASYMMETRIC, FP8):
            low, high = OBSERVERS.read(name).range(statistics, activations)
            x = torch.full((1, 4), value)
            assert error(x, activations, low, high) <= 1e-3 * max(float(x.square().sum()), 1e-9), (name, value)


def test_cross_entropy_weighs_errors_by_gradients() -> None:
    """With equal gradients it is mse; where the largest values alone matter, nothing is clipped."""
    statistics = gathered()
    statistics["gradients"] = 1e-3 * statistics["histogram"].double()
    ends = OBSERVERS.read("cross_entropy").range(statistics, INT4)
    assert ends == OBSERVERS.read("mse").range(statistics, INT4)
    x = torch.stack(batches())
    statistics["gradients"][:] = 0
    large = x[(x > 0.9 * x.max()) | (x < 0.9 * x.min())].bfloat16().view(torch.uint16).to(torch.int64)
    statistics["gradients"][large] = 1
    low, high = OBSERVERS.read("cross_entropy").range(statistics, INT4)
    assert high > 0.9 * float(x.max()) and low < 0.9 * float(x.min())
    assert high > 1.1 * ends[1]


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_the_loss(packed: bool, tiny_llama: Path) -> None:
    """Against autograd on the loss of each document apart, in float64 and loops; padding has no gradient."""
    tokens = np.random.default_rng(0).integers(0, 64, (2, 8))
    owners = np.asarray([[0, 0, 0, 1, 1, 1, -1, -1], [0] * 8], np.int32) if packed else None
    flow = Flow(Calibration(tokens, owners, {}), 1, "cpu", torch.float32)
    checkpoint = Checkpoint(tiny_llama)
    targets = select(checkpoint.config, (r"\.layers\.",), ("lm_head",))
    found = gradients.measure(Job(checkpoint, (), targets, "cpu", torch.float32), flow, Run(quiet=True))
    assert found.keys() == {matrix_name(index, one.path) for index, linears in enumerate(targets) for one in linears}

    name, path = matrix_name(0, "feed_forward.down"), "feed_forward.down"
    model, expected = load(tiny_llama, "cpu", torch.float64), [0.0] * (1 << 16)
    seen: list[torch.Tensor] = []
    model.layers[0].get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    pieces = [tokens[0, :3], tokens[0, 3:6], tokens[1]] if packed else list(tokens)
    for piece in pieces:
        ids = torch.from_numpy(piece)
        logits = model(ids[None])[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        inputs_of = seen.pop()
        (gradient,) = torch.autograd.grad(loss, inputs_of)
        inputs = inputs_of.detach().float().bfloat16().flatten().view(torch.uint16).tolist()
        for bits, one in zip(inputs, gradient.flatten().tolist(), strict=True):
            expected[bits] += one * one
    given = torch.tensor(expected, dtype=torch.float64)
    assert float(found[name].sum()) == pytest.approx(float(given.sum()), rel=1e-4)
    moved = (found[name] - given).abs().sum() / given.sum()  # float32 puts some inputs into the next number of bfloat16
    assert moved < 0.02


def test_gradients_follow_the_given_model_alone(compress, tiny_llama: Path, calibration_text: Path) -> None:
    step = {"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_tensor", "observer": "cross_entropy"}
    with pytest.raises(SpecError, match=r"gradients of the given model.*use observer mse"):
        compress(tiny_llama, {"kind": "smoothquant"}, step, calibration_text=str(calibration_text))
    made = compress(tiny_llama, step, calibration_text=str(calibration_text))
    assert made.figures["kl_to_dense"].value < 0.5
    planned = {name: made.figures[name].estimate.formula for name in ("time_s", "memory_growth_bytes")}
    assert "gradients" in planned["time_s"] and "divergences" not in planned["time_s"]
    assert "the whole model" in planned["memory_growth_bytes"] and "its backward pass" in planned["memory_growth_bytes"]
    plain = compress(tiny_llama, {**step, "activations": "int8_token"}, name="token")
    assert made.folder.exists() and plain.folder.exists(), "without static scales nothing is measured, nor refused"


def test_observers_of_one_scale_are_refused_for_groups() -> None:
    step = {"kind": "nvfp4", "activations": "nvfp4", "observer": "mse"}
    with pytest.raises(SpecError, match=r"(?s)observer mse works on one scale.*percentile"):
        QUANTIZERS.read(step).check("q", 64, 64)
    QUANTIZERS.read({**step, "observer": "percentile"}).check("q", 64, 64)
