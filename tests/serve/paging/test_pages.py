"""The page pool's books balance under any use, and what is found again is what was put there."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hone.base.errors import FitError
from hone.cost.cache import CacheTensor, keys_and_values, page_bytes
from hone.serve.paging import pages as pages_module
from hone.serve.paging.cache import KVCache
from hone.serve.paging.pages import NULL_PAGE, PagePool, root_key

SIZE = 2


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, grow, share prefixes and go; a model of who holds what is kept beside the pool."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7, SIZE)
        self.counts: dict[int, int] = {}
        self.contents: dict[int, tuple[int, ...]] = {}  # what each page holds, prefix included

    def _hold(self, pages):
        for page in pages:
            self.counts[page] = self.counts.get(page, 0) + 1

    @rule(target=held, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def start(self, tokens):
        matched = self.pool.match(tokens)
        assert len(matched) * SIZE < len(tokens)
        for place, page in enumerate(matched):
            assert self.contents[page] == tuple(tokens[: (place + 1) * SIZE])
        more = self.pool.allocate(-(-len(tokens) // SIZE) - len(matched))
        if more is None:
            self.pool.free(matched)
            return multiple()
        for page in more:
            assert self.counts.get(page, 0) == 0
            self.contents.pop(page, None)
        pages = matched + more
        self._hold(pages)
        key = self.pool.key_of(matched[-1]) if matched else root_key("")
        for place in range(len(matched), len(tokens) // SIZE):
            self.contents[pages[place]] = tuple(tokens[: (place + 1) * SIZE])
            key = self.pool.publish(pages[place], key, tokens[place * SIZE : (place + 1) * SIZE])
        return pages

    @rule(pages=consumes(held))
    def finish(self, pages):
        gone = self.pool.free(pages)
        for page in pages:
            self.counts[page] -= 1
        assert all(self.counts[page] == 0 for page in gone)

    @rule(pages=held)
    def forget(self, pages):
        self.pool.forget(pages[-1:])

    @invariant()
    def balance(self):
        self.pool.check()
        assert self.pool.num_used == sum(count > 0 for count in self.counts.values())
        assert self.pool.num_free + self.pool.num_used == self.pool.num_pages


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


def publish_all(pool: PagePool, tokens: list[int], salt: str = "") -> list[int]:
    pages = pool.allocate(len(tokens) // SIZE)
    key = root_key(salt)
    for place, page in enumerate(pages):
        key = pool.publish(page, key, tokens[place * SIZE : (place + 1) * SIZE])
    return pages


def test_freeing_a_page_twice_is_an_assertion_error():
    pool = PagePool(3, SIZE)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.free([NULL_PAGE])


def test_equal_pages_after_different_beginnings_are_different():
    pool = PagePool(8, SIZE)
    pool.free(publish_all(pool, [1, 2, 9, 9]))
    assert len(pool.match([1, 2, 9, 9, 0])) == 2
    assert pool.match([3, 4, 9, 9, 0]) == []
    assert pool.match([9, 9, 0]) == []
    assert pool.match([1, 2, 9, 9, 0], salt="other") == []


def test_a_hash_collision_gives_out_no_wrong_page(monkeypatch):
    monkeypatch.setattr(pages_module, "page_key", lambda parent, tokens: b"always the same!")
    pool = PagePool(8, SIZE)
    pool.free(publish_all(pool, [1, 2]))
    assert len(pool.match([1, 2, 0])) == 1
    assert pool.match([7, 8, 0]) == []


def test_the_page_freed_longest_ago_goes_first_and_ends_before_beginnings():
    pool = PagePool(4, SIZE)
    old, new = publish_all(pool, [1, 1, 2, 2]), publish_all(pool, [5, 5, 6, 6])
    pool.free(old)
    pool.free(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.allocate(1) == [old[0]]
    assert len(pool.match([5, 5, 6, 6, 0])) == 2
    assert pool.allocate(1) is None


def test_an_allocation_of_too_many_pages_changes_nothing():
    pool = PagePool(2, SIZE)
    assert pool.allocate(3) is None
    assert pool.num_free == 2


def test_cache_tensors_have_their_shapes_and_wipe_fills_every_layer():
    scaled = (CacheTensor("k", (2, 4), "int8"), CacheTensor("k_scale", (2, 1), "float32"))
    layers = [keys_and_values(2, 4), keys_and_values(1, 8), (), (CacheTensor("latent", (5,)),), scaled]
    cache = KVCache(layers, 5, SIZE)
    assert [{name: tuple(pages.shape) for name, pages in tensors.items()} for tensors in cache.layers] == [
        {"k": (6, 2, SIZE, 4), "v": (6, 2, SIZE, 4)},
        {"k": (6, 1, SIZE, 8), "v": (6, 1, SIZE, 8)},
        {},
        {"latent": (6, SIZE, 5)},
        {"k": (6, 2, SIZE, 4), "k_scale": (6, 2, SIZE, 1)},
    ]
    assert cache.num_bytes == 6 * page_bytes(layers, SIZE, "float32") == 6 * SIZE * (4 * (16 + 16 + 5 + 2) + 8)
    cache.wipe(list(range(6)))  # fresh memory may hold anything
    cache.wipe([3, 5], float("nan"))
    floats = [pages for tensors in cache.layers for pages in tensors.values() if pages.is_floating_point()]
    for pages in floats:
        assert pages[[3, 5]].isnan().all() and not pages[[0, 1, 2, 4]].isnan().any()


def test_a_cache_that_does_not_fit_says_what_it_needs():
    with pytest.raises(FitError, match="TiB"):
        KVCache([keys_and_values(64, 128)] * 64, 10_000_000_000, 16)
    with pytest.raises(FitError):
        PagePool(0, SIZE)
