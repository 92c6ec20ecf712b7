"""What compressing costs, against an H200's measured layers and by the parts that it must hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import mask_seconds
from hone.compress import PRUNERS, QUANTIZERS
from hone.cost.compress.compression import Compression, MatrixWork, Passes
from hone.cost.compress.memory import _moments, compress_bytes
from hone.cost.compress.seconds import HOST_BYTES_PER_S, compress_seconds
from hone.cost.dims import ModelDims
from tests.cost.h200 import LEDGER, h200

LAYER = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def compression(kind: str, num_sequences: int, num_layers: int = 2) -> Compression:
    """Llama-3-8B's layers, 4 bits in groups of 128, sequences of 2048 tokens; the head is of 4,096 rows."""
    dims = ModelDims.uniform(num_layers=num_layers, vocab_size=4096, max_seq_len=8192, tie_embeddings=True, **LAYER)
    step = QUANTIZERS.read({"kind": kind, "bits": 4, "group_size": 128})
    matrices = tuple(MatrixWork(n, k, (step.work(n, k),)) for n, k in dims.layers[0].matmuls)
    sizes = (8192 * 4096, *[sum(one.size for one in matrices) * 33 // 64] * num_layers)
    calibration = {"num_sequences": num_sequences, "seq_len": 2048, "batch_size": 4} if num_sequences else {}
    return Compression(dims, (matrices,) * num_layers, sizes, 2, "bfloat16", **calibration)


@pytest.mark.parametrize(("num_sequences", "layer_s"), [(512, 2.82), (128, 1.14)])
def test_gptq_on_an_h200_takes_what_was_measured(num_sequences: int, layer_s: float) -> None:
    estimate = compress_seconds(h200(), compression("gptq", num_sequences))
    assert estimate.value / 2 == pytest.approx(layer_s, rel=0.25), estimate.formula
    assert not estimate.bound


def test_pruning_in_the_sweep_is_a_second_sweep_and_its_masks() -> None:
    """The grid is fitted to what a sweep without rounding leaves. A CPU also chooses masks by a selection or group by group."""
    plain, half, pattern = (
        QUANTIZERS.read({"kind": "gptq", **more}).work(4096, 4096)
        for more in ({}, {"sparsity": 0.5}, {"sparsity": 0.5, "pattern": "2:4"})
    )
    alone = PRUNERS.read({"kind": "sparsegpt", "pattern": "2:4"}).work(4096, 4096)
    factor = 4096**3 / 3
    for both in (half, pattern):
        assert both.flops - factor == both.on_gpu.flops - factor == 2 * (plain.flops - factor)
    assert pattern.on_gpu.num_ops < half.on_gpu.num_ops and pattern.num_ops > 2 * half.num_ops
    # One sweep: what the joint one has beyond GPTQ's, less GPTQ's column loop that both sweeps share.
    assert alone.flops == plain.flops and alone.num_bytes < plain.num_bytes + pattern.num_bytes


@pytest.mark.parametrize("pattern", mask_seconds.PATTERNS)
def test_masks_cost_what_a_sweep_that_chooses_them_took(pattern: str) -> None:
    """Seconds of one core in the ledger, in units of the copies and operation starts that were measured beside it; and the sweep is
    still the one that was measured, by what it starts and moves."""
    lines = (LEDGER / "masks.jsonl").read_text(encoding="utf8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["figure"].endswith(f" {pattern}")]
    row = rows[-1]
    work = PRUNERS.read({"kind": "sparsegpt", "pattern": pattern}).work(mask_seconds.ROWS, mask_seconds.COLUMNS)
    estimate = work.num_bytes * row["byte_s"] + work.num_ops * row["op_s"] + work.flops * row["flop_s"]
    assert 0.67 < estimate / row["value"] < 1.5, (estimate, row["value"])
    now = mask_seconds.counted(pattern)
    assert now.num_ops == pytest.approx(row["num_ops"], rel=0.1), "measure it again: python -m benchmarks.mask_seconds"
    assert now.num_bytes == pytest.approx(row["operand_bytes"], rel=0.1), "python -m benchmarks.mask_seconds"


def test_the_parts_of_a_layer_are_those_that_were_measured() -> None:
    """One H200, 512 x 2048: forward with Hessians 1.65 s, solvers 0.33 s, errors 0.13 s, second pass 0.76 s."""
    formula = compress_seconds(h200(), compression("gptq", 512)).formula
    parts = {name: float(value) for name, value, _ in (part.rsplit(" ", 2) for part in formula.split(" + "))}
    assert parts["statistics"] / 2 == pytest.approx(1.65, rel=0.25), formula
    assert (parts["solvers"] + parts["errors"]) / 2 == pytest.approx(0.46, rel=0.25), formula
    assert parts["second pass"] == pytest.approx(0.76, rel=0.25), formula


def test_ranges_and_rounding_of_inputs_are_counted() -> None:
    plain = compression("gptq", 128)
    static = QUANTIZERS.read({"kind": "gptq", "activations": "int8_tensor", "observer": "entropy"})
    dynamic = QUANTIZERS.read({"kind": "gptq", "activations": "fp8_token"})
    assert dynamic.range_bytes == 0 and static.range_bytes > static.rounding_bytes > 0 < dynamic.rounding_bytes
    work = replace(plain, range_bytes=static.range_bytes, rounding_bytes=static.rounding_bytes)
    before, after = (compress_seconds(h200(), one) for one in (plain, work))
    assert "ranges of inputs" not in before.formula and before.value < after.value
    parts = {name: float(value) for name, value, _ in (part.rsplit(" ", 2) for part in after.formula.split(" + "))}
    values = 2 * 128 * 2048 * sum(one.columns for one in plain.layers[0])  # of both layers
    assert 3e12 < values * static.range_bytes / parts["ranges of inputs"] < 5e12, "bytes/s of an H200's memory"


def test_writing_waits_for_nothing_but_the_layer_before() -> None:
    two, eight = (compress_seconds(h200(), compression("rtn", 0, count)).value for count in (2, 8))
    shard_s = compression("rtn", 0).shard_bytes[1] / 1.1e9
    assert eight - two < 6 * 1.5 * max(shard_s, two / 2)


def test_memory_is_one_layer_and_the_states() -> None:
    one, many = (compress_bytes(h200(), compression("gptq", 512, count)).value for count in (1, 32))
    assert one == many
    without = compress_bytes(h200(), replace(compression("gptq", 512), num_sequences=0)).value
    assert one - without > 8.5e9, "the hidden states are 8.6 GB"


def test_memory_on_an_h200_is_what_was_measured() -> None:
    """Growth in the ledger (compress.jsonl), by steps that solve nothing, that factor, and of the rank that has no widest matrix."""
    two = h200().model_copy(update={"num_ranks": 2})
    for kind, machine, rank, measured in (
        ("rtn", h200(), None, 6356615168),
        ("gptq", h200(), None, 8822981632),
        ("gptq", two, 0, 5060453376),
    ):
        found = compress_bytes(machine, compression(kind, 128), rank)
        assert found.value == pytest.approx(measured, rel=0.05), found.formula
    other, whole = (compress_bytes(two, compression("gptq", 128), rank).value for rank in (1, None))
    assert whole == other > 1.3 * 5060453376, "the rank with the widest matrix needs most"


def test_memory_of_what_measures_before_counts_its_states_and_a_model_held_whole() -> None:
    """The passes of steps of the phase "model", which write nothing: on a GPU, too."""
    work = compression("rtn", 512)
    before = replace(work, layers=((),) * 2, shard_bytes=())
    found = {
        name: compress_bytes(h200(), replace(work, measured=((before, passes),))).value
        for name, passes in (
            ("pass", Passes(1.0)),
            ("two", Passes(1.0, variants=2)),
            ("whole", Passes(1.0, whole=True)),
        )
    }
    alone = compress_bytes(h200(), work).value
    assert found["pass"] == alone and found["two"] > alone + 5e9, "one more set of hidden states is 8.6 GB"
    layer = max(work.dims.layer_params) * 2
    assert found["whole"] == pytest.approx(alone + 2 * work.dims.num_params, abs=3 * layer)


def test_cost_of_a_second_stream_of_states() -> None:
    one = compression("gptaq", 512)
    two = replace(one, paired=True)
    assert compress_bytes(h200(), two).value - compress_bytes(h200(), one).value > 8.5e9
    parts = [
        {name: float(value) for name, value, _ in (part.rsplit(" ", 2) for part in formula.split(" + "))}
        for formula in (compress_seconds(h200(), work).formula for work in (one, two))
    ]
    assert parts[1]["statistics"] == pytest.approx(2 * parts[0]["statistics"], rel=0.01)
    assert parts[1]["second pass"] == parts[0]["second pass"]


@pytest.mark.parametrize("kind", ["hqq", "gptaq", "autoround"])
def test_more_turns_and_columns_cost_more(kind: str) -> None:
    step = QUANTIZERS.read(kind)
    for device in ("cpu", "gpu"):
        small, wide = (step.work(4096, columns) for columns in (1024, 4096))
        small, wide = (one.on_gpu if device == "gpu" else one for one in (small, wide))
        powers = 16 if kind != "hqq" else 4
        assert wide.num_bytes == pytest.approx(4 * small.num_bytes)
        assert (wide.flops or wide.num_bytes) >= 0.99 * powers * (small.flops or small.num_bytes)
    if kind != "gptaq":
        more = QUANTIZERS.read({"kind": kind, "iters": 2 * step.iters})
        assert 1.4 < more.work(4096, 4096).num_bytes / step.work(4096, 4096).num_bytes < 2


def test_a_checkpoint_is_read_at_one_rate_and_written_at_another() -> None:
    """A layer's bytes through the mapped file, its shard's into new host memory: each by its own rate of the calibration."""
    machine, work = h200(), compression("rtn", 128)
    base = compress_seconds(machine, work).value

    def more(**rates: float) -> float:
        changed = machine.calibration.model_copy(update=rates)
        return compress_seconds(machine.model_copy(update={"calibration": changed}), work).value - base

    weights = 2 * sum(work.dims.layer_params)
    assert more(mapped_bytes_per_s=1e9) == pytest.approx(weights * (1 / 1e9 - 1 / 6.9e9), rel=0.01)
    slow = 1e8  # the last shard is waited for, and the one before it while the last layer is computed
    assert more(host_bytes_per_s=slow) > work.shard_bytes[-1] * (1 / slow - 1 / HOST_BYTES_PER_S)


def test_reshaped_models_are_compared_on_one_rank() -> None:
    """Its states are not divided, and both models are loaded again; an embedding's matrix is stored in the first shard."""
    machine = h200().model_copy(update={"num_ranks": 4})
    work = replace(compression("rtn", 128), check_sequences=64)
    alone = replace(work, reshaped=True)
    states = 2 * 64 * 2048 * 4096 * 2
    assert work.checked_share(4) == 0.25 and [alone.checked_share(4, rank) for rank in (None, 0, 3)] == [1.0, 1.0, 0.0]
    assert compress_bytes(machine, alone, 0).value - compress_bytes(machine, work, 0).value == pytest.approx(
        0.75 * states
    )
    assert compress_seconds(machine, alone).value > compress_seconds(machine, work).value
    table = MatrixWork(500_000, 4096, work.layers[0][0].steps)
    for first in (1 << 30, 5 << 30):
        with_table = replace(work, embedding=((table,),), shard_bytes=(first, *work.shard_bytes[1:]))
        last = [*_moments(h200(), with_table, len(work.layers), 0)][-1]
        assert last["written"] == pytest.approx(first)
