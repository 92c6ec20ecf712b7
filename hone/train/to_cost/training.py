"""The training of `hone.cost.train` that a train stage is: from its spec and its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hone.cost.activations.segments import keep_all
from hone.cost.memory import BYTES
from hone.cost.train.adapted import code_width, coded_bytes
from hone.cost.train.pipeline import layer_seconds
from hone.cost.train.replicas import Divided
from hone.cost.train.training import Training
from hone.cost.train.update import masked
from hone.feed.facts import DataFacts
from hone.measure.machine import Machine
from hone.model.facts import CheckpointFacts
from hone.train.adapters.saving import exported
from hone.train.fp8.fits import fp8_products
from hone.train.growth.init import growths_of
from hone.train.precision import FP8_RECIPES, TORCH_NAMES, saved_dtype
from hone.train.teachers.temporal_ensemble import TemporalEnsemble
from hone.train.to_cost.adapted import adapted_linears

if TYPE_CHECKING:
    from hone.cost.dims import ModelDims
    from hone.feed.load import Packing
    from hone.model.config import ModelConfig


LEAN = frozenset({"lora", "pissa"})
"""Adapters whose products are one operation that keeps its input alone (`hone.ops.lora`)."""


def codes_of(
    config: ModelConfig,
    given: CheckpointFacts | None,
    dtype: str,
    part: ModelDims | None = None,
    trained: ModelDims | None = None,
) -> float | None:
    """Bytes of the frozen weights where an adapter leaves codes, those that are none in `dtype`; None where it leaves dense ones.

    Files of an adapter that is trained on are not among them, whose parameters are counted apart. `part` and `trained`: a
    tensor-parallel rank's weights and those of its adapters, where ranks divide them.
    """
    every = config.trained_dims()
    if every is None or given is None or not given.packed:
        return None
    base = config.model_copy(update={"adapters": ()}).dims()
    linears = sum(one.matmul_params + (1 - one.routed.share) * one.routed.params for one in base.layers)
    own = BYTES["float32"] * given.config.trained_params if given.config.adapters else 0  # as saved_dtype saves them
    widened = (BYTES[dtype] - BYTES[given.dtype]) * (base.num_params - linears)
    whole = float(given.weights_bytes - own + widened)
    if part is None or trained is None:
        return whole
    width, said = code_width(config.dims(), every, whole, dtype), given.quantization or {}
    if said.get("bnb_4bit_use_double_quant"):  # a part has float32 scales: `hone.model.quantized.nf4.NF4.cut`
        width += (4 - 1 - 4 / 256) / said.get("bnb_4bit_blocksize", 64)
    return coded_bytes(part, trained, width, dtype)


def training_of(
    spec: Any,
    config: ModelConfig,
    data: list[DataFacts],
    epoch: Packing,
    given: Mapping[str, CheckpointFacts],
    steps: int,
    machine: Machine,
    divided: Divided,
) -> Training:
    """The sizes of `steps` steps on `data` of the train stage `spec`, from which estimates are computed."""
    # Draft heads are what is trained; their frozen model runs forward alone, as a teacher does.
    heads = spec.objective.dims(config) if spec.objective.trains_heads else None
    dims, dtype, keep = heads or config.dims(), TORCH_NAMES[spec.precision], spec.checkpoint.keep
    val = [one.packed("val", spec.seq_len).num_sequences for one in data if "val" in one.splits]
    keep.check(sum(val))
    spec.early_stopping.check(sum(val))
    own = config if heads or spec.objective.reads_teacher else None
    # An adapter's own model takes a forward pass more, too.
    given_teacher = given.get("teacher", given.get("model"))
    teacher = given_teacher.config if spec.objective.from_teacher and given_teacher is not None else own
    teacher, remembered = teacher and spec.parallelism.part_of(teacher), 0.0
    if isinstance(ensemble := getattr(spec.objective, "teacher", None), TemporalEnsemble):
        teacher = replace(config.dims(), layers=())  # its head finds the most likely ids
        remembered = ensemble.remembered_bytes(min(epoch.num_sequences, steps * spec.batch_size), spec.seq_len)
    costs = partial(spec.optimizer.cost, dtype=dtype, device=machine.device)
    tokens = spec.batch_size * spec.seq_len // spec.gradient_accumulation_steps // divided.num_ranks
    timed = partial(layer_seconds, machine=machine, tokens=tokens, seq_len=spec.seq_len, dtype=dtype)
    degree = spec.parallelism.tensor_parallel_degree
    local = config.local(degree) if config.adapters and degree > 1 else config
    trained_part = local.trained_dims() if local is not config else None
    adapted = adapted_linears(local)
    shared = spec.parallelism.shared(config, costs, spec.gradient_accumulation_steps, spec.seq_len, timed)
    return Training(
        model=dims,
        steps=steps,
        batch_size=spec.batch_size,
        seq_len=spec.seq_len,
        dtype=dtype,
        saved_dtype=saved_dtype(spec.precision, spec.checkpoint.export_dtype, adapted=bool(config.adapters)),
        epoch=epoch,
        segments=keep_all(dims.num_layers),
        views=spec.objective.views,
        update=masked(shared.update, dims) if "mask" in given else (costs(heads) if heads else shared.update),
        gradient_accumulation_steps=spec.gradient_accumulation_steps,
        eval_sequences=spec.validation.total(
            steps,
            val,
            mixed=spec.mixture is not None,
            also=spec.evaluates_every,
            first=2 * bool(growths_of(spec.init)),
        ),
        sample_passes=spec.validation.sample_passes(steps, spec.evaluates_every),
        teacher=teacher,
        remembered=remembered,
        teaches_itself=teacher is not None and "teacher" not in given,
        num_checkpoints=spec.checkpoint.kept(steps, spec.optimizer.rewind) + keep.num_states(steps),
        snapshot=spec.checkpoint.async_mode == "async",
        keeps_state=keep.optimizer,
        num_models=1 + keep.num_models(steps),
        divided=spec.parallelism.with_experts(divided, config),
        local_ranks=machine.num_local_ranks,
        context=spec.parallelism.context_parallel.cost(),
        context_degree=spec.parallelism.context_parallel_degree,
        tensor=shared.tensor,
        offload=spec.parallelism.offload,
        experts=spec.parallelism.expert_rows,
        pipeline=shared.pipeline,
        fp8=fp8_products(spec.precision),
        fp8_recipe=FP8_RECIPES.get(spec.precision, ""),
        trained=config.trained_dims(),
        trained_part=trained_part,
        lean=bool(adapted) and all(one.kind in LEAN for one in config.adapters),
        adapted=adapted,
        frozen_bytes=codes_of(config, given.get("model"), dtype, shared.tensor.dims, trained_part),
        exported=exported(config).trained_params if config.adapters else 0,
    )
