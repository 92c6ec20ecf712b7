"""How many pages the cache gets, from a count, from bytes, from free memory."""

from __future__ import annotations

import psutil
import pytest
import torch

from hone.base.errors import FitError
from hone.serve import sizing
from hone.serve.engine import Engine
from hone.serve.sizing import cache_pages
from hone.serve.spec import EngineSpec
from tests.serve.small import decoder, engine

CPU = torch.device("cpu")


def test_a_count_is_taken_as_it_is():
    assert cache_pages(EngineSpec(num_pages=7, cache_bytes=1), 1000, CPU, 512) == 7


def test_bytes_hold_the_null_page_too():
    assert cache_pages(EngineSpec(cache_bytes=10_500), 1000, CPU, 512) == 9
    one = engine(decoder(), num_pages=None, cache_bytes=100_000)
    assert one.cache_bytes <= 100_000 < one.cache_bytes * (one.pool.num_pages + 2) / (one.pool.num_pages + 1)


def test_free_memory_is_used_up_to_what_the_rows_can_fill():
    few = EngineSpec(max_rows=2, page_size=16)
    assert cache_pages(few, 1000, CPU, 100) == 2 * 7
    free = psutil.virtual_memory().available
    part = EngineSpec(max_rows=1024, memory_fraction=0.01)
    pages = cache_pages(part, 10_000, CPU, 10**6)
    assert pages * 10_000 == pytest.approx(0.01 * free, rel=0.3)
    assert cache_pages(part, 10_000, CPU, 10**6, taken=free // 2) == pytest.approx(pages / 2, rel=0.3)


def test_too_little_memory_says_what_is_needed():
    with pytest.raises(FitError, match=r"engine.cache_bytes is 900 B, a KV cache of one page needs 2\.0 KiB"):
        cache_pages(EngineSpec(cache_bytes=900), 1000, CPU, 512)
    with pytest.raises(FitError, match="free memory"):
        cache_pages(EngineSpec(), 10**15, CPU, 512)


def test_weights_that_do_not_fit_are_a_clear_mistake(tiny_llama, monkeypatch):
    monkeypatch.setattr(sizing, "_free_now", lambda device: 1000)
    with pytest.raises(FitError, match="cpu has 1000 B free"):
        Engine(tiny_llama)


def test_more_pages_than_memory_fail_at_once():
    with pytest.raises(FitError, match=r"100000000 pages of 1.0 MiB are .* cpu has .* free") as caught:
        cache_pages(EngineSpec(num_pages=100_000_000), 1 << 20, CPU, 512)
    assert "engine.num_pages=" in caught.value.fix
