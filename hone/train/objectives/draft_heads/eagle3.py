"""Objective: an EAGLE-3 head, which learns the model's distributions at several steps of its own guessing."""

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
    from hone.model.drafters.eagle3 import Eagle3Head
    from hone.model.drafters.eagle3_config import Eagle3Config
    from hone.model.drafters.folder import DrafterFacts

DRAFT_VOCAB = 32_000
"""Tokens that a head guesses at most unless it is told: those that come most often in its data."""


class Eagle3(DraftHeads):
    """Trains an EAGLE-3 head beside a frozen model: sum over steps i of decay^i KL(model, head) over the head's tokens, each step on the one before (training-time test). Li et al. 2025, arXiv:2503.01840."""

    paper: ClassVar[str] = "arXiv:2503.01840"

    ttt_length: int = Field(
        7, ge=1, le=16, description="Steps that are unrolled: guesses that the head learns to make in a row."
    )
    decay: float = Field(0.8, gt=0, le=1, description="Weight of a step's loss relative to that of the step before.")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="Tokens that the head guesses, those most frequent in the data; empty: 32,000, or all of fewer."
    )  # fmt: skip
    layers: tuple[int, ...] = Field(
        (), description="The model's layers, from 0, after which the head reads hidden states; empty: 1, half of all less 1, and the fourth from the end."
    )  # fmt: skip

    def config(self, model: ModelConfig) -> Eagle3Config:
        """The sizes of the head."""
        from hone.model.drafters.eagle3_config import Eagle3Config

        return Eagle3Config.beside(model, self.draft_vocab_size or DRAFT_VOCAB, self.layers)

    def own_taps(self, num_layers: int) -> tuple[int, ...]:
        from hone.model.drafters.eagle3_config import default_taps

        return self.layers or default_taps(num_layers)

    def check(self, config: ModelConfig, seq_len: int) -> None:
        wrong = [layer for layer in self.layers if not 0 <= layer < config.num_layers]
        if wrong or (self.layers and len(self.layers) != 3):
            raise SpecError(
                f"objective.layers are {list(self.layers)}: an EAGLE-3 head reads three of the layers 0 to {config.num_layers - 1}",
                fix="name three layers of the model, or leave layers out",
            )
        if seq_len < self.ttt_length + 2:
            raise SpecError(
                f"objective eagle3 unrolls {self.ttt_length} steps, and sequences of {seq_len} tokens have no targets for the last one",
                fix=f"set seq_len to at least {self.ttt_length + 2}, or a smaller objective.ttt_length",
            )
        self.config(config)

    def num_params(self, config: ModelConfig) -> int:
        return self.config(config).num_params

    def dims(self, config: ModelConfig) -> ModelDims:
        from dataclasses import replace

        from hone.cost.dims import Attending, LayerDims

        head, width = self.config(config), config.hidden_size
        mixer, inner = head.layer.mixer, head.layer.feed_forward.intermediate_size
        q, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        products = ((q + 2 * kv, 2 * width), (width, q), (2 * inner, width), (inner, width))
        step = LayerDims.attention(products, Attending(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim), inner)
        fused = replace(step, matmuls=((width, len(head.taps) * width), *products))
        sizes = {"num_params": head.num_params, "active_params": head.num_params}
        sizes["vocab_size"] = self.ttt_length * head.draft_vocab_size
        layers = (fused, *(step,) * (self.ttt_length - 1))
        return replace(config.dims(), tie_embeddings=True, layers=layers, **sizes)

    def facts(self, config: ModelConfig, where: str, dtype: str, tokenizer: str | None) -> DrafterFacts:
        from hone.cost.memory import BYTES
        from hone.model.drafters.folder import DrafterFacts

        head = self.config(config)
        heads = (head.layer.mixer.num_kv_heads, head.layer.mixer.head_dim)
        size = head.num_params * BYTES[dtype] + 8 * head.draft_vocab_size + head.vocab_size
        sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_params": head.num_params}
        told = {"kind": "eagle3", "weights_bytes": size, "tokenizer": tokenizer, "kv_heads": heads}
        return DrafterFacts(where=where, **told, **sizes)

    def begin(self, model: Decoder, counts: NDArray[np.int64], seed: int) -> Eagle3Head:
        import numpy as np
        import torch

        from hone.model.drafters.eagle3 import begin

        config = self.config(model.config)
        # Ties, such as tokens that never come, go to the smaller id.
        chosen = np.sort(np.argsort(-counts, kind="stable")[: config.draft_vocab_size])
        return begin(model, config, torch.from_numpy(chosen), seed)

    def save(self, heads: Any, config: ModelConfig, folder: Path, base: str, dtype: torch.dtype) -> None:
        from hone.model.drafters.eagle3 import save

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
        """Nats of KL divergence summed over the valid targets of all steps, each weighted; the model's own loss is not in it."""
        import torch

        from hone.train.objectives.distill_loss import distill_loss
        from hone.train.objectives.draft_heads.unrolled import Unrolled

        head, tokens = model.drafter, context.tokens
        assert tokens is not None, "the pass has stored its tokens"
        # Step i at a position: the head reads the token i + 1 places on and guesses the one after, as the model would there.
        with torch.no_grad():
            known, rows = model.head_input(x), model.head_weight[head.draft_ids]
        unrolled, total = Unrolled(context), x.new_zeros((), dtype=torch.float32)
        h = head.fuse(context.memo["taps"])
        for step in range(self.ttt_length):
            unrolled.begin(step)
            embedded = head.embed(_later(tokens, step + 1), model)
            head.prepare(embedded, unrolled)
            normed, h = head.states(embedded, h, unrolled)
            valid = ahead(targets, context, step + 1) != -100
            total = total + self.decay**step * distill_loss(
                normed.flatten(0, -2),
                head.lm_head.weight,
                _later(known, step + 1).flatten(0, -2),
                rows,
                torch.where(valid, 0, -100).flatten(),
                alpha=1.0,
                temperature=1.0,
                softcaps=(None, model.config.logits_softcap),
            )
        return total


def _later(x: Tensor, places: int) -> Tensor:
    """x [B, S, ...] of the position `places` later; what is beyond the sequence is of its start, where nothing is learned."""
    return x.roll(-places, 1)
