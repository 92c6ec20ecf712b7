"""Every eviction technique against a naive list: the same pages are given out, no page twice, none that is in use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hone.base.errors import SpecError
from hone.serve import EVICTIONS
from hone.serve.paging.pages import PagePool, root_key
from hone.serve.request import Retention
from tests.serve.small import decoder, drain, engine, greedy, request

SIZE = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "lru": {}, "lfu": {}, "slru": {"protected_hits": 2}, "fifo": {}, "priority_duration": {}
}  # fmt: skip


def naive_key(kind: str, page: dict[str, Any], now: float) -> tuple:
    """What the docstrings say, written again."""
    return {
        "lru": (),
        "fifo": (page["published"],),
        "lfu": (page["hits"],),
        "slru": (1 if page["hits"] >= 2 else 0,),
        "priority_duration": (page["priority"] if page["ends"] is None or now < page["ends"] else 35,),
    }[kind]


class EvictionMachine(RuleBasedStateMachine):
    """Sequences come and go over a tiny pool; a list of dicts says which page has to be given out next."""

    kind = ""
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        eviction = EVICTIONS.read({"kind": self.kind, **OPTIONS[self.kind]})
        self.pool = PagePool(6, SIZE, eviction=eviction, clock=lambda: self.now)
        self.cached: dict[int, dict[str, Any]] = {}  # pages in the prefix cache, used or free
        self.users: dict[int, int] = {}
        self.events = 0

    def _victim(self) -> int:
        def rank(number: int) -> tuple:
            page = self.cached[number]
            continued = any(other["prefix"][:-SIZE] == page["prefix"] for other in self.cached.values())
            return (continued, naive_key(self.kind, page, self.now), page["freed"])

        return min((number for number in self.cached if not self.users.get(number)), key=rank)

    def _allocate(self, count: int) -> list[int] | None:
        free = 6 - sum(users > 0 for users in self.users.values())
        blank = free - sum(not self.users.get(number) for number in self.cached)
        pages: list[int] = []
        got = self.pool.allocate(count)
        assert (got is None) == (count > free)
        for page in got or []:
            assert not self.users.get(page), "a page in use was given out"
            if len(pages) >= blank:
                assert page == self._victim()
                del self.cached[page]
            else:
                assert page not in self.cached
            pages.append(page)
            self.users[page] = 1
        return None if got is None else pages

    @rule(target=held, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def start(self, tokens: list[int]) -> Any:
        matched = self.pool.match(tokens)
        for page in matched:
            self.users[page] = self.users.get(page, 0) + 1
        more = self._allocate(-(-len(tokens) // SIZE) - len(matched))
        if more is None:
            self._free(matched)
            return multiple()
        self.pool.count_hits(matched)
        for page in matched:
            self.cached[page]["hits"] += 1
        pages = matched + more
        key = self.pool.key_of(matched[-1]) if matched else root_key("")
        for place in range(len(matched), len(tokens) // SIZE):
            prefix = tuple(tokens[: (place + 1) * SIZE])
            key = self.pool.publish(pages[place], key, prefix[-SIZE:])
            if all(other["prefix"] != prefix for other in self.cached.values()):
                self.events += 1
                self.cached[pages[place]] = {
                    "prefix": prefix, "published": self.events, "hits": 0, "priority": 35, "lasts": None, "ends": None,
                    "freed": 0,
                }  # fmt: skip
        return pages

    def _free(self, pages: list[int]) -> None:
        self.pool.free(pages)
        for page in reversed(pages):
            self.users[page] -= 1
            if not self.users[page] and page in self.cached:
                self.events += 1
                entry = self.cached[page]
                entry["freed"] = self.events
                entry["ends"] = None if entry["lasts"] is None else self.now + entry["lasts"]

    @rule(
        pages=consumes(held),
        start=st.integers(0, 5),
        length=st.integers(1, 4),
        priority=st.none() | st.integers(0, 100),
        lasts=st.none() | st.integers(1, 5),
    )
    def finish(self, pages: list[int], start: int, length: int, priority: int | None, lasts: int | None) -> None:
        if priority is not None:
            self.pool.retain(pages, [Retention(start=start, end=start + length, priority=priority, duration_s=lasts)])
            for place, page in enumerate(pages):
                if page in self.cached and place * SIZE < start + length and (place + 1) * SIZE > start:
                    self.cached[page].update(priority=priority, lasts=lasts)
        self._free(pages)

    @rule(pages=held)
    def forget(self, pages: list[int]) -> None:
        self.pool.forget(pages[-1:])
        self.cached.pop(pages[-1], None)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def balance(self) -> None:
        self.pool.check()
        assert self.pool.num_used == sum(users > 0 for users in self.users.values())
        assert self.pool.num_cached == sum(not self.users.get(number) for number in self.cached)


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_pages_are_given_out_as_a_naive_list_says(kind: str) -> None:
    machine = type(f"Machine_{kind}", (EvictionMachine,), {"kind": kind})
    case = machine.TestCase
    case.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
    case().runTest()


def test_every_technique_is_in_the_oracle() -> None:
    assert set(OPTIONS) == set(EVICTIONS)


def _cached(pool: PagePool, tokens: list[int], retention: tuple[Retention, ...] = ()) -> None:
    pages = pool.allocate(len(tokens) // SIZE)
    assert pages is not None
    key = root_key("")
    for place, page in enumerate(pages):
        key = pool.publish(page, key, tokens[place * SIZE : (place + 1) * SIZE])
    pool.retain(pages, retention)
    pool.free(pages)


def test_a_priority_outlives_newer_pages_until_its_duration_ends() -> None:
    now = [0.0]
    pool = PagePool(2, SIZE, eviction=EVICTIONS.read("priority_duration"), clock=lambda: now[0])
    _cached(pool, [1, 1], (Retention(priority=90, duration_s=10.0),))
    _cached(pool, [2, 2])
    _cached(pool, [3, 3])
    assert pool.match([1, 1, 0]) and not pool.match([2, 2, 0])
    pool = PagePool(2, SIZE, eviction=EVICTIONS.read("priority_duration"), clock=lambda: now[0])
    _cached(pool, [1, 1], (Retention(priority=90, duration_s=10.0),))
    _cached(pool, [2, 2])
    now[0] = 11.0
    _cached(pool, [3, 3])
    assert not pool.match([1, 1, 0]) and pool.match([2, 2, 0])


def test_thousands_of_reuses_leave_the_order_small() -> None:
    pool = PagePool(4, SIZE)
    _cached(pool, [1, 1, 2, 2])
    for _ in range(2000):
        pool.free(pool.match([1, 1, 2, 2, 0]))
    assert len(pool._cached._heap) < 200
    assert pool.allocate(4) is not None


MODEL = decoder()


def test_the_engine_keeps_what_a_request_asks_to_retain() -> None:
    prompts = [[number] * 9 for number in range(1, 7)]
    hits = {}
    for kind in ("lru", "priority_duration"):
        one = engine(MODEL, num_pages=8, eviction={"kind": kind})
        retention = (Retention(end=8, priority=80),) if kind == "priority_duration" else ()
        for number, prompt in enumerate(prompts):
            one.add(request(str(number), prompt, greedy(2), retention=retention if number == 0 else ()))
            drain(one)
        one.add(request("again", prompts[0], greedy(2)))
        hits[kind] = drain(one)["again"][-1].num_cached_tokens
    assert hits == {"lru": 0, "priority_duration": 8}


def test_a_retention_that_nothing_reads_is_an_error() -> None:
    with pytest.raises(SpecError, match="retention"):
        engine(MODEL).add(request("0", [1, 2, 3], greedy(2), retention=(Retention(priority=80),)))
    with pytest.raises(SpecError, match="empty range"):
        Retention.read({"start": 3, "end": 3})
    with pytest.raises(SpecError, match="eviction"):
        engine(MODEL, eviction={"kind": "mru"})


def test_a_body_carries_its_retention_and_a_wrong_one_names_the_field() -> None:
    from pydantic import ValidationError

    from hone.serve.http.protocol import CompletionBody

    body = CompletionBody.model_validate(
        {"prompt": "a", "cache_retention": [{"end": 512, "priority": 90, "duration_s": 60}]}
    )
    assert body.cache_retention == [Retention(end=512, priority=90, duration_s=60)]
    with pytest.raises(ValidationError, match="priority"):
        CompletionBody.model_validate({"prompt": "a", "cache_retention": [{"priority": 101}]})
