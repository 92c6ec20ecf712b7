"""Attention's Hopper kernels on a GPU, and what runs unasked: masks against float64, poisoned memory, graphs, compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.ops import attend
from hone.ops.attention import masks, reference
from hone.ops.attention.masks import CAUSAL, FULL
from hone.ops.dispatch import locate
from tests.ops.attention import attend_case as case
from tests.ops.attention.attend_case import LENGTHS, check, check_lengths, far_from, random_documents, randoms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and not locate("cuda").runs_gluon, reason="these kernels need compute capability 9.0"
    ),
]
SQUARES = [(1, 1), (129, 129), (700, 700), (1003, 1003)]
FP16 = torch.float16


def test_causal() -> None:
    check_lengths(LENGTHS, (4, 2), 128, CAUSAL, "gluon", loose=True)
    check((2, 300, 300, 4, 2), (128, 128), CAUSAL, "gluon", loose=True, sinks=torch.randn(4, device="cuda"))


def test_documents() -> None:
    check_lengths(SQUARES, (4, 2), 128, lambda b, s: masks.documents(random_documents(b, s)), "gluon", loose=True)
    check_lengths(SQUARES, (2, 1), 128, lambda b, s: masks.documents(random_documents(b, s), 70), "gluon", loose=True)


def test_window() -> None:
    check_lengths(LENGTHS, (8, 4), 128, masks.window(100), "gluon", loose=True)


@pytest.mark.parametrize("seq_len", [70001, 131072])
def test_long_rows_are_right_and_their_memory_linear(seq_len: int) -> None:
    case.check_long(seq_len, "gluon")


def test_slices_are_read_where_they_lie_and_what_is_past_the_end_does_not_matter() -> None:
    case.check_slices("gluon")


def test_a_union_of_masks_is_the_merge_of_its_parts() -> None:
    case.check_union("gluon")


def test_a_graph_replays_with_new_numbers_and_new_documents_and_allocates_nothing() -> None:
    case.check_graph_of_documents("gluon")


def test_a_long_dense_row() -> None:
    q, k, v = (randoms(1, length, heads, 128) for length, heads in ((3, 2), (70001, 1), (70001, 1)))
    out, lse = attend(q, k, v, CAUSAL, return_lse=True, backend="gluon")
    exact, exact_lse = reference.attend(q.double(), k.double(), v.double())
    assert far_from(out, exact) < 8e-3
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-4)


def test_causal_heads_of_64_sixteen_to_a_key_head() -> None:
    check_lengths(LENGTHS, (16, 1), 64, CAUSAL, "gluon", loose=True)


def test_full_in_float16() -> None:
    check_lengths(LENGTHS, (2, 2), 64, FULL, "gluon", FP16, loose=True)


def test_blocks_of_a_table() -> None:
    for seq_len in (500, 1003):
        mask = masks.bigbird(seq_len, block=128, num_heads=4, causal=seq_len == 500, device="cuda")
        check((2, seq_len, seq_len, 4, 2), (128, 128), mask, "gluon", loose=True)


def test_global_tokens_three_heads_to_a_key_head() -> None:
    mask = masks.longformer(torch.rand(3, 1003, device="cuda") < 0.01, 50, 50)
    check((3, 1003, 1003, 6, 2), (64, 64), mask, "gluon", loose=True)


def test_data_of_every_head() -> None:
    check((2, 1024, 1024, 4, 4), (64, 64), case.groups_of_every_head(2, 4, 1024), "gluon", FP16, loose=True)


def test_a_band_as_a_range_and_as_a_rule() -> None:
    # More queries than keys, so that some see nothing; the second is too wide to be taken as a range.
    for lengths in ((700, 700), (333, 1400), (1025, 77)):
        for mask in (masks.band(30, 200), masks.band(100, 1 << 30)):
            check((2, *lengths, 4, 2), (128, 128), mask, "gluon", loose=True)


def test_softcap() -> None:
    check_lengths([(300, 300), (100, 900)], (4, 2), 128, CAUSAL, "gluon", loose=True, softcap=3.0, scale=0.2)


def test_compiles_whole() -> None:
    leaves = [randoms(2, 512, heads, 128).requires_grad_() for heads in (4, 2, 2)]
    window = masks.window(100)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attend(q * 1.5, k, v, window, return_lse=True)
        return out.float().square().mean() + lse.mean() + attend(q, k, v).float().sum()

    whole = torch.compile(loss, fullgraph=True)
    for ours, true in zip(torch.autograd.grad(whole(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves)):
        assert far_from(ours, true) < 5e-3


def test_what_runs_unasked_is_right() -> None:
    for dtype, width in ((torch.bfloat16, 128), (torch.float32, 64), (torch.float16, 320)):
        q, k, v = (randoms(1, 200, heads, width, dtype=dtype) for heads in (4, 2, 2))
        for mask in (CAUSAL, FULL, masks.window(100)):
            exact, _ = reference.attend(q.double(), k.double(), v.double(), mask)
            assert far_from(attend(q, k, v, mask), exact) < 8e-3
