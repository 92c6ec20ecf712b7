"""The streaming engine: loads, compresses and writes one decoder layer at a time, and resumes after the last one written.

Nothing but the written layers is kept for an interruption: the inputs of the first unfinished layer are computed again,
from the embedding through the compressed layers. That is one forward pass a finished layer, once, where a copy of all
states after every layer would cost more than the layer's own work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.base.artifact import Draft
from hone.base.durable import write_atomic
from hone.base.errors import ArtifactError
from hone.base.run import Run
from hone.compress.caches.kv_cache import KVCache
from hone.compress.capture import Flow
from hone.compress.check import Check
from hone.compress.check import read as read_check
from hone.compress.layer import LayerWeights
from hone.compress.matrix import Assigned, Matrix, Quantizer, Step, matrix_name, quantizer_of
from hone.compress.shards import read_shard, shard_name, write_index, write_shard
from hone.compress.sizes import stored_rest
from hone.compress.statistics import STATISTICS
from hone.compress.targets import Linear
from hone.compress.transforms.base import Transform
from hone.model.hf import Checkpoint
from hone.model.quantized import layouts
from hone.model.quantized.rounded_inputs import RoundedInputs


@dataclass(frozen=True)
class Job:
    """The engine's job: `steps` on every linear in `targets[layer]`, computing in `dtype`."""

    checkpoint: Checkpoint
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
        return frozenset() if quantizer is None else quantizer.input_statistics

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The steps that change a whole layer, before those that change a matrix."""
        return tuple(step for step in self.steps if isinstance(step, Transform))

    def matrix_steps(self, index: int, linear: Linear) -> tuple[Step, ...]:
        """The steps of one matrix, its quantizer with the bits that it was allocated."""
        own = self.quantizers.of(index, linear.path)
        steps = (step for step in self.steps if not isinstance(step, Transform))
        return tuple(own if own is not None and isinstance(step, Quantizer) else step for step in steps)

    @property
    def num_shards(self) -> int:
        """One for embedding, final norm and head, one for each layer."""
        return self.checkpoint.config.num_layers + 1

    def ends(self) -> list[str]:
        """Names of the tensors outside the decoder layers."""
        return [name for name in self.checkpoint.names() if not name.startswith("model.layers.")]

    def inside(self, index: int) -> list[str]:
        """Names of the tensors of layer `index`."""
        return [name for name in self.checkpoint.names() if name.startswith(f"model.layers.{index}.")]


def run_job(job: Job, flow: Flow | None, draft: Draft, run: Run, check: Check | None = None) -> list[dict[str, Any]]:
    """Writes every shard of the compressed model and its index; returns one row per matrix.

    Resumes after the last layer whose marker is in `draft.state`. `flow` is None when no calibration inputs are used;
    `check` compares the models' predictions at the end and keeps the result in `draft.state`.
    """
    count = job.checkpoint.config.num_layers
    done = _finished_layers(draft, job)
    first = draft.folder / shard_name(1, job.num_shards)
    if not first.exists():
        tensors = {}
        for name in job.ends():
            tensor = job.checkpoint.tensor(name)
            dtype = stored_rest(tensor.dtype, tensor.shape, job.rest_dtype)
            tensors[name] = job.checkpoint.converted(name, tensor, "cpu", dtype)
        write_shard(first, tensors)
        del tensors
    check = None if check is None or read_check(draft.state) is not None else check
    flows = [flow] if flow is not None and done < count else []
    if check is not None:
        flows.append(check.flow)
    if flows:
        _advance(job, flows, draft, done, run)
    if done < count and job.steps and job.steps[0].reads_model:
        job = replace(job, model=job.steps[0].prepare(lambda: _given(job)))
    # One thread writes a finished layer while the next one is computed; a layer's marker is written after its files.
    with torch.no_grad(), ThreadPoolExecutor(1) as writer, run.progress("compress", count, "layers") as bar:
        bar.advance(done)
        written: Future[None] | None = None
        for index in range(done, count):
            rows, tensors = _compress_layer(job, flow, check, index)
            if written is not None:
                written.result()
            written = writer.submit(_keep, job, draft, index, rows, tensors)
            del tensors  # only the writing thread keeps references, until they are on disk
            bar.advance(1, rows[-1]["name"] if rows else "")
        if written is not None:
            written.result()
    if check is not None:
        check.finish(job.checkpoint, job.rest_dtype, draft.state)
    return _finish(job, draft, run)


def _given(job: Job) -> Iterator[Tensor]:
    """The weights of the given model's linears that are compressed, a checkpoint module at a time."""
    for linears in job.targets:
        checkpoint = job.checkpoint.reopened()  # so that its memory maps are freed with it
        for linear in linears:
            for name, _ in linear.modules:
                yield checkpoint.tensor(f"{name}.weight").to(job.device)


@torch.no_grad()
def _advance(job: Job, flows: list[Flow], draft: Draft, done: int, run: Run) -> None:
    """Computes the inputs of layer `done`: the embedding, then the finished layers with their written weights."""
    for flow in flows:
        flow.embed(job.checkpoint.build_ends(job.device, job.dtype), job.rest_dtype)
    if not done:
        return
    with run.progress("finished layers", done, "layers") as bar:
        for index in range(done):
            checkpoint = job.checkpoint.reopened()  # so that its memory maps are freed with it
            layer = checkpoint.build_layer(index, job.device, job.dtype)
            for flow in flows:
                flow.dense_through(layer)
            written = read_shard(draft.folder / shard_name(index + 2, job.num_shards))
            if job.transforms:
                LayerWeights(checkpoint, index, layer, written, {}, frozenset(), None).put_stored()
            for linear in job.targets[index]:
                if _rounds_inputs(job):
                    _use_rounded(job, index, layer, linear, written)
                else:
                    _use(layer, linear, _read(job, index, linear, written).to(job.dtype))
            if job.cache is not None:
                job.cache.use(layer, checkpoint.config, index, written)
            for flow in flows:
                flow.through(layer)
            bar.advance()


def _read(job: Job, index: int, linear: Linear, written: dict[str, Tensor]) -> Tensor:
    """The fused weight [N, K] of a linear as its shard holds it, dequantized on the engine's device."""
    quantizer = job.quantizers.of(index, linear.path)
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
    write_shard(draft.folder / shard_name(index + 2, job.num_shards), tensors)
    entry = {"rows": rows, "tensors": {name: tensor.nbytes for name, tensor in tensors.items()}}
    write_atomic(_marker(draft, index), json.dumps(entry).encode())
    draft.keep_time()


def _finished_layers(draft: Draft, job: Job) -> int:
    """Number of leading layers whose shard and marker exist."""
    done = 0
    while done < job.checkpoint.config.num_layers and _marker(draft, done).exists():
        if not (draft.folder / shard_name(done + 2, job.num_shards)).exists():
            break
        done += 1
    return done


def _marker(draft: Draft, index: int) -> Path:
    return draft.state / f"layer-{index:05d}.json"


def _compress_layer(
    job: Job, flow: Flow | None, check: Check | None, index: int
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Rows of the report and the checkpoint tensors of layer `index`; advances `flow` and `check` to the layer's outputs."""
    checkpoint = job.checkpoint.reopened()  # so that its memory maps are freed with it
    layer = checkpoint.build_layer(index, job.device, job.dtype)
    readers: dict[str, list[str]] = {}
    for linear in job.targets[index]:
        readers.setdefault(linear.reads, []).append(linear.path)
    wanted = job.statistics if job.transforms else job.statistics | job.ranges
    if check is not None:
        check.flow.dense_through(layer)
    gathers = flow is not None and bool(readers or flow.paired)
    statistics = flow.statistics(layer, readers, wanted) if flow is not None and gathers else {}
    tensors = {name: checkpoint.tensor(name) for name in job.inside(index)}
    targets = frozenset(linear.path for linear in job.targets[index])
    weights = LayerWeights(checkpoint, index, layer, tensors, statistics, targets, quantizer_of(job.steps))
    for transform in job.transforms:
        transform.change(weights)
    if job.transforms:
        weights.put()
    if job.transforms and job.ranges and flow is not None:
        for path, values in flow.statistics(layer, readers, job.ranges).items():
            statistics[path] = statistics[path] | values
    rows = []
    for linear in job.targets[index]:
        weight = weights.weight(linear.path)
        matrix = _solve(job, index, linear, weight, statistics.pop(linear.path, {}))
        rows.append(_report(job, matrix, linear))
        written = _written(matrix, linear, tensors)
        tensors.update(written)
        if flow is not None:  # the second pass runs the weights that are written, in their stored precision
            plain = matrix.stored is None
            if _rounds_inputs(job):
                _use_rounded(job, index, layer, linear, written)
                continue
            weight = torch.cat([written[f"{name}.weight"] for name, _ in linear.modules]) if plain else matrix.weight
            _use(layer, linear, weight.to(job.dtype))
    if flow is not None and job.cache is not None:
        tensors.update(job.cache.calibrate(layer, flow, checkpoint, index))
    if flow is not None and index + 1 < job.checkpoint.config.num_layers:
        flow.through(layer)
    if check is not None:
        check.flow.through(layer)
    return rows, tensors


def _use(layer: nn.Module, linear: Linear, weight: Tensor) -> None:
    """Replaces the weight of a linear of `layer`."""
    layer.get_submodule(linear.path).weight = nn.Parameter(weight, requires_grad=False)


def _rounds_inputs(job: Job) -> bool:
    """Whether the written model rounds the inputs of its linears."""
    quantizer = quantizer_of(job.steps)
    return quantizer is not None and quantizer.rounding is not None


def _use_rounded(job: Job, index: int, layer: nn.Module, linear: Linear, written: dict[str, Tensor]) -> None:
    """Replaces a linear of `layer` by the quantized one that `written` holds, which rounds its inputs, too."""
    quantizer, dense = job.quantizers.of(index, linear.path), layer.get_submodule(linear.path)
    assert quantizer is not None
    with torch.device("meta"):
        rounded = RoundedInputs(linear.columns, linear.rows, False, scheme=quantizer.scheme(linear.columns))
    rounded.load(_parts(job, linear, written))
    rounded.bias = None if dense.bias is None else dense.bias.detach()
    layer.set_submodule(linear.path, rounded)


def _solve(job: Job, index: int, linear: Linear, original: Tensor, statistics: dict[str, Tensor]) -> Matrix:
    """Runs the steps on one fused matrix. Raises ArtifactError when its inputs are not finite."""
    name = f"model.{matrix_name(index, linear.path)}"
    if not all(bool(torch.isfinite(value).all()) for value in statistics.values()):
        raise ArtifactError(
            f"calibration: the inputs of {name} are not all finite in {str(job.dtype).removeprefix('torch.')}",
            fix="set compute_dtype=float32, or check the checkpoint and the calibration text",
        )
    modules = tuple(rows for _, rows in linear.modules)
    matrix = Matrix(name, original, job.checkpoint.dtype, statistics, modules, job.model)
    for step in job.matrix_steps(index, linear):
        step.apply(matrix)
    quantizer = job.quantizers.of(index, linear.path)
    if quantizer is not None:
        quantizer.calibrate_inputs(matrix)
    return matrix


def _written(matrix: Matrix, linear: Linear, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint tensors that replace those of the linear's modules, which are removed from `before`."""
    found: dict[str, Tensor] = {}
    begin = 0
    for name, count in linear.modules:
        rows = slice(begin, begin + count)
        begin += count
        dtype = before.pop(f"{name}.weight").dtype
        stored = None if matrix.stored is None else matrix.stored.rows(rows)
        part = {"weight": matrix.weight[rows].to(dtype)} if stored is None else layouts.write(stored)
        found.update({f"{name}.{suffix}": tensor for suffix, tensor in part.items()})
    return found


def _report(job: Job, matrix: Matrix, linear: Linear) -> dict[str, Any]:
    """The steps and errors of a matrix: a row of layers.jsonl."""
    errors = matrix.errors()
    return {
        "name": matrix.name,
        "modules": [name for name, _ in linear.modules],
        "kind": "+".join(step.kind for step in job.steps),
        "bits": matrix.stored.scheme.bits if matrix.stored is not None else 8 * job.checkpoint.dtype.itemsize,
        "error": errors.output,
        "weight_error": errors.weight,
        "zeros": errors.zeros,
        "weights": matrix.original.numel(),
        "notes": matrix.notes,
    }


def _finish(job: Job, draft: Draft, run: Run) -> list[dict[str, Any]]:
    """Writes the index over all shards; returns the rows of all layers; prints notes once."""
    count = job.num_shards
    weight_map, total, rows = {}, 0, []
    for name in job.ends():
        weight_map[name] = shard_name(1, count)
        tensor = job.checkpoint.tensor(name)
        total += tensor.numel() * stored_rest(tensor.dtype, tensor.shape, job.rest_dtype).itemsize
    for index in range(count - 1):
        entry = json.loads(_marker(draft, index).read_text(encoding="utf8"))
        weight_map.update(dict.fromkeys(entry["tensors"], shard_name(index + 2, count)))
        total += sum(entry["tensors"].values())
        rows += entry["rows"]
    write_index(draft.folder, weight_map, total)
    for row in rows:
        for note in row["notes"]:
            run.say(f"{row['name']}: {note}")
    return rows
