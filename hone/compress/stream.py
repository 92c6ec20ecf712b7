"""The streaming engine: loads, compresses and writes one decoder layer at a time, and resumes after the last one written.

Nothing but the written layers is kept for an interruption: the inputs of the first unfinished layer are computed again,
from the embedding through the compressed layers. That is one forward pass a finished layer, once, where a copy of all
states after every layer would cost more than the layer's own work.

With several ranks every rank runs all layers on its share of the calibration, and solves its share of a layer's matrices;
rank 0 alone writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hone.base.artifact import Draft
from hone.base.errors import ArtifactError
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.compress.caches.kv_cache import KVCache
from hone.compress.capture import Flow
from hone.compress.check import Check
from hone.compress.check import read as read_check
from hone.compress.layer import LayerWeights
from hone.compress.low_rank import adapter
from hone.compress.low_rank.base import Factorization, correction_of
from hone.compress.matrix import Assigned, Matrix, Quantizer, Step, matrix_name, notes_said, quantizer_of
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
from hone.compress.statistics import RANGES, STATISTICS
from hone.compress.targets import EMBEDDING, HEAD, Linear, has_head
from hone.compress.transforms.base import Transform
from hone.cost.compress import spread
from hone.model.decoder import Decoder
from hone.model.quantized import layouts
from hone.model.quantized.dense import DenseWeights
from hone.model.quantized.hadamard import input_hadamard, multiply_inputs
from hone.model.quantized.low_rank import FACTORS
from hone.model.quantized.rounded_inputs import RoundedInputs
from hone.model.weights.model import ModelSource


@dataclass(frozen=True)
class Job:
    """The engine's job: `steps` on every linear in `targets[layer]`, computing in `dtype`."""

    checkpoint: ModelSource
    steps: tuple[Step, ...]
    targets: tuple[tuple[Linear, ...], ...]
    device: str
    dtype: torch.dtype
    rest_dtype: torch.dtype | None = None
    """Dtype of the stored matrices outside the layers (embedding, head); None keeps theirs."""
    bits: Mapping[str, int] = field(default_factory=dict)
    """Bits of each matrix by `matrix_name`, where an allocation chose them."""
    cache: KVCache | None = None
    """The step that calibrates scales of the KV cache."""
    model: dict[str, float] = field(default_factory=dict)
    """What the first step's `prepare` found."""
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    """Squared gradients of the loss by each matrix's inputs, by `matrix_name`, where an observer reads them."""
    mesh: Mesh = field(default_factory=Mesh)
    embedding: Linear | None = None
    """The embedding, where it is compressed."""

    @property
    def statistics(self) -> frozenset[str]:
        """Statistics of the calibration inputs to gather: those of the steps' needs and of the output error."""
        return frozenset({"hessian"}).union(*(step.needs & STATISTICS.keys() for step in self.steps))

    @property
    def quantizers(self) -> Assigned:
        """The quantizer of each matrix."""
        return Assigned(quantizer_of(self.steps), self.bits)

    @property
    def ranges(self) -> frozenset[str]:
        """Statistics for the scales of the linears' inputs."""
        quantizer = quantizer_of(self.steps)
        return frozenset() if quantizer is None else quantizer.input_statistics & RANGES.keys()

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The steps that change a whole layer, before those that change a matrix."""
        return tuple(step for step in self.steps if isinstance(step, Transform) and not step.whole)

    def matrix_steps(self, index: int, linear: Linear) -> tuple[Step, ...]:
        """The steps of one matrix, its quantizer with the bits that it was allocated."""
        own = self.quantizers.of(index, linear)
        steps = (step for step in self.steps if not isinstance(step, Transform))
        return tuple(own if own is not None and isinstance(step, Quantizer) else step for step in steps)

    def mine(self, index: int) -> frozenset[str]:
        """The linears of layer `index` that this rank solves."""
        works = []
        for linear in self.targets[index]:
            works.append([step.work(linear.rows, linear.columns) for step in self.matrix_steps(index, linear)])
        ranks = spread(works, self.mesh.world_size, self.device)
        return frozenset(
            linear.path for linear, rank in zip(self.targets[index], ranks, strict=True) if rank == self.mesh.rank
        )

    @property
    def num_shards(self) -> int:
        """One for embedding, final norm and head, one for each layer, one for a head that is compressed."""
        return len(self.targets) + 1

    def ends(self) -> list[str]:
        """Names of the tensors outside the decoder layers, without a head or an embedding that is compressed."""
        without = self.inside(self.checkpoint.config.num_layers) if has_head(self.targets) else []
        without += [] if self.embedding is None else [f"{EMBEDDING}.weight"]
        return [one for one in self.checkpoint.names() if not one.startswith("model.layers.") and one not in without]

    def inside(self, index: int) -> list[str]:
        """Names of the tensors of layer `index`, or of the head."""
        if index == self.checkpoint.config.num_layers:
            return [f"{HEAD}.weight"]
        return [name for name in self.checkpoint.names() if name.startswith(f"model.layers.{index}.")]


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
        tensors, row = quantized_embedding(job.checkpoint, job.quantizers.of(-1, job.embedding), job.device)
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


def _read(job: Job, index: int, linear: Linear, written: dict[str, Tensor]) -> Tensor:
    """The fused weight [N, K] of a linear as its shard holds it, dequantized on the engine's device."""
    quantizer = job.quantizers.of(index, linear)
    wide, parts = torch.promote_types(job.checkpoint.dtype, torch.float32), []
    for part in _parts(job, linear, written):
        if quantizer is None:
            parts.append(part["weight"])
        else:
            scheme = quantizer.scheme(linear.columns)
            parts.append(layouts.read(scheme, part, linear.columns).weight(wide))
    return torch.cat(parts)


def _parts(job: Job, linear: Linear, written: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of each checkpoint module of a linear by suffix, on the engine's device."""
    found = []
    for name, _ in linear.modules:
        given = {key.removeprefix(f"{name}."): value for key, value in written.items() if key.startswith(f"{name}.")}
        found.append({suffix: value.to(job.device) for suffix, value in given.items()})
    return found


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
    readers: dict[str, list[str]] = {}
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
        found[linear.path] = matrix.row([name for name, _ in linear.modules], job.steps)
        written = _written(matrix, linear, tensors)
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
    quantizers = {linear.path: job.quantizers.of(index, linear) for linear in job.targets[index]}
    weights = LayerWeights(job.checkpoint, index, layer, tensors, statistics, targets, quantizers, job.mesh)
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
            _use(linear, "", linear.weight.detach().to(job.rest_dtype).to(job.dtype))
    if job.embedding is not None:
        written = read_shard(draft.folder / shard_name(1, job.num_shards), f"{EMBEDDING}.")
        _use(ends.embed_tokens, "", _read(job, -1, job.embedding, written).to(job.dtype))


def _put_ends(job: Job, draft: Draft, ends: Decoder) -> None:
    """Makes embedding and head of `ends` what they are on disk."""
    _put_rest(job, draft, ends)
    index = job.checkpoint.config.num_layers
    for linear in job.targets[index] if has_head(job.targets) else ():
        _put(job, index, ends, linear, read_shard(draft.folder / shard_name(index + 2, job.num_shards)))


def _put(
    job: Job, index: int, layer: nn.Module, linear: Linear, written: dict[str, Tensor], weight: Tensor | None = None
) -> None:
    """Puts a finished linear into `layer` as it is `written`; `weight` is its dequantized weight, None to read that from there."""
    if isinstance(job.steps[-1], Factorization):
        adapter.put_factors(layer, linear, _parts(job, linear, written))
    elif _rounds_inputs(job):
        _use_rounded(job, index, layer, linear, written)
    else:
        weight = _read(job, index, linear, written) if weight is None else weight
        _use(layer, linear.path, weight.to(job.dtype))
    if correction_of(job.steps) is not None:
        adapter.put(layer, linear, index, job.checkpoint.config, written, job.device, job.dtype)


def _use(module: nn.Module, path: str, weight: Tensor) -> None:
    """Replaces the weight of the linear or embedding at `path` in `module`."""
    module.get_submodule(path).weight = nn.Parameter(weight, requires_grad=False)


def _rounds_inputs(job: Job) -> bool:
    """Whether the written model rounds the inputs of its linears."""
    quantizer = quantizer_of(job.steps)
    return quantizer is not None and quantizer.rounding is not None


def _use_rounded(job: Job, index: int, layer: nn.Module, linear: Linear, written: dict[str, Tensor]) -> None:
    """Replaces a linear of `layer` by the quantized one that `written` holds, which rounds its inputs, too."""
    quantizer, dense = job.quantizers.of(index, linear), layer.get_submodule(linear.path)
    assert quantizer is not None
    with torch.device("meta"):
        rounded = RoundedInputs(linear.columns, linear.rows, False, scheme=quantizer.scheme(linear.columns))
    rounded.load(_parts(job, linear, written))
    rounded.bias = None if dense.bias is None else dense.bias.detach()
    layer.set_submodule(linear.path, multiply_inputs(rounded, input_hadamard(dense)))


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
    quantizer = job.quantizers.of(index, linear)
    matrix = Matrix(name, original, job.checkpoint.dtype, statistics, modules, job.model, quantizer=quantizer)
    matrix.keep_zeros(quantized=isinstance(job.checkpoint.weights, DenseWeights))
    for step in job.matrix_steps(index, linear):
        step.apply(matrix)
    if quantizer is not None:
        quantizer.calibrate_inputs(matrix)
    return matrix


def _written(matrix: Matrix, linear: Linear, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint tensors that replace those of the linear's modules in `before`, and an adapter's."""
    names = [name for name, _ in linear.modules]
    found = adapter.tensors(names, matrix.factors) if matrix.factors and not matrix.replaced else {}
    begin = 0
    for place, (name, count) in enumerate(linear.modules):
        rows = slice(begin, begin + count)
        begin += count
        dtype = before[f"{name}.weight"].dtype
        if matrix.replaced:
            part = dict(zip(FACTORS, matrix.factors[place], strict=True))
        elif matrix.stored is None:
            part = {"weight": matrix.base[rows].to(dtype)}
        else:
            part = layouts.write(matrix.stored.rows(rows))
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
    correction = correction_of(job.steps)
    if correction is not None:
        adapter.finish(draft, count - 1, adapter.spec(correction, job.checkpoint.config, job.targets))
    for line in notes_said(rows):
        run.warn(line)
    return rows
