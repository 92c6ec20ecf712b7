"""The paged attention kernels in the interpreter: any cut gives the softmax, and unused slots are never read."""

from __future__ import annotations

import pytest
import torch

from hone.ops.paged.triton_launch import Options, Plan, launch_decode, launch_prefill
from tests.ops.paged.paged_case import TREE, Case, distance


def run(case: Case, *, decode: int = 0, prefill: int = 0, programs: int = 5, swap: bool = False):
    """`decode`: most tokens of the decode kernel's rows; `prefill`: least tokens of the prefill kernel's."""
    given = case.poisoned()
    out = torch.full((*case.q.shape[:2], given[2].shape[3]), float("nan"), dtype=case.q.dtype)
    counts = torch.tensor(case.counts, dtype=torch.int32)
    if decode:
        plan = Plan(programs, 16, 2, 4, swap)
        launch_decode(out, *given[:5], given[5], decode, Options(**case.options), plan)
    if prefill:
        launch_prefill(out, *given[:5], counts, prefill, Options(**case.options), 16, 16, 2, 4)
    return out


ROWS = [20, 3, 0, 33]


# With 24 programs a part is less than a block, and a row has five of them; where parts end does not depend on `swap`.
@pytest.mark.parametrize(("programs", "swap"), [(1, False), (3, True), (7, False), (24, True)])
def test_decode_is_cut_anywhere(programs, swap):
    case = Case(ROWS, groups=3, page_size=16)
    assert distance(run(case, decode=1, programs=programs, swap=swap), case.expected()) < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"window": 9},
        {"window": 9, "sink_tokens": 5},
        {"window": 1, "sink_tokens": 100},
        {"sinks": True},
        {"sinks": True, "window": 30},
        {"page_size": 32},
        {"page_size": 3, "groups": 5},
        {"head_dim": 24, "value_dim": 40},
        {"kv_heads": 1, "groups": 8},
    ],
)
def test_decode_options(options):
    case = Case([50, 3, 17], **{"page_size": 16, **options})
    assert distance(run(case, decode=1), case.expected()) < 1e-6


def test_decode_of_a_few_tokens_a_row():
    case = Case([40, 3, 17], [3, 1, 2], page_size=16, groups=3, window=20)
    assert distance(run(case, decode=3), case.expected()) < 1e-6


# Page 16, so that a tree lies in two blocks of 16 slots; the row without new tokens only pads.
@pytest.mark.parametrize("swap", [False, True])
def test_new_tokens_that_are_a_tree(swap):
    case = Case([40, 3, 21, 35], [5, 0, 5, 5], page_size=16, groups=3, tree=TREE)
    assert distance(run(case, decode=5, swap=swap), case.expected()) < 1e-6


# int8 without a window is what small values have.
@pytest.mark.parametrize(
    ("page_dtype", "options"), [(torch.float8_e4m3fn, {}), (torch.int8, {"window": 9, "sink_tokens": 5})]
)
def test_pages_of_8_bits(page_dtype, options):
    case = Case([40, 3, 9, 33], [3, 1, 9, 10], page_size=16, page_dtype=page_dtype, **options)
    assert distance(run(case, decode=3, prefill=4), case.expected()) < 2e-3


def test_small_values_keep_their_precision():
    """float16 holds weights times scales, and scales of such values are far below its smallest number."""
    case = Case([40, 3, 9, 33], [3, 1, 9, 10], page_size=16, page_dtype=torch.int8)
    case.scales[1].mul_(1e-7)
    assert distance(run(case, decode=3, prefill=4), case.expected()) < 2e-3


def test_a_sink_may_be_switched_off():
    case = Case([40, 0, 17], page_size=16, sinks=True)
    case.options["sinks"].fill_(float("-inf"))
    assert distance(run(case, decode=1), case.expected()) < 1e-6


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 9}, {"window": 20, "sink_tokens": 5}, {"sinks": True}, {"page_size": 3, "groups": 3}, {"head_dim": 24}],
)  # fmt: skip
def test_prefill(options):
    case = Case([20, 3, 17, 40, 5], [20, 3, 2, 10, 1], **{"page_size": 16, **options})
    assert distance(run(case, prefill=1), case.expected()) < 1e-6


def test_decode_and_prefill_share_the_rows():
    case = Case([20, 3, 17, 40, 5], [20, 1, 2, 10, 1], page_size=16)
    out = run(case, decode=2)
    short = torch.tensor([count <= 2 for count in case.counts for _ in range(count)])
    assert out[short].isfinite().all() and out[~short].isnan().all()
    assert distance(run(case, decode=2, prefill=3), case.expected()) < 1e-6


def test_latents():
    case = Case([40, 3, 17], kv_heads=1, groups=4, head_dim=48, value_dim=32, page_size=16)
    case.pages[1] = case.pages[0][..., :32]
    q, keys, _, table, lens, _ = case.poisoned()
    out = torch.full((3, 4, 32), float("nan"))
    plan = Plan(4, 16, 2, 4)
    launch_decode(out, q, keys, keys[..., :32], table, lens, None, 1, Options(**case.options), plan, rope_dim=16)
    assert distance(out, case.expected()) < 1e-6
