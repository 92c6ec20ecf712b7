"""Reward model: a head gives each text a score, and the chosen answer of a pair is to have the higher one."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.feed.load import IGNORE, Batch
from hone.train.objectives.preference.base import Answers, Preference, answers_in

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.objectives.base import Setting
    from hone.train.passes import Prepared, Preparer, Trained

np = lazy("numpy")
torch = lazy("torch")
passes = lazy("hone.train.passes")
F = lazy("torch.nn.functional")


class Reward(Preference):
    """-log sigmoid(score of chosen - of rejected - margin), by a head of one output (Bradley-Terry): trains a reward model. Ouyang et al. 2022, arXiv:2203.02155."""

    paper: ClassVar[str] = "arXiv:2203.02155"
    reference_at_start: ClassVar[bool] = False
    prepares: ClassVar[bool] = True
    scores_text: ClassVar[bool] = True
    margin: float = Field(0.0, ge=0, description="What the chosen answer's score must be above the other's.")
    center: float = Field(
        0.0,
        ge=0,
        description="Weight of the squared sum of a pair's scores, which holds their mean near 0 (0.01 in arXiv:2312.09244).",
    )

    def preparer(self, setting: Setting | None) -> Preparer | None:
        """What gives each answer its last token as an input, at which the score is read."""
        return WholeAnswers()

    def losses(self, answers: Answers, reference: Answers | None) -> Tensor:
        scores = self.rewards(answers, reference)
        return -F.logsigmoid(scores[:, 0] - scores[:, 1] - self.margin) + self.center * scores.sum(1).square()

    def rewards(self, answers: Answers, reference: Answers | None) -> Tensor:
        """The scores: `answers.log_probs` holds these here."""
        return answers.log_probs

    def _both(
        self, model: Decoder, x: Tensor, targets: Tensor, context: Context, teacher: Any, teacher_hidden: Tensor | None
    ) -> tuple[Answers, Answers | None]:
        rows, length = targets.shape
        places = length + length % 2
        ids = getattr(context, "document_ids", torch.zeros_like(targets))
        number = torch.zeros_like(targets)
        number[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(-1)
        number = number + places * torch.arange(rows, device=targets.device)[:, None]
        last = targets != IGNORE
        found = model.head(x[last])[:, 0]
        found = found if found.dtype == torch.float64 else found.float()
        scores = found.new_zeros(rows * places).index_add(0, number[last], found)
        there = found.new_zeros(rows * places).index_add(0, number[last], torch.ones_like(found))
        return answers_in(scores, there), None


class WholeAnswers:
    """Prepares batches of pairs: each document of a row ends with its last target, which is an input then, and the one place with a
    target there is that token's. Documents without targets are left as they are. Rows grow by a token for each document."""

    parts = None

    def __init__(self) -> None:
        self.row: dict[str, float] = {}

    def state(self) -> dict[str, Tensor]:
        """Nothing: each batch is prepared anew."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restores `state`."""

    def prepare(self, trained: Trained, batch: Batch) -> Batch | Prepared:
        """The batch with whole answers; no values are added."""
        return whole_answers(batch)


def whole_answers(batch: Batch) -> Batch:
    """`batch` as `WholeAnswers` makes it: the targets int64 [B, S'] are 0 where scores are read, elsewhere -100."""
    rows = []
    for tokens, targets, ids in zip(*batch[:3]):
        borders = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1, append=ids[-1] - 1)).tolist()
        found: list[list[Any]] = [[], [], []]
        for first, end in pairwise(borders):
            marked, own, more = np.flatnonzero(targets[first:end] != IGNORE), int(ids[first]), []
            if len(marked):
                end = first + int(marked[-1]) + 1
                more = [int(targets[end - 1])]
            elif own < 0:
                continue  # padding
            inputs = [*tokens[first:end].tolist(), *more]
            found[0] += inputs
            found[1] += [IGNORE] * (end - first) + [0] * len(more)
            found[2] += [own] * len(inputs)
        rows.append(found)
    length = max(max(len(one[0]) for one in rows), 1)
    shape, fills = (len(rows), length), (0, IGNORE, -1)
    made = [np.full(shape, fill, array.dtype) for fill, array in zip(fills, batch[:3])]
    for at, row in enumerate(rows):
        for array, values in zip(made, row):
            array[at, : len(values)] = values
    return Batch(*made)
