"""The runners of several ranks: each runs the same steps on its part of the model; rank 0's also sends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hone.base.errors import SpecError
from hone.model.parallel.local import LocalDecoder
from hone.serve.experts.placing import ExpertPlacing
from hone.serve.ranks.errors import RankError
from hone.serve.ranks.frames import MessageKind
from hone.serve.ranks.links import Links, end_process
from hone.serve.ranks.packing import pack
from hone.serve.runner import Launched, Masks, Runner, SeqResult, _Part
from hone.serve.step import StepInput


class RankRunner(Runner):
    """A `Runner` on one rank. An error in a step is raised: other ranks cannot repeat it in halves.

    Every rank of the last pipeline stage samples: equal logits and equal keys make equal tokens.
    """

    model: LocalDecoder
    placing: ExpertPlacing | None = None
    """Counts and moves experts; None without `enable_eplb`."""

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn here: on the ranks of the last stage."""
        return self.model.place.last

    def _halved(self, step: StepInput) -> list[_Part]:
        return [self._run(step)]

    def _run(self, step: StepInput) -> _Part:
        if self.model.place.last:
            return super()._run(step)
        self._forward(step.batch, {})
        if self._masks is not None and any(step.sampling.masked[place] for place in step.sampled):
            self._masks()  # rank 0's, which go to the ranks that sample
        return _Part(step.num_seqs)


class LeadRunner(RankRunner):
    """Rank 0's runner: it sends every step to the workers before it runs it. Raises RankError once a rank is lost."""

    links: Links
    end: Callable[[], object]
    """Ends the workers and leaves their process group; a second call does nothing."""
    step_interval: int | None = None
    """Steps after which experts are placed anew."""
    placed: str = ""
    """What the last placement of experts changed."""

    def launch(self, step: StepInput, masks: Masks | None = None) -> Launched:
        """Starts the step on all ranks."""

        def sent() -> np.ndarray:
            assert masks is not None, "a step with masks comes with them"
            found = masks()
            self.links.send(MessageKind.MASKS, found)
            return found

        if self.step_interval and self.links.num_steps and self.links.num_steps % self.step_interval == 0:
            self.rebalance()
        self._guarded(lambda: self.links.send(MessageKind.STEP, memoryview(pack(step))))
        launched = self._guarded(lambda: super(LeadRunner, self).launch(step, masks and sent))
        if self.model.place.last:
            return _Guarded(self, launched)
        return _Awaited(self, step.num_seqs)

    def prepare(self) -> bool:
        """Prepares one more CUDA graph, on all ranks."""
        if self.graphs is None:
            return False
        self._guarded(lambda: self.links.send(MessageKind.PREPARE, b""))
        return self._guarded(super().prepare)

    def rebalance(self) -> str:
        """Places experts on ranks by what tokens asked for since the last time; says what moved in the first pipeline
        stage; the others place theirs themselves. Between two steps.

        Raises SpecError without `enable_eplb`, and for experts quantized in different formats.
        """
        placing = self.placing
        if placing is None:
            raise SpecError("this engine counts no loads of experts", fix="set engine.enable_eplb=true")
        placing.check_moves()
        slots, self.placed = self._guarded(placing.planned)
        self._guarded(lambda: self.links.send(MessageKind.PLACE, slots))
        self._guarded(lambda: placing.move(slots))
        return self.placed

    def when_lost(self, say: Callable[[RankError], None]) -> None:
        """See `Engine.when_lost`."""
        end_process(self.links, say)

    def close(self) -> None:
        """Ends the workers."""
        self.end()

    def _guarded(self, work: Any) -> Any:
        """The result of `work`; meanwhile the watching thread counts the time. Raises RankError for any error."""
        self.links.waits(True)
        try:
            return work()
        except RankError:
            raise
        except Exception as error:
            raise self.links.fail(error) from error
        finally:
            self.links.waits(False)


class _Guarded(Launched):
    """A step on its way, whose results this rank computes."""

    def __init__(self, runner: LeadRunner, launched: Launched) -> None:
        self._runner, self._launched = runner, launched

    @property
    def errors(self) -> dict[int, str]:
        return self._launched.errors

    def tokens(self) -> list[int | None] | None:
        return self._runner._guarded(self._launched.tokens)

    def results(self) -> list[SeqResult]:
        return self._runner._guarded(self._launched.results)


class _Awaited(Launched):
    """A step on its way through the pipeline; the last stage sends its results, in the order of the steps."""

    def __init__(self, runner: LeadRunner, num_seqs: int) -> None:
        self._runner, self._num_seqs = runner, num_seqs
        self._reply: tuple[list[int | None] | None, list[SeqResult]] | None = None

    @property
    def errors(self) -> dict[int, str]:
        return {}

    def tokens(self) -> list[int | None] | None:
        return self._replied()[0]

    def results(self) -> list[SeqResult]:
        tokens, results = self._replied()
        return results if tokens is None else [SeqResult.of(token) for token in tokens]

    def _replied(self) -> tuple[list[int | None] | None, list[SeqResult]]:
        if self._reply is None:
            place = self._runner.model.place
            last = (place.num_stages - 1) * place.tensor_size
            answer = (
                self._runner._guarded(lambda: self._runner.links.reply_of(last, MessageKind.STEP))
                if self._num_seqs
                else ([], [])
            )
            self._reply = answer
        return self._reply
