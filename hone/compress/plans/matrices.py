"""Every matrix of a compression and the steps that it passes through: whether they can, and what an engine then has to load."""

from __future__ import annotations

import torch

from hone.base.errors import SpecError
from hone.compress.allocations.base import candidates
from hone.compress.spec import CompressSpec
from hone.compress.statistics import PAIRED
from hone.compress.step import Step, Targets, giving
from hone.compress.targets import EMBEDDED, HEAD, Linear, has_head, matrix_name
from hone.compress.written.engines import Written
from hone.model.config import ModelConfig


def every_matrix(targets: Targets, embedding: Linear | None) -> Targets:
    """The matrices of all layers, then the embedding, if it is compressed."""
    return targets if embedding is None else (*targets, (embedding,))


def check_targets(spec: CompressSpec, targets: Targets, embedding: Linear | None) -> None:
    """Raises SpecError where the steps cannot work on a linear of `targets` or on the embedding, or rules fit none."""
    if spec.quantizer is not None:
        spec.quantizer.check_targets(every_matrix(targets, embedding))
    elif embedding is not None:
        raise SpecError(
            f"targets name the embedding, and {', '.join(step.kind for step in spec.layer_steps)} works on linears alone",
            fix="add a quantizer to the steps, as {kind: rtn, bits: 8}, or leave embed_tokens out of targets",
        )
    if spec.gradient_sequences and has_head(targets):
        raise SpecError(
            f"observer {spec.quantizer.observer.kind} reads gradients of the inputs of layers, not of lm_head's",
            fix="use observer mse, or leave it unchanged: ignore=['lm_head']",
        )
    for index, linears in enumerate(every_matrix(targets, embedding)):
        for linear in linears:
            for step in possible_steps(spec, linear):
                step.check_linear(matrix_name(index, linear.path), linear)


def steps_of(spec: CompressSpec, linear: Linear) -> tuple[Step, ...]:
    """The steps of a matrix, the quantizer with the options that it has for it; of the embedding that one alone."""
    names = [name for name, _ in linear.modules]
    if linear.path == EMBEDDED:
        return (spec.quantizer.of_matrix(names).of_embedding(),)
    return tuple(step.of_matrix(names) for step in spec.layer_steps)


def possible_steps(spec: CompressSpec, linear: Linear) -> tuple[Step, ...]:
    """The steps of a matrix, the quantizer with each choice of bits that it may get."""
    if spec.allocation is None or linear.path in (HEAD, EMBEDDED):
        return steps_of(spec, linear)
    quantizer = spec.quantizer
    others = (step for step in spec.layer_steps if step is not quantizer)
    return (*others, *candidates(quantizer, spec.allocation.bits).values())


def written_by(spec: CompressSpec, config: ModelConfig, targets: Targets, embedding: Linear | None = None) -> Written:
    """What an engine has to load: every scheme that a matrix may get."""
    schemes = (
        (matrix_name(index, linear.path), step.scheme(linear.columns), linear.columns)
        for index, linears in enumerate(every_matrix(targets, embedding))
        for linear in linears
        for step in possible_steps(spec, linear)
    )
    return Written(
        config,
        tuple((name, scheme, columns) for name, scheme, columns in schemes if scheme is not None),
        spec.cache and spec.cache.cache_scheme,
        *(step and step.kind for step in (giving(f"weights:{what}", spec.steps) for what in ("low_rank", "corrected"))),
        bool(hadamards_of(spec, config, targets)),
    )


def hadamards_of(spec: CompressSpec, config: ModelConfig, targets: Targets) -> dict[str, int]:
    """Sizes of the Hadamard matrices that multiply inputs, by the linear's name."""
    return {name: size for step in spec.model_steps for name, size in step.hadamards(config, targets).items()}


def paired(spec: CompressSpec) -> bool:
    """Whether a step needs statistics of the inputs in the model that is not compressed."""
    return any(step.needs & PAIRED for step in spec.steps)


def rest_dtype(spec: CompressSpec) -> torch.dtype | None:
    """Dtype of the stored matrices outside the layers; None keeps theirs."""
    return None if spec.rest_dtype == "keep" else getattr(torch, spec.rest_dtype)
