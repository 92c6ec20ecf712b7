"""Static, dynamic and continuous batching: when sequences start, and that tokens do not depend on it."""

from __future__ import annotations

import pytest

from hone.serve.paging.manager import PageManager
from hone.serve.paging.pages import PagePool
from hone.serve.request import Request, SamplingParams
from hone.serve.scheduler import Scheduler
from hone.serve.sequence import Seq
from tests.serve.small import VOCAB, assert_all_free, decoder, dense_greedy, engine, greedy

MODEL = decoder()
PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(1, 4 + 5 * i)] for i in range(4)]


class Clocked:
    """A scheduler whose clock is set by the test; sequences of one token of prompt and a given length of output."""

    def __init__(self, **more) -> None:
        self.now = 0.0
        pages = PageManager(PagePool(64, 4, enable_prefix_caching=False), max_num_batched_tokens=16)
        self.scheduler = Scheduler(pages, clock=lambda: self.now, **{"max_num_seqs": 2, **more})
        self._count = 0

    def add(self, output: int = 1) -> None:
        request = Request(str(self._count), [1], SamplingParams(max_tokens=output))
        self.scheduler.add(Seq(request, self._count, 1 + output))
        self._count += 1

    def step(self) -> list[str]:
        scheduled = self.scheduler.schedule().seqs
        for item in scheduled:
            item.seq.tokens.append(1)
            self.scheduler.pages.advance(item.seq, len(item.seq.tokens) - 1)
            if len(item.seq.tokens) >= item.seq.max_tokens:
                self.scheduler.finish(item.seq)
        return [item.seq.request.id for item in scheduled]


def test_dynamic_batching_waits_for_a_full_batch_or_for_the_oldest_delay():
    one = Clocked(batching="dynamic", max_delay_s=2.0)
    one.add()
    assert one.step() == [] and one.scheduler.delay_s == 2.0
    one.now = 1.5
    assert one.step() == [] and one.scheduler.delay_s == 0.5
    one.now = 2.0
    assert one.scheduler.delay_s == 0 and one.step() == ["0"]
    one.add()
    one.add()  # a full batch does not wait
    assert one.step() == ["1", "2"]


def test_dynamic_batching_runs_a_batch_to_its_end():
    one = Clocked(batching="dynamic", max_delay_s=2.0)
    one.add(output=3)
    one.add(output=1)
    assert one.step() == ["0", "1"]
    one.add()
    one.now = 9.0
    assert one.scheduler.delay_s == 0
    assert one.step() == ["0"] and one.step() == ["0"]  # the other waits although its delay is over
    assert one.step() == ["2"]


def test_continuous_and_static_batching_never_delay():
    for batching in ("static", "continuous"):
        one = Clocked(batching=batching, max_delay_s=2.0)
        one.add()
        assert one.scheduler.delay_s == 0 and one.step() == ["0"]


@pytest.mark.parametrize("batching", ["static", "dynamic", "continuous"])
def test_tokens_do_not_depend_on_batching(batching: str):
    one = engine(MODEL, batching=batching, max_delay_s=0.01, max_num_seqs=3)
    for prompt, completion in zip(PROMPTS, one.generate(PROMPTS, greedy(9))):
        assert completion.tokens == dense_greedy(MODEL, prompt, 9)
    assert_all_free(one)
