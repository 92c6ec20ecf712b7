"""Page waste: what is counted agrees with the pages looked at one by one, and a mixed load wastes less than 4 %."""

from __future__ import annotations

import random

import pytest

from hone.measure.machine import describe
from hone.serve.paging.fill import SAMPLED_STEPS
from hone.serve.paging.manager import PageManager
from hone.serve.paging.pages import PagePool
from hone.serve.request import Request, SamplingParams
from hone.serve.scheduler import Scheduler
from hone.serve.sequence import Seq
from hone.serve.sizing import sized
from hone.serve.spec import EngineSpec
from tests.serve.test_scheduler import run_step, seq


def scheduler_of(block_size: int, budget: int, most: int, *, shared: bool = False) -> Scheduler:
    pool = PagePool(512 * 1024 // block_size, block_size, enable_prefix_caching=shared)
    return Scheduler(PageManager(pool, max_num_batched_tokens=budget), max_num_seqs=most)


def test_512_sequences_of_100_to_1024_tokens_waste_less_than_4_percent():
    """With the default block size of a CPU, half of a page of a sequence: 7.5 of 562 + 7.5 tokens at its end, of fewer before."""
    spec = sized(EngineSpec(), describe("cpu").model_copy(update={"num_cores": 1}))
    assert spec.block_size == 16 and spec.max_num_batched_tokens and spec.max_num_seqs
    scheduler = scheduler_of(spec.block_size, spec.max_num_batched_tokens, spec.max_num_seqs)
    draw = random.Random(5)
    for number in range(512):
        length = draw.randint(100, 1024)
        scheduler.add(seq(number, length * 7 // 8, length - length * 7 // 8))
    while scheduler.running or scheduler.num_waiting:
        run_step(scheduler)
    fill = scheduler.fill
    assert 0.01 < fill.empty_slots / fill.slots < 0.04
    assert fill.looks > 50 and fill.used_pages * 16 == fill.slots


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_the_waste_of_one_sequence_is_the_rest_of_its_last_page(block_size):
    scheduler = scheduler_of(block_size, 512, 8)
    scheduler.add(seq(0, 37, 50))
    slots = empty = coming = 0
    for step in range(50):
        known = 37 + step
        if step % SAMPLED_STEPS == 0:
            slots += -(-known // block_size) * block_size
            empty += -known % block_size
            coming += 37 if step == 0 else 1
        run_step(scheduler)
    fill = scheduler.fill
    assert (fill.slots, fill.empty_slots, fill.coming_slots) == (slots, empty, coming)


def test_a_shared_page_counts_once_and_a_prompt_in_chunks_is_coming():
    scheduler = scheduler_of(4, 8, 8, shared=True)

    def add(number: int, own: int) -> None:
        prompt = [9] * 8 + [number] * own
        scheduler.add(Seq(Request(str(number), prompt, SamplingParams(max_tokens=40)), number, len(prompt) + 40))

    add(1, 1)
    while scheduler.running[0].num_output == 0 if scheduler.running else True:
        run_step(scheduler)
    add(2, 22)
    run_step(scheduler)  # the second sequence finds two pages of the first one's prefix
    first, second = scheduler.running
    assert first.pages[:2] == second.pages[:2]
    before = scheduler.fill.stats()
    scheduler.fill._look(scheduler.pages.pool, scheduler.running)
    after = scheduler.fill.stats()
    pages = len({*first.pages, *second.pages})
    assert after["kv_slots"] - before["kv_slots"] == 4 * pages
    assert after["kv_slots_coming"] - before["kv_slots_coming"] == 1 + 30 - second.num_computed
    known = len(first.tokens) + 30
    assert after["kv_slots_empty"] - before["kv_slots_empty"] == 4 * (len(first.pages) + len(second.pages)) - known
