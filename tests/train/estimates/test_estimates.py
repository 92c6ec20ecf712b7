"""What training should cost, against what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hone.base.errors import FitError
from hone.base.plan import DISK, MEMORY
from hone.cost.steps import pass_seconds
from hone.cost.train.figures import estimate, growth_bytes, step_seconds
from hone.cost.train.pipeline import passes_of
from hone.cost.train.training import CHECKPOINTS, Training
from hone.cost.train.update import adamw
from hone.measure.machine import describe
from hone.model.shape import Shape
from hone.train.activation_checkpointing import EveryNth, KeepAll, Segment, SquareRoot
from hone.train.continuation.plan import TrainPlan
from hone.train.faults.memory import WAYS
from hone.train.optimizers.adamw_8bit import AdamW8bit
from hone.train.watch import Watch

CONFIG = Shape(max_seq_len=256).config(2048)


def work(**changes) -> Training:
    dims = CONFIG.dims()
    base = Training(dims, 10, 16, 256, "float32", KeepAll().segments(4), adamw(dims))
    return replace(base, **changes)


def test_less_memory_is_predicted_where_less_is_kept():
    whole = growth_bytes(work(), "cpu").value
    assert growth_bytes(work(segments=EveryNth(n=1).segments(4)), "cpu").value < whole
    assert growth_bytes(work(gradient_accumulation_steps=4), "cpu").value < whole
    assert growth_bytes(work(dtype="bfloat16"), "cpu").value < whole
    assert growth_bytes(work(update=AdamW8bit().cost(CONFIG.dims(), "float32", "cpu")), "cpu").value < whole
    assert growth_bytes(work(teacher=CONFIG.dims()), "cpu").value > whole


def test_the_layers_that_run_twice_are_those_that_are_recomputed():
    """Of a cheap and a dear layer, recomputing the dear one takes longer, wherever it stands."""
    cheap, dear = CONFIG.dims().layers[0], CONFIG.dims().layers[0]
    dear = replace(dear, matmuls=tuple((8 * rows, columns) for rows, columns in dear.matmuls))
    dims = replace(CONFIG.dims(), layers=(cheap, dear, cheap, cheap))

    def seconds(layer: int) -> float:
        segments = tuple(Segment(at, at + 1, at == layer) for at in range(4))
        return step_seconds(work(model=dims, segments=segments), describe("cpu")).value

    assert seconds(1) > 1.05 * seconds(0)
    assert seconds(0) == pytest.approx(seconds(2)) and seconds(0) == pytest.approx(seconds(3))


def test_predictions_add_up():
    estimates = estimate(work(), describe("cpu"))
    assert estimates["model_bytes"].value == 4 * CONFIG.num_params
    assert estimates["memory_growth_bytes"].value == growth_bytes(work(), "cpu").value
    assert estimates["train_tokens"].value == 10 * 16 * 256
    assert estimates["disk_bytes"].value > estimates["model_bytes"].value and CHECKPOINTS not in estimates
    step_s = 16 * 256 / estimates["tokens_per_s"].value
    around_s = estimates["time_s"].value - 10 * step_s  # first weights are drawn, the last ones written
    assert 12e-9 * CONFIG.num_params / 8 < around_s < 1e-6 * CONFIG.num_params + 1
    longer = estimate(work(steps=20), describe("cpu"))["time_s"].value
    assert longer == pytest.approx(20 * step_s + around_s)
    longer = estimate(work(eval_sequences=64), describe("cpu"))
    assert longer["time_s"].value > estimates["time_s"].value


def test_a_training_that_cannot_fit_is_refused():
    plan = TrainPlan(estimates=estimate(work(batch_size=10**7), describe("cpu")), ways=WAYS, steps=10)
    with pytest.raises(FitError, match=r"train-x needs .* of memory, has") as caught:
        plan.must_fit({MEMORY: describe("cpu").free_memory_bytes}, "train-x")
    assert "smaller model" in caught.value.fix and caught.value.fix.count("; or ") == 1


def test_checkpoints_need_disk_beside_the_folder():
    estimates = estimate(work(num_checkpoints=3), describe("cpu"))
    assert estimates[CHECKPOINTS].value == 3 * 12 * CONFIG.num_params
    plan = TrainPlan(estimates=estimates, ways=WAYS, steps=10)
    folder = estimates[DISK].value
    assert plan.shortages({DISK: folder + estimates[CHECKPOINTS].value}) == []
    (short,) = plan.shortages({DISK: folder + 1})
    assert short.needed == folder + estimates[CHECKPOINTS].value and "lower checkpoint.keep_latest_k" in short.ways
    assert len(plan.shortages({DISK: 1.0})) == 1


def test_utilization_by_its_convention(tmp_path):
    forward = CONFIG.flops_per_token(256)
    watch = Watch(
        tmp_path, tmp_path, device="cpu", forward_flops_per_token=forward, step_positions=500, peak_flops_per_s=1e12
    )
    weights = CONFIG.num_params - 9 * 192  # norms multiply nothing; the tied embedding counts once, as the head
    attention = 4 * 12 * 192 * 256 / 2  # layers x 12 x width x seq_len, causal-halved
    assert watch.mfu(2.0) == pytest.approx((6 * weights + attention) * 1000 / 1e12, rel=2e-3)
    watch.close()
    assert Watch(tmp_path, tmp_path, device="cpu").mfu(1000.0) is None


def test_sqrt_keeps_less_than_every_second_layer_of_a_deep_stack():
    config = Shape(num_layers=36).config(2048)
    deep = work(model=config.dims(), update=adamw(config.dims()))
    root = growth_bytes(replace(deep, segments=SquareRoot().segments(36)), "cuda").value
    second = growth_bytes(replace(deep, segments=EveryNth(n=2).segments(36)), "cuda").value
    assert root < second


def test_the_passes_of_a_stage_are_those_of_both_directions():
    """The loss computes its gradients with it, so head and loss are in F alone; what is recomputed is in I, for W needs no more."""
    machine, dims = describe(), CONFIG.dims()
    sizes = {**work().pass_options("cpu"), "batch_tokens": 512, "recomputed": ()}
    forward, inputs, weights = passes_of(dims, machine, sizes, 0.0)
    both = pass_seconds(dims, machine, **sizes).value
    assert forward + inputs + weights == pytest.approx(both)
    inner = replace(dims, vocab_size=0)
    bare = passes_of(inner, machine, sizes, 0.0)
    assert bare[1:] == (inputs, weights)
    head = both - pass_seconds(inner, machine, **sizes).value
    assert forward - bare[0] == pytest.approx(head) and head > 0
    again = passes_of(dims, machine, {**sizes, "recomputed": (0, 1)}, 0.0)
    assert again[0] == pytest.approx(forward) and again[1] > inputs and again[2] == weights
    moved = passes_of(dims, machine, sizes, 1.0)
    assert moved == pytest.approx((forward + 0.5, inputs + 0.5, weights)), "transfers of layers travel with F and I"
