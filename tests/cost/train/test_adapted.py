"""Steps of adapters beside frozen weights: what a plan says from calibrated rates against the steps that the ledger measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.finetune import forecast
from benchmarks.ledger import FOLDER
from benchmarks.predicted.rates import kept, stored
from benchmarks.train import SHAPES
from hone.cost.activations.segments import keep_all
from hone.cost.steps import pass_seconds
from hone.cost.train.adapted import AdaptedLinear, adapters_seconds, code_width, decoding_seconds
from hone.model.config import ModelConfig
from hone.train.to_cost.adapted import adapted_linears
from tests.cost.h200 import h200

NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
"""A weight of NF4 with double quantization: half a byte, of 64 a byte of scale, of 256 of these a float (arXiv:2305.14314)."""


def config_of(shape: str, **adapter: object) -> ModelConfig:
    sizes, vocab = SHAPES[shape]
    given = {"kind": "lora", "rank": 16, "alpha": 32, **adapter}
    return ModelConfig.read({**sizes.config(vocab).model_dump(mode="json"), "adapters": [given]})


def frozen_bytes(config: ModelConfig) -> float:
    dims, own = config.dims(), config.trained_dims()
    coded = sum(one.matmul_params - two.matmul_params for one, two in zip(dims.layers, own.layers))
    return 2 * (dims.num_params - own.num_params - coded) + NF4_BYTES * coded


def machine():
    name = next(name for name, one in stored().items() if one["processor"] == "NVIDIA H200")
    return h200().model_copy(update={"calibration": kept(name)})


def measured() -> list[dict]:
    """The rows of H200s, whose rates the ledger has."""
    rows = [json.loads(line) for line in (FOLDER / "finetune.jsonl").read_text(encoding="utf8").splitlines()]
    return [row for row in rows if row["machine"]["gpus"] and "H200" in row["machine"]["gpus"][0]["name"]]


@pytest.mark.parametrize("row", measured(), ids=lambda row: row["figure"])
def test_a_step_takes_and_needs_what_the_ledger_measured(row, monkeypatch):
    """The rates were calibrated apart from these steps, and nothing is fitted to them: 10 % of the time, 5 % of the memory."""
    figure = row["figure"]
    shape = "llama3-70b" if "70b" in figure else "llama3-8b"
    config = config_of(shape, kind="dora" if "DoRA" in figure else "lora")
    recomputed, host = "recomputed" in figure, "on the host" in figure
    segments = tuple(one._replace(recompute=recomputed, to_host=host) for one in keep_all(config.num_layers))
    monkeypatch.setattr("benchmarks.finetune.describe", lambda device: machine())
    rows, weights = (1 if shape == "llama3-70b" else 4), frozen_bytes(config) if "QLoRA" in figure else None
    how = {"device": "cuda:0", "weights": weights, "eight": "8 bits" in figure}
    peak, seconds = forecast(config, rows, 2048, segments, **how)
    assert seconds == pytest.approx(row["seconds"], rel=0.1)
    assert peak == pytest.approx(row["peak_bytes"], rel=0.05)


def test_what_is_adapted_is_what_the_config_wraps():
    config = config_of("tiny", target_modules=["q_proj", "down_proj"], rank=8)
    (query, down), *_ = adapted_linears(config)
    assert [rank for _, rank in query.pieces] == [8] and query.out_features > query.pieces[0][0]
    assert down.gated and not query.gated and down.pieces == ((down.out_features, 8),)
    assert adapted_linears(config_of("tiny", dropout=0.1)) == ()
    assert adapted_linears(config_of("tiny").model_copy(update={"adapters": ()})) == ()


def test_more_adapters_passes_and_lengths_take_longer():
    linear, fast = AdaptedLinear(4096, 6144, ((4096, 16), (1024, 16), (1024, 16))), machine()

    def took(one: AdaptedLinear, forwards: int = 1) -> float:
        return adapters_seconds(fast, [(one, forwards)], 8192, "bfloat16")

    assert took(linear) < took(linear, 2) < 2 * took(linear)
    wide = linear._replace(pieces=tuple((rows, 256) for rows, _ in linear.pieces))
    assert took(linear) < min(took(wide), took(linear._replace(stretched=True)), took(linear._replace(gated=True)))
    whole = 2 * 6144 * 8192 * 2 / fast.calibration.read_bytes_per_s  # outputs are read and written once at least
    assert took(linear) > whole


def test_codes_become_matrices_at_the_rate_of_a_copy():
    config, fast = config_of("llama3-8b"), machine()
    dims, own = config.dims(), config.trained_dims()
    coded = sum(one.matmul_params - two.matmul_params for one, two in zip(dims.layers, own.layers))
    width = code_width(dims, own, frozen_bytes(config), "bfloat16")
    assert width == pytest.approx(NF4_BYTES)
    took = decoding_seconds(fast, dims, own, width, [2] * 32, "bfloat16")
    rate = max(fast.calibration.copies, key=lambda one: one.num_bytes).bytes_per_s
    assert took == pytest.approx(2 * coded * (NF4_BYTES + 2) / rate, rel=0.1)
    first = decoding_seconds(fast, replace(dims, layers=dims.layers[:1]), own, width, [2], "bfloat16")
    assert first == pytest.approx(took / 32)


def test_a_layer_alone_costs_its_own_adapters():
    """A plan that chooses what is recomputed asks for the passes of one layer of a model."""
    config, fast = config_of("llama3-8b"), machine()
    dims, own = config.dims(), config.trained_dims()
    options = {"batch_tokens": 8192, "seq_len": 2048, "dtype": "bfloat16", "trained": own, "code_width": NF4_BYTES}
    options["adapted"] = adapted_linears(config)
    one, two = (
        pass_seconds(replace(dims, layers=dims.layers[:count], vocab_size=0), fast, **options).value for count in (1, 2)
    )
    assert two == pytest.approx(2 * one, rel=1e-6)
