"""What compressing costs, against an H200's measured layers and by the parts that it must hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hone.compress import QUANTIZERS
from hone.cost.compress import Compression, MatrixWork, compress_bytes, compress_seconds
from hone.cost.facts import ModelFacts
from tests.cost.h200 import h200

LAYER = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def compression(kind: str, num_sequences: int, num_layers: int = 2) -> Compression:
    """Llama-3-8B's layers, 4 bits in groups of 128, sequences of 2048 tokens; the head is of 4,096 rows."""
    facts = ModelFacts.uniform(num_layers=num_layers, vocab_size=4096, max_seq_len=8192, tie_embeddings=True, **LAYER)
    step = QUANTIZERS.read({"kind": kind, "bits": 4, "group_size": 128})
    matrices = tuple(MatrixWork(n, k, (step.work(n, k),)) for n, k in facts.layers[0].matmuls)
    sizes = (8192 * 4096, *[sum(one.size for one in matrices) * 33 // 64] * num_layers)
    calibration = {"num_sequences": num_sequences, "seq_len": 2048, "batch_size": 4} if num_sequences else {}
    return Compression(facts, (matrices,) * num_layers, sizes, 2, "bfloat16", **calibration)


@pytest.mark.parametrize(("num_sequences", "layer_s"), [(512, 2.82), (128, 1.14)])
def test_gptq_on_an_h200_takes_what_was_measured(num_sequences: int, layer_s: float) -> None:
    estimate = compress_seconds(h200(), compression("gptq", num_sequences))
    assert estimate.value / 2 == pytest.approx(layer_s, rel=0.25), estimate.formula
    assert not estimate.bound


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
