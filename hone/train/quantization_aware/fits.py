"""What a quantization-aware training cannot be combined with, and what its plan says of the export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hone.base.errors import SpecError
from hone.train.fp8.techniques import FP8
from hone.train.precision import TORCH_NAMES, saved_dtype

if TYPE_CHECKING:
    from hone.model.config import ModelConfig
    from hone.train.objectives.base import Objective

_FIELD = "objective.quantization_aware"


def check_rounding(spec: Any, config: ModelConfig) -> None:
    """Raises SpecError where the fields of a train spec beside its objective's `quantization_aware`, or a model of `config`, would let
    the passes compute with other weights than those that are exported."""
    quantizer = spec.objective.quantization_aware
    if quantizer is None:
        return
    computed, saved = TORCH_NAMES[spec.precision], saved_dtype(spec.precision, spec.checkpoint.export_dtype)
    others = {
        "objective.simulated_device, which computes with other weights": (
            "objective.simulated_device: null",
            spec.objective.simulated_device is not None,
        ),
        f"precision {spec.precision}, which rounds once more": (
            "precision: bf16",
            spec.precision in FP8 or spec.precision == "fp16",
        ),
        f"weights saved in {saved}, because the scales found in {computed} would be others": (
            "checkpoint.export_dtype: null",
            saved != computed,
        ),
        f"precision {spec.precision}, in which the points of learned grids are no numbers": (
            "precision: fp32",
            quantizer.learns_steps and spec.precision != "fp32",
        ),
        f"offload {spec.parallelism.offload.kind}, whose weights are elsewhere when the rounded ones are saved": (
            "parallelism.offload: none",
            quantizer.learns_steps and spec.parallelism.offload.kind != "none",
        ),
        f"data_parallel {spec.parallelism.data_parallel.kind}, whose ranks have parts of the weights and their steps": (
            "parallelism.data_parallel: ddp",
            quantizer.learns_steps and "weights" in spec.parallelism.data_parallel.sharded,
        ),
        f"data_parallel {spec.parallelism.data_parallel.kind}, whose ranks take steps of their own": (
            "parallelism.data_parallel: ddp",
            quantizer.learns_steps and spec.parallelism.data_parallel.alone,
        ),
        "a pipeline, whose ranks have some of the layers and their steps": (
            "parallelism.pipeline_parallel_degree: 1",
            quantizer.learns_steps and spec.parallelism.pipeline_parallel_degree > 1,
        ),
        "tensor parallelism, whose ranks would each find scales of their part": (
            "parallelism.tensor_parallel_degree: 1",
            spec.parallelism.tensor_parallel_degree > 1,
        ),
    }
    for what, (fix, given) in others.items():
        if given:
            raise SpecError(f"{_FIELD} does not work with {what}", fix=f"set {fix}")
    for index in range(config.num_layers):
        for path, linear in config.linears(index).items():
            where = f"{_FIELD}: layers.{index}.{path}"
            if linear.experts is not None:
                raise SpecError(
                    f"{where} has {linear.experts} experts, which are not rounded", fix="give a model without experts"
                )
            adapters = [one for one, _ in config.wrappers(index, path, linear)]
            if adapters:
                _check_adapters(spec, adapters, where)
            said = None if linear.precise else quantizer.problem(linear.in_features, tuple(linear.parts.values()))
            if said is not None:
                raise SpecError(
                    f"{where}: {said}", fix="take a group_size that divides it, or fp8 with strategy channel"
                )


def _check_adapters(spec: Any, adapters: Sequence[Any], where: str) -> None:
    """Raises SpecError where the weight of a linear with `adapters` is not one sum that can be rounded, and merged as it was."""
    adapter = adapters[0]
    if len(adapters) > 1 or adapter.kind != "lora" or adapter.dropout:
        raise SpecError(
            f"{where} has an adapter whose sum with the weight is not rounded: {len(adapters)} adapters, {adapter.kind}",
            fix="take one adapter of kind lora without dropout, or merge the adapter into the model first",
        )
    for what, given, fix in (
        (
            f"precision {spec.precision}, in which a merge would add other numbers",
            spec.precision != "fp32",
            "precision: fp32",
        ),
        ("learned steps", spec.objective.quantization_aware.learns_steps, "objective.quantization_aware.kind: integer"),
    ):
        if given:
            raise SpecError(f"{where} with an adapter does not work with {what}", fix=f"set {fix}")


def exported_note(objective: Objective) -> tuple[str, ...]:
    """The step that stores the trained weights as they were computed with; nothing where none is rounded."""
    quantizer = objective.quantization_aware
    if quantizer is None:
        return ()
    step = ", ".join(
        f"{name}: {str(value).lower() if isinstance(value, bool) else value}"
        for name, value in quantizer.exported.items()
    )
    return (f"losses are those of rounded weights; `steps: [{{{step}}}]` of a compress stage stores exactly these",)
