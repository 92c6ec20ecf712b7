"""Where rotations of a model cancel: the residual stream, value heads and inputs of down projections are turned, which spreads outliers over all channels.

A rotation R of x and the inverse R^T in the weights that read x cancel. R1 turns the residual stream and R2 every value
head, both in the weights alone; R4 turns the inputs of down projections at run time. Names of SpinQuant, arXiv:2405.16406.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.spec import Spec
from hone.model.linear_spec import Norm, NormSpec, Output, each_expert

if TYPE_CHECKING:
    from hone.compress.targets import Linear
    from hone.model.config import ModelConfig

SMALLEST_BLOCK = 16
"""Fewer channels than this share too few values to spread an outlier."""


class Values(NamedTuple):
    """The value heads of a layer: rows `begin` to `end` of the linear at `path`, and the linear at `out` that reads them."""

    path: str
    begin: int
    end: int
    head_dim: int
    out: str


class Turning(Spec):
    """Which rotations there are, and the models in which they cancel."""

    r1: bool = Field(
        True,
        description="Rotate the residual stream; a tied head is stored apart, which adds vocabulary x hidden weights.",
    )
    r2: bool = Field(True, description="Rotate each value head and the columns of the output projection.")
    r4: bool = Field(
        False,
        description="Multiply inputs of quantized down projections by a Hadamard matrix at run time: hone and vLLM do.",
    )
    block_size: int = Field(
        0,
        ge=0,
        description="Columns of r4's Hadamard matrices, a power of two; 0: the largest that divides the columns.",
    )
    seed: int = Field(0, ge=0, description="Seed of the random signs of r1 and r2.")

    @model_validator(mode="after")
    def _something_turns(self) -> Self:
        if not (self.r1 or self.r2 or self.r4):
            raise ValueError("r1, r2 and r4 are all false: nothing would be rotated")
        if self.block_size and (self.block_size < SMALLEST_BLOCK or self.block_size & (self.block_size - 1)):
            raise ValueError(f"block_size {self.block_size} is no power of two of at least {SMALLEST_BLOCK}")
        return self

    def reshape(self, config: ModelConfig) -> ModelConfig:
        """The config of the rotated model, its head apart. Raises SpecError for a model that would compute something else."""
        for index in range(config.num_layers):
            if self.r1:
                _check_stream(config, index)
            if self.r2:
                values_of(config, index)
        return config.model_copy(update={"tie_embeddings": False}) if self.r1 else config

    def hadamards(self, config: ModelConfig, targets: tuple[tuple[Linear, ...], ...]) -> dict[str, int]:
        """Block sizes of r4 by the linear's name ('layers.3.feed_forward.down'). Raises SpecError where no block divides it."""
        found: dict[str, int] = {}
        for index, linears in enumerate(targets[: config.num_layers] if self.r4 else ()):
            specs = each_expert(config.linears(index))
            for linear in linears:
                if linear.path.startswith("feed_forward.") and specs[linear.path].residual:
                    found[f"layers.{index}.{linear.path}"] = self._block(index, linear)
        if self.r4 and not found:
            raise SpecError(
                "r4 multiplies inputs of down projections, and none is among the targets",
                fix="target them, or set r4=false",
            )
        return found

    def _block(self, index: int, linear: Linear) -> int:
        size = self.block_size or linear.columns & -linear.columns
        if size < SMALLEST_BLOCK or linear.columns % size:
            raise SpecError(
                f"r4 needs blocks of at least {SMALLEST_BLOCK} columns, a power of two that divides the {linear.columns} "
                f"input features of layers.{index}.{linear.path}, and {size} is none",
                fix="set r4=false, or another block_size" if self.block_size else "set r4=false",
            )
        return size


def values_of(config: ModelConfig, index: int) -> Values:
    """The value heads of layer `index`. Raises SpecError for a mixer whose outputs are not each head's values, weighted."""
    linears = config.linears(index)
    for out, reader in linears.items():
        if not (out.startswith("mixer.") and reader.residual):
            continue
        for path, linear in linears.items():
            begin = 0
            for piece in linear.pieces:
                if reader.reads == Output(path, piece.name) and piece.heads and reader.share == 1.0:
                    return Values(path, begin, begin + piece.out_features, piece.out_features // piece.heads, out)
                begin += piece.out_features
    raise SpecError(
        f"r2: the outputs of layer {index}'s mixer '{config.layers[index].mixer.kind}' are no sums of its value heads",
        fix="set r2=false",
    )


def _check_stream(config: ModelConfig, index: int) -> None:
    """Raises SpecError unless layer `index` reads the residual stream through norms whose weights fold into linears alone."""
    layer = config.layers[index]
    if layer.norms != "pre":
        raise SpecError(
            f"r1: layer {index} has norms after its blocks, whose weights cannot be folded into linears",
            fix="set r1=false: r2 and r4 are exact there",
        )
    parameters = config.parameters(index)
    for path, linear in config.linears(index).items():
        norm = linear.reads if isinstance(linear.reads, Norm) else None
        known = norm is not None and f"{norm.name}.weight" in config.singles(index)
        if not (linear.residual or known):
            raise SpecError(
                f"r1: layer {index} reads '{linear.reads}' in {path}, which is not the norm of the residual stream",
                fix="set r1=false",
            )
    for path, one in parameters.items():
        if not isinstance(one, NormSpec) and config.hidden_size in one.shape:
            raise SpecError(
                f"r1: {path} of layer {index} has an entry a channel of the residual stream, and channels are mixed",
                fix="set r1=false",
            )
