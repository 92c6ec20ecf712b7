"""Objective: Medusa heads, each of which learns the token so many places further on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.train.objectives.draft_heads.base import DraftHeads, ahead

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from hone.cost.dims import ModelDims
    from hone.model.config import ModelConfig
    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.model.drafters.folder import DrafterFacts
    from hone.model.drafters.medusa import MedusaHeads


class Medusa(DraftHeads):
    """Trains Medusa heads beside a frozen model: sum over k of decay^k times the cross entropy of the token k + 2 places on. Cai et al. 2024, arXiv:2401.10774."""

    paper: ClassVar[str] = "arXiv:2401.10774"

    num_heads: int = Field(3, ge=1, le=16, description="Heads, each a guess one place further.")
    num_layers: int = Field(1, ge=1, le=4, description="Residual blocks of a head before its last linear.")
    decay: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Weight of each head's loss relative to that of the head before (0.8 in the paper).",
    )

    def check(self, config: ModelConfig, seq_len: int) -> None:
        if seq_len < self.num_heads + 2:
            raise SpecError(
                f"objective medusa has {self.num_heads} heads, and sequences of {seq_len} tokens have no targets for the last one",
                fix=f"set seq_len to at least {self.num_heads + 2}, or fewer objective.num_heads",
            )

    def num_params(self, config: ModelConfig) -> int:
        width = config.hidden_size
        return self.num_heads * (self.num_layers * (width * width + width) + config.vocab_size * width)

    def dims(self, config: ModelConfig) -> ModelDims:
        from dataclasses import replace

        from hone.cost.dims import Attending, LayerDims, Widths

        width = config.hidden_size
        block = LayerDims(((width, width),), Attending(0, 0, 0), Widths(width, 0, width), 0)
        count = self.num_params(config)
        sizes = {"num_params": count, "active_params": count, "vocab_size": self.num_heads * config.vocab_size}
        layers = (block,) * (self.num_heads * self.num_layers)
        return replace(config.dims(), tie_embeddings=True, layers=layers, **sizes)

    def facts(self, config: ModelConfig, where: str, dtype: str, tokenizer: str | None) -> DrafterFacts:
        from hone.cost.memory import BYTES
        from hone.model.drafters.folder import DrafterFacts

        count = self.num_params(config)
        sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_params": count}
        return DrafterFacts(
            where=where, kind="medusa", weights_bytes=count * BYTES[dtype], tokenizer=tokenizer, **sizes
        )

    def begin(self, model: Decoder, counts: NDArray[np.int64], seed: int) -> MedusaHeads:
        from hone.model.drafters.medusa import begin

        return begin(model, self.num_heads, self.num_layers)

    def save(self, heads: Any, config: ModelConfig, folder: Path, base: str, dtype: torch.dtype) -> None:
        from hone.model.drafters.medusa import save

        save(heads, config, folder, base, dtype)

    def total_in(
        self,
        model: Decoder,
        x: Tensor,
        targets: Tensor,
        context: Context,
        teacher: Decoder | None,
        teacher_hidden: Tensor | None,
    ) -> Tensor:
        """Nats summed over the valid targets of all heads, each weighted; the model's own loss is not in it."""
        from hone.ops import linear_cross_entropy

        heads = model.drafter
        inputs = heads.inputs(model.head_input(x))
        losses = [
            self.decay**k * linear_cross_entropy(one, head[-1].weight, ahead(targets, context, k + 1), reduction="sum")
            for k, (one, head) in enumerate(zip(inputs, heads.heads, strict=True))
        ]
        return sum(losses[1:], losses[0])
