"""Attention in Triton and through cuDNN on a GPU: every width, small tables, determinism, lse of a library."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.ops import attend
from hone.ops.attention import masks
from hone.ops.attention.masks import CAUSAL, FULL
from hone.ops.dispatch import locate
from tests.ops.attention import attend_case as case
from tests.ops.attention.attend_case import (
    LENGTHS,
    both_passes,
    check,
    check_lengths,
    far_from,
    random_documents,
    randoms,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def hopper() -> None:
    if not locate("cuda").runs_gluon:
        pytest.skip("attend asks cuDNN on Hopper only")


def test_causal() -> None:
    check_lengths(LENGTHS, (4, 2), 128, CAUSAL, "triton")
    check((2, 300, 300, 4, 2), (128, 128), CAUSAL, "triton", sinks=torch.randn(4, device="cuda"))


@pytest.mark.parametrize(("width", "heads"), [(96, (4, 4)), (192, (4, 2)), (256, (8, 1))])
def test_cudnn(width: int, heads: tuple[int, int], hopper: None) -> None:
    for mask, seq_q, seq_k in ((CAUSAL, 1003, 1003), (FULL, 600, 1024)):
        shapes = ((seq_q, heads[0]), (seq_k, heads[1]), (seq_k, heads[1]))
        inputs = [randoms(2, length, count, width) for length, count in shapes]
        upstream = [randoms(2, seq_q, heads[0], width), torch.randn(2, heads[0], seq_q, device="cuda")]
        case.poison(upstream[0], *inputs)
        exact = both_passes([part.double() for part in inputs], mask, upstream, "reference", by_lse=False)
        for backend in ("cudnn", None):  # unasked it is the same
            found = both_passes(inputs, mask, upstream, backend, by_lse=False)
            for name, ours, true in zip(("out", "lse", "dq", "dk", "dv"), found, exact, strict=True):
                assert ours.shape == true.shape and ours.is_contiguous()
                assert far_from(ours, true) < 8e-3, (name, mask.name, backend)


def test_cudnn_leaves_the_gradient_of_lse_to_triton(hopper: None) -> None:
    check((2, 700, 700, 4, 2), (192, 192), CAUSAL, "cudnn")
    check((2, 700, 700, 4, 2), (192, 192), CAUSAL, "cudnn", sinks=torch.randn(4, device="cuda"))
    check((2, 700, 700, 4, 2), (192, 128), CAUSAL, None)


def test_cudnn_with_narrower_values(hopper: None) -> None:
    """Latent attention's widths, the values a slice of a wider projection."""
    q, k, wide = randoms(2, 1003, 4, 192), randoms(2, 1003, 4, 192), randoms(2, 1003, 4, 256)
    upstream = [randoms(2, 1003, 4, 128), torch.randn(2, 4, 1003, device="cuda")]
    exact = both_passes([q.double(), k.double(), wide[..., 128:].double()], CAUSAL, upstream, "reference", by_lse=False)
    found = both_passes([q, k, wide[..., 128:]], CAUSAL, upstream, None, by_lse=False)
    for name, ours, true in zip(("out", "lse", "dq", "dk", "dv"), found, exact, strict=True):
        assert far_from(ours, true) < 8e-3, name


def test_cudnn_in_a_graph_and_compiled(hopper: None) -> None:
    fused = randoms(2, 600, 8, 256)
    leaves = [part.detach().requires_grad_() for part in fused.split([4, 2, 2], dim=2)]
    upstream = randoms(2, 600, 4, 256)

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, lse = attend(q, k, v, return_lse=True, backend="cudnn")
        return [out, lse.detach(), *torch.autograd.grad(out, [q, k, v], upstream)]

    def change() -> None:
        with torch.no_grad():
            fused.normal_()

    case.check_graph(lambda: run(*leaves), [change])
    whole = torch.compile(lambda q, k, v: attend(q * 2, k, v, backend="cudnn"), fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(whole(*leaves), leaves, upstream)
    for found, true in zip(ours, torch.autograd.grad(attend(leaves[0] * 2, *leaves[1:]), leaves, upstream)):
        assert far_from(found, true) < 5e-3


@pytest.mark.parametrize("widths", [(32, 32), (96, 96), (192, 128), (256, 256), (80, 24)])
def test_widths(widths: tuple[int, int]) -> None:
    check((2, 300, 433, 4, 2), widths, CAUSAL, "triton")


def test_prefix_of_wide_heads() -> None:
    check((2, 300, 300, 4, 2), (256, 256), masks.prefix(torch.tensor([9, 200], device="cuda")), "triton")


def test_gradients_that_must_be_bit_equal() -> None:
    check((2, 300, 300, 4, 2), (128, 128), CAUSAL, None, deterministic=True)


def test_documents() -> None:
    check_lengths([(1, 1), (1003, 1003)], (4, 2), 128, lambda b, s: masks.documents(random_documents(b, s)), "triton")
    case.check_graph_of_documents("triton")


@pytest.mark.parametrize("block", [16, 64])
def test_small_blocks_of_a_table(block: int) -> None:
    check((1, 500, 500, 4, 2), (64, 64), masks.bigbird(500, block=block, num_heads=4, device="cuda"), "triton")


def test_a_long_row() -> None:
    case.check_long(70001, "triton")


def test_slices_are_read_where_they_lie_and_what_is_past_the_end_does_not_matter() -> None:
    case.check_slices("triton")


def test_full_and_softcap_in_float16() -> None:
    check_lengths([(63, 500), (700, 700)], (2, 2), 64, FULL, "triton", torch.float16)
    check((2, 300, 300, 2, 2), (64, 64), FULL, "triton", torch.float16, softcap=3.0, scale=0.2)


def test_global_tokens_and_data_of_every_head() -> None:
    check((2, 700, 700, 3, 1), (64, 64), masks.longformer(torch.rand(2, 700, device="cuda") < 0.01, 50, 50), "triton")
    check((2, 512, 512, 4, 4), (64, 64), case.groups_of_every_head(2, 4, 512), "triton")


def test_a_union_of_masks_is_the_merge_of_its_parts() -> None:
    case.check_union("triton")
