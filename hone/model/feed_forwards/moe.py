"""A mixture of experts: several SwiGLU feed-forwards, of which a router has each token computed by a few."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from hone.base.errors import SpecError
from hone.base.table import Choice, Technique
from hone.model.balance import BALANCES
from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.feed_forwards.base import FeedForward
from hone.model.feed_forwards.moe_fused import fused
from hone.model.linear import Dense, Experts
from hone.model.linear_spec import Computed, Input, LinearSpec, Norm, Output, Parameter, ParameterSpec, Piece, Product
from hone.model.routers import ROUTERS
from hone.model.routers.base import Seen
from hone.model.routers.routes import ByToken, Routes
from hone.model.routers.softmax import Softmax
from hone.ops import clamped_swiglu, swiglu
from hone.ops.moe.api import takes_pieces
from hone.ops.moe.local import LocalExperts
from hone.parallel.experts import ExpertExchange


class MoE(FeedForward):
    """The weighted sum of the experts that a router chooses for a token, and of experts that every token visits. Shazeer et al. 2017, arXiv:1701.06538."""

    paper: ClassVar[str] = "arXiv:1701.06538"
    splits: ClassVar[tuple[str, ...]] = ("intermediate_size",)
    sums_once: ClassVar[bool] = True

    intermediate_size: int = Field(gt=0, description="Width of one expert.")
    num_experts: int = Field(8, gt=0, description="Experts among which the router chooses.")
    router: Annotated[Technique, Choice(ROUTERS, default="softmax")] = Field(
        Softmax(kind="softmax"), description="How tokens and experts find each other."
    )
    num_shared_experts: int = Field(
        0, ge=0, description="Experts of the same width that every token visits, computed as one (DeepSeekMoE)."
    )
    shared_gate: bool = Field(
        False, description="The shared experts' result is multiplied by a sigmoid of the token (Qwen2-MoE)."
    )
    biases: bool = Field(False, description="Biases on the router and on the experts' projections (gpt-oss).")
    swiglu_limit: float | None = Field(
        None,
        gt=0,
        description="Clamp of gpt-oss's gate: (up + 1) * gate * sigmoid(swiglu_alpha * gate), gate at most this, up within it; "
        "empty: silu(gate) * up.",
    )
    swiglu_alpha: float = Field(1.702, gt=0, description="Sigmoid's factor where swiglu_limit is given.")
    balance: tuple[Annotated[Technique, Choice(BALANCES)], ...] = Field(
        (), description="What keeps the experts equally busy in training."
    )
    capacity_factor: float | None = Field(
        None,
        gt=0,
        description="In a training pass an expert computes at most capacity_factor x k x tokens / experts tokens, rounded up; "
        "visits beyond that are dropped. Empty: none are.",
    )
    token_drop_policy: Literal["position", "probs"] = Field(
        "position",
        description="Which visits are dropped: of the last tokens, or of those whose best score is smallest (batch-prioritized, "
        "arXiv:2106.05974). First choices come before second ones.",
    )
    jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="In a training, the router's input is multiplied by random numbers from 1 - jitter to 1 + jitter.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> MoE:
        router = self.router
        router.check(self.num_experts)
        for one in self.balance:
            one.check(self.num_experts)
        if not router.by_token and (self.balance or self.capacity_factor is not None):
            raise ValueError(f"router '{router.kind}' balances by itself: leave balance and capacity_factor out")
        if router.reads_tokens and self.balance:
            said = f"router '{router.kind}' fixes a token's expert by its id: it has no scores to balance"
            raise ValueError(f"{said}: leave balance ({', '.join(one.kind for one in self.balance)}) out")
        moving = [one for one in self.balance if one.moves_bias]
        if moving and not router.takes_bias:
            raise ValueError(f"router '{router.kind}' chooses without a bias: take router softmax or sigmoid")
        if len(moving) > 1:
            raise ValueError("two balances move one bias: leave one of them out")
        if self.jitter and router.reads_tokens:
            raise ValueError(f"router '{router.kind}' has no input that jitter could change")
        if self.shared_gate and not self.num_shared_experts:
            raise ValueError("shared_gate needs num_shared_experts")
        return self

    @property
    def causal(self) -> bool:
        return self.router.causal

    @property
    def bias(self) -> bool:
        """Whether the router has a bias of its choice."""
        return any(one.moves_bias for one in self.balance)

    @property
    def whole_sequences(self) -> bool:
        """Whether ranks may not share a sequence: what is computed of a token depends on others, or is of whole sequences."""
        return self.capacity_factor is not None or any(one.whole_sequences for one in self.balance)

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        inner, normed = self.intermediate_size, Norm("feed_forward_norm")
        share = self.router.visits(self.num_experts) / self.num_experts
        options = {"bias": self.biases, "scales": self.swiglu_limit is None}
        found = [*_gated("", hidden_size, inner, **options, experts=self.num_experts, share=share)]
        outputs = self.router.outputs(self.num_experts)
        if outputs:
            pieces = (Piece("router", outputs),)
            found.insert(0, LinearSpec("router", hidden_size, pieces, reads=normed, bias=self.biases, precise=True))
        if self.num_shared_experts:
            found += _gated("shared_", hidden_size, inner * self.num_shared_experts, **options)
        if self.shared_gate:
            found.append(
                LinearSpec("shared_weight", hidden_size, (Piece("shared_weight", 1),), reads=normed, precise=True)
            )
        return tuple(found)

    def routed_values(self, hidden_size: int) -> int:
        return 2 * self.router.visits(self.num_experts) * hidden_size

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        return (ParameterSpec("router_bias", (self.num_experts,), (0.0, 0.0), trained=False),) if self.bias else ()

    def build(self, place: Placement) -> MoELayer:
        return MoELayer(self, place)


class MoELayer(Block):
    """The module behind `MoE`. `forward(x [..., D], context) -> [..., D]`."""

    routed = True
    """It reports its routing to the context."""
    exchange: ExpertExchange | None = None
    """Brings rows to the ranks of their experts and back, where the linears have some of the experts; None: they have all."""
    local_share: float = 1.0
    """Share of visits that is expected to be of the experts that the linears have, where others' are no concern of this rank."""
    loss_copies: int = 1
    """Ranks that compute the same losses of the routing in training, of whose gradients all weights get the sum."""

    def local(self, context: Context) -> LocalExperts | None:
        """Where the experts are, on one of several ranks of a stage that have the same tokens; None: they are all here."""
        return None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec, tokens = self.spec, x.flatten(0, -2)
        shared = None
        y = fused(self, tokens, x, context) if self.exchange is None else None
        if y is None:
            routes = self._routes(tokens, x, context)
            if self.exchange is None:
                made = self.experts_of(*routes.dispatch(tokens))
            else:  # what every token visits is computed while rows travel
                plain = self._plain(tokens)
                pieces = self._pieces(routes) if plain else None
                rows, ends = routes.dispatch(tokens) if pieces is None else routes.dispatch(tokens, pieces)  # type: ignore[call-arg]
                sent = self.exchange.dispatch(rows, ends, None if pieces is None else pieces[1])
                del rows
                if spec.num_shared_experts:
                    shared = self.shared_gate_up(tokens)
                returning = self.exchange.combine(self.experts_of(*sent.arrived(in_pieces=plain)), sent)
                shared = None if shared is None else self._shared_down(self._gated(shared), tokens)
                made = returning.arrived()
            y = routes.combine(made)
        if spec.num_shared_experts:
            y = y + (self._shared_down(self._gated(self.shared_gate_up(tokens)), tokens) if shared is None else shared)
        return y.view_as(x)

    def _plain(self, tokens: Tensor) -> bool:
        """Whether the experts' linears are nothing but products that take rows as they came from other ranks."""
        linears = self.gate_up, self.down
        plain = all(type(one) is Experts and one.bias is None and not one._forward_hooks for one in linears)
        return plain and takes_pieces(tokens, *(one.weight for one in linears))

    def _pieces(self, routes: Routes) -> tuple[int, int] | None:
        """The rooms in which rows travel without that the host knows how many there are; None: it must know."""
        if self.exchange is None or not isinstance(routes, ByToken) or routes.leaves_out or not routes.ids.numel():
            return None
        return self.exchange.pieces

    def experts_of(self, rows: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
        """What experts make of their rows [R, D], sorted by expert; ends int32 [E]. With `starts` rows are in pieces (`grouped_linear`)."""
        if starts is None:
            return self.down(self._gated(self.gate_up(rows, ends)), ends)
        return self.down(self._gated(self.gate_up(rows, ends, starts)), ends, starts)

    def _gated(self, gate_up: Tensor) -> Tensor:
        limit = self.spec.swiglu_limit
        return swiglu(gate_up) if limit is None else clamped_swiglu(gate_up, limit, self.spec.swiglu_alpha)

    def _shared_down(self, inner: Tensor, tokens: Tensor) -> Tensor:
        """The shared experts' result, of its inner values."""
        shared = self.shared_down(inner)
        return shared * self.shared_weight(tokens).sigmoid() if self.spec.shared_gate else shared

    def _routes(self, tokens: Tensor, x: Tensor, context: Context) -> Routes:
        """The router's decision, with losses and counts told to the context in a training pass."""
        spec, draws = self.spec, None
        if context.draw is not None:  # the same numbers when a pass is run again
            draws = torch.Generator().manual_seed(context.draw * 65_537 + self.layer)
        logits, ids = None, None
        if spec.router.reads_tokens:
            ids = _ids(context, len(tokens))
        else:
            seen = tokens
            if spec.jitter and draws is not None:
                noise = torch.rand(tokens.shape, generator=draws).to(tokens.device)
                seen = tokens.float() * (1 + spec.jitter * (2 * noise - 1))
            logits = _precise(self.router, seen)
        sequences = math.prod(x.shape[:-2]) if x.dim() > 2 else 1
        told = Seen(logits, spec.num_experts, sequences, getattr(self, "router_bias", None), ids, draws)
        routes = spec.router.route(told)
        if context.measures or not torch.is_grad_enabled():
            return routes
        if isinstance(routes, ByToken):
            for one in spec.balance:
                loss = one.loss(told, routes)
                if loss is not None:
                    if self.loss_copies > 1 and loss.requires_grad:  # each gives a share of the gradient
                        loss.register_hook(lambda gradient: gradient / self.loss_copies)
                    context.add_loss(loss)
            if spec.capacity_factor is not None:
                most = math.ceil(spec.capacity_factor * routes.ids.shape[1] * len(tokens) / spec.num_experts)
                routes = routes.within(most, by_score=spec.token_drop_policy == "probs")
        context.count_routes(self.layer, _counts(routes, len(tokens)))
        return routes


@torch.no_grad()
def _counts(routes: Routes, num_tokens: int) -> Tensor:
    """Float64 [E + 3]: tokens that ask for each expert; visits left out; entropy of the scores in nats, summed; tokens."""
    entropy = torch.special.entr(routes.scores.double()).sum()
    rest = torch.stack([routes.dropped.double(), entropy, torch.full_like(entropy, num_tokens)])
    return torch.cat([routes.loads.double(), rest])


def _precise(linear: torch.nn.Module, x: Tensor) -> Tensor:
    """The logits of a router in float32, computed so where its weights are dense."""
    if type(linear) is Dense:
        # This is no call of the module: hooks, such as a compression's, would not see what it reads.
        for hook in linear._forward_pre_hooks.values():
            hook(linear, (x,))
        return F.linear(x.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float())
    return linear(x.to(linear.weight.dtype) if hasattr(linear, "weight") else x).float()


def _ids(context: Context, count: int) -> Tensor:
    """The token ids of a pass, flat."""
    if context.tokens is None or context.tokens.numel() != count:
        raise SpecError(
            "router 'hash' reads token ids, which this pass does not have",
            fix="run whole models (Decoder.hidden), or take another router",
        )
    return context.tokens.reshape(-1)


def _gated(
    prefix: str, hidden_size: int, inner: int, *, scales: bool, **options: float
) -> tuple[LinearSpec, LinearSpec]:
    """Gate with up, and down, whose names begin with `prefix`; `scales`: what down reads is linear in up."""
    up = f"feed_forward.{prefix}gate_up"
    product: Input = Product((Output(up, f"{prefix}gate"), Output(up, f"{prefix}up")))
    if not scales:
        product = Computed(f"feed_forward.{prefix}gated")
    return (
        LinearSpec(
            f"{prefix}gate_up", hidden_size, (Piece(f"{prefix}gate", inner), Piece(f"{prefix}up", inner)),
            reads=Norm("feed_forward_norm"), shard="column", **options,  # type: ignore[arg-type]
        ),
        LinearSpec(
            f"{prefix}down", inner, (Piece(f"{prefix}down", hidden_size),),
            reads=product, shard="row", residual=True, **options,  # type: ignore[arg-type]
        ),
    )  # fmt: skip
