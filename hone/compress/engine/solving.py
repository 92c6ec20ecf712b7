"""One matrix of a job: its steps in order, then the tensors that are written of it.

Shapes: N output features (rows), K input features (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hone.compress.calibration import not_finite
from hone.compress.engine.job import Job
from hone.compress.matrix import Matrix
from hone.compress.statistics import LEAST_TOKENS, uncalibrated
from hone.compress.targets import EMBEDDING, HEAD, Linear, matrix_name
from hone.model.quantized import layouts


def solve(job: Job, index: int, linear: Linear, original: Tensor, statistics: dict[str, Tensor]) -> Matrix:
    """The weight `original` [N, K] of a linear of layer `index` after the steps of `job`.

    `statistics` are those of its inputs. Raises ArtifactError when they are not finite.
    """
    name = matrix_name(index, linear.path)
    statistics = statistics | ({"gradients": job.gradients[name]} if job.gradients else {})
    name = name if linear.path == HEAD else f"model.{name}"
    if not all(bool(torch.isfinite(value).all()) for value in statistics.values()):
        raise not_finite(f"the inputs of {name}", job.dtype)
    steps, storage = job.matrix_steps(index, linear), job.storage.of(index, linear)
    matrix = Matrix(
        name,
        original,
        job.checkpoint.dtype,
        statistics,
        tuple(rows for _, rows in linear.modules),
        job.model,
        quantize=None if storage is None else storage.apply,
        tokens=int(statistics["tokens"]) if "tokens" in statistics else None,
    )
    if matrix.seldom:
        matrix.statistics = uncalibrated(statistics)
    if matrix.seldom and any(step.needs & statistics.keys() for step in steps):
        matrix.notes.append(
            f"an expert saw fewer than {LEAST_TOKENS} calibration tokens: compressed as without calibration"
        )
    matrix.keep_zeros(quantized=job.requantized)
    for step in steps:
        step.apply(matrix)
    for step in steps:
        step.finish(matrix)
    return matrix


def written(job: Job, index: int, linear: Linear, matrix: Matrix, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint tensors that replace those `given` of the linear's modules, and what steps write beside them."""
    names, storage, begin = [name for name, _ in linear.modules], job.storage.of(index, linear), 0
    found = {key: tensor for step in job.steps for key, tensor in step.beside(matrix, names).items()}
    for number, (name, count) in enumerate(linear.modules):
        rows = slice(begin, begin + count)
        begin += count
        if storage is None:
            part = {"weight": matrix.base[rows].to(given[f"{name}.weight"].dtype)}
        else:
            part = storage.tensors_of(matrix, number, rows)
        found.update({f"{name}.{suffix}": tensor for suffix, tensor in part.items()})
    return found


def quantized_embedding(job: Job, embedding: Linear) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The checkpoint tensors that replace the embedding's weight, by name, and its row of layers.jsonl."""
    name, storage = f"{EMBEDDING}.weight", job.storage.of(-1, embedding)
    assert storage is not None
    stored = job.checkpoint.tensor(name)
    weight = job.checkpoint.converted(name, stored, job.device, torch.promote_types(stored.dtype, torch.float32))
    matrix = Matrix(EMBEDDING, weight, job.checkpoint.dtype, modules=(len(weight),))
    storage.apply(matrix)
    assert matrix.stored is not None, f"{storage.kind} stored nothing"
    row = matrix.row([EMBEDDING], [storage.kind])
    return {f"{EMBEDDING}.{suffix}": one.cpu() for suffix, one in layouts.write(matrix.stored).items()}, row
