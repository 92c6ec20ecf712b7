"""Modules of what is written: a finished linear is put into its layer as the module that computes it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hone.compress.engine.job import Job
from hone.compress.matrix import Parts
from hone.compress.targets import Linear


def parts_of(
    job: Job, index: int, linear: Linear, tensors: Mapping[str, Tensor], weight: Tensor | None = None
) -> Parts:
    """What is written of a linear of layer `index`, among `tensors`; `weight` is what they hold, where it is known."""
    wide = torch.promote_types(job.checkpoint.dtype, torch.float32)
    return Parts(linear, index, job.checkpoint.config, tensors, job.device, job.dtype, wide, weight)


def put(
    job: Job,
    layer: nn.Module,
    index: int,
    linear: Linear,
    tensors: Mapping[str, Tensor],
    weight: Tensor | None = None,
) -> None:
    """Puts a finished linear into layer `index` as it is written in `tensors`; `weight` is what those hold, None to read it there.

    Each step makes its module of the one that the given model has or the steps before made.
    """
    dense, parts = layer.get_submodule(linear.path), parts_of(job, index, linear, tensors, weight)
    module = dense if job.storage.template is not None else parts.unquantized(dense)
    for step in job.matrix_steps(index, linear):
        module = step.module(module, parts)
    if module is not dense:
        layer.set_submodule(linear.path, module)
