"""The linears that a config's LoRA or DoRA adapters wrap, as `hone.cost.train.adapted` counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hone.cost.train.adapted import AdaptedLinear
from hone.model.linear_spec import LinearSpec

if TYPE_CHECKING:
    from hone.model.config import ModelConfig

_KINDS = frozenset({"lora", "pissa", "dora"})
"""Adapters whose product with a frozen linear is one operation."""


def adapted_linears(config: ModelConfig) -> tuple[tuple[AdaptedLinear, ...], ...]:
    """Those of each layer; empty where some adapter is of another kind or computes apart from its linear: with dropout, around experts,
    or pieces of one linear (q, k and v) with ranks or scales of their own."""
    if not config.adapters or any(one.kind not in _KINDS or one.dropout for one in config.adapters):
        return ()
    layers = []
    for index in range(config.num_layers):
        found: list[AdaptedLinear] = []
        for path, linear in config.linears(index).items():
            around = config.wrappers(index, path, linear)
            apart = any(one.kind != "dora" and one.varies for one, _ in around)  # DoRA's operation scales each piece
            if len(around) > 1 or apart or (around and linear.experts is not None):
                return ()
            found += [_around(config, index, path, linear, *one) for one in around]
        layers.append(tuple(found))
    return tuple(layers)


def _around(config: ModelConfig, index: int, path: str, linear: LinearSpec, adapter: Any, pieces: Any) -> AdaptedLinear:
    ranks = tuple((piece.out_features, adapter.of_piece(piece.name).rank) for piece in pieces)
    gated = path == "feed_forward.down" and config.layers[index].feed_forward.kind == "swiglu"
    return AdaptedLinear(linear.in_features, linear.out_features, ranks, adapter.kind == "dora", gated)
