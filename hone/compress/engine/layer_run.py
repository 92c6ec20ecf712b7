"""One layer, or the head, on its way through the engine: read, transformed, solved matrix by matrix, and as it is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from hone.compress.caches.ranges import observe
from hone.compress.capture import Flow
from hone.compress.engine.head import HeadLayer
from hone.compress.engine.job import Job
from hone.compress.engine.modules import put
from hone.compress.engine.solving import solve, written
from hone.compress.layer import LayerWeights
from hone.compress.targets import readers_of
from hone.model.weights.exchanged import build_layer


class LayerRun:
    """Layer `index` of a job, or the head after the last one, built on this rank; `flow` has its calibration inputs, if there are any.

    `tensors` are its checkpoint tensors, first as they are given, at last as they are written.
    """

    def __init__(self, job: Job, index: int, flow: Flow | None = None) -> None:
        self.job, self.index, self.flow = job, index, flow
        self.checkpoint = job.checkpoint.reopened()  # so that its memory maps are freed with it
        self.linears = job.targets[index]
        self.is_head = index == self.checkpoint.config.num_layers  # no transform changes its inputs
        if self.is_head:
            self.layer = HeadLayer(self.checkpoint.build_ends(job.device, job.dtype))
        else:
            self.layer = build_layer(self.checkpoint, index, job.device, job.dtype, job.mesh)
        self.tensors: dict[str, Tensor] = {}

    def replay(self, stored: dict[str, Tensor], added: dict[str, Tensor]) -> None:
        """Makes a layer that was finished before what it is on disk: its shard's tensors `stored`, and adapters `added` beside it."""
        job = self.job
        if job.transforms:
            LayerWeights(self.checkpoint, self.index, self.layer, stored, {}, frozenset(), {}).put_stored()
        for linear in self.linears:
            put(job, self.layer, self.index, linear, stored | added)
        if job.cache is not None:
            job.cache.use(self.layer, self.checkpoint.config, self.index, stored)

    def compress(self) -> list[dict[str, Any]]:
        """Leaves in `tensors` what is written, and in the layer what computes it; one row of the report a matrix.

        A rank solves its matrices, and receives the others as they are stored.
        """
        job = self.job
        statistics, weight = self._prepared()
        mine, runs = job.mine(self.index), self.flow is not None and not self.is_head
        rows, made = {}, {}
        for linear in self.linears:
            own = statistics.pop(linear.path, {})
            if linear.path not in mine:
                continue
            matrix = solve(job, self.index, linear, weight(linear.path), own)
            rows[linear.path] = matrix.row([name for name, _ in linear.modules], (step.kind for step in job.steps))
            tensors = written(job, self.index, linear, matrix, self.tensors)
            made.update(tensors)
            if runs:  # the second pass runs what is written, in its stored precision
                held = None if matrix.stored is None else matrix.base
                put(job, self.layer, self.index, linear, tensors, held)
        made = job.mesh.exchange(made, job.device)
        for linear in self.linears:
            for name, _ in linear.modules:
                self.tensors.pop(f"{name}.weight", None)
            if runs and linear.path not in mine:
                put(job, self.layer, self.index, linear, made)
        self.tensors.update(made)
        by_path = {path: row for part in job.mesh.gather(rows) for path, row in part.items()}
        if runs and job.cache is not None:
            self._calibrate_cache()
        return [by_path[linear.path] for linear in self.linears]

    def _prepared(self) -> tuple[dict[str, dict[str, Tensor]], Callable[[str], Tensor]]:
        """Reads the tensors, gathers statistics and applies the transforms: (statistics of each linear, its weight by path)."""
        job, readers = self.job, readers_of(self.linears)
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

    def _calibrate_cache(self) -> None:
        """Adds the scales of the layer's cache to what is written, and lets the layer round it with them.

        The layer has the weights that are written: what is observed is what a served model caches.
        """
        job, config = self.job, self.checkpoint.config
        mixer = config.layers[self.index].mixer
        heads, by_head = (mixer.num_kv_heads, mixer.head_dim), job.cache.cache_scheme.per == "head"
        ranges = observe(self.layer, heads, self.flow, job.cache.cache_statistics, by_head=by_head)
        scales = job.cache.scales(ranges, config, self.index, self.checkpoint.dtype, job.dtype)
        job.cache.use(self.layer, config, self.index, scales)
        self.tensors.update(scales)
