"""The streaming engine: loads, compresses and writes one decoder layer at a time, and resumes after the last one written.

Nothing but the written layers is kept for an interruption: the inputs of the first unfinished layer are computed again,
from the embedding through the compressed layers. That is one forward pass a finished layer, once, where a copy of all
states after every layer would cost more than the layer's own work.

With several ranks every rank runs all layers on its share of the calibration, and solves its share of a layer's matrices;
rank 0 alone writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hone.base.artifact import Draft
from hone.base.errors import ArtifactError
from hone.base.run import Run
from hone.compress.capture import Flow
from hone.compress.check import Check
from hone.compress.check import read as read_check
from hone.compress.engine.job import Job
from hone.compress.layer import LayerWeights
from hone.compress.low_rank import adapter
from hone.compress.matrix import Matrix, notes_said
from hone.compress.shards import (
    build_layer,
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
from hone.compress.statistics import LEAST_TOKENS, uncalibrated
from hone.compress.targets import EMBEDDING, HEAD, Linear, has_head, matrix_name
from hone.model.decoder import Decoder


def run_job(job: Job, flow: Flow | None, draft: Draft, run: Run, check: Check | None = None) -> list[dict[str, Any]]:
    """Writes every shard of the compressed model and its index; returns one row per matrix (on rank 0; none on others).

    Resumes after the last layer whose marker is in `draft.state`. `flow` is None when no calibration inputs are used;
    `check` compares the models' predictions at the end and keeps the result in `draft.state`.
    """
    count = len(job.targets)
    mesh = job.mesh
    done = mesh.from_leader(lambda: finished_layers(draft, len(job.targets)))
    if mesh.leads:
        _write_ends(job, draft)
    checked = mesh.from_leader(lambda: read_check(draft.state) is not None)
    check = None if checked else check
    flows = [flow] if flow is not None and done < count else []
    if check is not None:
        flows.append(check.flow)
    if flows:
        _advance(job, flows, draft, done, run)
    if done < count and job.steps and job.steps[0].reads_model:
        # Rank 0 alone: this reads the model, and computes next to nothing.
        job = replace(
            job,
            model=mesh.from_leader(
                lambda: job.steps[0].prepare(lambda: given_weights(job.checkpoint, job.targets, job.device))
            ),
        )
    # One thread writes a finished layer while the next one is computed; a layer's marker is written after its files.
    with torch.no_grad(), ThreadPoolExecutor(1) as writer, run.progress("compress", count, "layers") as bar:
        bar.advance(done)
        written: Future[None] | None = None
        for index in range(done, count):
            rows, tensors = _compress_layer(job, flow, check, index)
            if written is not None:
                written.result()
            if mesh.leads:
                written = writer.submit(_keep, job, draft, index, rows, tensors)
            del tensors  # only the writing thread keeps references, until they are on disk
            bar.advance(1, rows[-1]["name"] if rows else "")
        if written is not None:
            written.result()
    if check is not None:
        mesh.from_leader(lambda: None)  # the head is on disk
        check.finish(job.checkpoint, draft.state, partial(_put_ends, job, draft))
    return _finish(job, draft, run) if mesh.leads else []


def _write_ends(job: Job, draft: Draft) -> None:
    """Writes the shard of the tensors outside the layers, if it is not there."""
    first = draft.folder / shard_name(1, job.num_shards)
    if first.exists():
        return
    tensors: dict[str, Tensor] = {}
    if job.embedding is not None:
        tensors, row = quantized_embedding(job.checkpoint, job.storage.of(-1, job.embedding), job.device)
        mark(draft, -1, [row], tensors)
    for name in job.ends():
        tensor = job.checkpoint.tensor(name)
        dtype = stored_rest(tensor.dtype, tensor.shape, job.rest_dtype)
        tensors[name] = job.checkpoint.converted(name, tensor, "cpu", dtype)
    write_shard(first, tensors)


@torch.no_grad()
def _advance(job: Job, flows: list[Flow], draft: Draft, done: int, run: Run) -> None:
    """Computes the inputs of layer `done`: the embedding, then the finished layers with their written weights."""
    for flow in flows:
        flow.embed(job.checkpoint.build_ends(job.device, job.dtype), partial(_put_rest, job, draft))
    if not done:
        return
    done = min(done, job.checkpoint.config.num_layers)
    with run.progress("finished layers", done, "layers") as bar:
        for index in range(done):
            checkpoint = job.checkpoint.reopened()  # so that its memory maps are freed with it
            layer = build_layer(checkpoint, index, job.device, job.dtype, job.mesh)
            for flow in flows:
                flow.dense_through(layer)
            written = read_shard(draft.folder / shard_name(index + 2, job.num_shards))
            if job.transforms:
                LayerWeights(checkpoint, index, layer, written, {}, frozenset(), {}).put_stored()
            added = adapter.read(draft, index)
            for linear in job.targets[index]:
                _put(job, index, layer, linear, written | added)
            if job.cache is not None:
                job.cache.use(layer, checkpoint.config, index, written)
            for flow in flows:
                flow.through(layer)
            bar.advance()


def _keep(job: Job, draft: Draft, index: int, rows: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    """Writes layer `index`: its shard, then the marker that it is complete."""
    tensors, added = adapter.split(tensors)
    write_shard(draft.folder / shard_name(index + 2, job.num_shards), tensors)
    adapter.keep(draft, index, added)
    mark(draft, index, rows, tensors)
    draft.keep_time()


def _compress_layer(
    job: Job, flow: Flow | None, check: Check | None, index: int
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Rows of the report and the checkpoint tensors of layer `index` or the head; advances `flow` and `check` to its outputs.

    A rank solves its matrices, and receives the others as they are stored.
    """
    checkpoint = job.checkpoint.reopened()  # so that its memory maps are freed with it
    layer = build_layer(checkpoint, index, job.device, job.dtype, job.mesh)
    readers: dict[Any, list[str]] = {}
    for linear in job.targets[index]:
        readers.setdefault(linear.reads, []).append(linear.path)
    head = index == checkpoint.config.num_layers  # no transform changes its inputs
    wanted = job.statistics if job.transforms and not head else job.statistics | job.ranges
    if check is not None:
        check.flow.dense_through(layer)
    gathers = flow is not None and bool(readers or flow.paired)
    statistics = flow.statistics(layer, readers, wanted) if flow is not None and gathers else {}
    tensors = {name: checkpoint.tensor(name) for name in job.inside(index)}
    if head:
        weight = partial(layer.original, tensors)
    else:
        weight = _transformed(job, flow, index, layer, tensors, statistics, readers)
    mine = job.mine(index)
    found, made = {}, {}
    for linear in job.targets[index]:
        given = statistics.pop(linear.path, {})
        if linear.path not in mine:
            continue
        if job.gradients:
            given = given | {"gradients": job.gradients[matrix_name(index, linear.path)]}
        matrix = _solve(job, index, linear, weight(linear.path), given)
        found[linear.path] = matrix.row([name for name, _ in linear.modules], (step.kind for step in job.steps))
        written = _written(job, index, matrix, linear, tensors)
        made.update(written)
        if flow is not None and not head:  # the second pass runs what is written, in its stored precision
            _put(job, index, layer, linear, written, None if matrix.stored is None else matrix.base)
    made = job.mesh.exchange(made, job.device)
    for linear in job.targets[index]:
        for name, _ in linear.modules:
            tensors.pop(f"{name}.weight", None)
        if flow is not None and not head and linear.path not in mine:
            _put(job, index, layer, linear, made)
    tensors.update(made)
    by_path = {path: row for part in job.mesh.gather(found) for path, row in part.items()}
    rows = [by_path[linear.path] for linear in job.targets[index]]
    if flow is not None and job.cache is not None and not head:
        tensors.update(job.cache.calibrate(layer, flow, checkpoint, index))
    if flow is not None and index + 1 < len(job.targets):
        flow.through(layer)
    if check is not None:
        check.flow.through(layer)
    return rows, tensors


def _transformed(
    job: Job,
    flow: Flow | None,
    index: int,
    layer: nn.Module,
    tensors: dict[str, Tensor],
    statistics: dict[str, dict[str, Tensor]],
    readers: dict[str, list[str]],
) -> Callable[[str], Tensor]:
    """Changes a layer, its checkpoint `tensors` and the `statistics` by the transforms; the weights of its linears by path."""
    targets = frozenset(linear.path for linear in job.targets[index])
    storage = {linear.path: job.storage.of(index, linear) for linear in job.targets[index]}
    weights = LayerWeights(job.checkpoint, index, layer, tensors, statistics, targets, storage, job.mesh)
    for transform in job.transforms:
        transform.change(weights)
    if job.transforms:
        weights.put()
    if job.transforms and job.ranges and flow is not None:
        for path, values in flow.statistics(layer, readers, job.ranges).items():
            statistics[path] = statistics[path] | values
    return weights.weight


def _put_rest(job: Job, draft: Draft, ends: Decoder) -> None:
    """Makes what is written first of the model `ends` as it is on disk: the embedding, and a head that is not compressed."""
    for linear in (ends.embed_tokens, ends.lm_head) if job.rest_dtype is not None else ():
        if linear is not None:
            stored = linear.weight.detach().to(job.rest_dtype).to(job.dtype)
            linear.weight = nn.Parameter(stored, requires_grad=False)
    if job.embedding is not None:
        written = read_shard(draft.folder / shard_name(1, job.num_shards), f"{EMBEDDING}.")
        step = job.storage.of(-1, job.embedding)
        assert step is not None
        step.module(ends.embed_tokens, job.parts(-1, job.embedding, written))


def _put_ends(job: Job, draft: Draft, ends: Decoder) -> None:
    """Makes embedding and head of `ends` what they are on disk."""
    _put_rest(job, draft, ends)
    index = job.checkpoint.config.num_layers
    for linear in job.targets[index] if has_head(job.targets) else ():
        _put(job, index, ends, linear, read_shard(draft.folder / shard_name(index + 2, job.num_shards)))


def _put(
    job: Job, index: int, layer: nn.Module, linear: Linear, written: dict[str, Tensor], weight: Tensor | None = None
) -> None:
    """Puts a finished linear into `layer` as it is `written`; `weight` is what that holds, None to read it from there."""
    dense = layer.get_submodule(linear.path)
    module = job.module(dense, job.parts(index, linear, written, weight))
    if module is not dense:
        layer.set_submodule(linear.path, module)


def _solve(job: Job, index: int, linear: Linear, original: Tensor, statistics: dict[str, Tensor]) -> Matrix:
    """Runs the steps on one fused matrix. Raises ArtifactError when its inputs are not finite."""
    name = matrix_name(index, linear.path)
    name = name if linear.path == HEAD else f"model.{name}"
    if not all(bool(torch.isfinite(value).all()) for value in statistics.values()):
        raise ArtifactError(
            f"calibration: the inputs of {name} are not all finite in {str(job.dtype).removeprefix('torch.')}",
            fix="set compute_dtype=float32, or check the checkpoint and the calibration text",
        )
    modules = tuple(rows for _, rows in linear.modules)
    tokens = int(statistics["tokens"]) if "tokens" in statistics else None
    steps, storage = job.matrix_steps(index, linear), job.storage.of(index, linear)
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


def _written(job: Job, index: int, matrix: Matrix, linear: Linear, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint tensors that replace those of the linear's modules in `before`, and what steps write beside them."""
    names, storage, begin = [name for name, _ in linear.modules], job.storage.of(index, linear), 0
    found = {key: tensor for step in job.steps for key, tensor in step.beside(matrix, names).items()}
    for number, (name, count) in enumerate(linear.modules):
        rows = slice(begin, begin + count)
        begin += count
        if storage is None:
            part = {"weight": matrix.base[rows].to(before[f"{name}.weight"].dtype)}
        else:
            part = storage.tensors_of(matrix, number, rows)
        found.update({f"{name}.{suffix}": tensor for suffix, tensor in part.items()})
    return found


def _finish(job: Job, draft: Draft, run: Run) -> list[dict[str, Any]]:
    """Writes the index over all shards; returns the rows of all layers; prints notes once."""
    count = job.num_shards
    weight_map, total, rows = {}, 0, []
    for name in job.ends():
        weight_map[name] = shard_name(1, count)
        tensor = job.checkpoint.tensor(name)
        total += tensor.numel() * stored_rest(tensor.dtype, tensor.shape, job.rest_dtype).itemsize
    for index in range(-1 if job.embedding is not None else 0, count - 1):
        entry = json.loads(marker(draft, index).read_text(encoding="utf8"))
        weight_map.update(dict.fromkeys(entry["tensors"], shard_name(index + 2, count)))
        total += sum(entry["tensors"].values())
        rows += entry["rows"]
    write_index(draft.folder, weight_map, total)
    for step in job.steps:
        step.conclude(draft, job.checkpoint.config, job.targets)
    for line in notes_said(rows):
        run.warn(line)
    return rows
