"""A training step on a GPU: the prediction from the ledger's own rates against the steps that the ledger measured."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from hone.cost.roofline import attention_seconds, matmul_rate, matmul_seconds
from hone.cost.steps import held_cast_seconds, train_step_seconds
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.replicas import Divided
from hone.cost.train.training import Training
from hone.cost.train.update import adamw, update_seconds
from hone.measure.calibration import LinearRate
from hone.model.shape import Shape
from hone.train.activation_checkpointing import KeepAll
from hone.train.fp8.fits import fp8_products
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.precision import FP8_RECIPES
from tests.cost.h100 import LAYER_FLOPS, h100
from tests.cost.h100 import rows as h100_rows
from tests.cost.h200 import LLAMA_8B, h200, row


@pytest.mark.parametrize(
    ("rows", "seq_len", "every", "how"),
    [(1, 8192, 2, ", compiled"), (4, 8192, 1, ", compiled")],
)
def test_a_training_step_takes_what_the_ledger_measured(rows, seq_len, every, how):
    """Those that are not compiled are of an earlier hone, which ran other kernels; and no row says what an H200 sustains."""
    name = f"training, llama3-8b shape, bf16, {rows} x {seq_len}, recompute every {every}{how}"
    measured_s = rows * seq_len / row("train", name)["value"]
    predicted = train_step_seconds(
        LLAMA_8B, h200(), batch_tokens=rows * seq_len, seq_len=seq_len, dtype="bfloat16", recomputed=range(0, 32, every)
    )
    assert predicted.value == pytest.approx(measured_s, rel=0.15)


def test_rates_between_measured_shapes():
    machine = h200()
    peak, read = machine.calibration.peak_flops_per_s("bfloat16"), machine.calibration.read_bytes_per_s
    for rows in (32, 64, 128, 512):
        num_bytes = 2 * (rows * 4096 * 2 + 4096 * 4096)
        roof_s = max(2 * rows * 4096**2 / peak, num_bytes / read)
        found = matmul_seconds(machine, (rows, 4096, 4096), "forward", num_bytes, "bfloat16")
        assert roof_s * 0.999 < found < 1.15 * roof_s
        cpu = machine.model_copy(update={"device": "cpu"})
        rate = matmul_rate(machine.calibration, "bfloat16", (rows, 4096, 4096))
        assert matmul_seconds(cpu, (rows, 4096, 4096), "forward", 1.0, "bfloat16") == 2 * rows * 4096**2 / rate


def test_fp8_halves_the_products_of_layers():
    machine, layouts = h200(), ("forward", "input_gradient", "weight_gradient")
    how = {"batch_tokens": 8192, "seq_len": 8192, "dtype": "bfloat16"}
    plain = train_step_seconds(LLAMA_8B, machine, **how)
    times = {count: train_step_seconds(LLAMA_8B, machine, **how, fp8=layouts[:count]) for count in range(4)}
    assert times[0] == plain
    assert times[3].value < times[2].value < plain.value
    # The head's three products stay, as attention, update and traffic do; the casts take a part of what is won.
    assert "387 matmuls" in plain.formula and "casts" not in plain.formula
    assert "3 matmuls" in times[3].formula and "384 fp8 products (assumed 1.78 times as fast as" in times[3].formula
    products_s = 3 * 2 * 8192 * sum(one.matmul_params for one in LLAMA_8B.layers) / 660e12
    assert 0.25 * products_s < plain.value - times[3].value < 0.44 * products_s
    # Blocks of 128 are cast from one read and multiplied more slowly.
    blocks = train_step_seconds(LLAMA_8B, machine, **how, fp8=layouts, recipe="blockwise")
    assert "384 fp8 products (assumed 1.35 times as fast as" in blocks.formula
    assert times[3].value < blocks.value < plain.value
    once = [held_cast_seconds(LLAMA_8B, machine, "bfloat16", recipe) for recipe in ("blockwise", "rowwise")]
    assert once[0] / once[1] == pytest.approx((2 + 2 * 33 / 32) / (2 * 2 + 2))
    recipes = (("rowwise", 1.0), ("tensorwise", 1.25))
    rates = tuple(
        LinearRate(
            recipe=name, held=held, passes=passes, m=8192, n=4096, k=4096, flops_per_s=(850e12 + 1e14 * held) * more
        )
        for name, more in recipes
        for held in (False, True)
        for passes in ("forward", "trained")
    )
    known = machine.model_copy(update={"calibration": machine.calibration.model_copy(update={"fp8": rates})})
    measured = train_step_seconds(LLAMA_8B, known, **how, fp8=layouts)
    assert "128 fp8 linears (rowwise, calibrated)" in measured.formula and measured.value < plain.value
    assert measured.value - plain.value == pytest.approx(products_s * 660 / 850 - products_s, abs=0.08 * products_s)
    quicker = train_step_seconds(LLAMA_8B, known, **how, fp8=layouts, recipe="tensorwise")
    assert measured.value - quicker.value == pytest.approx(products_s * 660 / 850 * 0.2, rel=0.01)
    held = train_step_seconds(LLAMA_8B, known, **how, fp8=layouts, held=True)
    assert "codes of weights" in held.formula
    again = train_step_seconds(LLAMA_8B, known, **how, fp8=layouts, recomputed=range(32))
    assert again.value - measured.value > products_s * 660 / 850 / 3
    other = train_step_seconds(LLAMA_8B, known, **how, fp8=layouts[:2], recipe="rowwise_with_gw_hp")
    assert "assumed" in other.formula, "a recipe without rates is said to be assumed"


SINCE = {**dict.fromkeys(("zero2", "zero3", "tp"), "2026-11-26T18:20"), "tp-async": "2026-11-27"}
"""From when on the ledger's rows of a layout have the ways of weights and activations that this hone has."""


def layout_work(name: str, layers: int, precision: str, vocab: int = 128256, num_ranks: int = 2) -> Training:
    """The step that `benchmarks.train_layouts` times as `name` on two GPUs, with a sequence of 8,192 for each."""
    given = {
        "tp": {"tensor_parallel_degree": 2},
        "tp-async": {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True},
    }
    parallelism = Parallelism.read(given.get(name, {"data_parallel": name}))
    config = Shape(
        hidden_size=4096,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        max_seq_len=8192,
    ).config(vocab)
    shared = parallelism.shared(config, partial(AdamW().cost, dtype="bfloat16", device="cuda"), 1, 8192)
    return Training(
        model=config.dims(), steps=1, batch_size=num_ranks, seq_len=8192, dtype="bfloat16",
        segments=KeepAll().segments(layers), update=shared.update, packed=False, divided=parallelism.divided(num_ranks),
        tensor=shared.tensor, pipeline=shared.pipeline, fp8=fp8_products(precision), fp8_recipe=FP8_RECIPES.get(precision, ""),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["zero2", "zero3", "tp", "tp-async"])
def test_a_step_of_two_gpus_takes_what_the_ledger_measured(name):
    """Two numbers are fitted, to steps on one GPU; collectives, and what they slow beside them, are as calibrated on such a host."""
    rows = [one for one in h100_rows("on 2 GPUs") if one.get("technique") == f"layout/{name}"]
    found = [one for one in rows if one["time"] > SINCE[name]]
    assert found
    for one in found:
        layers, precision = (
            int(re.search(r"(\d+) layers", one["figure"])[1]),
            re.search(r"GPUs, (\w+),", one["figure"])[1],
        )
        told = step_seconds(layout_work(name, layers, precision), h100(2))
        assert told.value == pytest.approx(8192 / one["value"], rel=0.07), (one["figure"], told.formula)


@pytest.mark.parametrize(("precision", "within"), [("bf16", 0.02), ("fp8", 0.02), ("fp8_tensorwise", 0.08)])
def test_a_step_of_one_gpu_takes_what_the_ledger_measured(precision, within):
    """The first two are what SUSTAINED is fitted to; linears with scales of tensors are faster than others on their own alone."""
    (one,) = h100_rows("training step on 1 GPU, 8 layers of Llama-3 8B, 1 x 8192: fp8 (rowwise)")
    (other,) = h100_rows("1 x 8192: fp8_tensorwise")
    measured = {"bf16": one["peer_value"], "fp8": one["value"], "fp8_tensorwise": other["value"]}
    told = step_seconds(layout_work("ddp", 8, precision, 32768, 1), h100())
    assert told.value == pytest.approx(8192 / measured[precision], rel=within), told.formula


def test_attention_has_the_rate_of_its_length():
    machine = h200()
    points = {one.seq_len: one for one in machine.calibration.attentions}
    took = {
        size: attention_seconds(machine, 1e15, "bfloat16", train=True, seq_len=size)
        for size in (512, 2048, 4096, 8192, 99999)
    }
    assert took[512] == took[2048] == 1e15 / points[2048].train_flops_per_s
    # Half-way in logarithms.
    assert took[4096] == pytest.approx((took[2048] * took[8192]) ** 0.5)
    assert took[99999] == 1e15 / points[16384].train_flops_per_s < took[8192] < took[4096]


def test_arithmetic_that_lasts_is_slower_and_memory_is_not():
    machine, quick = h100(), h100()
    quick = quick.model_copy(update={"calibration": quick.calibration.model_copy(update={"sustained": {}})})
    large, thin = ((16384, 4096, 4096), 2.0 * 3 * 4096 * 16384), ((1, 4096, 4096), 2.0 * 4096 * 4096)
    slow, fast = (matmul_seconds(one, large[0], "forward", large[1], "bfloat16") for one in (machine, quick))
    assert fast / slow == pytest.approx(machine.calibration.sustained["bfloat16"])
    slow, fast = (matmul_seconds(one, thin[0], "forward", thin[1], "bfloat16") for one in (machine, quick))
    assert slow == fast
    assert attention_seconds(quick, 1.0, "bfloat16") < attention_seconds(machine, 1.0, "bfloat16")


def test_an_update_reads_gradients_as_they_are_or_widened():
    """Bytes a weight: 28 of the step, its norm, its rounding; 4 less of half gradients, 6 and 10 more of sums in float32."""
    machine, copy = h100(), h100().calibration.kernel_bytes_per_s("adamw", "bfloat16")
    widen = machine.calibration.kernel_bytes_per_s("widen", "bfloat16")
    cost, weights = adamw(LLAMA_8B, fused=True), LLAMA_8B.num_params
    took = [update_seconds(replace(cost, widened=passes), LLAMA_8B, machine, "bfloat16").value for passes in range(3)]
    assert took == pytest.approx(
        [weights * 30 / copy, weights * (34 / copy + 6 / widen), weights * (34 / copy + 16 / widen)]
    )
    half = update_seconds(replace(cost, share=0.5), LLAMA_8B, machine, "bfloat16").value
    assert half == pytest.approx(took[0] / 2)
    # Of two ranks' gradients each adds up its half: two of 2 bytes are read and 4 written; a further pass reads 8 and writes 4.
    for passes, moved in ((1, 8), (2, 28)):
        divided = replace(cost, share=0.5, senders=2, widened=passes)
        took_then = update_seconds(divided, LLAMA_8B, machine, "bfloat16").value
        assert took_then == pytest.approx(weights / 2 * (34 / copy + moved / widen))


def test_transfers_beyond_the_compute_are_waited_for():
    work, machine = layout_work("zero2", 16, "bf16"), h100(2)
    assert 3 * 2 * 8192 * work.model.layers[0].matmul_params == LAYER_FLOPS

    def step(beside: float) -> float:
        calibration = machine.calibration.model_copy(update={"beside": beside})
        return step_seconds(work, machine.model_copy(update={"calibration": calibration})).value

    from hone.cost.ranks import Transfers

    assumed = work.divided.exposed_s(work.part, "bfloat16", "cuda", Transfers("cuda"))
    times = Transfers("cuda", machine.calibration.collectives)
    moved = work.divided.step_s(work.part, "bfloat16", 1, "cuda", times)
    waits = work.divided.exposed_s(work.part, "bfloat16", "cuda", times)
    embedding = 128256 * 4096
    assert assumed == pytest.approx(2 * embedding / 2 / 3e11, rel=0.01)
    assert step(0.5) - step(0.0) == pytest.approx(0.5 * (moved - waits))
    alone = replace(work, divided=Divided(), batch_size=1)
    assert step(0.0) - waits < step_seconds(alone, machine).value, "half of the update is another rank's"
    assert "products 0.0203 s longer (measured" in step_seconds(work, machine).formula
    calibration = machine.calibration.model_copy(update={"beside": None})
    formula = step_seconds(work, machine.model_copy(update={"calibration": calibration})).formula
    assert "assumed 15% of the transfers" in formula


def test_memory_of_a_divided_loss_is_that_of_its_chunks(monkeypatch):
    """In plain torch two float32 values and one in half precision for each logit that exists at once."""
    shape = Shape(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=128, max_seq_len=8192)
    shared = Parallelism(tensor_parallel_degree=2).shared(shape.config(128256), adamw, 1, 8192)
    narrow = {"update": shared.update, "tensor": shared.tensor, "batch_size": 2}
    work = replace(layout_work("tp", 1, "bf16"), **narrow)
    whole = growth_bytes(work, "cpu").value
    monkeypatch.setattr("hone.cost.chunks.VOCABULARY_CHUNK", 512)
    assert whole - growth_bytes(work, "cpu").value == (1024 - 512) * 128256 // 2 * (2 * 4 + 2)
