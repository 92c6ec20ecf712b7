"""Masks: rules against their definitions, tile lists against the pairs themselves, errors that name the way out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.attention import gluon_ranges as ranges
from hone.ops.attention import masks
from hone.ops.attention.intervals import FAR_LONGER, Interval, resolve_rule
from hone.ops.attention.masks import CAUSAL, FULL, Mask, Tiles, as_flex

CPU = torch.device("cpu")


def odd_rule(q, k, q_data, k_data, params):
    """A rule with every operation a rule may use."""
    near = (q * 2 - k // params[0] != 3) & ~(k % params[1] > 5) | (q_data + k_data == 4)
    return near & (params[1] + q >= k - q_data * -1) & (q + 3 > 1) & ((q - k) * (k + q_data) <= 900)


def every_mask(seq_len: int, batch: int, heads: int, seed: int) -> list[Mask]:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    ids = draw(4, batch, seq_len).sort(-1).values
    data = draw(4, batch, 1, seq_len).int()
    own = draw(4, batch, heads, seq_len).sort(-1).values.int()
    return [
        FULL,
        CAUSAL,
        masks.window(1 + seed),
        masks.band(seed, 7),
        masks.window_with_sinks(9, 3),
        masks.prefix(draw(seq_len, batch)),
        masks.documents(ids),
        masks.documents(ids, 5),
        masks.documents(ids, causal=False),
        masks.since(draw(seq_len + 2, batch, seq_len)),
        masks.since(draw(seq_len + 2, 1, seq_len), causal=False),
        masks.longformer(draw(9, 1, seq_len) == 0, 6, 2),
        masks.longformer(draw(9, batch, seq_len) == 0, 6, causal=True),
        masks.bigbird(seq_len, block=16, num_heads=heads, seed=seed),
        masks.bigbird(seq_len, block=16, seed=seed, causal=True),
        Mask(odd_rule, (3, 8), data, data),
        Mask(odd_rule, (3, 8), own, own),
    ]


def check_lists(lists: list[Tensor], kept: Tensor, block_rows: int, block_columns: int) -> None:
    """Every pair that is kept lies in a listed tile; tiles after the first `partial` are kept whole and lie inside."""
    count, index, partial = lists
    for b in range(count.shape[0]):
        for h in range(count.shape[1]):
            pairs = kept[min(b, kept.shape[0] - 1), min(h, kept.shape[1] - 1)]
            for row in range(count.shape[2]):
                here = pairs[row * block_rows : (row + 1) * block_rows]
                listed = index[b, h, row, : count[b, h, row]].tolist()
                assert len(set(listed)) == len(listed)
                for column in range(index.shape[3]):
                    tile = here[:, column * block_columns : (column + 1) * block_columns]
                    assert column in listed or not tile.any()
                for column in listed[int(partial[b, h, row]) :]:
                    assert (column + 1) * block_columns <= pairs.shape[1]
                    assert here[:, column * block_columns : (column + 1) * block_columns].all()


def check_turns(tiles: Tiles) -> None:
    """Every tile of queries once: far longer ones first, the longest before all, then from the last to the first."""
    for b in range(tiles.kv_count.shape[0]):
        for h in range(tiles.kv_count.shape[1]):
            counts, partial = tiles.kv_count[b, h].tolist(), tiles.kv_partial[b, h].tolist()
            limit = FAR_LONGER * sum(counts) / len(counts)
            turns = sorted(range(len(counts)), key=lambda m: (-counts[m] if counts[m] > limit else 0, -m))
            first = [int(tiles.kv_index[b, h, m, 0]) if counts[m] else 0 for m in turns]
            assert tiles.kv_turns[b, h].tolist() == [
                [m, counts[m], partial[m], at] for m, at in zip(turns, first, strict=True)
            ]


@settings(max_examples=12)
@given(
    seq_len=st.sampled_from([1, 16, 50, 97, 128]),
    batch=st.sampled_from([1, 2]),
    heads=st.sampled_from([1, 2]),
    blocks=st.sampled_from([(16, 16), (8, 16), (16, 4)]),
    seed=st.integers(0, 20),
)
def test_tile_lists_of_every_mask(seq_len, batch, heads, blocks, seed) -> None:
    for mask in every_mask(seq_len, batch, heads, seed):
        tiles = mask.tiles(seq_len, seq_len, *blocks, CPU, transposed=True)
        if tiles.causal or tiles.full:
            assert not tiles.lists
            continue
        kept = mask.dense(seq_len, seq_len, CPU)
        check_lists(tiles.lists[:3], kept, *blocks)
        check_lists(tiles.lists[4:], kept.mT, *blocks[::-1])
        check_turns(tiles)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(30, 90), (90, 30)])
def test_tile_lists_when_lengths_differ(seq_q: int, seq_k: int) -> None:
    for mask in (masks.window(20), masks.window_with_sinks(20, 5), masks.band(9, 9)):
        tiles = mask.tiles(seq_q, seq_k, 16, 8, CPU, transposed=True)
        kept = mask.dense(seq_q, seq_k, CPU)
        check_lists(tiles.lists[:3], kept, 16, 8)
        check_lists(tiles.lists[4:], kept.mT, 8, 16)
        check_turns(tiles)


def test_lists_are_tight_where_it_matters() -> None:
    """A window or documents in long sequences touch few tiles, and only their edges are partial."""
    tiles = masks.window(1024).tiles(16384, 16384, 128, 128, CPU)
    assert int(tiles.kv_count.max()) == 9 and int(tiles.kv_partial.max()) == 2
    ids = (torch.arange(4096) // 512)[None]
    tiles = masks.documents(ids).tiles(4096, 4096, 128, 128, CPU)
    assert tiles.kv_count.flatten().tolist() == [1, 2, 3, 4] * 8
    assert (tiles.kv_partial == 1).all()
    assert tiles.kv_index[0, 0, 3, :4].tolist() == [
        3,
        2,
        1,
        0,
    ]  # the tile on the diagonal, then from the right to the left
    table = torch.rand(8, 8) < 0.4
    tiles = masks.block_sparse(table, 128).tiles(1024, 1024, 128, 128, CPU)
    assert tiles.kv_count[0, 0].tolist() == table.sum(1).tolist()
    assert not tiles.kv_partial.any()


def test_far_longer_rows_of_tiles_come_first() -> None:
    table = torch.rand(2, 150, 40, generator=torch.Generator().manual_seed(0)) < 0.1
    table[:, ::50] = True
    table[0, 50, 7] = False
    table[1, -1] = False  # sees nothing at all
    tiles = masks.block_sparse(table, 16).tiles(150 * 16, 40 * 16, 16, 16, CPU)
    check_turns(tiles)
    assert tiles.kv_turns[0, :, :4, 0].tolist() == [[100, 0, 50, 149], [100, 50, 0, 149]]
    assert tiles.kv_turns[0, 1, 3].tolist() == [149, 0, 0, 0]
    none = masks.window(3).tiles(5, 0, 16, 16, CPU)
    assert none.kv_turns.tolist() == [[[[0, 0, 0, 0]]]]


def test_rules_say_what_they_mean() -> None:
    i, j = torch.arange(40)[:, None], torch.arange(40)[None, :]

    def same(mask: Mask, wanted: Tensor) -> None:
        assert torch.equal(mask.dense(40, 40, CPU), wanted.expand(mask.dense(40, 40, CPU).shape))

    same(masks.window(3), (j <= i) & (j > i - 3))
    assert masks.window(3).dense(40, 40, CPU)[0, 0, 20].sum() == 3  # three tokens, its own among them
    same(masks.window_with_sinks(3, 2), (j <= i) & ((j > i - 3) | (j < 2)))
    same(masks.band(2, 1), (j >= i - 2) & (j <= i + 1))
    same(masks.prefix(torch.tensor([4])), (j <= i) | (j < 4))
    ids = torch.tensor([0] * 10 + [1] * 20 + [2] * 10)
    same(masks.documents(ids[None]), (j <= i) & (ids[:, None] == ids))
    same(masks.documents(ids[None], 3), (j <= i) & (j > i - 3) & (ids[:, None] == ids))
    again = torch.tensor([5] * 10 + [1] * 20 + [5] * 10)  # an id that comes back is a new document
    same(masks.documents(again[None]), (j <= i) & (ids[:, None] == ids))
    same(masks.documents(again[None], causal=False), again[:, None] == again)
    assert torch.equal(
        masks.documents_at(torch.tensor([0, 10, 30, 40]), 40).dense(40, 40, CPU),
        masks.documents(ids[None]).dense(40, 40, CPU),
    )
    flags = torch.zeros(40, dtype=torch.bool)
    flags[[0, 17]] = True
    same(masks.longformer(flags[None], 4, 4), ((i - j).abs() <= 4) | flags[:, None] | flags[None, :])
    assert torch.equal(CAUSAL.dense(3, 5, CPU)[0, 0], torch.ones(3, 5, dtype=torch.bool).tril(2))


def test_bigbird_is_a_window_the_ends_and_chance() -> None:
    mask = masks.bigbird(32 * 20, block=32, num_window=3, num_global=2, num_random=3, seed=5, num_heads=2)
    table = mask.table[0]
    assert table.shape == (2, 20, 20)
    assert table[:, [0, -1]].all() and table[:, :, [0, -1]].all()
    for row in range(1, 19):
        assert table[:, row, row - 1 : row + 2].all()
        inner = {2: 6 + 2}.get(row, 8) if 2 <= row <= 17 else 7
        assert table[:, row].sum(-1).tolist() == [inner, inner]
    assert not torch.equal(table[0], table[1])
    assert torch.equal(masks.bigbird(640, block=32, seed=5, num_heads=2).table, mask.table)
    assert not torch.equal(masks.bigbird(640, block=32, seed=6, num_heads=2).table, mask.table)
    causal = masks.bigbird(640, block=32, causal=True).dense(640, 640, CPU)
    assert not causal.triu(1).any() and causal.diagonal(dim1=-2, dim2=-1).all()


@settings(max_examples=60)
@given(data=st.data(), edge=st.sampled_from([0, 9, 300, ranges._FAR - 1]))
def test_ranges_say_what_their_rules_say(data, edge) -> None:
    """In int32, as kernels count."""
    params = tuple(data.draw(st.lists(st.integers(-edge, edge), min_size=2, max_size=2)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, k = torch.arange(-90, 200, dtype=torch.int32)[:, None], torch.arange(150, dtype=torch.int32)[None, :]
    q_data = torch.randint(-1 - edge, 160 + edge, q.shape, generator=generator, dtype=torch.int32)
    for rule, name in ranges.KEYS.items():
        first, last = resolve_rule(name)(q, q_data, params)
        assert torch.equal(resolve_rule(rule)(q, k, q_data, 0, params), (first <= k) & (k <= last))
    for rule, name in ranges.QUERIES.items():
        first, last = resolve_rule(name)(k, params)
        assert torch.equal(resolve_rule(rule)(q, k, q_data, 0, params), (first <= q) & (q <= last))


def test_which_masks_are_ranges() -> None:
    pytest.importorskip("triton")
    ids = torch.zeros(1, 64, dtype=torch.int64)
    found = {
        mask.name.partition(":")[2]: [
            what(mask.tiles(64, 64, 16, 16, CPU)) for what in (ranges.keys_of, ranges.queries_of)
        ]
        for mask in (masks.window(9), masks.documents(ids), masks.documents(ids, causal=False), Mask(odd_rule, (3, 8)))
    }
    assert [made is not None for made in found["_band"]] == [True, True]
    assert [made is not None for made in found["_since"]] == [True, False]
    assert found["_same_document"] == found["odd_rule"] == [None, None]
    far = masks.band(1 << 30, 0).tiles(64, 64, 16, 16, CPU)  # as far as an int32 does not go
    assert ranges.keys_of(far) is None and ranges.queries_of(far) is None


def test_flex_sees_the_same() -> None:
    for mask in every_mask(60, 2, 2, 3):
        mask_mod = as_flex(mask, 60, 60)
        b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[None, :, None, None]
        q, k = torch.arange(60)[:, None], torch.arange(60)[None, :]
        found = mask_mod(b, h, q, k)
        assert torch.equal(*torch.broadcast_tensors(found.expand(2, 2, 60, 60), mask.dense(60, 60, CPU)))


def test_lists_are_kept_and_let_go() -> None:
    mask = Mask(odd_rule, (3, 8))
    first = mask.tiles(64, 64, 16, 16, CPU)
    again = mask.tiles(64, 64, 16, 16, CPU)
    assert again.kv_index is first.kv_index and again.kv_turns is first.kv_turns
    assert mask.tiles(65, 65, 16, 16, CPU).kv_index is not first.kv_index
    for length in range(1, 40):
        mask.tiles(length, length, 16, 16, CPU)
    assert len(mask._kept) <= 16
    assert masks.window(7) is masks.window(7)


def test_intervals_hold_every_value() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randint(-20, 20, (200,), generator=generator)
    a = Interval(low, low + torch.randint(0, 9, (200,), generator=generator))
    low = torch.randint(0, 30, (200,), generator=generator)
    b = Interval(low, low + torch.randint(0, 9, (200,), generator=generator))
    functions = [
        lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x * -3, lambda x, y: 5 - x,
        lambda x, y: y // 4, lambda x, y: y % 7, lambda x, y: -x, lambda x, y: 2 * y + x,
    ]  # fmt: skip
    for function in functions:
        made = function(a, b)
        for step in range(60):
            x = a.low + step % 9
            y = b.low + step // 7
            inside = (x <= a.high) & (y <= b.high)
            value = function(x, y)
            assert ((value >= made.low) & (value <= made.high))[inside].all()
    with pytest.raises(SpecError, match="positive constants"):
        b // 0


def test_wrong_masks_say_so() -> None:
    for wrong in (
        lambda: masks.band(-3, 1),
        lambda: masks.window_with_sinks(4, -1),
        lambda: masks.longformer(torch.zeros(1, 5, dtype=torch.bool), 2, -1),
    ):
        with pytest.raises(SpecError, match="count tokens from 0"):
            wrong()
    with pytest.raises(SpecError, match=r"ids are of shape \[5\]"):
        masks.documents(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(SpecError, match=r"table is of shape \[4\]"):
        masks.block_sparse(torch.ones(4, dtype=torch.bool), 16)
    with pytest.raises(SpecError, match="q_data is int32"):
        Mask(odd_rule, (3, 8), torch.zeros(1, 1, 4))
    with pytest.raises(SpecError, match="k_data is for 4 positions, not for 5"):
        Mask(odd_rule, (3, 8), None, torch.zeros(1, 1, 4, dtype=torch.int32)).tiles(4, 5, 16, 16, CPU)
    with pytest.raises(SpecError, match="power of two"):
        masks.block_sparse(torch.ones(2, 2, dtype=torch.bool), 24)
    with pytest.raises(SpecError, match="3, 3"):
        masks.block_sparse(torch.ones(2, 2, dtype=torch.bool), 32).tiles(96, 96, 32, 32, CPU)
    with pytest.raises(SpecError, match="do not divide"):
        masks.block_sparse(torch.ones(2, 2, dtype=torch.bool), 32).tiles(64, 64, 64, 32, CPU)
    with pytest.raises(SpecError, match="4 queries over 5 keys"):
        masks.documents(torch.zeros(1, 4, dtype=torch.int64)).check_sizes(4, 5)
    with pytest.raises(SpecError, match="keeps no key"):
        masks.window(0)
    with pytest.raises(SpecError, match="keeps no key"):
        masks.documents(torch.zeros(1, 4, dtype=torch.int64), 0)
    local = Mask(lambda q, k, q_data, k_data, params: q >= k)
    assert local.dense(3, 3, CPU)[0, 0].sum() == 6  # the reference runs it all the same
    with pytest.raises(SpecError, match="inside a function"):
        resolve_rule(local.name)
    assert resolve_rule(Mask(odd_rule).name) is odd_rule
