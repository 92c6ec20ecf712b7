"""The stream of layers: loads, compresses and writes one decoder layer at a time, and resumes after the last one written.

Nothing but the written layers is kept for an interruption: the inputs of the first unfinished layer are computed again,
from the embedding through the compressed layers. That is one forward pass a finished layer, once, where a copy of all
states after every layer would cost more than the layer's own work.

With several ranks every rank runs all layers on its share of the calibration, and solves its share of a layer's matrices;
rank 0 alone writes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.base.artifact import Draft
from hone.base.run import Run
from hone.compress.capture import Flow
from hone.compress.engine import ends
from hone.compress.engine.job import Job
from hone.compress.engine.layer_run import LayerRun
from hone.compress.low_rank import adapter
from hone.compress.shards import mark, read_shard, shard_file, write_shard
from hone.model.weights.stacked import stack_experts, unstack_experts


class Stream:
    """A job whose layers are written into `draft`, from the first one that is not `done`.

    `flow` has the calibration inputs, None when none are used; `checked` those on which the compressed model is compared with
    the given one, None where it is not: they run through the layers beside the others.
    """

    def __init__(
        self, job: Job, draft: Draft, run: Run, *, done: int = 0, flow: Flow | None = None, checked: Flow | None = None
    ) -> None:
        self.job, self.draft, self.run = job, draft, run
        self.done, self.flow, self.checked = done, flow, checked

    def compress(self) -> None:
        """Writes the shard of every layer that is not done, and its marker, on rank 0; `checked` ends after the last layer."""
        mesh, count = self.job.mesh, len(self.job.targets)
        self._advance()
        # One thread writes a finished layer while the next one is computed; a layer's marker is written after its files.
        with torch.no_grad(), ThreadPoolExecutor(1) as writer, self.run.progress("compress", count, "layers") as bar:
            bar.advance(self.done)
            written: Future[None] | None = None
            for index in range(self.done, count):
                rows, tensors = self._compress_layer(index)
                if written is not None:
                    written.result()
                if mesh.leads:
                    written = writer.submit(self._keep, index, rows, tensors)
                del tensors  # only the writing thread keeps references, until they are on disk
                bar.advance(1, rows[-1]["name"] if rows else "")
            if written is not None:
                written.result()

    @torch.no_grad()
    def _advance(self) -> None:
        """Computes the inputs of layer `done`: the embedding, then the finished layers with their written weights."""
        job = self.job
        flows = [self.flow] if self.flow is not None and self.done < len(job.targets) else []
        flows += [] if self.checked is None else [self.checked]
        if not flows:
            return
        self._embed(flows)
        done = min(self.done, job.checkpoint.config.num_layers)
        if not done:
            return
        with self.run.progress("finished layers", done, "layers") as bar:
            for index in range(done):
                layer_run = LayerRun(job, index)
                for flow in flows:
                    flow.dense_through(layer_run.layer)
                stored = unstack_experts(read_shard(self._shard(index)), job.stacked)
                layer_run.replay(stored, adapter.read(self.draft, index))
                for flow in flows:
                    flow.through(layer_run.layer)
                bar.advance()

    def _embed(self, flows: list[Flow]) -> None:
        """Computes the inputs of the first layer by the embedding as it is given, and as it is written."""
        model = self.job.checkpoint.build_ends(self.job.device, self.job.dtype)
        for flow in flows:
            flow.embed_dense(model)
        ends.put(self.job, self.draft, model)
        for flow in flows:
            flow.embed(model)

    def _compress_layer(self, index: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """Rows of the report and the checkpoint tensors of layer `index` or the head; advances the flows to its outputs."""
        layer_run = LayerRun(self.job, index, self.flow)
        if self.checked is not None:
            self.checked.dense_through(layer_run.layer)
        rows = layer_run.compress()
        if self.flow is not None and index + 1 < len(self.job.targets):
            self.flow.through(layer_run.layer)
        if self.checked is not None:
            self.checked.through(layer_run.layer)
        return rows, layer_run.tensors

    def _keep(self, index: int, rows: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
        """Writes layer `index`: its shard, then the marker that it is complete."""
        tensors, added = adapter.split(tensors)
        tensors = dict(stack_experts(tensors.items(), self.job.stacked))
        write_shard(self._shard(index), tensors)
        adapter.keep(self.draft, index, added)
        mark(self.draft, index, rows, tensors)
        self.draft.keep_time()

    def _shard(self, index: int) -> Path:
        """The shard of layer `index`, or of the head after the last one."""
        return shard_file(self.draft, index, self.job.num_shards)
