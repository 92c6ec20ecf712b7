"""The base of objectives on pairs of answers: log-probabilities of both, the loss of a pair, and how often the chosen one wins.

Legend: B sequences, S positions, D width, V vocabulary, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hone.base.errors import HoneError
from hone.base.lazy import lazy
from hone.feed.load import IGNORE
from hone.train.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from hone.feed.load import Batch
    from hone.model.context import Context
    from hone.model.decoder import Decoder

np = lazy("numpy")
torch = lazy("torch")
_CHUNK = 1024
"""Tokens whose logits are in memory at once; they are computed again in the backward pass."""


class OnePrompt(HoneError):
    """Answers that are compared with those to other prompts, and there is no other prompt."""


class Answers(NamedTuple):
    """`log_probs` float32 [P, 2] of the chosen and the rejected answer, summed over their `lengths` [P, 2] trained tokens.

    A pair is `there` (bool [P]) when both have such tokens; the others are places without a pair.
    """

    log_probs: Tensor
    lengths: Tensor
    there: Tensor

    @property
    def means(self) -> Tensor:
        """Log-probability a token."""
        return self.log_probs / self.lengths.clamp(min=1)


class Preference(Objective):
    """A loss over pairs. The data must be pairs (`tokenizer.chat: preference`): documents 2k and 2k + 1 of a sequence are one."""

    reads: ClassVar[tuple[str, ...]] = ("pairs",)
    """The targets of data that it can be trained on (`DataFacts.targets`)."""
    reference_at_start: ClassVar[bool] = True
    unit: ClassVar[str] = "nats/pair"
    measures_kl: ClassVar[bool] = False
    """Whether a mean over all ranks is measured before each step."""

    def losses(self, answers: Answers, reference: Answers | None) -> Tensor:
        """The loss of every pair [P], in nats; `reference` are the same answers under the teacher. Finite also where no pair is."""
        raise NotImplementedError

    def rewards(self, answers: Answers, reference: Answers | None) -> Tensor:
        """The implicit rewards [P, 2] of the chosen and the rejected answer."""
        raise NotImplementedError

    def count_in(self, batch: Batch) -> int:
        """The divisor of the sum: pairs of which both answers have a target."""
        rows, length = batch.targets.shape
        places = np.arange(rows)[:, None] * (length + 1) + batch.document_ids + 1
        held = np.bincount(places[batch.targets != IGNORE], minlength=rows * (length + 1)).reshape(rows, -1)[:, 1:]
        held = held[:, : length // 2 * 2].reshape(-1, 2)
        return int((held > 0).all(1).sum())

    def total_in(
        self,
        model: Decoder,
        x: Tensor,
        targets: Tensor,
        context: Context,
        teacher: Decoder | None,
        teacher_hidden: Tensor | None,
    ) -> Tensor:
        """The losses summed over the pairs; float32 scalar. Shapes as in `Objective.total`."""
        answers, reference = self._both(model, x, targets, context, teacher, teacher_hidden)
        return torch.where(answers.there, self.losses(answers, reference), 0.0).sum()

    def measures(
        self,
        model: Decoder,
        x: Tensor,
        targets: Tensor,
        context: Context,
        teacher: Decoder | None,
        teacher_hidden: Tensor | None,
    ) -> Tensor:
        """Sums over the pairs, float64 [4]: their number, the losses, pairs whose chosen answer has the higher reward, margins of rewards."""
        answers, reference = self._both(model, x, targets, context, teacher, teacher_hidden)
        rewards = self.rewards(answers, reference)
        margins = rewards[:, 0] - rewards[:, 1]
        values = [torch.ones_like(margins), self.losses(answers, reference), (margins > 0).float(), margins]
        return torch.stack([torch.where(answers.there, one, 0.0).double().sum() for one in values])

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """What an evaluation says, of the `measures` of all its batches together."""
        pairs, loss, wins, margins = sums
        count = max(pairs, 1.0)
        means = {"val_preference_loss": loss / count, "val_accuracy": wins / count, "val_margin": margins / count}
        return {"val_pairs": pairs, **means}

    def _both(
        self, model: Decoder, x: Tensor, targets: Tensor, context: Context, teacher: Any, teacher_hidden: Tensor | None
    ) -> tuple[Answers, Answers | None]:
        sums, lengths, owner = document_sums(model, x, targets, context)
        answers = answers_in(sums, lengths)
        if not self.from_teacher:
            return answers, None
        if not self.reads_teacher:
            assert context.values is not None, f"{self.kind} without the cache of its reference"
            known = context.values[targets != IGNORE][:, 0].to(sums.dtype)
            return answers, answers_in(torch.zeros_like(sums).index_copy(0, owner, known), lengths)
        assert teacher is not None and teacher_hidden is not None, f"{self.kind} without its reference"
        with torch.no_grad():
            return answers, answers_in(document_sums(teacher, teacher_hidden, targets, context)[0], lengths)


def answers_in(sums: Tensor, lengths: Tensor) -> Answers:
    """The answers of a micro-batch by the `document_sums` of all its documents."""
    pairs = lengths.view(-1, 2)
    return Answers(sums.view(-1, 2), pairs, (pairs > 0).all(1))


def document_sums(model: Decoder, x: Tensor, targets: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of the trained tokens of each document, their number, the document of each valid target in turn) of a micro-batch, of
    which x [B, S, D] are the last hidden states and `targets` int64 [B, S].

    Float32 [B P], float32 [B P] and int64 [n]: each of B sequences of S positions has places for P documents, S or S + 1, an even
    number.
    """
    rows, length = targets.shape
    places = length + length % 2  # no sequence has more documents
    ids = getattr(context, "document_ids", torch.zeros_like(targets))  # a causal context has one document, no pair
    number = torch.zeros_like(targets)
    number[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(-1)
    number = number + places * torch.arange(rows, device=targets.device)[:, None]
    valid = targets != IGNORE
    owner = number[valid]
    found = token_log_probs(model, x[valid], targets[valid])
    sums = found.new_zeros(rows * places).index_add(0, owner, found)
    return sums, found.new_zeros(rows * places).index_add(0, owner, torch.ones_like(found)), owner


def token_log_probs(model: Decoder, x: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each of `targets` int64 [n] given hidden states x [n, D], float32 [n] (float64 of float64 inputs), at a temperature.

    Logits of _CHUNK tokens exist at once, and are computed again in the backward pass.
    """
    from torch.utils.checkpoint import checkpoint

    h, parts = model.head_input(x), []
    for first in range(0, len(h), _CHUNK):
        given = (
            h[first : first + _CHUNK],
            model.head_weight,
            targets[first : first + _CHUNK],
            model.config.logits_softcap,
            temperature,
        )
        parts.append(checkpoint(_log_probs, *given, use_reentrant=False))
    wide = h.dtype if h.dtype == torch.float64 else torch.float32
    return torch.cat(parts) if parts else h.sum().to(wide).reshape(1)[:0]


def _log_probs(h: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, temperature: float) -> Tensor:
    logits = h @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits if temperature == 1.0 else logits / temperature
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
