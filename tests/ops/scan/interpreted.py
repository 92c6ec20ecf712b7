"""The scan kernels in the interpreter agree with the recurrence, forward and backward, however a head is cut."""

from __future__ import annotations

import pytest
import torch

from hone.ops import scan
from hone.ops.scan import triton_kernels as kernels
from hone.ops.scan.reference import scan_steps

CUT = {"chunk": 16, "block_v": 16, "warps": 4, "stages": 2}


def drawn(rows, seq_len, dim_k, dim_v, form, share=1):
    batch, heads = rows
    q, k = torch.randn(batch, seq_len, heads, dim_k), torch.randn(batch, seq_len, heads // share, dim_k)
    v = torch.randn(batch, seq_len, heads, dim_v)
    decay = {
        "none": None,
        "head": -torch.rand(heads),
        "token": -torch.rand(batch, seq_len, heads),
        "strong": -40 * torch.rand(batch, seq_len, heads),
        "channel": -torch.rand(batch, seq_len, heads, dim_k),
        "strong channel": -40 * torch.rand(batch, seq_len, heads, dim_k),
    }[form]
    return [q, k, v, decay, torch.randn(batch, heads, dim_k, dim_v)]


# Each form of decay has several rows and several heads once, where heads share keys; lengths and segments need no more.
@pytest.mark.parametrize(
    ("rows", "seq_len", "segments", "dim_k", "dim_v", "form", "resets", "share"),
    [
        ((2, 2), 20, 1, 16, 16, "none", False, 1),
        ((1, 2), 33, 2, 32, 16, "head", True, 1),
        ((2, 2), 20, 2, 16, 40, "token", True, 2),
        ((1, 2), 33, 3, 12, 20, "token", False, 1),
        ((2, 1), 31, 2, 16, 16, "strong", False, 1),
        ((1, 1), 1, 1, 16, 16, "token", True, 1),
        ((1, 1), 100, 3, 16, 16, "token", True, 1),
        ((1, 1), 40, 1, 16, 16, "channel", False, 1),
        ((2, 2), 20, 2, 12, 40, "channel", True, 2),
        ((1, 1), 33, 2, 32, 16, "strong channel", False, 1),
    ],
)
def test_agrees_with_the_recurrence(monkeypatch, rows, seq_len, segments, dim_k, dim_v, form, resets, share):
    monkeypatch.setattr(kernels, "tiling", lambda *_: kernels.Tiling(segments=segments, **CUT))
    given = drawn(rows, seq_len, dim_k, dim_v, form, share)
    reset = torch.rand(rows[0], seq_len) < 0.1 if resets else None
    taking = [x.requires_grad_() for x in given if x is not None]
    wide = [None if x is None else x.detach().double().requires_grad_() for x in given]
    wanted = scan_steps(*wide[:4], state=wide[4], reset=reset, scale=0.5)
    got = scan(*given[:4], state=given[4], reset=reset, scale=0.5, return_state=True, backend="triton")
    weights = [torch.randn_like(x) for x in wanted]
    # Cumulative decays of -600 are rounded to 6e-5, and so are the weights that come from their differences.
    rtol, atol = (2e-4, 3e-4) if "strong" in form else (1e-5, 3e-5)
    for mine, oracle in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), oracle, rtol=rtol, atol=atol)
    gradients = torch.autograd.grad([*got], taking, [w.float() for w in weights])
    oracles = torch.autograd.grad([*wanted], [x for x in wide if x is not None], weights)
    for mine, oracle in zip(gradients, oracles, strict=True):
        torch.testing.assert_close(mine.double(), oracle, rtol=3e-4, atol=1e-4 * max(1.0, oracle.abs().max().item()))


def channels(monkeypatch, dtype, strength, chunk, segments, parts, shape, share):
    """Relative errors of a scan with a decay a channel and resets: out, state, then gradients of q, k, v, decay, state."""
    plan = kernels.Tiling(chunk, 16, segments, 4, 2, parts)
    monkeypatch.setattr(kernels, "tiling", lambda *_: plan)
    batch, seq_len, heads, dim_k, dim_v = shape
    q = torch.randn(batch, seq_len, heads, dim_k).to(dtype)
    k = (torch.randn(batch, seq_len, heads // share, dim_k) * dim_k**-0.5).to(dtype)
    v = torch.randn(batch, seq_len, heads // share, dim_v).to(dtype)
    given = [q, k, v, -strength * torch.rand(batch, seq_len, heads, dim_k), torch.randn(batch, heads, dim_k, dim_v)]
    reset = torch.rand(batch, seq_len) < 4 / seq_len
    wide = [x.double().requires_grad_() for x in given]
    wanted = scan_steps(*wide[:4], state=wide[4], reset=reset, scale=0.7)
    weights = [torch.randn_like(x) for x in wanted]
    taking = [x.requires_grad_() for x in given]
    got = scan(*given[:4], state=given[4], reset=reset, scale=0.7, return_state=True, backend="triton")
    gradients = torch.autograd.grad([*got], taking, [w.to(x.dtype) for w, x in zip(weights, got, strict=True)])
    oracles = [*wanted, *torch.autograd.grad([*wanted], wide, weights)]
    pairs = zip([*got, *gradients], oracles, strict=True)
    return [((mine.double() - x).norm() / (x.norm() if x.any() else 1)).item() for mine, x in pairs]


@pytest.mark.parametrize(
    ("chunk", "segments", "parts", "shape", "share"),
    [
        (64, 2, 2, (1, 138, 2, 40, 24), 2),
        (32, 2, 3, (1, 138, 1, 72, 40), 1),
        (16, 3, 4, (2, 66, 1, 16, 16), 1),
    ],
)
def test_a_decay_a_channel_however_it_is_cut(monkeypatch, chunk, segments, parts, shape, share):
    errors = channels(monkeypatch, torch.float32, 0.3, chunk, segments, parts, shape, share)
    assert max(errors) < 2e-6, errors


@pytest.mark.parametrize(("strength", "bound"), [(0.3, 1e-3), (30.0, 4e-3)])
def test_rounded_pairs_cancel_in_the_gradient_of_decays(monkeypatch, strength, bound):
    """Made of rounded dq and dk it would be off by 2e-3 and, decays being strong, 2e-2: errors add up over a segment."""
    *others, of_decay, _ = channels(monkeypatch, torch.float16, strength, 64, 2, 2, (1, 300, 1, 40, 24), 1)
    assert max(others) < 6e-4
    assert of_decay < bound


@pytest.mark.parametrize("segments", [1, 2])
def test_without_a_state_to_begin_with(monkeypatch, segments):
    monkeypatch.setattr(kernels, "tiling", lambda *_: kernels.Tiling(segments=segments, **CUT))
    q, k, v, decay, _ = drawn((1, 2), 40, 16, 16, "token")
    taking = [x.requires_grad_() for x in (q, k, v, decay)]
    wanted, _ = scan_steps(q, k, v, decay)
    got = scan(q, k, v, decay, backend="triton")
    weight = torch.randn_like(got)
    for mine, oracle in zip(
        torch.autograd.grad(got, taking, weight), torch.autograd.grad(wanted, taking, weight), strict=True
    ):
        torch.testing.assert_close(mine, oracle, rtol=1e-4, atol=1e-4)


def test_views_are_read_in_place_and_nothing_else():
    """q, k and v as slices of one fused tensor whose other columns are NaN."""
    fused = torch.full((1, 20, 2, 64), torch.nan)
    fused[..., :48] = torch.randn(1, 20, 2, 48)
    q, k, v = fused[..., :16], fused[..., 16:32], fused[..., 32:48]
    wanted, _ = scan_steps(q, k, v)
    torch.testing.assert_close(scan(q, k, v, backend="triton"), wanted, rtol=1e-5, atol=3e-5)


def test_tilings_cover_every_token_once():
    for batch, heads, seq_len in [(1, 16, 16384), (1, 1, 70000), (64, 32, 1), (8, 32, 2048), (1, 3, 65)]:
        plan = kernels.tiling(batch, heads, seq_len, 128, 128, 132)
        chunks = -(-seq_len // plan.chunk)
        each = -(-chunks // plan.segments)
        assert (plan.segments - 1) * each < chunks <= plan.segments * each
