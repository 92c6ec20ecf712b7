"""One layer, or the head, on its way through the engine: read, transformed, solved matrix by matrix, and as it is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.compress.capture import Flow
from hone.compress.engine.job import Job
from hone.compress.layer import LayerWeights
from hone.compress.matrix import Matrix
from hone.compress.shards import build_layer
from hone.compress.statistics import LEAST_TOKENS, uncalibrated
from hone.compress.targets import HEAD, Linear, matrix_name


class LayerRun:
    """Layer `index` of a job, or the head after the last one, built on this rank; `flow` has its calibration inputs, if there are any.

    `tensors` are its checkpoint tensors, first as they are given, at last as they are written.
    """

    def __init__(self, job: Job, index: int, flow: Flow | None = None) -> None:
        self.job, self.index, self.flow = job, index, flow
        self.checkpoint = job.checkpoint.reopened()  # so that its memory maps are freed with it
        self.layer = build_layer(self.checkpoint, index, job.device, job.dtype, job.mesh)
        self.linears = job.targets[index]
        self.is_head = index == self.checkpoint.config.num_layers  # no transform changes its inputs
        self.tensors: dict[str, Tensor] = {}

    def replay(self, written: dict[str, Tensor], added: dict[str, Tensor]) -> None:
        """Makes a layer that was finished before what it is on disk: its `written` shard, and adapters `added` beside it."""
        job = self.job
        if job.transforms:
            LayerWeights(self.checkpoint, self.index, self.layer, written, {}, frozenset(), {}).put_stored()
        for linear in self.linears:
            job.put(self.layer, self.index, linear, written | added)
        if job.cache is not None:
            job.cache.use(self.layer, self.checkpoint.config, self.index, written)

    def compress(self) -> list[dict[str, Any]]:
        """Leaves in `tensors` what is written, and in the layer what computes it; one row of the report a matrix.

        A rank solves its matrices, and receives the others as they are stored.
        """
        job = self.job
        statistics, weight = self._prepared()
        mine, runs = job.mine(self.index), self.flow is not None and not self.is_head
        found, made = {}, {}
        for linear in self.linears:
            given = statistics.pop(linear.path, {})
            if linear.path not in mine:
                continue
            if job.gradients:
                given = given | {"gradients": job.gradients[matrix_name(self.index, linear.path)]}
            matrix = self._solve(linear, weight(linear.path), given)
            found[linear.path] = matrix.row([name for name, _ in linear.modules], (step.kind for step in job.steps))
            written = self._written(linear, matrix)
            made.update(written)
            if runs:  # the second pass runs what is written, in its stored precision
                held = None if matrix.stored is None else matrix.base
                job.put(self.layer, self.index, linear, written, held)
        made = job.mesh.exchange(made, job.device)
        for linear in self.linears:
            for name, _ in linear.modules:
                self.tensors.pop(f"{name}.weight", None)
            if runs and linear.path not in mine:
                job.put(self.layer, self.index, linear, made)
        self.tensors.update(made)
        by_path = {path: row for part in job.mesh.gather(found) for path, row in part.items()}
        if runs and job.cache is not None:
            self.tensors.update(job.cache.calibrate(self.layer, self.flow, self.checkpoint, self.index))
        return [by_path[linear.path] for linear in self.linears]

    def _prepared(self) -> tuple[dict[str, dict[str, Tensor]], Callable[[str], Tensor]]:
        """Reads the tensors, gathers statistics and applies the transforms: (statistics of each linear, its weight by path)."""
        job, readers = self.job, self._readers()
        wanted = job.statistics if job.transforms and not self.is_head else job.statistics | job.ranges
        gathers = self.flow is not None and bool(readers or self.flow.paired)
        statistics = self.flow.statistics(self.layer, readers, wanted) if self.flow is not None and gathers else {}
        self.tensors = {name: self.checkpoint.tensor(name) for name in job.inside(self.index)}
        if self.is_head:
            return statistics, partial(self.layer.original, self.tensors)
        targets = frozenset(linear.path for linear in self.linears)
        storage = {linear.path: job.storage.of(self.index, linear) for linear in self.linears}
        weights = LayerWeights(
            job.checkpoint, self.index, self.layer, self.tensors, statistics, targets, storage, job.mesh
        )
        for transform in job.transforms:
            transform.change(weights)
        if job.transforms:
            weights.put()
        if job.transforms and job.ranges and self.flow is not None:
            for path, values in self.flow.statistics(self.layer, readers, job.ranges).items():
                statistics[path] = statistics[path] | values
        return statistics, weights.weight

    def _readers(self) -> dict[Any, list[str]]:
        """The linears that read each input."""
        found: dict[Any, list[str]] = {}
        for linear in self.linears:
            found.setdefault(linear.reads, []).append(linear.path)
        return found

    def _solve(self, linear: Linear, original: Tensor, statistics: dict[str, Tensor]) -> Matrix:
        """Runs the steps on one fused matrix. Raises ArtifactError when its inputs are not finite."""
        job, name = self.job, matrix_name(self.index, linear.path)
        name = name if linear.path == HEAD else f"model.{name}"
        if not all(bool(torch.isfinite(value).all()) for value in statistics.values()):
            raise ArtifactError(
                f"calibration: the inputs of {name} are not all finite in {str(job.dtype).removeprefix('torch.')}",
                fix="set compute_dtype=float32, or check the checkpoint and the calibration text",
            )
        modules = tuple(rows for _, rows in linear.modules)
        tokens = int(statistics["tokens"]) if "tokens" in statistics else None
        steps, storage = job.matrix_steps(self.index, linear), job.storage.of(self.index, linear)
        quantize = None if storage is None else storage.apply
        matrix = Matrix(
            name, original, job.checkpoint.dtype, statistics, modules, job.model, quantize=quantize, tokens=tokens
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

    def _written(self, linear: Linear, matrix: Matrix) -> dict[str, Tensor]:
        """The checkpoint tensors that replace those of the linear's modules, and what steps write beside them."""
        names, storage, begin = [name for name, _ in linear.modules], self.job.storage.of(self.index, linear), 0
        found = {key: tensor for step in self.job.steps for key, tensor in step.beside(matrix, names).items()}
        for number, (name, count) in enumerate(linear.modules):
            rows = slice(begin, begin + count)
            begin += count
            if storage is None:
                part = {"weight": matrix.base[rows].to(self.tensors[f"{name}.weight"].dtype)}
            else:
                part = storage.tensors_of(matrix, number, rows)
            found.update({f"{name}.{suffix}": tensor for suffix, tensor in part.items()})
        return found
