"""The streaming engine: loads, compresses and writes one decoder layer at a time, and resumes after the last one written.

Nothing but the written layers is kept for an interruption: the inputs of the first unfinished layer are computed again,
from the embedding through the compressed layers. That is one forward pass a finished layer, once, where a copy of all
states after every layer would cost more than the layer's own work.

With several ranks every rank runs all layers on its share of the calibration, and solves its share of a layer's matrices;
rank 0 alone writes.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.base.artifact import Draft
from hone.base.run import Run
from hone.compress.capture import Flow
from hone.compress.check import Check
from hone.compress.check import read as read_check
from hone.compress.engine.job import Job
from hone.compress.engine.layer_run import LayerRun
from hone.compress.low_rank import adapter
from hone.compress.matrix import notes_said
from hone.compress.shards import (
    finished_layers,
    given_weights,
    mark,
    marker,
    quantized_embedding,
    read_shard,
    shard_name,
    write_index,
    write_shard,
)
from hone.compress.sizes import stored_rest
from hone.compress.targets import EMBEDDING, has_head
from hone.model.decoder import Decoder


class Stream:
    """A job that is written into `draft`, layer by layer.

    `flow` has the calibration inputs, None when none are used; `check` compares the models' predictions at the end and keeps
    the result in `draft.state`.
    """

    def __init__(self, job: Job, flow: Flow | None, draft: Draft, run: Run, check: Check | None = None) -> None:
        self.job, self.flow, self.draft, self.run, self.check = job, flow, draft, run, check

    def compress(self) -> list[dict[str, Any]]:
        """Writes every shard of the compressed model and its index; returns one row per matrix (on rank 0; none on others).

        Resumes after the last layer whose marker is in `draft.state`.
        """
        mesh, count = self.job.mesh, len(self.job.targets)
        done = mesh.from_leader(lambda: finished_layers(self.draft, count))
        if mesh.leads:
            self._write_ends()
        if mesh.from_leader(lambda: read_check(self.draft.state) is not None):
            self.check = None
        flows = [self.flow] if self.flow is not None and done < count else []
        if self.check is not None:
            flows.append(self.check.flow)
        if flows:
            self._advance(flows, done)
        if done < count and self.job.steps and self.job.steps[0].reads_model:
            self.job = replace(self.job, model=mesh.from_leader(self._measured))
        # One thread writes a finished layer while the next one is computed; a layer's marker is written after its files.
        with torch.no_grad(), ThreadPoolExecutor(1) as writer, self.run.progress("compress", count, "layers") as bar:
            bar.advance(done)
            written: Future[None] | None = None
            for index in range(done, count):
                rows, tensors = self._compress_layer(index)
                if written is not None:
                    written.result()
                if mesh.leads:
                    written = writer.submit(self._keep, index, rows, tensors)
                del tensors  # only the writing thread keeps references, until they are on disk
                bar.advance(1, rows[-1]["name"] if rows else "")
            if written is not None:
                written.result()
        if self.check is not None:
            mesh.from_leader(lambda: None)  # the head is on disk
            self.check.finish(self.job.checkpoint, self.draft.state, self._put_ends)
        return self._finish() if mesh.leads else []

    def _measured(self) -> dict[str, float]:
        """What the first step finds over all matrices. Rank 0 alone: this reads the model, and computes next to nothing."""
        job = self.job
        return job.steps[0].prepare(lambda: given_weights(job.checkpoint, job.targets, job.device))

    def _compress_layer(self, index: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """Rows of the report and the checkpoint tensors of layer `index` or the head; advances the flows to its outputs."""
        one = LayerRun(self.job, index, self.flow)
        if self.check is not None:
            self.check.flow.dense_through(one.layer)
        rows = one.compress()
        if self.flow is not None and index + 1 < len(self.job.targets):
            self.flow.through(one.layer)
        if self.check is not None:
            self.check.flow.through(one.layer)
        return rows, one.tensors

    @torch.no_grad()
    def _advance(self, flows: list[Flow], done: int) -> None:
        """Computes the inputs of layer `done`: the embedding, then the finished layers with their written weights."""
        job = self.job
        for flow in flows:
            flow.embed(job.checkpoint.build_ends(job.device, job.dtype), self._put_rest)
        if not done:
            return
        done = min(done, job.checkpoint.config.num_layers)
        with self.run.progress("finished layers", done, "layers") as bar:
            for index in range(done):
                one = LayerRun(job, index)
                for flow in flows:
                    flow.dense_through(one.layer)
                one.replay(read_shard(self._shard(index)), adapter.read(self.draft, index))
                for flow in flows:
                    flow.through(one.layer)
                bar.advance()

    def _shard(self, index: int) -> Path:
        """The file of layer `index`, of the head after the last one, or of what is outside them (-1)."""
        return self.draft.folder / shard_name(index + 2, self.job.num_shards)

    def _write_ends(self) -> None:
        """Writes the shard of the tensors outside the layers, if it is not there."""
        job = self.job
        if self._shard(-1).exists():
            return
        tensors: dict[str, Tensor] = {}
        if job.embedding is not None:
            tensors, row = quantized_embedding(job.checkpoint, job.storage.of(-1, job.embedding), job.device)
            mark(self.draft, -1, [row], tensors)
        for name in job.ends():
            tensor = job.checkpoint.tensor(name)
            dtype = stored_rest(tensor.dtype, tensor.shape, job.rest_dtype)
            tensors[name] = job.checkpoint.converted(name, tensor, "cpu", dtype)
        write_shard(self._shard(-1), tensors)

    def _keep(self, index: int, rows: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
        """Writes layer `index`: its shard, then the marker that it is complete."""
        tensors, added = adapter.split(tensors)
        write_shard(self._shard(index), tensors)
        adapter.keep(self.draft, index, added)
        mark(self.draft, index, rows, tensors)
        self.draft.keep_time()

    def _put_rest(self, ends: Decoder) -> None:
        """Makes what is written first of the model `ends` as it is on disk: the embedding, and a head that is not compressed."""
        job = self.job
        for linear in (ends.embed_tokens, ends.lm_head) if job.rest_dtype is not None else ():
            if linear is not None:
                stored = linear.weight.detach().to(job.rest_dtype).to(job.dtype)
                linear.weight = nn.Parameter(stored, requires_grad=False)
        if job.embedding is not None:
            written = read_shard(self._shard(-1), f"{EMBEDDING}.")
            step = job.storage.of(-1, job.embedding)
            assert step is not None
            step.module(ends.embed_tokens, job.parts(-1, job.embedding, written))

    def _put_ends(self, ends: Decoder) -> None:
        """Makes embedding and head of `ends` what they are on disk."""
        self._put_rest(ends)
        index = self.job.checkpoint.config.num_layers
        for linear in self.job.targets[index] if has_head(self.job.targets) else ():
            self.job.put(ends, index, linear, read_shard(self._shard(index)))

    def _finish(self) -> list[dict[str, Any]]:
        """Writes the index over all shards; returns the rows of all layers; prints notes once."""
        job, weight_map, total, rows = self.job, {}, 0, []
        for name in job.ends():
            weight_map[name] = self._shard(-1).name
            tensor = job.checkpoint.tensor(name)
            total += tensor.numel() * stored_rest(tensor.dtype, tensor.shape, job.rest_dtype).itemsize
        for index in range(-1 if job.embedding is not None else 0, len(job.targets)):
            entry = json.loads(marker(self.draft, index).read_text(encoding="utf8"))
            weight_map.update(dict.fromkeys(entry["tensors"], self._shard(index).name))
            total += sum(entry["tensors"].values())
            rows += entry["rows"]
        write_index(self.draft.folder, weight_map, total)
        for step in job.steps:
            step.conclude(self.draft, job.checkpoint.config, job.targets)
        for line in notes_said(rows):
            self.run.warn(line)
        return rows
