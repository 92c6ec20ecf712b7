"""Linear attention, Performer, retention and gated linear attention against their formulas written as sums over all pairs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import SpecError
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.incremental import Incremental, generate
from hone.model.mixers import MIXERS
from hone.model.mixers.performer import orthogonal_features, running_max
from hone.model.shape import Shape
from tests.model.mixers.small import (
    VOCAB,
    check_apart,
    check_causal,
    check_gradients,
    check_incremental,
    check_saved,
    check_together,
    prompt,
    small,
    state_count,
)

LINEAR = "linear_attention"
PERFORMER = {"kind": "performer", "num_features": 10}
RETNET = {"kind": "retnet"}
CHANNEL = {"kind": "gated_linear", "gate_rank": 3, "gate_root": 2}
HEAD = {"kind": "gated_linear", "gate": "head", "value_head_dim": 7}
DELTA = {"kind": "delta_net", "gated": False, "value_head_dim": 7}
GATED_DELTA = {"kind": "delta_net"}
FAMILY = pytest.mark.parametrize(
    "mixer",
    [LINEAR, PERFORMER, RETNET, CHANNEL, HEAD, DELTA, GATED_DELTA],
    ids=["linear", "performer", "retnet", "channel", "head", "delta", "gated delta"],
)


def turned(y, theta=10000.0):
    """Rotary positions on [B, S, H, D]: the pair (i, i + D/2) by position * theta^(-2i/D)."""
    half = y.shape[-1] // 2
    rates = 1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angles = (torch.arange(y.shape[1]).float()[:, None] * rates)[:, None]
    cos, sin = angles.cos().double(), angles.sin().double()  # as exact as the model's own
    a, b = y[..., :half], y[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def heads(module, x, count):
    """Query, key and value heads of a layer, and the rest of its input projection."""
    linear = module.qkv if hasattr(module, "qkv") else module.qkvg
    parts = (x @ linear.weight.T).split(module.rows["qkv" if hasattr(module, "qkv") else "qkvg"], -1)
    return [part.unflatten(-1, (count, -1)) for part in parts[:3]], parts[3:]


def formula(module, x, kind):
    """out [B, S, D] by one sum over all pairs t <= s a head; products of decays one by one."""
    spec, seq_len = module.spec, x.shape[1]
    (q, k, v), rest = heads(module, x, spec.num_heads)
    seen = torch.ones(seq_len, seq_len).tril().bool()[:, :, None]
    if kind in ("linear", "performer"):
        if kind == "linear":
            of_q, of_k = F.elu(q) + 1, F.elu(k) + 1
        else:
            directions = orthogonal_features(spec.features, spec.head_dim, spec.seed + 1_000_003 * module.layer)
            q, k = turned(q) / spec.head_dim**0.25, turned(k) / spec.head_dim**0.25
            of_q, of_k = ((y @ directions.T - y.square().sum(-1, keepdim=True) / 2).exp() for y in (q, k))
        weights = torch.einsum("bshm,bthm->bsth", of_q, of_k) * seen
        mixed = torch.einsum("bsth,bthv->bshv", weights / weights.sum(2, keepdim=True), v)
        return mixed.flatten(-2) @ module.out.weight.T
    gate = F.silu(rest[0])
    if kind == "retnet":
        q, k = turned(q), turned(k)
        rates = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(spec.num_heads)]).double()
        step = rates.log()[None, None, :, None].expand(*q.shape)
    elif kind == "channel":
        logits = rest[1] @ module.decay_up.T + module.decay_bias
        step = (logits.unflatten(-1, (spec.num_heads, -1)).sigmoid() ** (1 / spec.gate_root)).log()
    else:
        wait = F.softplus(rest[1] + module.step_bias)
        step, k = (-wait * module.log_rate.exp())[..., None].expand(*q.shape), k * wait[..., None]
    fall = step.cumsum(1)
    weights = (fall[:, :, None] - fall[:, None]).exp() * seen[..., None]
    mixed = torch.einsum("bshd,bthd,bsthd,bthv->bshv", q, k, weights, v) / math.sqrt(spec.head_dim)
    if kind == "retnet":
        spread = (mixed - mixed.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + module.norm_eps
        normed = (mixed - mixed.mean(-1, keepdim=True)) / spread.sqrt()
    else:
        spread = mixed.square().mean(-1, keepdim=True) + module.head_norm.eps
        normed = mixed / spread.sqrt() * module.head_norm.weight
    return (gate * normed.flatten(-2)) @ module.out.weight.T


@torch.no_grad()
@pytest.mark.parametrize(
    ("mixer", "kind"),
    [(LINEAR, "linear"), (PERFORMER, "performer"), (RETNET, "retnet"), (CHANNEL, "channel"), (HEAD, "head")],
)
def test_formula(mixer, kind):
    model = small(mixer)
    x = torch.randn(2, 21, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for layer in model.layers:
        found = layer.mixer(x, Causal(torch.zeros(2, 21)))
        torch.testing.assert_close(found, formula(layer.mixer, x, kind))


@torch.no_grad()
@pytest.mark.parametrize("mixer", [DELTA, GATED_DELTA], ids=["delta", "gated delta"])
def test_delta_rule(mixer):
    """Token by token: the state's error for a key is what is corrected."""
    module = small(mixer, num_layers=1).layers[0].mixer
    x = torch.randn(2, 90, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (q, k, v), (gate, beta, *low) = heads(module, x, 4)
    q, k = (F.silu(y) / F.silu(y).norm(dim=-1, keepdim=True) for y in (q, k))
    state, rows = torch.zeros(2, 4, 6, v.shape[-1], dtype=torch.float64), []
    for t in range(90):
        if low:
            state = (
                state * (-F.softplus(low[0][:, t] + module.step_bias) * module.log_rate.exp()).exp()[..., None, None]
            )
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + beta[:, t].sigmoid()[..., None, None] * k[:, t, :, :, None] * error[:, :, None]
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    mixed = torch.stack(rows, 1)
    mixed = mixed / (mixed.square().mean(-1, keepdim=True) + module.head_norm.eps).sqrt() * module.head_norm.weight
    wanted = (F.silu(gate) * mixed.flatten(-2)) @ module.out.weight.T
    torch.testing.assert_close(module(x, Causal(torch.zeros(2, 90))), wanted)


@pytest.mark.slow
@FAMILY
def test_bit_by_bit_is_the_whole_in_bounded_memory(mixer):
    model = small(mixer)
    carry = check_incremental(model, 40, [[1] * 40, [3, 17, 1, 12, 7], [40]])
    assert state_count(carry) == 2 * sum(layer.mixer.state_values(40) for layer in model.config.layers)


@FAMILY
def test_sees_no_future(mixer):
    check_causal(small(mixer), 30)


@FAMILY
def test_documents_stay_apart(mixer):
    model = small(mixer)
    check_apart(model, [7, 1, 19, 3])
    check_together(model, [7, 1, 19, 3])


@torch.no_grad()
@FAMILY
def test_documents_stay_apart_when_they_come_bit_by_bit(mixer):
    """A pass that begins within one document and ends within another."""
    model = small(mixer)
    lengths = [7, 1, 19, 3]
    tokens = prompt(1, 30)
    ids = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    wanted = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], 1)
    carry, done, parts = {}, 0, []
    for part in tokens.split([5, 1, 1, 1, 12, 10], dim=1):
        here = slice(done, done + part.shape[1])
        context = Incremental(part, done, carry)
        context.document_ids = ids[:, here]
        context.positions = torch.cat([torch.arange(length) for length in lengths])[None, here]
        context._line = context.positions[0]
        parts.append(model(part, context))
        done += part.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=1e-10, rtol=1e-9)


@FAMILY
def test_gradients(mixer):
    # Keys made unit length bend more sharply than the rest: the differences must be of shorter steps.
    check_gradients(small(mixer), 12, step=1e-6 if mixer in (DELTA, GATED_DELTA) else 1e-5)


@FAMILY
def test_saved_and_loaded(mixer, tmp_path):
    check_saved(small(mixer), tmp_path)


@FAMILY
def test_counts_its_parameters(mixer):
    model = small(mixer)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.num_params
    layer, linears = model.layers[0].mixer, model.config.linears(0)
    fused = "qkvg" if hasattr(layer, "qkvg") else "qkv"
    matmuls = model.config.dims().layers[0].matmuls
    assert matmuls[0] == (linears[f"mixer.{fused}"].out_features, 24) == tuple(getattr(layer, fused).weight.shape)
    assert matmuls[1] == tuple(layer.out.weight.shape) and linears["mixer.out"].residual


@pytest.mark.slow
@FAMILY
def test_learns_and_writes(mixer):
    """Built as it is for training (float32, its own initial values), it learns a repeating text and goes on with it."""
    sizes = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 64}
    model = build(Shape.read({**sizes, "max_seq_len": 64, "num_layers": 2, "mixers": (mixer,)}).config(VOCAB))
    text = torch.arange(64).remainder(7)[None]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3 > 0.5 > losses[-1]
    written = generate(model, text[:, :9], 20)
    assert torch.equal(written, text[:, :29])


@torch.no_grad()
def test_performer_estimates_softmax():
    """The mean over many directions of the product of features is exp(q . k); orthogonal ones are closer than chance."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 50, 8, generator=generator, dtype=torch.float64) * 0.4

    def miss(directions):
        of_q, of_k = ((y @ directions.T - y.square().sum(-1, keepdim=True) / 2).exp() for y in (q, k))
        return ((of_q @ of_k.T / len(directions)).log() - q @ k.T).abs().mean().item()

    chance = [miss(torch.randn(64, 8, generator=generator, dtype=torch.float64)) for _ in range(50)]
    ours = [miss(orthogonal_features(64, 8, seed)) for seed in range(50)]
    assert sum(ours) < sum(chance)
    assert miss(orthogonal_features(65536, 8, 0)) < 0.02
    block = orthogonal_features(8, 8, 3)
    apart = F.normalize(block, dim=1) @ F.normalize(block, dim=1).T
    torch.testing.assert_close(apart, torch.eye(8, dtype=torch.float64))


@torch.no_grad()
def test_performer_holds_when_keys_grow_and_shrink():
    """Exponents of several hundred, rising and falling: the maximum moves, nothing overflows, float32 stays right."""
    spec = MIXERS["performer"].read({"kind": "performer", "num_heads": 1, "head_dim": 6})
    model = small({**spec.model_dump(), "kind": "performer"}, num_layers=1)
    x = torch.randn(1, 40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x * torch.linspace(0, 12, 40).sin()[:, None] * 5
    mixer, context = model.layers[0].mixer, Causal(torch.zeros(1, 40))
    wanted = formula(mixer, x, "performer")
    assert wanted.isfinite().all()
    torch.testing.assert_close(mixer(x, context), wanted, rtol=1e-5, atol=1e-5)
    found = mixer.float()(x.float(), context)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3)


def test_running_max():
    torch.manual_seed(0)
    x, begins, before = torch.randn(3, 50, 2), torch.rand(3, 50) < 0.15, torch.randn(3, 2)
    for given, known in [(None, None), (begins, None), (begins, before), (None, before)]:
        wanted = torch.empty_like(x)
        highest = torch.full((3, 2), -torch.inf) if known is None else known
        for place in range(50):
            if given is not None:
                highest = torch.where(given[:, place, None], -torch.inf, highest)
            highest = torch.maximum(highest, x[:, place])
            wanted[:, place] = highest
        assert torch.equal(running_max(x, given, known), wanted)


def test_sizes_that_no_kernel_takes_are_refused():
    for options in ({"kind": "retnet", "head_dim": 192}, {"kind": "gated_linear", "head_dim": 192}):
        with pytest.raises(SpecError, match="value_head_dim"):
            MIXERS.read({"num_heads": 2, **options})
    with pytest.raises(SpecError, match="odd"):
        MIXERS.read({"kind": "performer", "num_heads": 2, "head_dim": 5})
