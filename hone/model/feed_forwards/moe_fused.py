"""A mixture of experts in few kernels, where nothing needs a gradient: what generation and serving run on a GPU.

Without it a layer is the router's product, a softmax, a choice, a sort, a copy of the tokens, a product, a gate, a product and a
sum. With it (`hone.ops.choose_experts`, `hone.ops.expert_swiglu`) a decode step's layer is four kernels for few tokens and five for
more. It never waits for the device, and its shapes depend on the number of tokens alone, so that it is part of CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hone.model.context import Context
from hone.model.linear import Dense, ExpertLinears, Experts
from hone.model.routers.routes import ByToken
from hone.model.routers.sigmoid import Sigmoid
from hone.model.routers.softmax import Softmax
from hone.ops import choose_experts, expert_swiglu
from hone.ops.dispatch import choose, locate, runs_kernel
from hone.ops.moe.weights import ExpertWeights, Rounding


def fused(layer: Any, tokens: Tensor, x: Tensor, context: Context) -> Tensor | None:
    """The weighted sum of the chosen experts of tokens [T, D] (x before it was flattened), without shared ones; None where they must
    be computed in steps: with a gradient, on a CPU, or where something watches or replaces one of the layer's linears."""
    if torch.is_grad_enabled() or not _on_gpu(tokens):
        return None
    found = _weights(layer, tokens)
    if found is None:
        return None
    gate_up, down = found
    chosen = _chosen(layer, tokens, context)
    if chosen is None:
        routes = layer._routes(tokens, x, context)
        if not isinstance(routes, ByToken):
            return routes.combine(layer.experts_of(*routes.dispatch(tokens)))
        chosen = routes.ids, routes.weights
    spec = layer.spec
    options = {"limit": spec.swiglu_limit, "alpha": spec.swiglu_alpha, "rounding": _rounding(layer.gate_up)}
    return expert_swiglu(tokens, *chosen, gate_up, down, local_share=layer.local_share, **options)


def _weights(layer: Any, tokens: Tensor) -> tuple[ExpertWeights, ExpertWeights] | None:
    """Both weights of all experts, where a kernel multiplies them with these tokens."""
    gate_up, down = _stacked(layer.gate_up), _stacked(layer.down)
    if gate_up is None or down is None or _rounding(layer.gate_up) != _rounding(layer.down):
        return None
    experts, both, width = gate_up.sizes
    if any(one.kind == "dense" and one.values.dtype != tokens.dtype for one in (gate_up, down)):
        return None
    case = {
        "dtype": tokens.dtype,
        "visits": int(len(tokens) * layer.spec.router.visits(layer.spec.num_experts) * layer.local_share),
        "num_experts": experts,
        "sizes": (both // 2, width),
        "kind": gate_up.kind if gate_up.kind == down.kind else "mixed",
        "plain": True,
    }
    return (gate_up, down) if choose("expert_swiglu", locate(tokens.device), **case).backend != "reference" else None


def _stacked(linear: nn.Module) -> ExpertWeights | None:
    """The weights of a linear of all experts that nothing watches."""
    if _watched(linear):
        return None
    if type(linear) is Experts:
        return ExpertWeights(linear.weight, None, linear.bias)
    return linear.at_once() if isinstance(linear, ExpertLinears) else None


def _rounding(linear: nn.Module) -> Rounding | None:
    return linear.rounding if isinstance(linear, ExpertLinears) else None


def _chosen(layer: Any, tokens: Tensor, context: Context) -> tuple[Tensor, Tensor] | None:
    """The choice of a router whose scores and choice are one kernel's."""
    router, linear = layer.spec.router, getattr(layer, "router", None)
    if type(router) not in (Softmax, Sigmoid) or router.num_groups > 1:
        return None
    if type(linear) is not Dense or _watched(linear):
        return None
    if linear.weight.dtype != tokens.dtype:
        return None
    case = {"dtype": tokens.dtype, "num_experts": linear.out_features, "top_k": router.top_k}
    if not runs_kernel("choose_experts", tokens.device, **case):
        return None
    options: dict[str, Any] = {"normalize": router.normalize, "scale": router.scale}
    options |= {
        "score": "sigmoid" if type(router) is Sigmoid else "softmax",
        "bias": getattr(layer, "router_bias", None),
        "logit_bias": linear.bias,
        "local": layer.local(context),
    }
    return choose_experts(tokens, linear.weight, router.top_k, **options)


def _on_gpu(tokens: Tensor) -> bool:
    return tokens.is_cuda


def _watched(linear: nn.Module) -> bool:
    """Whether something sees or changes what goes through the module."""
    return bool(linear._forward_hooks or linear._forward_pre_hooks)
