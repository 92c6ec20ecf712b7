"""Kahneman-Tversky optimization: answers that are each labelled as desirable or not, of which no two must be of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.base.lazy import lazy
from hone.feed.load import IGNORE, Batch
from hone.train.objectives.preference.base import OnePrompt, Preference, document_sums

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.objectives.base import Setting
    from hone.train.passes import Prepared, Preparer, Trained

np = lazy("numpy")
torch = lazy("torch")
passes = lazy("hone.train.passes")
scoring = lazy("hone.train.objectives.scoring")


class KTO(Preference):
    """weight (1 - sigmoid(+-beta (log-ratio - z))), + of desirable answers; z is the batch's KL from the reference. Ethayarajh et al. 2024, arXiv:2402.01306."""

    paper: ClassVar[str] = "arXiv:2402.01306"
    from_teacher: ClassVar[bool] = True
    prepares: ClassVar[bool] = True
    unit: ClassVar[str] = "loss/answer"
    reads: ClassVar[tuple[str, ...]] = ("labels", "pairs")
    beta: float = Field(0.1, gt=0, description="How strongly the model is held to its reference.")
    loss: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto",
        description="kto: log-ratios are compared with z, the KL from the reference; apo_zero_unpaired: with 0, which needs no z "
        "(arXiv:2408.06266).",
    )
    desirable_weight: float = Field(1.0, ge=0, description="Weight of the losses of desirable answers.")
    undesirable_weight: float = Field(
        1.0,
        ge=0,
        description="Of undesirable ones; the weights times the numbers of answers of either kind should be within 1 to 4/3 of each other.",
    )

    def preparer(self, setting: Setting | None) -> Preparer:
        return ReferencePoint(self.measures_kl)

    @property
    def measures_kl(self) -> bool:  # type: ignore[override]
        """Whether there is a z."""
        return self.loss == "kto"

    def count_in(self, batch: Batch) -> int:
        """The divisor of the sum: answers with a target."""
        return len(_documents(batch))

    def total_in(
        self,
        model: Decoder,
        x: Tensor,
        targets: Tensor,
        context: Context,
        teacher: Decoder | None,
        teacher_hidden: Tensor | None,
    ) -> Tensor:
        """The losses summed over the answers; float32 scalar. Shapes as in `Objective.total`; `context.values` are those of ReferencePoint."""
        ratios, desirable, z = self._ratios(model, x, targets, context, teacher, teacher_hidden)
        return self._losses(ratios, desirable, z).sum()

    def measures(
        self,
        model: Decoder,
        x: Tensor,
        targets: Tensor,
        context: Context,
        teacher: Decoder | None,
        teacher_hidden: Tensor | None,
    ) -> Tensor:
        """Sums over the answers, float64 [6]: the number of desirable ones, their rewards, both of the undesirable ones, the losses, and how
        many answers have a reward on their label's side of z."""
        ratios, desirable, z = self._ratios(model, x, targets, context, teacher, teacher_hidden)
        found, rewards = [], self.beta * ratios
        for side in (desirable, ~desirable):
            found += [side.sum().double(), rewards[side].double().sum()]
        right = (ratios > z) == desirable
        return torch.stack([*found, self._losses(ratios, desirable, z).double().sum(), right.double().sum()])

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """val_answers, and means over them: val_preference_loss, val_accuracy (the share whose reward is on its label's side of z), and
        val_margin: the mean reward of desirable answers less that of undesirable ones, where there are both."""
        good, good_rewards, bad, bad_rewards, loss, right = sums
        count = max(good + bad, 1.0)
        found = {"val_answers": good + bad, "val_preference_loss": loss / count, "val_accuracy": right / count}
        return found | ({"val_margin": good_rewards / good - bad_rewards / bad} if good and bad else {})

    def _losses(self, ratios: Tensor, desirable: Tensor, z: Tensor) -> Tensor:
        gained = self.beta * (ratios - z) if self.loss == "kto" else self.beta * ratios
        losses = 1 - torch.sigmoid(torch.where(desirable, gained, -gained))
        return torch.where(desirable, self.desirable_weight, self.undesirable_weight) * losses

    def _ratios(
        self,
        model: Decoder,
        x: Tensor,
        targets: Tensor,
        context: Context,
        teacher: Decoder | None,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(log-ratios to the reference [n], whether desirable bool [n], z) of the n answers of a micro-batch."""
        assert teacher is not None and hidden is not None and context.values is not None, "kto without its reference"
        sums, lengths, owner = document_sums(model, x, targets, context)
        with torch.no_grad():
            reference, _, _ = document_sums(teacher, hidden, targets, context)
        values = context.values[targets != IGNORE]
        labels = torch.zeros_like(sums).index_copy(0, owner, values[:, 0].to(sums.dtype))  # one document's are equal
        there = lengths > 0
        z = context.values[0, 0, 1].to(sums.dtype)
        return (sums - reference)[there], labels[there] > 0, z


class ReferencePoint:
    """Prepares batches for KTO. `values`: 1 of a desirable answer and -1 of another, and z.

    z is the mean log-ratio of answers to prompts that are not theirs (`mismatched`) in the ranks' parts of the step, over all ranks,
    and at least 0: an estimate of the KL divergence from the reference. It has no gradient.
    """

    parts = None

    def __init__(self, measures: bool) -> None:
        self._measures, self.row = measures, {}

    def state(self) -> dict[str, Tensor]:
        """Nothing: each step is prepared anew."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restores `state`."""

    def prepare(self, trained: Trained, batch: Batch) -> Prepared:
        """Raises OnePrompt, on all ranks, where none has answers to two prompts."""
        values = np.empty((*batch.targets.shape, 2), np.float32)
        values[..., 0] = np.where(batch.document_ids % 2 == 0, 1, -1)
        values[..., 1] = self._z(trained, batch) if self._measures else 0
        return passes.Prepared(*batch[:3], values)  # type: ignore[no-any-return]

    def _z(self, trained: Trained, batch: Batch) -> float:
        rows = mismatched(batch)
        sums = torch.zeros(2, dtype=torch.float64)
        if rows is not None:
            device, at_once = trained.device, len(batch.tokens) // trained.gradient_accumulation_steps
            ours, theirs = (scoring.score(one, rows, device, at_once) for one in (trained.model, trained.teacher))
            sums = torch.tensor([(ours.astype(np.float64) - theirs).sum(), len(rows.tokens)], dtype=torch.float64)
        total, number = trained.ranks.mesh.sum(sums * trained.ranks.counts_loss).tolist()
        if not number:
            raise OnePrompt(
                "kto compares each answer with those of other prompts, and no rank's part of a step has answers to two prompts",
                fix="raise batch_size or seq_len, or set objective.loss=apo_zero_unpaired",
            )
        return max(total / number, 0.0)


def mismatched(batch: Batch) -> Batch | None:
    """Each prompt of `batch` with the newest answer before it that is to another prompt, after the first one the last answers: a document
    a row. None with fewer than two prompts.

    The two answers of a pair have one prompt, so the document before is not enough. What would be longer than a sequence is cut off.
    """
    found, length = _documents(batch), batch.tokens.shape[1]
    answers = [targets[targets != IGNORE] for _, targets in found]
    prompts = [tokens[: int(np.argmax(targets != IGNORE)) + 1] for tokens, targets in found]
    names = [prompt.tobytes() for prompt in prompts]
    if len({*names}) < 2:
        return None
    others = [
        next(at for at in range(own - 1, -len(names), -1) if names[at] != names[own]) for own in range(len(names))
    ]
    whole = np.zeros((len(found), length + 1), np.int64)
    targets = np.full((len(found), length), IGNORE, np.int64)
    ids = np.full((len(found), length), -1, np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, (answers[at] for at in others))):
        one = np.concatenate([prompt, answer])[: length + 1]
        whole[row, : len(one)] = one
        ids[row, : len(one) - 1] = 0
        targets[row, len(prompt) - 1 : len(one) - 1] = one[len(prompt) :]
    most = max(int((ids >= 0).sum(1).max()), 1)
    return Batch(whole[:, :most].copy(), targets[:, :most].copy(), ids[:, :most].copy())


def _documents(batch: Batch) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(tokens, targets) of each document that has a target, in order."""
    found = []
    for tokens, targets, ids in zip(*batch[:3]):
        borders = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1, append=ids[-1] - 1))
        for first, last in pairwise(borders.tolist()):
            if (targets[first:last] != IGNORE).any():
                found.append((tokens[first:last], targets[first:last]))
    return found
