"""MiniLM: a layer's attention and relations between its queries, keys or values are as the teacher's, whatever the widths are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.train.objectives.hidden_states import Layers

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.config import ModelConfig
    from hone.model.context import Context
    from hone.train.objectives.seen import Seen

heads = lazy("hone.train.objectives.heads")


class MiniLM(Layers):
    """KL of softmax(QQ^T), KK^T and VV^T of one layer, the heads divided anew, or of attention and VV^T, added to distill. Wang et al. 2020, arXiv:2012.15828."""

    paper: ClassVar[str] = "arXiv:2012.15828"
    reads_heads: ClassVar[bool] = True
    layers: tuple[int, ...] = Field(
        (), description="The student's layers, from 0, that are compared; empty: the last one."
    )
    compares: Literal["queries_keys_values", "attention_values"] = Field(
        "queries_keys_values",
        description="queries_keys_values: MiniLMv2, any numbers of heads; attention_values: MiniLM (arXiv:2002.10957), as many query "
        "heads as the teacher.",
    )
    relation_heads: int = Field(
        0, ge=0, description="Heads into which all numbers of a token are divided; 0: the student's key heads."
    )

    def usual_layers(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers - 1,)

    def compared(self, own: Seen, theirs: Seen, valid: Tensor, context: Context) -> Tensor:
        mine, wanted = own.heads, theirs.heads
        assert mine is not None and wanted is not None, "heads were not tapped"
        seen = heads.visible(context, valid.shape[1], valid.device, (mine, wanted))
        count = self.relation_heads or mine.k.shape[-2]

        def related(ours: Tensor, other: Tensor) -> Tensor:
            both = (heads.relations(heads.resplit(one, count)) for one in (ours, other))
            return heads.apart(*both, seen)  # type: ignore[no-any-return]

        values = related(mine.v, wanted.v)
        if self.compares == "attention_values":
            return heads.apart(heads.scores(mine.q, mine.k), heads.scores(wanted.q, wanted.k), seen) + values  # type: ignore[no-any-return]
        return related(mine.q, wanted.q) + related(mine.k, wanted.k) + values

    def check_models(self, config: ModelConfig, teacher: ModelConfig) -> None:
        for own, theirs in self.pairs(config.num_layers, teacher.num_layers):
            heads.check_heads(config, [own], "student", self.kind)
            heads.check_heads(teacher, [theirs], "teacher", self.kind)
            mine, wanted = config.layers[own].mixer, teacher.layers[theirs].mixer
            if self.compares == "attention_values" and mine.num_heads != wanted.num_heads:  # type: ignore[attr-defined]
                raise SpecError(
                    f"objective minilm compares attention head by head, and the student has {mine.num_heads}, the teacher "  # type: ignore[attr-defined]
                    f"{wanted.num_heads}",  # type: ignore[attr-defined]
                    fix="set objective.compares: queries_keys_values",
                )
            count = self.relation_heads or mine.num_kv_heads  # type: ignore[attr-defined]
            for one in (mine, wanted):
                widths = [number * one.head_dim for number in (one.num_heads, one.num_kv_heads)]  # type: ignore[attr-defined]
                if any(width % count for width in widths):
                    raise SpecError(
                        f"objective.relation_heads {count} does not divide the widths {widths} of queries and keys",
                        fix="give a number that divides those of student and teacher",
                    )
