"""BigBird: which blocks a token sees, that a prefix sees what it will see in the longer text, decoding."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.model.context import Causal
from hone.ops import rope
from tests.model.mixers.small import (
    check_apart,
    check_causal,
    check_gradients,
    check_incremental,
    check_saved,
    dense,
    prompt,
    small,
    state_count,
)

BIG = {"kind": "bigbird", "block": 16, "num_window": 2, "num_global": 1, "num_random": 1, "max_seq_len": 160}
WIDE = {**BIG, "num_window": 1, "num_random": 2}


def sees(mixer, seq_len: int) -> torch.Tensor:
    """Which keys change which rows: bool [S, S], by trying."""
    torch.manual_seed(3)
    x = torch.randn(1, seq_len, 24, dtype=torch.float64)
    plain = mixer(x, Causal(x[..., 0]))
    columns = []
    for place in range(seq_len):
        other = x.clone()
        other[:, place] += 1
        columns.append(((mixer(other, Causal(x[..., 0])) - plain).abs().amax(-1) > 1e-9)[0])
    return torch.stack(columns, 1)


@torch.no_grad()
@pytest.mark.parametrize("encoder", [False, True])
def test_a_block_sees_its_window_the_global_ones_and_some_drawn(encoder):
    spec = {**BIG, "num_window": 3, "num_global": 2, "encoder": encoder}
    mixer = small(spec).layers[0].mixer
    seen = sees(mixer, 150).view(-1)[: 150 * 150].view(150, 150)
    drawn = 0
    for i in range(0, 150, 7):
        for j in range(150):
            a, b = i // 16, j // 16
            window = abs(a - b) <= 1 if encoder else 0 <= a - b < 3
            ends = {0, 9} if encoder else {0, 1}
            must = window or b in ends or (encoder and a in ends)
            if not encoder and j > i:
                assert not seen[i, j], (i, j)
            elif must:
                assert seen[i, j], (i, j)
            elif seen[i, j]:
                drawn += 1
    assert drawn


@torch.no_grad()
@pytest.mark.parametrize("spec", [BIG, {**BIG, "num_window": 3, "encoder": True}])
def test_formula_under_its_own_table(spec):
    mixer = small(spec).layers[0].mixer
    x = torch.randn(2, 70, 24, dtype=torch.float64)
    context = Causal(x[..., 0])
    q, k, v = (part.unflatten(-1, (-1, 6)) for part in (x @ mixer.qkv.weight.T).split([24, 12, 12], -1))
    turns = context.rotary(mixer.spec.rope, 6, x.dtype)
    seen = mixer.mask(70, x.device).dense(70, 70, x.device)
    assert len({tuple(rows.flatten().tolist()) for rows in seen[0]}) > 1, "every head drew the same blocks"
    want = dense(rope(q, *turns), rope(k, *turns), v, seen, 6**-0.5)
    torch.testing.assert_close(mixer(x, context), want.flatten(-2) @ mixer.out.weight.T)


@torch.no_grad()
def test_layers_draw_apart_and_prefixes_alike():
    model = small(WIDE, num_layers=2)
    tables = [layer.mixer.mask(160, torch.device("cpu")).table for layer in model.layers]
    assert not torch.equal(*tables)
    tokens = prompt(1, 130)
    torch.testing.assert_close(model(tokens[:, :75]), model(tokens)[:, :75])


@pytest.mark.parametrize("spec", [BIG, WIDE])
def test_decoding(spec):
    model = small(spec, max_seq_len=160)
    carry = check_incremental(model, 75, [[75], [1] * 75, [30, 1, 44]])
    assert state_count(carry) == 2 * model.config.dims().state_values(75)


def test_order_gradients_documents_folder(tmp_path):
    model = small(WIDE)
    check_causal(model, 70)
    check_gradients(model, 40)
    check_apart(model, [30, 37, 3])
    check_apart(small({**BIG, "num_window": 3, "encoder": True}), [30, 37, 3])
    check_saved(model, tmp_path)
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())


def test_more_than_it_was_drawn_for_is_refused():
    with pytest.raises(SpecError, match="160 tokens"):
        small(BIG)(prompt(1, 161))
    with pytest.raises(SpecError, match="block"):
        small({**BIG, "block": 24})
    with pytest.raises(SpecError, match="num_window 2 is even"):
        small({**BIG, "encoder": True})


@torch.no_grad()
@pytest.mark.parametrize("spec", [BIG, WIDE, {**BIG, "num_window": 3, "num_global": 2, "encoder": True}])
def test_flops_are_those_of_the_pairs_kept(spec):
    model = small({**spec, "max_seq_len": 640}, max_seq_len=640)
    mixer, seq_len = model.layers[0].mixer, 640
    pairs = mixer.mask(seq_len, torch.device("cpu")).dense(seq_len, seq_len, "cpu").sum().item()
    predicted = mixer.spec.mixing_flops(seq_len) * seq_len / (4 * mixer.spec.head_dim)
    assert predicted == pytest.approx(pairs, rel=0.1)
