"""What a training of adapters asks of its spec and its inputs: one error for what does not go with frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.base.errors import SpecError
from hone.model.adapters.lora import LoRA
from hone.model.adapters.peft import adapted, alone, wrapped_modules
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts
from hone.train.precision import FP8_RECIPES
from hone.train.routing.layouts import expert_params

TENSOR_PARALLEL = frozenset({"lora", "pissa"})
"""Adapters whose factors tensor-parallel ranks divide."""


def with_adapter(spec: Any, config: ModelConfig, given: Mapping[str, CheckpointFacts]) -> ModelConfig:
    """`config` with the adapter that the train stage `spec` adds, if any. Raises SpecError where it does not fit the model or the spec."""
    if spec.adapter is not None:
        config = _added(spec, config, given)
    if config.adapters:
        _check(spec, config, given)
    return config


def _added(spec: Any, config: ModelConfig, given: Mapping[str, CheckpointFacts]) -> ModelConfig:
    if "model" not in given:
        raise SpecError("adapter needs a model whose weights it leaves as they are", fix="give --from.model=FOLDER")
    if given["model"].config.adapters:
        raise SpecError(
            f"adapter is given, and {given['model'].where} has an adapter already",
            fix="leave adapter out to train on with that one, or merge it into its model first",
        )
    if spec.init != "random":
        raise SpecError("adapter leaves the model as it is, and init makes another one", fix="leave one of them out")
    found = adapted(config, spec.adapter)
    if isinstance(spec.adapter, LoRA) and (unmatched := spec.adapter.unmatched(wrapped_modules(found))):
        raise SpecError(
            f"{', '.join(map(repr, unmatched))} in adapter.rank_pattern or alpha_pattern names no wrapped module",
            fix="name modules of target_modules, such as down_proj or layers.3.self_attn.q_proj",
        )
    return found


def _check(spec: Any, config: ModelConfig, given: Mapping[str, CheckpointFacts]) -> None:
    """Raises SpecError for what a training of adapters cannot do."""
    if alone(config) is None:
        kinds = ", ".join(one.kind for one in config.adapters)
        raise SpecError(f"adapters {kinds} are of no PEFT folder", fix="train one adapter")
    if getattr(config.adapters[0], "dropout", 0) and spec.activation_checkpointing.kind != "none":
        raise SpecError(
            f"adapter.dropout is drawn anew where activation_checkpointing {spec.activation_checkpointing.kind} computes a layer again",
            fix="set adapter.dropout=0, which finetunings seldom miss, or activation_checkpointing: none",
        )
    layout, degree = spec.parallelism, spec.parallelism.context_parallel_degree
    wrong = {
        "parallelism.context_parallel_degree": config.prompt is not None and degree > 1 and degree,
        "precision": spec.precision in FP8_RECIPES and spec.precision,
        "parallelism.pipeline_parallel_degree": layout.pipeline_parallel_degree > 1 and layout.pipeline_parallel_degree,
        "parallelism.expert_parallel_degree": layout.expert_parallel_degree > 1 and layout.expert_parallel_degree,
        "parallelism.offload": layout.offload.kind != "none" and layout.offload.kind,
        "parallelism.data_parallel": layout.data_parallel.kind not in ("ddp", "zero1", "zero2", "zero3")
        and layout.data_parallel.kind,
    }
    ways = {
        "parallelism.context_parallel_degree": "context_parallel_degree: 1: a soft prompt stands before whole documents",
        "precision": "precision: bf16",
        "parallelism.offload": "offload: none: an adapter's optimizer state is small",
        "parallelism.data_parallel": "data_parallel ddp, zero1, zero2 or zero3",
    }
    for field, value in wrong.items():
        if value:
            way = ways.get(
                field,
                "ranks that share the batch or the products alone: data_parallel ddp, zero1, zero2 or zero3, tensor_parallel_degree",
            )
            raise SpecError(f"{field} {value} does not train adapters, whose model is frozen", fix=f"take {way}")
    if layout.tensor_parallel_degree > 1:
        _check_tensor_parallel(config, layout, given.get("model"))


def _check_tensor_parallel(config: ModelConfig, layout: Any, model: CheckpointFacts | None) -> None:
    """Raises SpecError for an adapter, or a model under it, that tensor-parallel ranks cannot have parts of."""
    adapter, degree = config.adapters[0], layout.tensor_parallel_degree
    stored = dict(model.quantization or {}) if model is not None else {}
    reasons = {
        f"adapter '{adapter.kind}', whose numbers belong to whole rows or whole layers": (
            "take adapter.kind: lora or pissa",
            adapter.kind not in TENSOR_PARALLEL,
        ),
        "adapter.dropout, which each rank would draw for itself": (
            "set adapter.dropout=0",
            getattr(adapter, "dropout", 0) > 0,
        ),
        "weights of the model that train beside the factors": (
            "leave out adapter.bias, modules_to_save and trainable_token_indices",
            bool(config.own_weights() or config.token_rows()),
        ),
        "enable_async_tensor_parallel, whose products have no factors": (
            "set parallelism.enable_async_tensor_parallel: false",
            layout.enable_async_tensor_parallel,
        ),
        "a model with experts, whose frozen stacks ranks have no parts of": (
            "set parallelism.tensor_parallel_degree to 1; data_parallel zero3 divides what is frozen",
            expert_params(config) > 0,
        ),
        f"a model stored as {stored.get('quant_method')}, of which ranks have no parts": (
            "give a model in bfloat16, or one whose weights are in bitsandbytes' 4 bits (hone compress with nf4 or fp4)",
            bool(stored) and not stored.get("load_in_4bit"),
        ),
    }
    for reason, (way, applies) in reasons.items():
        if applies:
            raise SpecError(
                f"parallelism.tensor_parallel_degree {degree} does not train {reason}",
                fix=f"{way}, or share the batch alone: data_parallel ddp, zero1, zero2 or zero3",
            )


def needs_teacher(spec: Any, given: Mapping[str, CheckpointFacts]) -> bool:
    """Whether another model is the teacher of the objective of `spec`: that of an adapter, as it is at the start, may be its own reference."""
    adapts = spec.adapter is not None or ("model" in given and bool(given["model"].config.adapters))
    alone = adapts and spec.objective.reference_at_start
    return spec.objective.from_teacher and ("teacher" in given or not alone)
