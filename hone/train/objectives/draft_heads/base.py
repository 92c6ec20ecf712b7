"""The base of objectives that train draft heads: the model is frozen, and the heads that it gets are all that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hone.train.objectives.base import Objective

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from hone.cost.dims import ModelDims
    from hone.model.config import ModelConfig
    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.model.drafters.folder import DrafterFacts


class DraftHeads(Objective):
    """A loss of heads that guess a model's next tokens. They are the submodule `drafter` of the model while they are trained."""

    trains_heads: ClassVar[bool] = True

    def check(self, config: ModelConfig, seq_len: int) -> None:
        """Raises SpecError where heads of these options cannot be trained beside a model of `config`."""

    def dims(self, config: ModelConfig) -> ModelDims:
        """The sizes of the heads, for estimates: those of a model that is trained while `config`'s, like a teacher, only runs forward."""
        raise NotImplementedError

    def num_params(self, config: ModelConfig) -> int:
        """The parameters that are trained."""
        raise NotImplementedError

    def facts(self, config: ModelConfig, where: str, dtype: str, tokenizer: str | None) -> DrafterFacts:
        """Of the folder that a training in `dtype` writes."""
        raise NotImplementedError

    def begin(self, model: Decoder, counts: NDArray[np.int64], seed: int) -> nn.Module:
        """New heads for `model`, float32 on its device. `counts` [V]: how often each token comes in the data."""
        raise NotImplementedError

    def save(self, heads: Any, config: ModelConfig, folder: Path, base: str, dtype: torch.dtype) -> None:
        """Writes heads of a model of `config`, which is in the folder `base`."""
        raise NotImplementedError


def ahead(targets: Tensor, context: Context, places: int) -> Tensor:
    """`targets` [B, S] of the position `places` later, -100 where that is of another document or beyond the sequence."""
    found = targets.new_full(targets.shape, -100)
    if places >= targets.shape[-1]:
        return found
    if places == 0:
        return targets
    found[..., :-places] = targets[..., places:]
    ids = context.document_ids
    if ids is not None:
        found[..., :-places] = found[..., :-places].masked_fill(ids[..., :-places] != ids[..., places:], -100)
    return found
