"""Steps of adapters beside frozen weights: what a plan says from calibrated rates against the steps that the ledger measured."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.finetune import forecast
from benchmarks.ledger import FOLDER
from benchmarks.predicted.rates import kept, stored
from benchmarks.train import SHAPES
from hone.cost.activations.segments import keep_all
from hone.cost.steps import pass_seconds
from hone.cost.train.adapted import AdaptedLinear, added_by_adapters, added_by_decoding, code_width
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts
from hone.ops import lora_linear
from hone.train.to_cost.adapted import adapted_linears
from hone.train.to_cost.training import codes_of
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


def test_pieces_with_ranks_of_their_own_are_no_operation_of_one_linear():
    """Those of LoRA run beside the linear, so that a plan takes their products as others; DoRA scales each piece in its operation."""
    own = {"rank_pattern": {"q_proj": 4}}
    assert adapted_linears(config_of("tiny", **own)) == ()
    (qkv, *_), *_ = adapted_linears(config_of("tiny", kind="dora", **own))
    assert [rank for _, rank in qkv.pieces] == [4, 16, 16]
    (qkv, *_), *_ = adapted_linears(config_of("tiny", rank_pattern={"q_proj": 4, "k_proj": 4, "v_proj": 4}))
    assert [rank for _, rank in qkv.pieces] == [4, 4, 4]  # all alike: one operation


def counted(dtype: torch.dtype) -> tuple[int, int]:
    """(products, casts of factors or their gradients) of a frozen linear under an adapter, forward and backward."""
    seen: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    rank, pieces = 4, (8, 16)
    weight = torch.randn(24, 32, dtype=dtype)
    downs = [torch.randn(rank, 32, requires_grad=True) for _ in pieces]
    ups = [torch.randn(rows, rank, requires_grad=True) for rows in pieces]
    x = torch.randn(10, 32, dtype=dtype, requires_grad=True)
    with Count():
        factors = [one.to(dtype) for one in downs], [one.to(dtype) for one in ups]
        lora_linear(x, lambda _: weight, None, *factors, scale=2.0, begins=[0, 8]).sum().backward()
    return sum(seen[name] for name in ("mm", "addmm", "addmm_")), seen["_to_copy"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_starts_are_those_of_the_operation(dtype):
    """The products and the casts that `lora_linear` makes, counted as torch dispatches them, less the two with the frozen weight."""
    products, casts = counted(dtype)
    linear = AdaptedLinear(32, 24, ((8, 4), (16, 4)))
    name = str(dtype).removeprefix("torch.")
    found = added_by_adapters(machine(), [(linear, 1)], 10, name)
    joined = 2  # the factors A of both pieces, forward and backward
    assert found.starts == products - 2 + casts + joined
    assert casts == (8 if dtype is torch.bfloat16 else 0)
    again = added_by_adapters(machine(), [(linear, 2)], 10, name)
    assert found.starts < again.starts < 2 * found.starts


def test_a_step_of_few_tokens_waits_for_the_starts_of_adapters():
    config, fast = config_of("llama3-8b"), machine()
    options = {"batch_tokens": 64, "seq_len": 64, "dtype": "bfloat16", "trained": config.trained_dims()}
    adapted = adapted_linears(config)
    with_them = pass_seconds(config.dims(), fast, **options, adapted=adapted).value
    without = pass_seconds(config.dims(), fast, **options, adapted=((),) * config.num_layers).value
    starts = added_by_adapters(fast, [(one, 1) for layer in adapted for one in layer], 64, "bfloat16").starts
    assert with_them - without == pytest.approx(starts * fast.calibration.op_s, rel=0.02)


def test_more_adapters_passes_and_lengths_take_longer():
    linear, fast = AdaptedLinear(4096, 6144, ((4096, 16), (1024, 16), (1024, 16))), machine()

    def took(one: AdaptedLinear, forwards: int = 1) -> float:
        return added_by_adapters(fast, [(one, forwards)], 8192, "bfloat16").seconds

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
    took = added_by_decoding(fast, dims, own, width, [2] * 32, "bfloat16").seconds
    rate = max(fast.calibration.copies, key=lambda one: one.num_bytes).bytes_per_s
    assert took == pytest.approx(2 * coded * (NF4_BYTES + 2) / rate, rel=0.1)
    first = added_by_decoding(fast, replace(dims, layers=dims.layers[:1]), own, width, [2], "bfloat16").seconds
    assert first == pytest.approx(took / 32)


def test_a_cpu_goes_over_codes_several_times():
    config = config_of("llama3-8b")
    here = machine().model_copy(update={"device": "cpu"})
    gpu, cpu = (
        added_by_decoding(one, config.dims(), config.trained_dims(), 0.5, [2] * 32, "float32")
        for one in (machine(), here)
    )
    assert cpu.seconds > 10 * gpu.seconds
    assert cpu.starts == gpu.starts == 2 * 32 * 4  # of the stacked linears, not of the adapters


def test_all_experts_become_matrices():
    """Not the ones of one token alone, whose codes are a part of what the folder holds."""
    shape = SHAPES["deepseek-v3-16b"]
    values = shape[0].config(shape[1]).model_dump(mode="json")
    given = {"kind": "lora", "rank": 16, "alpha": 32, "target_modules": ["o_proj"]}
    config = ModelConfig.read({**values, "adapters": [given]})
    dims, own = config.dims(), config.trained_dims()
    held = 2 * config.num_params / 4  # half a byte a weight, all
    assert code_width(dims, own, held, "bfloat16") > 0.4 * held / dims.num_params
    took = added_by_decoding(machine(), dims, own, 0.5, [1] * dims.num_layers, "bfloat16").seconds
    copied = 2.5 * 0.8 * dims.num_params / max(one.bytes_per_s for one in machine().calibration.copies[-1:])
    assert took > copied


def test_what_is_no_code_is_counted_as_it_is_in_memory():
    """A folder stores embedding and norms in bf16; a training in float32 holds them in 4 bytes, one in bf16 in 2."""
    config = config_of("llama3-8b")
    plain = config.model_copy(update={"adapters": ()})
    given = CheckpointFacts.model_construct(
        config=plain, dtype="bfloat16", quantization={"quant_method": "bitsandbytes"}, weights_bytes=6_000_000_000
    )
    dense = plain.num_params - sum(one.matmul_params for one in plain.dims().layers)
    assert codes_of(config, given, "bfloat16") == 6e9
    assert codes_of(config, given, "float32") == 6e9 + 2 * dense
    adapter = given.model_copy(update={"config": config})
    assert codes_of(config, adapter, "bfloat16") == 6e9 - 4 * config.trained_params
    assert codes_of(plain, given, "bfloat16") is None
    assert codes_of(config, given.model_copy(update={"quantization": None}), "bfloat16") is None


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
