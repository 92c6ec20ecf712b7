"""Two students that learn from each other: the second is trained beside the first and is then forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.train.activation_checkpointing import KeepAll
from hone.train.teachers.base import Teacher, Training, Tutor

if TYPE_CHECKING:
    from torch import Tensor

    from hone.feed.load import Batch
    from hone.model.decoder import Decoder
    from hone.train.checkpoint import SavedTensors
    from hone.train.passes import Counts, Step

torch = lazy("torch")
decoders = lazy("hone.model.decoder")
passes = lazy("hone.train.passes")
taps = lazy("hone.train.objectives.taps")
updates = lazy("hone.train.update")

_HEAD = "teacher."


class Peer(Teacher):
    """A second student of the same shape from other random weights; each learns from the text and the other. Zhang et al. 2017 (deep mutual learning), arXiv:1706.00384."""

    paper: ClassVar[str] = "arXiv:1706.00384"
    seed: int = Field(1, ge=0, description="Seed of the second student's weights; take another than the training's.")

    def tutor(self, model: Decoder, given: Decoder | None) -> Tutor:
        return Peers(decoders.build(model.config, device=model.device, seed=self.seed))


class Peers(Tutor):
    """The second student: its objective is the first one's with the roles exchanged, and it has an optimizer of the same kind.

    Both compare with what the other was before the step.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        assert self.decoder is not None
        self.decoder.train().requires_grad_(True)
        self._update: Any = None
        self._segments = KeepAll().segments(len(decoder.layers))

    def begin(self, trainer: Training) -> None:
        several = trainer.gradient_accumulation_steps > 1
        dtype = next(trainer.model.parameters()).dtype
        self._update = updates.Update(self.decoder, trainer.optimizer, dtype, accumulate=several)

    def learn(self, trainer: Training, parts: Sequence[Batch], counts: Counts) -> None:
        peer = self.decoder
        assert peer is not None
        for place, part in enumerate(parts, 1):
            tokens, targets, context = passes.to_device(part, trainer.device)
            taps.tap(trainer.objective, peer, trainer.model, context)
            x = passes.run_layers(peer, tokens, context, self._segments)
            loss = taps.total(trainer.objective, peer, trainer.model, x, tokens, targets, context) / counts.targets
            if context.extra_loss is not None:
                loss = loss + context.extra_loss * (tokens.numel() / counts.positions)
            self._update.weights.before_backward(last=place == len(parts))
            loss.backward()
            self._update.weights.after_backward()

    def drop_grads(self) -> None:
        self._update.weights.drop_grads()

    def stepped(self, trainer: Training, step: Step) -> None:
        weights = self._update.weights
        norm = weights.squared_norm().double().sqrt()
        if step.skipped or not bool(torch.isfinite(norm)):
            weights.drop_grads()
            return
        self._update.apply(step.lr, passes.shrink(norm, trainer.max_grad_norm))

    def state(self) -> dict[str, Tensor]:
        return {f"{_HEAD}{name}": one for name, one in self._update.state().items()}

    def restore(self, stored: SavedTensors) -> None:
        self._update.restore(_Own(stored))


class _Own:
    """The tensors of a checkpoint that are the second student's, under the names that its update gave them."""

    def __init__(self, stored: SavedTensors) -> None:
        self._stored = stored
        self.labels = [label.removeprefix(_HEAD) for label in stored.labels if label.startswith(_HEAD)]

    def cuts(self, label: str) -> list[Any]:
        return self._stored.cuts(_HEAD + label)

    def numel(self, label: str) -> int:
        return self._stored.numel(_HEAD + label)

    def whole(self, label: str) -> Tensor:
        return self._stored.whole(_HEAD + label)

    def part(self, label: str, start: int, count: int, cut: Any = None) -> Tensor:
        return self._stored.part(_HEAD + label, start, count, cut)
