"""Linear attention that begins with the projections of softmax attention, and what a hybrid keeps of a token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import SpecError
from hone.model.hf import load
from hone.model.incremental import generate

TOKENS = torch.arange(2 * 24).reshape(2, 24) * 7 % 250
MIXERS = ("gated_linear", "linear_attention", "retnet", "delta_net")


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_projections_are_those_of_the_attention(mixer: str, family: str, family_folder, compress) -> None:
    folder = family_folder(family)
    made = compress(folder, {"kind": "linearize", "mixer": mixer, "layers": [1]}, name=f"{family}-{mixer}")
    given, model = load(folder), load(made.folder)
    assert [layer.mixer.kind for layer in model.config.layers] == ["attention", mixer]
    linear = model.layers[1].mixer.qkv if mixer == "linear_attention" else model.layers[1].mixer.qkvg
    q, k, v = given.layers[1].mixer.qkv.weight.detach().split([64, 32, 32])
    own = linear.weight.detach().split(model.layers[1].mixer.rows["qkv" if mixer == "linear_attention" else "qkvg"])
    twice = [x.unflatten(0, (2, 16)).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v)]
    for found, wanted in zip(own[:3], (q, *twice), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(model.layers[1].mixer.out.weight, given.layers[1].mixer.out.weight)
    kept = made.figures["kv_bytes_per_token"]
    assert kept.value == kept.estimate.value == 2 * 2 * 16 * 4, "of the layer that stays alone"
    with torch.no_grad():
        whole = model(TOKENS)
        greedy = generate(model, TOKENS[:1, :8], 4)
    assert torch.isfinite(whole).all() and greedy.shape == (1, 12)


def test_linear_attention_is_the_attention_with_another_kernel(family_folder, compress) -> None:
    """By hand: elu(q) + 1 and elu(k) + 1 in place of the exponential of a rotated product."""
    folder = family_folder("llama")
    made = load(compress(folder, {"kind": "linearize", "mixer": "linear_attention", "layers": [0]}).folder)
    given = load(folder).layers[0].mixer
    x = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    from hone.model.context import Causal

    with torch.no_grad():
        q, k, v = given.qkv(x).split([64, 32, 32], -1)
        q = q.unflatten(-1, (4, 16))
        k, v = (one.unflatten(-1, (2, 16)).repeat_interleave(2, -2) for one in (k, v))
        weights = torch.einsum("bshd,bthd->bhst", F.elu(q) + 1, F.elu(k) + 1).tril()
        mixed = torch.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdim=True), v)
        wanted = given.out(mixed.flatten(-2))
        found = made.layers[0].mixer(x, Causal(TOKENS[:1, :12]))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_every_second_layer_changes_and_the_seed_decides_what_is_new(family_folder, compress) -> None:
    folder = family_folder("llama")
    made = [
        compress(folder, {"kind": "linearize", "seed": seed}, name=str(name)).folder
        for name, seed in enumerate((0, 0, 1))
    ]
    gates = [load(one).layers[1].mixer.qkvg.weight[192:256] for one in made]
    assert torch.equal(gates[0], gates[1]) and not torch.equal(gates[0], gates[2])
    assert load(made[0]).config.layers[0].mixer.kind == "attention"


def test_mistakes_are_named(family_folder, compress, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="layers names 5 of a model with 2 layers"):
        compress(family_folder("llama"), {"kind": "linearize", "layers": [5]})
    with pytest.raises(SpecError, match="none of 2 layers is one that it converts; they mix with mla"):
        compress(family_folder("llama"), {"kind": "transmla"}, {"kind": "linearize"}, calibration_text=__file__)
    with pytest.raises(SpecError, match="qkv_bias=True"):
        compress(family_folder("qwen2"), {"kind": "linearize"})
    hybrid = compress(family_folder("llama"), {"kind": "linearize", "layers": [1]}).folder
    with pytest.raises(SpecError, match="layer 1 mixes with 'gated_linear', which has no projections"):
        compress(hybrid, {"kind": "linearize", "layers": [1]}, name="twice")
