"""What a compression plans before it runs: its calibration sequences, sizes, seconds and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hone.base.errors import SpecError
from hone.base.figure import Estimate, human_bytes
from hone.base.lazy import lazy
from hone.base.plan import DISK, MEMORY
from hone.compress.allocations import base as allocations
from hone.compress.low_rank import base as low_rank
from hone.compress.matrix import Quantizer, Step, matrix_name
from hone.compress.pruners.base import Sparse
from hone.compress.written import engines
from hone.compress.written.engines import Written
from hone.cost.compress import Compression, MatrixWork, compress_bytes
from hone.cost.files import beside_bytes

if TYPE_CHECKING:
    from hone.compress.allocations.base import Budget
    from hone.compress.caches.kv_cache import KVCache
    from hone.compress.targets import Linear
    from hone.data.facts import DataFacts
    from hone.measure.machine import Machine
    from hone.model.config import ModelConfig
    from hone.model.facts import CheckpointFacts

allocating = lazy("hone.compress.allocations.planning")
chain = lazy("hone.compress.structured.chain")
targets_of = lazy("hone.compress.targets")
texts = lazy("hone.data.plain")

DEFAULT_SEQ_LEN = 512
"""Default tokens of a calibration sequence for models with a longer context."""

TEXT_BYTES_PER_TOKEN = 3.5
"""Bytes of text per token, to estimate the number of sequences of a text before it is encoded."""


WAYS = {MEMORY: ("compute on another device", "free some memory", "compress on a machine with more")}
"""Ways out when memory is too small, besides `remedies`."""


def remedies(spec: Any) -> list[list[tuple[str, str]]]:
    """Changes of the compression `spec` that may need less memory; see `Stage.remedies`."""
    smaller = {
        name: [str(getattr(spec, name) // part) for part in (2, 4, 8, 16) if getattr(spec, name) >= part]
        for name in ("batch_size", "num_sequences")
    }
    return [*([(name, value) for value in values] for name, values in smaller.items()), [("compute_dtype", "bfloat16")]]


class Calibrated(NamedTuple):
    """Calibration sequences, their tokens, and other sequences for the check."""

    num_sequences: int
    seq_len: int
    num_spare: int = 0


def calibrated(spec: Any, model: CheckpointFacts, data: DataFacts | None) -> Calibrated | None:
    """Number and length of the sequences; None without calibration. Raises SpecError for an unusable source."""
    if data is not None and spec.calibration_text is not None:
        raise SpecError("both the role data and calibration_text are given", fix="give one of them")
    if data is None and spec.calibration_text is None:
        return None
    borrowing = [index for index, layer in enumerate(model.config.layers) if layer.mixer.reuses_kv]
    if borrowing:
        raise SpecError(
            f"layer {borrowing[0]} uses the keys of another layer, and calibration runs one layer at a time",
            fix="compress without calibration: kind=rtn, no data and no calibration_text",
        )
    longest = model.config.max_seq_len
    seq_len = spec.seq_len or min(longest, DEFAULT_SEQ_LEN)
    if seq_len > longest:
        raise SpecError(
            f"seq_len {seq_len} is longer than the model's context of {longest}", fix=f"use {longest} or less"
        )
    if data is None:
        size = texts.num_bytes(str(spec.calibration_text), "calibration_text")
        there = max(int(size / TEXT_BYTES_PER_TOKEN / seq_len), 1)
    else:
        if None not in (data.tokenizer, model.tokenizer) and data.tokenizer != model.tokenizer:
            raise SpecError(
                f"the tokens in {data.where} were made with another tokenizer than {model.where}'s",
                fix="give the data the model was trained on, or calibration_text=FILE, which is encoded anew",
            )
        there = max(data.split("train").num_sequences(seq_len), 1)
    count = min(spec.num_sequences, there)
    return Calibrated(count, seq_len, min(spec.check_sequences, there - count))


def with_head(model: CheckpointFacts, targets: tuple[tuple[Any, ...], ...]) -> CheckpointFacts:
    """The model with a head apart from its embedding, if the head is compressed."""
    if not (model.config.tie_embeddings and targets_of.has_head(targets)):
        return model
    return model.model_copy(update={"config": model.config.model_copy(update={"tie_embeddings": False})})


def notes(
    spec: Any,
    whole: CheckpointFacts,
    model: CheckpointFacts,
    targets: tuple[tuple[Any, ...], ...],
    embedding: Linear | None,
    written: Written,
) -> tuple[str, ...]:
    """What rules give, how the head of the model `whole` and a compressed embedding are stored, and what that means to engines."""
    found = () if spec.quantizer is None else spec.quantizer.lines(_with(targets, embedding))
    if whole.config.tie_embeddings and not model.config.tie_embeddings and targets_of.has_head(targets):
        other = "which stays as it is" if embedding is None else "which is quantized, too"
        found += (f"lm_head is tied to the embedding: the compressed head is stored beside it, {other}",)
    if embedding is None:
        return found
    if model.config.tie_embeddings:
        found += ("the embedding and the head that is tied to it are one quantized matrix",)
    if any(isinstance(step, Sparse) for step in spec.layer_steps):
        found += ("the embedding is quantized and not pruned",)
    if engines.dequantizes(written):
        why = "" if engines.alike(written) else ", and where all matrices have one scheme: not this folder"
        found += (
            f"transformers loads this embedding only with CompressedTensorsConfig(dequantize=True){why}; hone loads it packed",
        )
    return found


def _with(targets: tuple[tuple[Any, ...], ...], embedding: Linear | None) -> tuple[tuple[Any, ...], ...]:
    """The matrices of all layers, then the embedding, if it is compressed."""
    return targets if embedding is None else (*targets, (embedding,))


def check_targets(spec: Any, targets: tuple[tuple[Any, ...], ...], embedding: Linear | None) -> None:
    """Raises SpecError where the steps cannot work on a linear of `targets` or on the embedding, or rules fit none."""
    if spec.quantizer is not None:
        spec.quantizer.check_targets(_with(targets, embedding))
    elif embedding is not None:
        raise SpecError(
            f"targets name the embedding, and {', '.join(step.kind for step in spec.layer_steps)} works on linears alone",
            fix="add a quantizer to the steps, as {kind: rtn, bits: 8}, or leave embed_tokens out of targets",
        )
    if spec.gradient_sequences and targets_of.has_head(targets):
        raise SpecError(
            f"observer {spec.quantizer.observer.kind} reads gradients of the inputs of layers, not of lm_head's",
            fix="use observer mse, or leave it unchanged: ignore=['lm_head']",
        )
    for index, linears in enumerate(_with(targets, embedding)):
        for linear in linears:
            for step in possible_steps(spec, linear):
                step.check(matrix_name(index, linear.path), linear.rows, linear.columns)
                if isinstance(step, Quantizer):
                    targets_of.check_modules(linear, step.scheme(linear.columns))
            if linear is not embedding:
                low_rank.check_modules(spec.layer_steps, linear)


def steps_of(spec: Any, linear: Linear) -> tuple[Step, ...]:
    """The steps of a matrix, the quantizer with the options that it has for it; of the embedding that one alone."""
    names = [name for name, _ in linear.modules]
    if linear.path == targets_of.EMBEDDED:
        return (spec.quantizer.of_matrix(names).of_embedding(),)
    return tuple(step.of_matrix(names) if isinstance(step, Quantizer) else step for step in spec.layer_steps)


def possible_steps(spec: Any, linear: Linear) -> tuple[Step, ...]:
    """The steps of a matrix, the quantizer with each choice of bits that it may get."""
    if spec.allocation is None or linear.path in (targets_of.HEAD, targets_of.EMBEDDED):
        return steps_of(spec, linear)
    steps = (step for step in spec.layer_steps if not isinstance(step, Quantizer))
    return (*steps, *allocations.candidates(spec.quantizer, spec.allocation.bits).values())


def written(
    spec: Any,
    config: ModelConfig,
    targets: tuple[tuple[Any, ...], ...],
    cache: KVCache | None,
    embedding: Linear | None = None,
) -> Written:
    """What an engine has to load: every scheme that a matrix may get."""
    return Written(
        config,
        tuple(
            (matrix_name(index, linear.path), step.scheme(linear.columns), linear.columns)
            for index, linears in enumerate(_with(targets, embedding))
            for linear in linears
            for step in possible_steps(spec, linear)
            if isinstance(step, Quantizer)
        ),
        cache and cache.scheme,
        next((step.kind for step in spec.layer_steps if isinstance(step, low_rank.LowRank)), None),
        bool(spec.hadamards(config, targets)),
    )


def work(
    spec: Any,
    whole: CheckpointFacts,
    model: CheckpointFacts,
    targets: tuple[tuple[Any, ...], ...],
    shards: tuple[int, ...],
    calibrated: Calibrated | None,
    stored_width: int,
    dtype: str,
    embedding: Linear | None = None,
) -> Compression:
    """The work of compressing the linears in `targets` of `model`, which is the model `whole` as the first steps leave it.

    `shards`: bytes of every file; `stored_width`: bytes of a weight in the checkpoint; `dtype` of the forward passes.
    """
    layers = tuple(
        tuple(
            MatrixWork(one.rows, one.columns, tuple(step.work(one.rows, one.columns) for step in steps_of(spec, one)))
            for one in linears
        )
        for linears in _with(targets, embedding)
    )
    count = model.config.num_layers
    num_sequences, seq_len, num_spare = calibrated or (0, 0, 0)
    once = {"stored_width": stored_width, "dtype": dtype, "batch_size": spec.batch_size}
    more = {"num_sequences": num_sequences, "seq_len": seq_len} if spec.calibrated_steps else {}
    probes, differentiated = 0, min(spec.gradient_sequences, num_sequences)
    if spec.allocation is not None:
        probes = spec.allocation.probes(sum(map(len, targets[:count])))
        differentiated += min(spec.allocation.differentiated, spec.allocation.num_sequences, num_sequences)
    if spec.quantizer is not None:
        more |= {"range_bytes": spec.quantizer.range_bytes, "rounding_bytes": spec.quantizer.rounding_bytes}
    return Compression(
        model.config.facts(),
        layers[:count],
        shards,
        head=layers[count : len(targets)],
        embedding=layers[len(targets) :],
        **once,
        **more,
        measured=chain.measured(whole.config, spec.structured, num_sequences, seq_len, **once),
        paired=spec.paired,
        ends_bytes=0.0 if spec.rotation is None else spec.rotation.ends_bytes,
        cache_bytes=0.0 if spec.kv_cache is None else spec.kv_cache.range_bytes(model.config),
        check_sequences=0 if spec.structured else num_spare,
        probes=probes,
        differentiated=differentiated,
    )


def estimates(
    spec: Any,
    whole: CheckpointFacts,
    model: CheckpointFacts,
    machine: Machine,
    work: Compression,
    budget: Budget | None,
) -> dict[str, Estimate]:
    """Exact sizes; seconds and memory; figures that follow from the steps' options."""
    size, params = sum(work.shard_bytes) + work.adapter_bytes, model.config.num_params
    beside = beside_bytes(model.config.vocab_size)
    options: dict[str, Any] = {"formula": "headers, codes, scales and unchanged tensors", "tolerance": 0.0}
    if budget is not None:
        size = budget.model_bytes
        options = {"formula": "the budget, of which a choice of bits leaves little unused", "tolerance": 0.05}
    bits = {"value": 8 * size / params, "unit": "bits", "formula": "8 x bytes / parameters", **options}
    found = {
        "model_bytes": Estimate(value=size, unit="B", **options),
        "bits_per_weight": Estimate(**bits),
        "time_s": allocating.seconds(machine, work, spec.allocation),
        MEMORY: compress_bytes(machine, work),
        DISK: Estimate(
            value=size + work.adapter_bytes + beside,
            unit="B",
            formula=f"the weights{', an adapter twice' if work.adapter_bytes else ''}; tokenizer, config, index, rows {human_bytes(beside)}",
        ),
    }
    if params != whole.config.num_params:
        found["num_params"] = Estimate(value=params, unit="parameters", formula="the new config", tolerance=0.0)
    if spec.quantizer is None:
        for step in spec.layer_steps:
            found.update(step.figures())
    return found
