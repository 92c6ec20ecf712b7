"""What an objective sees of a layer of the student or its teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Heads(NamedTuple):
    """Queries [B, S, H, D], keys and values [B, S, KV, D] with which a layer attends to `window` tokens, itself included (None: all before
    it); queries and keys are rotated."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: int | None = None


class Seen(NamedTuple):
    """Of layer `layer`, from 0, its output `hidden` [B, S, D]; where the objective reads them the model's embeddings of the tokens
    `embedded` [B, S, D], and `heads`."""

    layer: int
    hidden: Tensor
    embedded: Tensor | None = None
    heads: Heads | None = None

    def wide(self) -> Seen:
        """The same in float32, or in float64."""
        import torch

        def widened(one: Tensor) -> Tensor:
            return one.to(torch.promote_types(one.dtype, torch.float32))

        heads = None if self.heads is None else Heads(*(widened(one) for one in self.heads[:3]), self.heads.window)
        embedded = None if self.embedded is None else widened(self.embedded)
        return Seen(self.layer, widened(self.hidden), embedded, heads)
