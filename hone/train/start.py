"""The models with which a training starts: the one that it trains, and its teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hone.base.artifact import Artifact
from hone.train.precision import Precision

if TYPE_CHECKING:
    from hone.data.load import PackedTokens
    from hone.model.decoder import Decoder
    from hone.model.shape import Shape
    from hone.train.objectives.base import Objective


class Training(Protocol):
    """The fields of a train spec that say with which models it starts."""

    @property
    def model(self) -> Shape: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def init(self) -> str: ...
    @property
    def keep_every(self) -> int: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def seed(self) -> int: ...


def starting_models(
    spec: Training, parents: dict[str, Artifact], data: PackedTokens, device: str
) -> tuple[Decoder, Decoder | None]:
    """(model in float32, teacher in the compute dtype or None) on `device`.

    With init: teacher the model has every `keep_every`-th layer of the teacher; else it is the parent 'model', or a random
    one for the tokens of `data`. There is a teacher where the objective needs one.
    """
    import torch

    from hone.model.decoder import build
    from hone.model.hf import load
    from hone.train.precision import compute_dtype
    from hone.train.student import from_teacher

    copies, reads = spec.init == "teacher", spec.objective.from_teacher
    teacher = load(parents["teacher"].folder, device, torch.float32) if reads or copies else None
    if "model" in parents:
        model = load(parents["model"].folder, device, torch.float32)
    elif copies:
        assert teacher is not None, "planned without a teacher"
        model = from_teacher(teacher, spec.keep_every)
    else:
        model = build(spec.model.config(data.vocab_size, eos=data.eos_token_id), device=device, seed=spec.seed)
    return model, teacher.to(compute_dtype(spec.precision)) if teacher is not None and reads else None
