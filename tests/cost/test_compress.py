"""What compressing costs, against an H200's measured layers and by the parts that it must hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import mask_seconds
from benchmarks.predicted.rates import kept, stored
from hone.compress import PRUNERS, QUANTIZERS
from hone.compress.quantizers.integer import SCALES_TRIED
from hone.cost.compress.compression import Compression, MatrixWork, Passes
from hone.cost.compress.memory import _moments, compress_bytes
from hone.cost.compress.seconds import HOST_BYTES_PER_S, compress_seconds
from hone.cost.compress.sweep import FACTOR_BYTES
from hone.cost.dims import ModelDims
from hone.cost.work import FACTORED, Work, factor_s, products_s, work_seconds
from hone.measure.calibration import FactorRate
from hone.ops.rounding.integer_grid import SHRINK
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
    for both in (half, pattern):
        assert both.factored == both.on_gpu.factored == plain.factored == 4096
        assert both.flops == both.on_gpu.all_flops - 4096**3 / 3 == 2 * plain.flops
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
    estimate = work.num_bytes * row["byte_s"] + work.num_ops * row["op_s"] + work.all_flops * row["flop_s"]
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
        squares = FACTOR_BYTES if kind == "gptaq" and device == "gpu" else 0
        assert wide.num_bytes - squares * 4096**2 == pytest.approx(4 * (small.num_bytes - squares * 1024**2))
        assert (wide.all_flops or wide.num_bytes) >= 0.99 * powers * (small.all_flops or small.num_bytes)
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


def test_a_factor_has_a_rate_of_its_size() -> None:
    """That of the calibration, else the part of large products that an H200's factors reached; on a CPU that of a product."""
    machine = h200()
    large = products_s(machine, 1e12)
    for columns, share in FACTORED:
        assert factor_s(machine, columns) == pytest.approx(columns**3 / 3e12 * large / share)
    assert factor_s(machine, 0) == 0.0
    rates = (FactorRate(columns=1024, flops_per_s=1e12), FactorRate(columns=4096, flops_per_s=16e12))
    known = machine.model_copy(update={"calibration": machine.calibration.model_copy(update={"factors": rates})})
    assert factor_s(known, 4096) == pytest.approx(4096**3 / 3 / 16e12)
    assert factor_s(known, 2048) == pytest.approx(2048**3 / 3 / 4e12)
    assert factor_s(known, 16384) == pytest.approx(16384**3 / 3 / 16e12)  # beyond the last one its rate
    here = machine.model_copy(update={"device": "cpu"})
    assert factor_s(here, 4096) == pytest.approx(products_s(here, 4096**3 / 3))


def test_a_gpu_computes_while_operations_are_started() -> None:
    machine, starts, moved = h200(), Work(num_ops=1e5), Work(num_bytes=1e12)
    both = Work(num_ops=1e5, num_bytes=1e12)
    one, two = work_seconds(machine, starts), work_seconds(machine, moved)
    assert work_seconds(machine, both) == pytest.approx(max(one, two))
    here = machine.model_copy(update={"device": "cpu"})
    assert work_seconds(here, both) == pytest.approx(work_seconds(here, starts) + work_seconds(here, moved))


def test_few_rows_of_a_product_are_slow() -> None:
    """The sweep adds the errors of all columns before 64 columns, products of which a GPU's rate is far from that of large ones."""
    name = next(name for name, one in stored().items() if one["processor"] == "NVIDIA H200")
    machine = h200().model_copy(update={"calibration": kept(name)})
    thin = Work(products=((64.0, 64, 4096, 2048),))
    assert (
        1.3 * products_s(machine, thin.all_flops)
        < work_seconds(machine, thin)
        < 4 * products_s(machine, thin.all_flops)
    )


def test_inputs_that_a_gpu_multiplies_as_codes_cost_no_wide_weights() -> None:
    work = replace(compression("rtn", 128), rounding_bytes=80.0)
    coded = replace(work, codes="rowwise")
    machine = h200()
    plain, wide, codes = (compress_seconds(machine, one).value for one in (compression("rtn", 128), work, coded))
    assert codes < 1.1 * plain < wide
    here = machine.model_copy(update={"device": "cpu"})
    assert compress_seconds(here, coded).value == compress_seconds(here, work).value  # a CPU has no such products


def test_the_search_tries_the_sizes_of_the_grid() -> None:
    assert len(SHRINK) == SCALES_TRIED
    search, none = (
        QUANTIZERS.read({"kind": "rtn", "scale": scale}).work(64, 128).on_gpu for scale in ("search", "absmax")
    )
    assert search.num_bytes - none.num_bytes == pytest.approx(80.0 * (1 + 2 * len(SHRINK)) * 64 * 128)


def test_the_next_layer_is_read_after_the_last_one_was_fetched() -> None:
    """Copies of one stream follow one another: with a disk that takes no time, a slow copy to the host delays every layer but the first."""
    machine, work = h200(), compression("rtn", 128, num_layers=4)
    quick, slow = ({"host_bytes_per_s": rate, "disk_bytes_per_s": 1e15, "durable_s": 1e-9} for rate in (1e12, 1e9))
    took = []
    for rates in (quick, slow):
        changed = machine.calibration.model_copy(update=rates)
        took.append(compress_seconds(machine.model_copy(update={"calibration": changed}), work).value)
    assert took[1] - took[0] == pytest.approx(sum(work.shard_bytes[1:]) * (1e-9 - 1e-12), rel=0.01)
