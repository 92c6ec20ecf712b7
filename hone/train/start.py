"""The models with which a training starts: the one that it trains, and its teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.base.artifact import Artifact
from hone.train.precision import Precision

if TYPE_CHECKING:
    from hone.model.config import ModelConfig
    from hone.model.decoder import Decoder


def starting_models(
    parents: dict[str, Artifact],
    config: ModelConfig,
    device: str,
    keep_every: int | None,
    reads_teacher: bool,
    precision: Precision,
    seed: int,
) -> tuple[Decoder, Decoder | None]:
    """(model in float32, teacher in the compute dtype or None) on `device`.

    With `keep_every` the model has every so many-th layer of the teacher; else it is the parent 'model', or a random one
    of `config`. `reads_teacher`: the objective needs the teacher.
    """
    import torch

    from hone.model.decoder import build
    from hone.model.hf import load
    from hone.train.precision import compute_dtype
    from hone.train.student import from_teacher

    wanted = reads_teacher or keep_every is not None
    teacher = load(parents["teacher"].folder, device, torch.float32) if wanted else None
    if "model" in parents:
        model = load(parents["model"].folder, device, torch.float32)
    elif keep_every is not None:
        assert teacher is not None, "planned without a teacher"
        model = from_teacher(teacher, keep_every)
    else:
        model = build(config, device=device, seed=seed)
    return model, teacher.to(compute_dtype(precision)) if teacher is not None and reads_teacher else None
