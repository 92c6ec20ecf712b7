"""Fixed masks: the weights that are zero in a given model are zero and stay zero while another one is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hone.base.errors import ArtifactError, SpecError
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts

if TYPE_CHECKING:
    from torch import Tensor


def check_mask(mask: CheckpointFacts, config: ModelConfig) -> None:
    """Raises SpecError unless `mask` is a model of `config`'s layers that is not quantized."""
    for where, one in ((mask.where, mask.config), ("the model that is trained", config)):
        if one.adapters:
            raise SpecError(
                f"{where} has adapters around its linears, and a mask is of the weights alone",
                fix="give models without adapters, such as the pruned one before it was corrected",
            )
    if mask.packed:
        raise SpecError(
            f"{mask.where} has quantized weights, whose zeros are not those of pruning",
            fix="give the pruned model before it was quantized",
        )
    if (mask.config.layers, mask.config.hidden_size) != (config.layers, config.hidden_size):
        raise SpecError(
            f"{mask.where} has other layers than the model that is trained, so that its zeros say nothing of it",
            fix="give a pruned version of that model as mask",
        )


def zeros_of(folder: Path, device: str) -> dict[str, Tensor]:
    """Bool masks of the layers' linears of the model in `folder` by parameter name, True where the weight is zero.

    Raises ArtifactError when no weight is.
    """
    from hone.model.hf import load
    from hone.train.weights import describe_parameters

    model = load(folder, device)
    kinds = describe_parameters(model)
    found = {name: part.detach() == 0 for name, part in model.named_parameters() if kinds[name].kind == "matrix"}
    if not any(bool(mask.any()) for mask in found.values()):
        raise ArtifactError(
            f"{folder}: no weight of a layer's linear is zero, so that it is no mask",
            fix="give a model that a pruner made, such as steps: [magnitude]",
        )
    return found


def sparsity(zeros: dict[str, Tensor]) -> float:
    """The fraction of True in all masks together."""
    return sum(int(mask.sum()) for mask in zeros.values()) / sum(mask.numel() for mask in zeros.values())
