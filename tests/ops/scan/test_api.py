"""The plain torch scan: the recurrence written out, chunks of it, gradients, documents, states, refusals, rules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import SpecError
from hone.ops import scan, scan_delta
from hone.ops.dispatch import Where, choose
from hone.ops.scan.reference import scan_chunks, scan_steps

FORMS = ("none", "head", "token", "channel")


def drawn(form, seq_len=37, dim_k=5, dim_v=3, strength=3.0, seed=0):
    torch.manual_seed(seed)
    batch, heads = 2, 2
    q, k = (torch.randn(batch, seq_len, heads, dim_k, dtype=torch.float64) for _ in range(2))
    v = torch.randn(batch, seq_len, heads, dim_v, dtype=torch.float64)
    shape = {"head": (heads,), "token": (batch, seq_len, heads), "channel": (batch, seq_len, heads, dim_k)}.get(form)
    decay = None if shape is None else -strength * torch.rand(shape, dtype=torch.float64)
    return q, k, v, decay, torch.randn(batch, heads, dim_k, dim_v, dtype=torch.float64)


def by_formula(q, k, v, decay, state, reset, scale):
    """out_s as one sum over all t <= s of one document, weights from products of exp(decay): no recurrence, no chunks."""
    batch, seq_len, heads, dim_k = q.shape
    if decay is None:
        decay = torch.zeros(heads, dtype=q.dtype)
    if decay.dim() == 1:
        decay = decay.expand(batch, seq_len, heads)
    if decay.dim() == 3:
        decay = decay[..., None].expand(batch, seq_len, heads, dim_k)
    document = torch.zeros(batch, seq_len) if reset is None else reset.cumsum(1)
    out = torch.zeros(*v.shape, dtype=v.dtype)
    for b in range(batch):
        for s in range(seq_len):
            for t in range(s + 1):
                if document[b, t] == document[b, s]:
                    weight = decay[b, t + 1 : s + 1].sum(0).exp()
                    out[b, s] += (q[b, s] * k[b, t] * weight).sum(-1, keepdim=True) * v[b, t]
            if document[b, s] == 0:
                out[b, s] += torch.einsum("hk,hkv->hv", q[b, s] * decay[b, : s + 1].sum(0).exp(), state[b])
    return scale * out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("resets", [False, True])
def test_the_recurrence_is_the_formula(form, resets):
    *given, state = drawn(form, seq_len=12)
    reset = torch.rand(2, 12) < 0.2 if resets else None
    out, _ = scan_steps(*given, state=state, reset=reset, scale=0.5)
    torch.testing.assert_close(out, by_formula(*given, state, reset, 0.5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("strength", [3.0, 300.0])
def test_chunks_agree_with_the_recurrence_and_so_do_gradients(form, resets, strength):
    """Also where decays are so strong that exp of a cumulative one would leave any range if it were ever inverted."""
    given = drawn(form, strength=strength)
    reset = torch.rand(2, 37) < 0.1 if resets else None
    taking = [x.requires_grad_() for x in given if x is not None]
    wanted = scan_steps(*given[:4], state=given[4], reset=reset, scale=0.5)
    got = scan_chunks(*given[:4], state=given[4], reset=reset, scale=0.5, chunk=8)
    weights = [torch.randn_like(x) for x in wanted]
    for mine, oracle in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, oracle)
    pairs = zip(torch.autograd.grad(got, taking, weights), torch.autograd.grad(wanted, taking, weights), strict=True)
    for mine, oracle in pairs:
        torch.testing.assert_close(mine, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    given = [x.requires_grad_() if x is not None else None for x in drawn(form, seq_len=7)]
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[0, 3] = True

    def run(*given):
        q, k, v, *rest = given
        return scan_chunks(q, k, v, rest[0] if len(rest) == 2 else None, state=rest[-1], reset=reset, chunk=4)

    assert torch.autograd.gradcheck(run, [x for x in given if x is not None])


@pytest.mark.parametrize("form", FORMS)
def test_in_pieces_with_the_state_handed_on(form):
    q, k, v, decay, state = drawn(form, seq_len=23)
    reset = torch.zeros(2, 23, dtype=torch.bool)
    reset[0, 9] = reset[1, 4] = reset[1, 15] = True
    whole, last = scan(q, k, v, decay, state=state, reset=reset, return_state=True)
    parts, first = [], 0
    for size in (1, 1, 7, 6, 8):
        here = slice(first, first + size)
        step = decay if decay is None or decay.dim() == 1 else decay[:, here]
        part, state = scan(
            q[:, here], k[:, here], v[:, here], step, state=state, reset=reset[:, here], return_state=True
        )
        parts.append(part)
        first += size
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("form", FORMS)
def test_a_document_is_what_it_is_alone(form):
    """Bit by bit: what stands before a reset, the state included, and what stands after, is never seen."""
    q, k, v, decay, state = drawn(form, seq_len=30)
    reset = torch.zeros(2, 30, dtype=torch.bool)
    reset[:, 11] = True
    k[:, :11], v[:, :11] = 1e30, 1e30
    out = scan(q, k, v, decay, state=state * 1e30, reset=reset)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, 20:] = 7.0
    assert torch.equal(scan(*changed, decay, state=state, reset=reset)[:, 11:20], out[:, 11:20])
    alone = scan(q[:, 11:], k[:, 11:], v[:, 11:], decay if decay is None or decay.dim() == 1 else decay[:, 11:])
    torch.testing.assert_close(out[:, 11:], alone)


@pytest.mark.parametrize("form", ["none", "head", "token"])
@pytest.mark.parametrize("resets", [False, True])
def test_the_delta_rule_in_chunks_is_the_rule(form, resets):
    q, k, v, decay, state = drawn(form, seq_len=150, strength=0.5)
    k, beta = k / k.norm(dim=-1, keepdim=True), torch.rand(2, 150, 2, dtype=torch.float64)
    reset = torch.rand(2, 150) < 0.05 if resets else None
    now, rows = state, []
    for t in range(150):
        if reset is not None:
            now = torch.where(reset[:, t, None, None, None], 0.0, now)
        if decay is not None:
            now = now * (decay if decay.dim() == 1 else decay[:, t]).exp()[..., None, None]
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], now)
        now = now + beta[:, t, :, None, None] * k[:, t, :, :, None] * error[:, :, None]
        rows.append(0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], now))
    out, last = scan_delta(q, k, v, beta, decay, state=state, reset=reset, scale=0.5, return_state=True)
    torch.testing.assert_close(out, torch.stack(rows, 1))
    torch.testing.assert_close(last, now)


@pytest.mark.slow
def test_gradcheck_of_the_delta_rule():
    q, k, v, decay, state = drawn("token", seq_len=7)
    given = [q, k / k.norm(dim=-1, keepdim=True), v, torch.rand(2, 7, 2, dtype=torch.float64), decay]
    given = [x.detach().requires_grad_() for x in given]
    assert torch.autograd.gradcheck(lambda *given: scan_delta(*given, state=state, return_state=True), given)


def test_the_delta_rule_of_shared_heads_and_its_refusals():
    q, k, v = torch.randn(1, 9, 4, 5), F.normalize(torch.randn(1, 9, 2, 5), dim=-1), torch.randn(1, 9, 1, 3)
    beta = torch.rand(1, 9, 4)
    repeated = scan_delta(q, k.repeat_interleave(2, 2), v.expand(-1, -1, 4, -1), beta)
    torch.testing.assert_close(scan_delta(q, k, v, beta), repeated)
    with pytest.raises(SpecError, match="beta"):
        scan_delta(q, k, v, beta[..., :2])
    with pytest.raises(SpecError, match="decay"):
        scan_delta(q, k, v, beta, -torch.rand(1, 9, 4, 5))


def test_shared_heads_are_repeated_heads():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 9, 6, 4), torch.randn(1, 9, 2, 4), torch.randn(1, 9, 3, 5)
    repeated = scan(q, k.repeat_interleave(3, 2), v.repeat_interleave(2, 2))
    torch.testing.assert_close(scan(q, k, v), repeated)


def test_halves_are_summed_in_float32():
    q, k, v, decay, _ = drawn("token", seq_len=300)
    wanted, _ = scan_steps(*(x.bfloat16() for x in (q, k, v)), decay)
    got, state = scan(*(x.bfloat16() for x in (q, k, v)), decay.float(), return_state=True)
    assert got.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(got.float(), wanted.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", {"q": torch.zeros(2, 4, 5)}),
        ("k", {"k": torch.zeros(2, 4, 2, 6)}),
        ("v", {"v": torch.zeros(2, 5, 2, 3)}),
        ("heads", {"v": torch.zeros(2, 4, 3, 3)}),
        ("decay", {"decay": torch.zeros(3)}),
        ("decay", {"decay": torch.zeros(2, 4, 2, 4)}),
        ("state", {"state": torch.zeros(2, 2, 3, 5)}),
        ("reset", {"reset": torch.zeros(2, 4)}),
        ("backend", {"backend": "cudnn"}),
        ("scale", {"scale": 0.0}),
        ("tokens", {"q": torch.zeros(2, 0, 2, 5), "k": torch.zeros(2, 0, 2, 5), "v": torch.zeros(2, 0, 2, 3)}),
    ],
)
def test_refusals_name_the_argument(name, change):
    given = {"q": torch.zeros(2, 4, 2, 5), "k": torch.zeros(2, 4, 2, 5), "v": torch.zeros(2, 4, 2, 3), **change}
    with pytest.raises(SpecError, match=name):
        scan(**given)


def test_where_it_runs():
    hopper = Where("cuda", (9, 0), 132, (3, 6))
    case = {"dtype": torch.bfloat16, "dim_k": 128, "dim_v": 128, "seq_len": 4096, "decay": "token"}
    assert choose("scan", hopper, **case).backend == "gluon"
    assert choose("scan", Where("cuda", (8, 0), 108, (3, 6)), **case).backend == "triton"
    for change in ({"dtype": torch.float16}, {"dim_k": 256}, {"dim_v": 16}, {"seq_len": 1}):
        assert choose("scan", hopper, **{**case, **change}).backend == "triton"
    assert choose("scan", hopper, **{**case, "decay": "channel"}).backend == "triton"
    assert choose("scan", Where(), **case).backend == "reference"
    assert choose("scan", Where("cuda", (7, 5), 40, (3, 6)), **case).backend == "reference"
    assert "float32" in choose("scan", hopper, **{**case, "dtype": torch.float32}).reason
    assert "256" in choose("scan", hopper, **{**case, "dim_v": 512}).reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": torch.zeros(2, 5, 0, 4)}, "k .* no heads"),
        ({"v": torch.zeros(2, 5, 2, 0)}, "v .* no heads or heads of width 0"),
        ({"k": torch.zeros(2, 5, 2, 4, dtype=torch.float64)}, "k is torch.float64"),
        ({"q": torch.zeros(2, 5, 2, 4, dtype=torch.int64)}, "q is torch.int64"),
        ({"decay": torch.zeros(2, device="meta")}, "decay is on meta"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": 0.0}, "scale is 0.0"),
    ],
)
def test_what_does_not_fit_is_named(change, said):
    given = {name: torch.zeros(2, 5, 2, 4) for name in "qkv"} | change
    with pytest.raises(SpecError, match=said):
        scan(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_an_empty_batch_is_empty():
    q = torch.zeros(0, 5, 2, 4)
    out, state = scan(q, q, q, return_state=True)
    assert out.shape == (0, 5, 2, 4) and state.shape == (0, 2, 4, 4)
