"""The scheduler alone: budget, order, fairness and preemption, without any model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hone.serve.paging.manager import PageManager
from hone.serve.paging.pages import PagePool
from hone.serve.request import Request, SamplingParams
from hone.serve.scheduler import Scheduler
from hone.serve.sequence import Seq


def make(num_pages: int = 64, block_size: int = 4, budget: int = 16, **more) -> Scheduler:
    pool = PagePool(num_pages, block_size, enable_prefix_caching=False)
    return Scheduler(PageManager(pool, max_num_batched_tokens=budget), **{"max_num_seqs": 4, **more})


def seq(number: int, length: int, output: int = 8, priority: int = 0) -> Seq:
    request = Request(str(number), [1] * length, SamplingParams(max_tokens=output), priority)
    return Seq(request, number, length + output)


def run_step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """One step in which every sampling sequence gets token 1; sequences at their end finish. Returns (id, tokens run)."""
    scheduled = scheduler.schedule().seqs
    for item in scheduled:
        if item.samples:
            item.seq.tokens.append(1)
            scheduler.pages.advance(item.seq, len(item.seq.tokens) - 1)
            if len(item.seq.tokens) >= item.seq.max_tokens:
                scheduler.finish(item.seq)
        else:
            scheduler.pages.advance(item.seq, item.start + item.count)
    return [(item.seq.request.id, item.count) for item in scheduled]


def test_decoding_sequences_come_first_and_prompts_get_the_rest():
    scheduler = make()
    scheduler.add(seq(0, 3))
    run_step(scheduler)
    scheduler.add(seq(1, 40))
    assert run_step(scheduler) == [("0", 1), ("1", 15)]
    assert run_step(scheduler) == [("0", 1), ("1", 15)]
    assert run_step(scheduler) == [("0", 1), ("1", 10)]
    assert run_step(scheduler) == [("0", 1), ("1", 1)]


def test_a_long_prompt_takes_half_of_the_budget_and_what_others_leave():
    scheduler = make(budget=600, num_pages=1000)
    for number, length in enumerate([2000, 2, 290]):
        scheduler.add(seq(number, length))
    assert run_step(scheduler) == [("0", 308), ("1", 2), ("2", 290)]
    assert run_step(scheduler) == [("1", 1), ("2", 1), ("0", 598)]


def test_prompts_are_read_in_order_of_arrival():
    scheduler = make(max_num_seqs=64, budget=8192, num_pages=100_000, block_size=16)
    for number in range(8):
        scheduler.add(seq(number, 4096, output=1))
    assert run_step(scheduler) == [("0", 4096), ("1", 2048), ("2", 1024), ("3", 512), ("4", 256), ("5", 256)]


def test_max_num_seqs_and_free_pages_bound_admission():
    scheduler = make(num_pages=5, max_num_seqs=2)
    for number in range(3):
        scheduler.add(seq(number, 8))
    assert run_step(scheduler) == [("0", 8), ("1", 8)]
    assert scheduler.num_waiting == 1
    narrow = make(num_pages=4)
    for number in range(2):
        narrow.add(seq(number, 8))
    assert run_step(narrow) == [("0", 8)]  # two more would fit, but the running sequence keeps a page in reserve


def test_the_newest_sequence_of_the_lowest_priority_is_preempted():
    scheduler = make(num_pages=5, block_size=2, max_num_seqs=3)
    for number, priority in [(0, 1), (1, 0), (2, 1)]:
        scheduler.add(seq(number, 1, output=6, priority=priority))
    run_step(scheduler)
    assert {one.request.id for one in scheduler.running} == {"0", "1", "2"}
    for _ in range(2):
        run_step(scheduler)
    assert scheduler.num_preemptions == 1
    assert [one.request.id for one in scheduler.waiting()] == ["2"]


def test_finished_and_aborted_sequences_free_their_pages():
    scheduler = make(max_num_seqs=1)
    seqs = [seq(number, 4) for number in range(3)]
    for one in seqs:
        scheduler.add(one)
    run_step(scheduler)
    scheduler.finish(seqs[1])
    scheduler.finish(seqs[0])
    assert scheduler.num_waiting == 1 and not scheduler.running
    assert run_step(scheduler) == [("2", 4)]
    scheduler.finish(seqs[2])
    assert scheduler.pages.pool.num_used == 0 and scheduler.schedule().seqs == []


def test_a_static_batch_ends_with_its_longest_sequence():
    scheduler = make(batching="static", max_num_seqs=2)
    for number, output in enumerate([1, 3, 1]):
        scheduler.add(seq(number, 2, output))
    steps = [[name for name, _ in run_step(scheduler)] for _ in range(4)]
    assert steps == [["0", "1"], ["1"], ["1"], ["2"]]


@settings(max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10), st.integers(0, 2)), min_size=1, max_size=12),
    num_pages=st.integers(10, 20),
    budget=st.integers(4, 24),
    batching=st.sampled_from(["continuous", "static"]),
)
def test_all_sequences_finish_and_no_step_exceeds_the_budget(lengths, num_pages, budget, batching):
    """No deadlock, no starvation, no step above the budget, no page lost, whatever comes."""
    scheduler = make(num_pages=num_pages, block_size=3, budget=budget, batching=batching)
    for number, (length, output, priority) in enumerate(lengths):
        scheduler.add(seq(number, length, output, priority))
    for _ in range(3_000):
        work = run_step(scheduler)
        assert sum(count for _, count in work) <= budget
        assert len({name for name, _ in work}) == len(work)
        scheduler.pages.pool.check()
        if not work:
            break
    assert scheduler.num_waiting == 0 and not scheduler.running
    assert scheduler.pages.pool.num_used == 0
