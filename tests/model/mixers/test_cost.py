"""What mixers say they keep for the backward pass, against what autograd keeps; and what decoding a long text costs."""

from __future__ import annotations

import pytest
import torch

from hone.cost.activations.segments import saved_values
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.shape import Shape

LOCAL = {"kind": "sliding_window", "window": 40}
MIXED = [
    LOCAL,
    {"kind": "mla", "latent_dim": 32, "rope_dim": 16},
    {"kind": "linformer", "rank": 16},
    {"kind": "longformer", "window": 40},
    {"kind": "bigbird", "block": 16},
    {"kind": "transformer_xl", "segment": 32, "memory": 32},
    {"kind": "transformer_xl", "segment": 16, "memory": 48},
    {"kind": "compressive", "segment": 32, "memory": 32, "compressed": 8},
]


def config(mixer):
    sizes = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128, "max_seq_len": 4096}
    return Shape.read({**sizes, "num_layers": 1, "mixers": [mixer]}).config(64)


@pytest.mark.parametrize("mixer", MIXED, ids=lambda mixer: mixer["kind"])
def test_kept_for_the_backward_pass(mixer):
    decoder = build(config(mixer))
    tokens = torch.randint(0, 64, (2, 128))
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # or the address would be given to another tensor
        return tensor

    x = decoder.embed(tokens)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.layers[0](x, Causal(tokens))
    real = sum(kept.values()) / 4 / tokens.numel()
    assert saved_values(decoder.config.dims().layers[0], 128) == pytest.approx(real, rel=0.3)


@pytest.mark.parametrize(
    ("mixer", "grows"), [("attention", True), (LOCAL, False), (MIXED[5], False), ("retnet", False)]
)
def test_work_and_state_over_a_long_text(mixer, grows):
    made = config(mixer)
    assert (made.flops_per_token(4096) > 1.5 * made.flops_per_token(512)) == grows
    assert (made.state_bytes(4096) == 8 * made.state_bytes(512)) == grows
    assert made.state_bytes(512, bytes_per_value=4) == 4 * made.dims().state_values(512)


def test_latents_are_a_fraction_of_the_keys():
    """The paper's sizes: 576 numbers a token against 2 x 128 heads x 128."""
    latent = config({"kind": "mla", "num_heads": 128, "head_dim": 128}).layers[0].mixer
    whole = config({"kind": "attention", "num_heads": 128, "num_kv_heads": 128, "head_dim": 128}).layers[0].mixer
    assert latent.state_values(1000) == 576_000
    assert whole.state_values(1000) / latent.state_values(1000) == pytest.approx(56.9, abs=0.1)
