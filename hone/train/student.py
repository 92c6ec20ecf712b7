"""A shallower student made from a teacher's own layers, for instance for a draft model of half the depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.model.config import ModelConfig

if TYPE_CHECKING:
    from hone.model.decoder import Decoder

torch = lazy("torch")


def student_config(teacher: ModelConfig, keep_every: int) -> ModelConfig:
    """The teacher's config with layers 0, n, 2n, ... only. Raises SpecError when that removes no layer."""
    if not 1 < keep_every <= teacher.num_layers:
        raise SpecError(
            f"keep_every = {keep_every} makes no smaller student of a teacher with {teacher.num_layers} layers",
            fix=f"give a value from 2 to {teacher.num_layers}",
        )
    # Validated again: a layer that reuses the keys of a removed layer must be refused.
    return ModelConfig.read({**teacher.model_dump(mode="json"), "layers": teacher.layers[::keep_every]})


def from_teacher(teacher: Decoder, keep_every: int) -> Decoder:
    """A decoder with copies of every `keep_every`-th layer, the embedding, the norm and the head of `teacher`.

    Same dtype and device. A student initialised from its teacher's layers needs a fraction of the steps of a random
    one (DistilBERT, Sanh et al. 2019, arXiv:1910.01108, which kept every second layer).
    """
    from hone.model.decoder import Decoder

    with torch.device("meta"):
        student = Decoder(student_config(teacher.config, keep_every))
    weights = {}
    for name, tensor in teacher.state_dict().items():
        parts = name.split(".")
        if parts[0] == "layers":
            index, rest = divmod(int(parts[1]), keep_every)
            if rest:
                continue
            parts[1] = str(index)
        weights[".".join(parts)] = tensor.detach().clone()
    student.load_state_dict(weights, strict=True, assign=True)
    config = student.config
    fixed = {f"layers.{index}.{path}" for index in range(config.num_layers) for path in config.untrained(index)}
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name not in fixed)
    return student
