"""TinyBERT: attention scores, hidden states and embeddings are as the teacher's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.train.objectives.hidden_states import Projecting

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.config import ModelConfig
    from hone.model.context import Context
    from hone.train.objectives.seen import Seen

torch = lazy("torch")
heads = lazy("hone.train.objectives.heads")
projections = lazy("hone.train.objectives.projections")

EMBEDDINGS = -1
"""The layer whose matrix projects embeddings."""


class AttentionMaps(Projecting):
    """Squared distances of attention scores before the softmax, of hidden states and of embeddings, added to distill. Jiao et al. 2019 (TinyBERT), arXiv:1909.10351."""

    paper: ClassVar[str] = "arXiv:1909.10351"
    reads_heads: ClassVar[bool] = True
    hidden: bool = Field(True, description="Compare hidden states after the layers, too.")
    embeddings: bool = Field(True, description="Compare embeddings, too.")

    @property
    def reads_embeddings(self) -> bool:
        return self.embeddings

    def projected_layers(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        return [*([EMBEDDINGS] * self.embeddings), *(own for own, _ in pairs if self.hidden)]

    def compared(self, own: Seen, theirs: Seen, valid: Tensor, context: Context) -> Tensor:
        assert own.heads is not None and theirs.heads is not None, "heads were not tapped"
        seen = heads.visible(context, valid.shape[1], valid.device, (own.heads, theirs.heads))
        mine, wanted = (heads.scores(one.q, one.k) for one in (own.heads, theirs.heads))
        apart = (mine - wanted).square().masked_fill(~seen, 0).sum(-1) / seen.sum(-1)
        found = apart.mean(1)  # over heads
        if self.hidden:
            found = found + (projections.projected(context, own.layer, own.hidden) - theirs.hidden).square().mean(-1)
        return found

    def tapped(self, pairs: Sequence[tuple[Seen, Seen]], targets: Tensor, context: Context) -> Tensor:
        total = super().tapped(pairs, targets, context)
        if not self.embeddings:
            return total
        own, theirs = (one.wide().embedded for one in pairs[0])
        assert own is not None and theirs is not None, "embeddings were not looked up"
        apart = (projections.projected(context, EMBEDDINGS, own) - theirs).square().mean(-1)
        return total + self.weight * (apart * (targets != -100)).sum()

    def check_models(self, config: ModelConfig, teacher: ModelConfig) -> None:
        for own, theirs in self.pairs(config.num_layers, teacher.num_layers):
            heads.check_heads(config, [own], "student", self.kind)
            heads.check_heads(teacher, [theirs], "teacher", self.kind)
            mine, wanted = (one.mixer.num_heads for one in (config.layers[own], teacher.layers[theirs]))  # type: ignore[attr-defined]
            if mine != wanted:
                raise SpecError(
                    f"objective attention_maps compares scores head by head, and the student has {mine} heads, the teacher {wanted}",
                    fix="take objective: minilm, which compares any numbers of heads",
                )
