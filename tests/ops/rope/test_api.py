"""Rotary positions, in place and into pages, against their definition."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.ops import rope, rope_write, write_kv
from hone.ops.rope import reference
from hone.ops.rope.api import angle_rows

F64 = torch.float64


def test_rotation_in_place_and_into_pages() -> None:
    qkv = torch.randn(6, 4 + 2 + 2, 16)
    before = qkv.clone()
    q, k, v = qkv.split([4, 2, 2], dim=1)
    angles = torch.randn(6, 1, 8)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.tensor([5, 0, 7, 2, 11, 6])
    k_pages, v_pages, k_expected, v_expected = torch.full((4, 3, 2, 4, 16), 7.0)
    expected = reference.rope(q, cos, sin)
    write_kv(reference.rope(k, cos, sin), v, k_expected, v_expected, slots // 4, slots % 4)
    rope_write(q, k, v, cos, sin, k_pages, v_pages, slots // 4, slots % 4)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(k_pages, k_expected)
    assert torch.equal(v_pages, v_expected)
    assert torch.equal(qkv[:, 4:], before[:, 4:])
    again = before[:, :4]
    assert rope(again, cos, sin, in_place=True) is again
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize(
    ("shape", "angles", "rows"),
    [((2, 5, 3, 8), (5,), 5), ((2, 5, 3, 8), (2, 5), 10), ((2, 5, 3, 8), (2, 1), 10), ((5, 3, 8), (1, 5), 5)],
)
def test_angles_repeat_over_the_batch(shape: tuple[int, ...], angles: tuple[int, ...], rows: int) -> None:
    x, cos = torch.randn(shape), torch.randn(*angles, 1, 4)
    found, _ = angle_rows(x, cos, cos)
    assert found.shape == (rows, 4)
    tokens = x[..., 0, 0].numel()
    spread = cos.expand(*shape[:-2], 1, 4) if len(angles) <= len(shape) - 2 else cos.expand(1, *shape[:-2], 1, 4)
    assert torch.equal(found[torch.arange(tokens) % rows], spread.reshape(-1, 4))


def test_pages_of_eight_bits_get_their_scales() -> None:
    q, k, v = torch.randn(5, 4, 16), *torch.randn(2, 5, 2, 16)
    angles = torch.randn(5, 1, 8)
    pages, offsets = torch.tensor([2, 0, 1, 1, 2]), torch.tensor([1, 0, 0, 3, 2])
    (k_pages, v_pages), scales = torch.zeros(2, 3, 2, 4, 16).to(torch.int8), torch.zeros(2, 3, 2, 4)
    rope_write(q, k, v, angles.cos(), angles.sin(), k_pages, v_pages, pages, offsets, *scales)
    found = v_pages[pages, :, offsets].float() * scales[1][pages, :, offsets][..., None]
    torch.testing.assert_close(found, v, atol=float(v.abs().max()) / 254 * 1.01, rtol=0)
    assert not scales[0][0, :, 1:].any() and scales[0][pages, :, offsets].all()


def test_heads_are_normed_before_they_turn() -> None:
    q, k, v = torch.randn(6, 8, 16).split([4, 2, 2], dim=1)
    angles, norms = torch.randn(6, 1, 8), torch.rand(2, 16) + 0.5
    cos, sin, slots = angles.cos(), angles.sin(), torch.tensor([5, 0, 7, 2, 11, 6])
    first, second = torch.zeros(2, 2, 3, 2, 4, 16)
    normed = [
        one / (one**2).mean(-1, keepdim=True).add(1e-3).sqrt() * by for one, by in zip((q, k), norms, strict=True)
    ]
    write_kv(reference.rope(normed[1], cos, sin), v, *second, slots // 4, slots % 4)
    expected = reference.rope(normed[0], cos, sin)
    rope_write(q, k, v, cos, sin, *first, slots // 4, slots % 4, q_norm=norms[0], k_norm=norms[1], eps=1e-3)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(first, second)


def test_angles_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(SpecError, match="do not fit"):
        angle_rows(torch.randn(5, 3, 8), torch.randn(5, 1, 3), torch.randn(5, 1, 3))


def test_rope_turns_pairs_and_keeps_relative_angles() -> None:
    x, y = torch.randn(2, 1, 8, dtype=F64)
    frequencies = 10.0 ** -torch.arange(4, dtype=F64)

    def at(vector: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * frequencies
        return reference.rope(vector, angles.cos()[None], angles.sin()[None])

    turned = at(x, 3)
    pair = torch.complex(x[0, 1], x[0, 5]) * torch.polar(torch.ones((), dtype=F64), 3 * frequencies[1])
    torch.testing.assert_close(torch.stack([turned[0, 1], turned[0, 5]]), torch.view_as_real(pair))
    torch.testing.assert_close((at(x, 9) * at(y, 4)).sum(), (at(x, 5) * at(y, 0)).sum())
