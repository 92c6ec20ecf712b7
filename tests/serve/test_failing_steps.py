"""Steps that fail now and then, at any point, run again in halves: no request of the random mixes gets another text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hone.serve.engine import Engine
from hone.serve.runner import Runner
from hone.serve.sampler import Sampler
from tests.serve import test_combinations as mixes


def poison_before_steps(one: Engine) -> None:
    """As `poison_freed_pages`, but when the next step begins: what a step frees it may read again in its halves."""
    gone: list[int] = []
    free, allocate, launch = one.pool.free, one.pool.allocate, one.runner.launch

    def freed(pages: list[int]) -> list[int]:
        found = free(pages)
        gone.extend(found)
        return found

    def allocated(count: int) -> list[int] | None:
        found = allocate(count)
        for page in found or ():
            if page in gone:
                gone.remove(page)
        return found

    def launched(*given: Any) -> Any:
        one.runner.cache.wipe(gone, float("nan"))
        gone.clear()
        return launch(*given)

    one.pool.free, one.pool.allocate, one.runner.launch = freed, allocated, launched  # type: ignore[method-assign]


@pytest.mark.parametrize("seeds", [(0, 2), (3, 4, 5)])  # all models, caches and drafters
def test_failing_steps_change_nothing(seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after the forward pass, after the masks, before the draw; a sequence alone never fails."""
    pytest.importorskip("llguidance")
    dice, failures, together = random.Random(seeds[0]), [], [0]
    run, forward, draw, bring = Runner._run, Runner._forward, Sampler.draw, Runner._bring

    def fail() -> None:
        if together[0] > 1 and dice.random() < 0.15:
            failures.append(1)
            raise RuntimeError("now and then")

    def running(self: Runner, step: Any) -> Any:
        together[0] = step.num_seqs
        return run(self, step)

    def forwarded(self: Runner, *given: Any) -> Any:
        fail()
        found = forward(self, *given)
        fail()
        return found

    def brought(self: Runner, masks: Any) -> None:
        bring(self, masks)
        fail()

    def drawn(self: Sampler, *given: Any, **more: Any) -> Any:
        fail()
        return draw(self, *given, **more)

    monkeypatch.setattr(mixes, "poison_freed_pages", poison_before_steps)
    for place, name, value in (
        (Runner, "_run", running), (Runner, "_forward", forwarded), (Runner, "_bring", brought), (Sampler, "draw", drawn),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, value)
    for seed in seeds:
        mixes.check(seed)
    assert len(failures) > 10
