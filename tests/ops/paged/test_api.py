"""Paged attention against attention over the gathered rows, for every mix of lengths, groups and windows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.ops import rope_write
from hone.ops.attention import masks
from hone.ops.attention.reference import attend
from hone.ops.paged import reference as paged_rows
from hone.ops.paged.api import attend_latent, attend_paged, attend_planned, plan_sequences, quantize_kv, write_kv
from tests.ops.paged.paged_case import TREE, Case, distance

HEAD_DIM = 6


def filled(seq_lens: list[int], kv_heads: int, page_size: int, seed: int = 0):
    """Pages holding random rows, pages in shuffled order, slots past a row's end NaN-free but wild; the rows too."""
    generator = torch.Generator().manual_seed(seed)
    widest = max(-(-length // page_size) for length in seq_lens)
    num_pages = sum(-(-length // page_size) for length in seq_lens) + 1
    pages = [torch.full((num_pages, kv_heads, page_size, HEAD_DIM), 1e3, dtype=torch.float64) for _ in range(2)]
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(seq_lens), widest, dtype=torch.int64)
    rows = []
    for row, length in enumerate(seq_lens):
        ids = [order.pop() for _ in range(-(-length // page_size))]
        table[row, : len(ids)] = torch.tensor(ids)
        k, v = torch.randn(2, length, kv_heads, HEAD_DIM, generator=generator, dtype=torch.float64)
        places = torch.arange(length)
        write_kv(k, v, *pages, table[row, places // page_size], places % page_size)
        rows.append((k, v))
    return pages, table, rows


def expected(q, rows, query_lens, window):
    out, begin = [], 0
    for (k, v), count in zip(rows, query_lens):
        length = len(k)
        padded = torch.zeros(length, *q.shape[1:], dtype=q.dtype)
        padded[length - count :] = q[begin : begin + count]
        mask = masks.CAUSAL if window is None else masks.window(window)
        whole = attend(padded[None], k[None], v[None], mask, scale=0.4)[0][0]
        out.append(whole[length - count :])
        begin += count
    return torch.cat(out)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 1, 2, 7, 40])), min_size=1, max_size=7),
    kv_heads=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 3]),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 5, 100]),
    seed=st.integers(0, 5),
)
def test_any_mix_of_rows(rows, kv_heads, groups, page_size, window, seed):
    seq_lens = [length for length, _ in rows]
    query_lens = [max(1, min(count, length)) for length, count in rows]
    (k_pages, v_pages), table, contents = filled(seq_lens, kv_heads, page_size, seed)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(query_lens), kv_heads * groups, HEAD_DIM, generator=generator, dtype=torch.float64)
    found = attend_paged(
        q, k_pages, v_pages, table, torch.tensor(seq_lens), torch.tensor(query_lens), scale=0.4, window=window
    )
    torch.testing.assert_close(found, expected(q, contents, query_lens, window), atol=1e-9, rtol=1e-9)


def test_decode_is_the_default():
    (k_pages, v_pages), table, contents = filled([9, 3, 17], 2, 4)
    q = torch.randn(3, 4, HEAD_DIM, dtype=torch.float64)
    found = attend_paged(q, k_pages, v_pages, table, torch.tensor([9, 3, 17]), scale=0.4)
    torch.testing.assert_close(found, expected(q, contents, [1, 1, 1], None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_number_formats(dtype):
    (k_pages, v_pages), table, contents = filled([9, 30], 2, 4)
    q = torch.randn(21, 4, HEAD_DIM, dtype=torch.float64)
    lengths = torch.tensor([9, 30]), torch.tensor([1, 20])
    found = attend_paged(q.to(dtype), k_pages.to(dtype), v_pages.to(dtype), table, *lengths, scale=0.4)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(found.double(), expected(q, contents, [1, 20], None), atol=tolerance, rtol=tolerance)


def test_like_rows_share_a_call_and_unlike_ones_do_not():
    table = torch.zeros(40, 64, dtype=torch.int64).numpy()
    decode = plan_sequences(table, [100] * 32, [1] * 32, 16)
    assert len(decode.groups) == 1 and isinstance(decode.groups[0].queries, slice)
    spread = plan_sequences(table, [20] * 32 + [1000], [1] * 33, 16)
    assert len(spread.groups) == 2
    mixed = plan_sequences(table, [100] * 8 + [60, 64, 700], [1] * 8 + [60, 64, 200], 16)
    assert [group.fresh for group in mixed.groups].count(True) == 1
    assert sorted(group.table.shape[0] for group in mixed.groups) == [1, 2, 8]


def test_a_plan_serves_layers_of_different_shapes():
    plan = None
    for kv_heads in (1, 2, 1):
        (k_pages, v_pages), table, contents = filled([9, 12], kv_heads, 4, seed=3)
        plan = plan or plan_sequences(table.numpy(), [9, 12], [3, 1], 4)
        q = torch.randn(4, 2, HEAD_DIM, dtype=torch.float64)
        for window in (None, 4):
            found = attend_planned(q, k_pages, v_pages, plan, scale=0.4, window=window)
            torch.testing.assert_close(found, expected(q, contents, [3, 1], window))


@pytest.mark.parametrize("window", [None, 6])
def test_long_chunks_go_in_blocks_of_queries(monkeypatch, window):
    """With a bound on the mask so small that every query is a block of its own, or two."""
    (k_pages, v_pages), table, contents = filled([40, 33], 2, 4)
    q = torch.randn(36, 4, HEAD_DIM, dtype=torch.float64)
    lengths = torch.tensor([40, 33]), torch.tensor([20, 16])
    for values in (1, 2 * 2 * 40 * 2):
        monkeypatch.setattr(paged_rows, "_MASK_VALUES", values)
        found = attend_paged(q, k_pages, v_pages, table, *lengths, scale=0.4, window=window)
        torch.testing.assert_close(found, expected(q, contents, [20, 16], window))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 9, "sink_tokens": 5},
        {"sinks": True},
        {"sinks": True, "window": 3, "sink_tokens": 1},
        {"head_dim": 6, "value_dim": 10},
        {"page_dtype": torch.float8_e4m3fn},
        {"page_dtype": torch.int8, "sinks": True},
    ],
)
@pytest.mark.parametrize("query_lens", [None, [3, 1, 17, 20]])
def test_options(options, query_lens):
    case = Case([40, 3, 17, 64], query_lens, dtype=torch.float64, page_size=8, **options)
    given = case.poisoned()
    given[1:3] = case.pages  # the reference wants finite slots
    assert distance(attend_paged(*given, **case.options), case.expected()) < 1e-6


def test_scales_of_a_head_or_a_page_are_those_of_every_token():
    case = Case([40, 3], page_dtype=torch.int8, page_size=8)
    given = case.poisoned()
    for shape in ((2,), (len(case.pages[0]), 2)):
        scales = [torch.rand(shape) for _ in range(2)]
        spread = [(x if x.dim() == 2 else x[None])[..., None].expand(case.scales[0].shape) for x in scales]
        alike = [
            attend_paged(*given, scale=0.3, k_scale=k_scale, v_scale=v_scale)
            for k_scale, v_scale in (scales, [x.contiguous() for x in spread])
        ]
        torch.testing.assert_close(*alike, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_written_pages_hold_what_quantize_says(dtype):
    k, v = torch.randn(2, 5, 2, 8)
    k[1] = 0
    pages, offsets = torch.tensor([2, 2, 0, 1, 1]), torch.tensor([0, 3, 1, 2, 0])
    k_pages, v_pages = torch.zeros(2, 3, 2, 4, 8).to(dtype)
    k_scale, v_scale = torch.zeros(2, 3, 2, 4)
    write_kv(k, v, k_pages, v_pages, pages, offsets, k_scale, v_scale)
    for x, written, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        back = written[pages, :, offsets].float() * scale[pages, :, offsets][..., None]
        worst = x.abs().amax(-1, keepdim=True) * (1 / 16 if dtype.is_floating_point else 0.51 / 127)
        assert ((back - x).abs() <= worst).all() and (back[1][x[1] == 0] == 0).all()
        number, found = quantize_kv(x, dtype)
        assert torch.equal(number.float(), written[pages, :, offsets].float())
        assert torch.equal(found, scale[pages, :, offsets])


@pytest.mark.parametrize("shape", ["head", "page"])
def test_fixed_scales_are_used_and_clamped_to(shape):
    k = torch.tensor([[[1.0, -300.0]]])
    pages, scale = torch.zeros(1, 1, 4, 2, dtype=torch.int8), torch.full((1,) if shape == "head" else (1, 1), 0.5)
    write_kv(k, k, pages, pages.clone(), torch.tensor([0]), torch.tensor([2]), scale, scale)
    assert pages[0, 0, 2].tolist() == [2, -128] and pages.count_nonzero() == 2


@pytest.mark.parametrize("query_lens", [None, [2, 1, 3]])
def test_latents_are_keys_whose_beginning_is_the_value(query_lens):
    case = Case([9, 3, 17], query_lens, kv_heads=1, groups=4, head_dim=12, value_dim=8, dtype=torch.float64)
    case.pages[1] = case.pages[0][..., :8]
    q, _, _, table, lens, counts = case.poisoned()
    found = attend_latent(q, case.pages[0][:, 0], table, lens, counts, value_dim=8, scale=case.options["scale"])
    assert distance(found, case.expected()) < 1e-12


def test_new_tokens_that_are_a_tree(monkeypatch):
    case = Case([40, 3, 21, 6], [5, 0, 5, 5], dtype=torch.float64, page_size=8, tree=TREE)
    given = case.poisoned()
    given[1:3] = case.pages
    for values in (paged_rows._MASK_VALUES, 1):
        monkeypatch.setattr(paged_rows, "_MASK_VALUES", values)
        assert distance(attend_paged(*given, **case.options, max_query_len=5), case.expected()) < 1e-12


def test_misuse_names_the_argument():
    case = Case([9, 3])
    q, k, v, table, lens, _ = case.poisoned()
    for arguments, options, word in (
        ((q[..., :8], k, v, table, lens), {}, "fit together"),
        ((q[:, :3], k, v, table, lens), {}, "query heads"),
        ((q[:1], k, v, table, lens), {}, "one token per sequence"),
        ((q, k, v, table[:1], lens), {}, "different numbers"),
        ((q, k.to(torch.int8), v.to(torch.int8), table, lens), {}, "scales"),
        ((q, k, v, table, lens), {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}, "scales"),
        ((q, k.to(torch.int8), v.to(torch.int8), table, lens), {"k_scale": torch.ones(3)}, "do not fit"),
    ):
        with pytest.raises(SpecError, match=word):
            attend_paged(*arguments, scale=1.0, **options)
    for options, word in (
        ({"window": 0}, "window of 0"),
        ({"window": -3}, "window of -3"),
        ({"sink_tokens": -1}, "sink_tokens"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"query_lens": torch.tensor([1, 2])}, "add up to 3"),  # outputs that nobody would write
        ({"query_lens": torch.tensor([2, 0])}, None),
        ({"query_lens": torch.tensor([-1, 3])}, "sequence 0 has -1"),
        ({"seq_lens": torch.tensor([9, 300])}, "sequence 1 has 1 new tokens of 300"),
        ({"seq_lens": torch.tensor([9, 0])}, "sequence 1 has 1 new tokens of 0"),
        ({"page_table": table[:, :0]}, "sequence 0"),
        ({"page_table": table[0]}, "different numbers"),
        ({"tree": TREE, "query_lens": torch.tensor([1, 1])}, "max_query_len is None"),
        ({"tree": TREE.int(), "query_lens": lens, "max_query_len": 5}, "tree is torch.int32"),
        ({"tree": torch.ones(40, dtype=torch.int64), "query_lens": lens, "max_query_len": 40}, "more than 64 queries"),
        ({"tree": TREE, "query_lens": lens, "max_query_len": 5, "window": 3}, "with a window"),
    ):
        given = {"page_table": table, "seq_lens": lens, "scale": 1.0, **options}
        if word is None:
            assert attend_paged(q, k.nan_to_num(), v.nan_to_num(), **given).isfinite().all()
            continue
        with pytest.raises(SpecError, match=word):
            attend_paged(q, k, v, **given)
    with pytest.raises(SpecError, match="without heads"):
        attend_paged(q, k[:, :0], v[:, :0], table, lens, scale=1.0)
    with pytest.raises(SpecError, match="different numbers"):
        attend_latent(q, k[:, 0], table[:1], lens, value_dim=8, scale=1.0)
    with pytest.raises(SpecError, match="scale"):
        attend_paged(q, k, v, table, lens, scale=0.0)
    with pytest.raises(SpecError, match="value_dim"):
        attend_latent(q, k[:, 0], table, lens, value_dim=16, scale=1.0)


def test_a_misused_write_names_the_argument():
    k, pages, places = torch.randn(3, 2, 8), torch.zeros(4, 2, 16, 8), torch.tensor([0, 1, 2])
    for arguments, word in (
        (
            (k, k, pages.to(torch.int8), pages.to(torch.int8), places, places),
            "without k_scale",
        ),  # would be cut to integers
        ((k, k, pages, pages, places, places, torch.ones(2), torch.ones(2)), "with k_scale"),
        ((k[..., :4], k, pages, pages, places, places), "k .* do not fit together"),
        ((k, k[:, :1], pages, pages, places, places), "v .* do not fit together"),
        ((k, k, pages, pages, places[:1], places[:1]), "1 pages"),  # would be spread over all tokens
    ):
        with pytest.raises(SpecError, match=word):
            write_kv(*arguments)
        turned = arguments[0][..., :4].mean(1, keepdim=True)
        with pytest.raises(SpecError, match=word):
            rope_write(k.clone(), arguments[0], arguments[1], turned, turned, *arguments[2:])
    with pytest.raises(SpecError, match=r"quantized to torch\.float32"):
        quantize_kv(k, torch.float32)
