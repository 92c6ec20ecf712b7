"""The base of balance techniques: a loss of what tokens asked for, or a rule by which a bias of the choice moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.routers.base import Seen
    from hone.model.routers.routes import ByToken


class Balance(Technique):
    """Base of every balance's spec. It sees what tokens asked for, before a capacity leaves some out."""

    whole_sequences: ClassVar[bool] = False
    """Whether it needs all tokens of a sequence."""
    moves_bias: ClassVar[bool] = False
    """Whether it moves the bias of the choice after each step."""

    def check(self, num_experts: int) -> None:
        """Raises ValueError when it cannot balance so many experts."""

    def loss(self, seen: Seen, routes: ByToken) -> Tensor | None:
        """Its loss, a float32 scalar that is a mean over the pass's tokens, times its weight; None: it has none."""
        return None


def asked(routes: ByToken) -> Tensor:
    """Visits that the tokens ask for, as shares of all tokens: float32 [E], summing to at most k."""
    return routes.loads.to(routes.scores.dtype) / len(routes.ids)


def in_groups(num_experts: int, groups: int, name: str) -> None:
    """Raises ValueError unless `groups` divides the experts."""
    if num_experts % groups:
        raise ValueError(f"{name} {groups} does not divide {num_experts} experts")
