"""A shallower student made from a teacher's own layers, for instance for a draft model of half the depth."""

from __future__ import annotations

import torch

from hone.model.decoder import Decoder
from hone.train.inputs import student_config


def from_teacher(teacher: Decoder, keep_every: int) -> Decoder:
    """A decoder with copies of every `keep_every`-th layer, the embedding, the norm and the head of `teacher`.

    Same dtype and device. A student initialised from its teacher's layers needs a fraction of the steps of a random
    one (DistilBERT, Sanh et al. 2019, arXiv:1910.01108, which kept every second layer).
    """
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
