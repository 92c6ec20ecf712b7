"""Which linears of a model compute in fp8, what an fp8 training cannot be combined with, and what its plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hone.base.errors import SpecError
from hone.measure.calibration import LAYOUTS, Layout
from hone.train.fp8.techniques import FP8
from hone.train.precision import FP8_RECIPES, Precision

if TYPE_CHECKING:
    from hone.model.config import ModelConfig

MULTIPLE = 16
"""Tokens of a pass, and a linear's features, are multiples of this: the 16 bytes of hone.ops.fp8, which needs torch."""


class Training(Protocol):
    """The fields of a train spec that are read here."""

    @property
    def parallelism(self) -> Any: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def gradient_accumulation_steps(self) -> int: ...


def in_fp8(config: ModelConfig, index: int, precision: Precision) -> list[str]:
    """The paths, in layer `index`, of the linears that compute in fp8: those of layers, but for routers, whose sizes are multiples of 16.

    Experts are among them where the precision takes them (`Fp8.experts`); on a GPU they compute so on Hopper alone.

    `config` is that of one tensor-parallel rank (`ModelConfig.local`), whose part of a linear has these sizes.
    """
    return [
        path
        for path, linear in config.linears(index).items()
        if (linear.experts is None or FP8[precision].experts)
        and not linear.precise
        and not linear.out_features % MULTIPLE
        and not linear.in_features % MULTIPLE
    ]


def fp8_parameters(config: ModelConfig, precision: Precision, degree: int = 1) -> int:
    """The weights of these linears, of all experts, over `degree` tensor-parallel ranks."""
    local = config.local(degree) if degree > 1 else config
    linears = (
        config.linears(index)[path] for index in range(config.num_layers) for path in in_fp8(local, index, precision)
    )
    return sum((linear.experts or 1) * linear.out_features * linear.in_features for linear in linears)


def check_passes(spec: Training, config: ModelConfig, num_ranks: int) -> None:
    """Raises SpecError where the batch cannot be divided into passes, or an fp8 precision cannot compute them.

    fp8 needs a linear of such sizes on each rank, and passes of a multiple of 16 tokens. The layers can be divided as the degrees
    say (`Parallelism.check`).
    """
    shared, precision = spec.parallelism, spec.precision
    tokens = spec.seq_len * shared.sequences(spec.batch_size, spec.gradient_accumulation_steps, num_ranks)
    if precision not in FP8_RECIPES:
        return
    degree = shared.tensor_parallel_degree
    if shared.enable_async_tensor_parallel:
        raise SpecError(
            f"precision {precision} does not work with enable_async_tensor_parallel, whose products are of parts of the tokens in bf16",
            fix="set parallelism.enable_async_tensor_parallel: false, or precision: bf16",
        )
    if not fp8_parameters(config, precision, degree):
        of = f" of one of {degree} tensor-parallel ranks" if degree > 1 else ""
        raise SpecError(
            f"precision {precision}: no linear of the layers{of} has input and output features in multiples of {MULTIPLE}",
            fix="set precision: bf16, or change model.hidden_size and model.intermediate_size"
            + (", or lower parallelism.tensor_parallel_degree" if degree > 1 else ""),
        )
    tokens //= shared.context_parallel_degree
    if tokens % MULTIPLE:
        raise SpecError(
            f"precision {precision}: a pass of a rank has {tokens} tokens, and fp8 products need a multiple of {MULTIPLE}",
            fix=f"set seq_len to a multiple of {MULTIPLE * shared.context_parallel_degree}, or precision: bf16",
        )


def fp8_notes(precision: Precision, config: ModelConfig, degree: int = 1) -> tuple[str, ...]:
    """What of the model computes in which format on `degree` tensor-parallel ranks, for a plan; none in other precisions."""
    if precision not in FP8_RECIPES:
        return ()
    share = fp8_parameters(config, precision, degree) / config.num_params
    config = config.local(degree) if degree > 1 else config
    others = sorted(
        {path for index in range(config.num_layers) for path in config.linears(index)}
        - {path for index in range(config.num_layers) for path in in_fp8(config, index, precision)}
    )
    also = f", {', '.join(others)}" if others else ""
    return (
        f"{precision}: products of the layers' linears are of fp8 codes ({share:.0%} of the weights); embedding, head, norms, "
        f"attention{also} and evaluations stay in bf16, master weights and sums of gradients in float32",
    )


def fp8_products(precision: Precision) -> frozenset[Layout]:
    """Which of a linear's three products are of codes, for estimates."""
    if precision not in FP8_RECIPES:
        return frozenset()
    return frozenset(LAYOUTS[: FP8[precision].products])
