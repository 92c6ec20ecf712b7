"""Closed forms against what autograd really keeps, and against arithmetic on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hone.cost.activations.segments import Segment, adapted_values, saved_values
from hone.cost.dims import ModelDims
from hone.cost.memory import score_bytes, serve_bytes, train_bytes
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.shape import Shape


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("hidden", [96, 192])
@pytest.mark.parametrize("adapted", [False, True])
def test_saved_values_are_what_autograd_keeps(kv_heads, hidden, adapted):
    shape = Shape(hidden_size=hidden, num_layers=2, num_heads=6, num_kv_heads=kv_heads, intermediate_size=256)
    config = shape.config(64, eos=0)
    if adapted:
        config = config.read({**config.model_dump(mode="json"), "adapters": [{"kind": "lora", "rank": 4}]})
    decoder = build(config)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(not adapted or "lora_" in name)
    tokens = torch.randint(0, 64, (2, 32))
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # or the address would be given to another tensor
        return tensor

    x = decoder.embed(tokens).detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.layers[0](x, Causal(tokens))
    real = sum(kept.values()) / 4 / tokens.numel()
    values = adapted_values if adapted else saved_values
    assert values(decoder.config.dims().layers[0], hidden) == pytest.approx(real, rel=0.02)


def test_a_frozen_model_under_lora_takes_less():
    """An 8 B model of 16 bits, of 4.13 bits a weight, and trained whole: activations of one operation a product, codes, one dequantized matrix."""
    whole = llama_8b()
    few = replace(whole, num_params=40_000_000, active_params=40_000_000, vocab_size=0)
    sizes = {
        "batch_tokens": 4096,
        "seq_len": 4096,
        "dtype": "bfloat16",
        "kernels": True,
        "loss_chunk": 4096,
        "device": "cuda",
        "packed": False,
    }
    plain, lean, codes = (
        train_bytes(whole, trained=few, **sizes, **more).value
        for more in ({}, {"lean": True}, {"lean": True, "frozen_bytes": 4.13 / 8 * whole.num_params})
    )
    layer = whole.layers[0]
    less = 2 * 4096 * 32 * (saved_values(layer, 4096) - adapted_values(layer, 4096))
    assert plain - lean == pytest.approx(less, rel=0.01) and less > 2e9
    held = (2 - 4.13 / 8) * whole.num_params - 2 * 40e6
    assert held - 2 * 4096 * 28672 <= lean - codes <= 1.001 * held, "a matrix is dequantized in the backward pass"


def llama_8b() -> ModelDims:
    return ModelDims.uniform(
        num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
        vocab_size=128256, max_seq_len=8192,
    )  # fmt: skip


def test_states_of_a_large_model():
    """bf16 training of 8.03e9 parameters: 2 weight + 4 master + 8 moments, and 2 of gradient at the update."""
    estimate = train_bytes(llama_8b(), batch_tokens=8, seq_len=8, dtype="bfloat16", loss_chunk=8, device="cuda")
    assert llama_8b().num_params == 8_030_261_248
    assert estimate.value == pytest.approx(16 * 8.03e9, rel=0.07)
    assert "update" in estimate.formula


def test_more_of_anything_needs_more():
    facts = llama_8b()
    base = {"batch_tokens": 4096, "seq_len": 1024, "dtype": "bfloat16", "device": "cuda", "loss_chunk": 1024}
    one = train_bytes(facts, **base).value
    assert train_bytes(facts, **{**base, "batch_tokens": 65536}).value > one
    assert train_bytes(facts, **base, passes=2).value > one
    assert (
        train_bytes(
            facts, **{**base, "batch_tokens": 65536}, segments=[Segment(at, at + 1, True) for at in range(32)]
        ).value
        < one * 1.2
    )
    assert train_bytes(facts, **base, model_loaded=True).value == pytest.approx(one - 4 * facts.num_params)


def test_serving_adds_up():
    facts = llama_8b()
    estimate = serve_bytes(facts, weights_bytes=16e9, kv_bytes=20e9, device="cuda")
    assert estimate.value == 36e9
    assert facts.kv_values_per_token == 32 * 2 * 8 * 128
    more = serve_bytes(facts, weights_bytes=16e9, max_tokens=8192, max_num_seqs=64, dtype="bfloat16", device="cuda")
    # 8,192 tokens x 2 bytes x (2 x 4,096 + 3 x 14,336) and 64 rows x 128,256 logits x 14 bytes.
    assert more.value - 16e9 == pytest.approx(8192 * 2 * (2 * 4096 + 3 * 14336) + 64 * 128256 * 14)


def test_scoring_holds_a_forward_pass_or_the_logits():
    facts = llama_8b()
    hidden = 4096 * 4096 * 2
    few = {"weights_bytes": 16e9, "max_tokens": 4096, "dtype": "bfloat16", "device": "cuda"}
    # Both halves of the widest layer and their product, or 32 rows of logits in float32 and the next ones in both formats.
    assert score_bytes([facts], max_rows=1, **few).value == 16e9 + 4096 * 2 * (2 * 4096 + 3 * 14336)
    assert score_bytes([facts], max_rows=4096, **few).value == 16e9 + hidden + 4096 * 128256 * 10
    beside = score_bytes([facts, facts], max_rows=4096, **few)
    assert beside.value == 16e9 + 2 * hidden + 4096 * 128256 * 16 and "divergence" in beside.formula
    cpu = score_bytes([facts], max_rows=4096, **{**few, "device": "cpu"})
    assert cpu.value > 16e9 + 4096 * 2 * (2 * 4096 + 3 * 14336) + 2 * 4096 * 128256 * 10


def test_a_cpu_has_gaps_and_code_on_top():
    facts = llama_8b()
    gpu = serve_bytes(facts, max_tokens=100, device="cuda").value
    cpu = serve_bytes(facts, max_tokens=100, device="cpu")
    assert cpu.value > gpu and "gaps" in cpu.formula and "code" in cpu.formula
