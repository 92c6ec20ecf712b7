"""The base of training objectives: a loss summed over the positions that have a target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from pydantic import Field

from hone.base.table import Choice, Technique
from hone.model.devices import DEVICES
from hone.train.quantization_aware import FAKE_QUANTIZERS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from hone.feed.load import Batch
    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.objectives.seen import Seen
    from hone.train.passes import Preparer
    from hone.train.teachers.base import Tutor


class Setting(NamedTuple):
    """What an objective's preparer may know of its training."""

    tokenizer: Path
    """The folder with the tokenizer of the data."""
    seed: int


class Objective(Technique):
    """A loss over the decoder's last hidden states. It returns a sum: the loop divides by all valid targets of a step,
    so that the result does not depend on the division into micro-batches."""

    unit: ClassVar[str] = "nats/token"
    """Of its mean, as figures have it."""

    from_teacher: ClassVar[bool] = False
    """Whether it requires the input 'teacher', whose hidden states it gets."""

    trains_heads: ClassVar[bool] = False
    """Whether it trains draft heads beside a frozen model (`draft_heads.base.DraftHeads`), and not the model."""

    scores_text: ClassVar[bool] = False
    """Whether it trains a reward model, whose head of one output scores texts, and no language model."""

    reference_at_start: ClassVar[bool] = False
    """Whether, where an adapter is trained and no teacher is given, the model as it was at the start is the teacher."""

    views: ClassVar[int] = 1
    """Passes over each sequence of a training step, which its `preparer` makes rows of."""

    prepares: ClassVar[bool] = False
    """Whether it has a `preparer`."""
    writes: ClassVar[bool] = False
    """Whether it is trained on answers that the model writes itself, so that a step's size is known only then."""

    simulated_device: Annotated[Technique, Choice(DEVICES)] | None = Field(
        None,
        description="A device whose rounding and writing noise the layers' linears compute the loss with; empty: none.",
    )
    quantization_aware: Annotated[Technique, Choice(FAKE_QUANTIZERS)] | None = Field(
        None,
        description="The grid to which the layers' linears' weights are rounded in every pass; empty: none. Exported with the same "
        "options, the model is the one that was trained.",
    )

    def preparer(self, setting: Setting | None) -> Preparer | None:
        """What prepares the batches of a training of `setting`, once before the passes of a step or of an evaluation's batch; it may have
        state, which checkpoints keep, and adds values or writes other tokens. None: they are taken as they are read."""
        return None

    @property
    def from_cache(self) -> bool:
        """Whether it requires the input 'logits', which a teacher wrote."""
        return False

    @property
    def reads_teacher(self) -> bool:
        """Whether it gets the hidden states of a teacher, of the input or of another (`hone.train.teachers`)."""
        return self.from_teacher

    def tutor(self, model: Decoder, given: Decoder | None) -> Tutor:
        """The teacher of `model` in a training; `given` is the input 'teacher'."""
        from hone.train.teachers.base import Tutor

        assert given is not None or not self.from_teacher or self.reference_at_start, "this objective needs a teacher"
        return Tutor(given)

    def count(self, targets: NDArray[np.int64]) -> int:
        """The divisor of the sum: the number of targets that are not -100. `targets` are of a whole step, on the host."""
        return int((targets != -100).sum())

    def count_in(self, batch: Batch) -> int:
        """`count` of a step's batch, for an objective whose divisor is not a number of targets."""
        return self.count(batch.targets)

    def total_in(
        self,
        model: Decoder,
        x: Tensor,
        targets: Tensor,
        context: Context,
        teacher: Decoder | None,
        teacher_hidden: Tensor | None,
    ) -> Tensor:
        """`total` of a micro-batch with its `context`, for an objective that must know which tokens are of one document."""
        return self.total(model, x, targets, teacher, teacher_hidden)

    def total(
        self, model: Decoder, x: Tensor, targets: Tensor, teacher: Decoder | None, teacher_hidden: Tensor | None
    ) -> Tensor:
        """The loss in nats summed over the targets that are not -100; float32 scalar.

        x [B, S, D] and `teacher_hidden` [B, S, D'] are hidden states before the final norm; targets int64 [B, S].
        """
        raise NotImplementedError

    def pairs(self, num_layers: int, teacher_layers: int) -> tuple[tuple[int, int], ...]:
        """The layers of a student and its teacher, from 0, after which it compares hidden states; none."""
        return ()

    def own_taps(self, num_layers: int) -> tuple[int, ...]:
        """The model's layers, from 0, after which it reads hidden states, from `context.memo["taps"]`; none."""
        return ()

    reads_heads: ClassVar[bool] = False
    """Whether it compares queries, keys and values of the layers of `pairs`, too."""

    @property
    def reads_embeddings(self) -> bool:
        """Whether it compares embeddings, too."""
        return False

    def tapped(self, pairs: Sequence[tuple[Seen, Seen]], targets: Tensor, context: Context) -> Tensor:
        """What is added to `total` for what is seen of each of `pairs`, the student's layer first, summed over the valid targets."""
        raise NotImplementedError
