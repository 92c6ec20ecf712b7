"""A teacher whose predictions were written to disk before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.lazy import lazy
from hone.train.teachers.base import Teacher, Tutor

if TYPE_CHECKING:
    from torch import Tensor

    from hone.feed.load import Batch
    from hone.model.context import Context
    from hone.model.decoder import Decoder

torch = lazy("torch")
ops = lazy("hone.ops.loss.cached")

_KEPT = "teacher's log-probabilities"
"""Their place in a context's memo, and that of what is told of the student's."""


class Cached(Teacher):
    """The few log-probabilities a token of the input 'logits', which the stage teach wrote: no teacher is in memory. Anshumann et al. 2025, arXiv:2503.16870."""

    paper: ClassVar[str] = "arXiv:2503.16870"
    from_cache: ClassVar[bool] = True
    has_decoder: ClassVar[bool] = False
    rest: Literal["bucket", "zero"] = Field(
        "bucket",
        description="What the ids count that are not among the k most likely: all together one more outcome, or nothing (biased).",
    )

    def tutor(self, model: Decoder, given: Any) -> Tutor:
        assert given is not None, "cached logits are not there"
        return Reader(given, bucket=self.rest == "bucket")


class Reader(Tutor):
    """Looks up what is kept of each sequence of a pass."""

    def __init__(self, cache: Any, *, bucket: bool) -> None:
        super().__init__(None)
        self._cache, self._bucket = cache, bucket

    def look_up(self, batch: Batch, context: Context) -> None:
        """Gives `context` what is kept of `batch`. Raises HoneError for a sequence that was not written."""
        found, facts = self._cache.of(batch), self._cache.facts
        ids, log_probs, tails = (None if one is None else torch.from_numpy(one).flatten(0, 1) for one in found)
        assert ids is not None and log_probs is not None
        if not self._bucket:
            tails = None
        device = context.positions.device
        kept = ops.Kept(
            ids.to(device),
            log_probs.to(device),
            facts.vocab_size,
            facts.temperature,
            None if tails is None else tails.to(device),
            facts.sampled,
        )
        keep_for(context, kept)


def keep_for(context: Context, kept: Any, sees: Callable[[Tensor, Tensor, float | None], None] | None = None) -> None:
    """Gives the pass of `context` what is `kept` of its tokens (`hone.ops.loss.cached.Kept`); `sees` is told of its normed hidden
    states [T, D], the head [V, D] and the softcap of logits."""
    context.memo[_KEPT] = kept, sees


def kept_of(context: Context, model: Decoder, x: Tensor) -> Any:
    """What `keep_for` gave `context`, the pass of `model` with normed hidden states x [T, D]."""
    kept, sees = context.memo[_KEPT]
    if sees is not None:
        sees(x, model.head_weight, model.config.logits_softcap)
    return kept
