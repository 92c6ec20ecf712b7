"""The base of routers, which say for each token what experts compute it: a spec that turns logits into routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hone.base.table import Technique

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hone.model.routers.routes import Routes


class Seen(NamedTuple):
    """What a router sees of T tokens in a pass."""

    logits: Tensor | None
    """float32 [T, outputs]; None for a router without weights."""
    num_experts: int
    sequences: int
    """The tokens are those of this many sequences, one after another; 1 where they have no such shape."""
    bias: Tensor | None = None
    """float32 [E], added to scores for the choice alone; None without the balance `bias`."""
    tokens: Tensor | None = None
    """Token ids int64 [T], for a router that `reads_tokens`."""
    draws: torch.Generator | None = None
    """Where random choices come from, on the CPU; None outside training: nothing is random."""


class Router(Technique):
    """Base of every router's spec.

    Scores are float32, whatever the model computes in (selective precision, Fedus et al. 2021). A router whose tokens choose
    returns `ByToken`, to which capacity, drops and balance apply.
    """

    causal: ClassVar[bool] = True
    """Whether a token's experts depend on no later token."""
    by_token: ClassVar[bool] = True
    """Whether tokens choose experts."""
    takes_bias: ClassVar[bool] = False
    """Whether the choice is of scores + bias (the balance `bias`)."""
    reads_tokens: ClassVar[bool] = False
    """Whether it chooses by token ids, and has no weights."""

    def visits(self, num_experts: int) -> int:
        """Experts that compute a token, on average."""
        raise NotImplementedError

    def outputs(self, num_experts: int) -> int:
        """Logits of a token."""
        return num_experts

    def check(self, num_experts: int) -> None:
        """Raises ValueError when it cannot choose among so many experts."""
        if self.visits(num_experts) > num_experts:
            raise ValueError(
                f"router '{self.kind}' sends a token to {self.visits(num_experts)} of {num_experts} experts"
            )

    def route(self, seen: Seen) -> Routes:
        """The decision."""
        raise NotImplementedError
