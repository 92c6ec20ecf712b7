"""How the weights and gradients of layers travel between the ranks that each hold a part of both, and the field that says so."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from hone.base.errors import SpecError


class Moves(NamedTuple):
    """How the weights and gradients of layers travel in a group of ranks that each hold a part of both."""

    within: int
    """Neighbours among which weights are gathered for the backward pass; 1: they stay whole after the forward pass."""
    weight_bits: int = 0
    """Bits of a weight that travels; 0: those of its dtype."""
    gradient_bits: int = 0
    """Bits of a gradient that travels; 0: float32."""


ReshardAfterForward = Literal["default", "always", "never"] | Annotated[int, Field(ge=2)]
RESHARD = (
    "A layer's weights after its forward pass: always (default), freed and gathered again; never, kept until its backward pass; "
    "a number of neighbours, such as a machine's GPUs, among which a second copy is divided, and gathered from (hpZ)."
)


def within(reshard: ReshardAfterForward, num_shards: int) -> int:
    """As `Moves.within` in a group of `num_shards`. Raises SpecError when a number does not divide it."""
    if isinstance(reshard, str):
        return 1 if reshard == "never" else num_shards
    if num_shards % reshard:
        raise SpecError(
            f"reshard_after_forward {reshard} does not divide the {num_shards} ranks that hold the weights together",
            fix="set parallelism.data_parallel.reshard_after_forward to the ranks of one machine, always or never",
        )
    return reshard
