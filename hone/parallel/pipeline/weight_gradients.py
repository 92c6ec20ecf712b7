"""Weight gradients of linear layers computed later than the gradients of their inputs: the W passes of a schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Key = tuple[int, int]
"""Stage and microbatch."""


class WeightGradients:
    """The weight gradients that backwards have left for later, in their order.

    Each keeps the layer's input and the gradient of its output, nothing else of the graph. Gradients of other parameters
    (norms, embeddings) are computed with those of the inputs.
    """

    def __init__(self) -> None:
        self._queued: dict[Key, list[Callable[[], None]]] = defaultdict(list)
        self._key: Key | None = None

    @contextmanager
    def later(self, key: Key) -> Iterator[None]:
        """Backwards inside leave the gradients of the weights of the layers that `defer` changed to `compute(key)`."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    @property
    def deferring(self) -> bool:
        """Whether a backward inside `later` is under way."""
        return self._key is not None

    def compute(self, key: Key) -> None:
        """Adds what `later(key)` left to the weights' `grad`."""
        for one in self._queued.pop(key, []):
            one()

    def __len__(self) -> int:
        return len(self._queued)

    def take(self, weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor) -> bool:
        """Whether the gradients of `weight` and `bias` are left for later."""
        return self.leave(lambda: _found(weight, bias, x, grad))

    def leave(self, compute: Callable[[], Sequence[tuple[Tensor, Tensor]]]) -> bool:
        """Whether weights and their gradients, which `compute` gives, are left for later; it may hold what they are computed from."""
        if self._key is None:
            return False
        self._queued[self._key].append(lambda: _add(compute))
        return True

    def defer(self, linears: Iterable[nn.Module]) -> None:
        """Makes the layers of weight [out, in] and bias [out] or None leave their gradients inside `later`.

        A layer with products of its own has a method `deferring(self)` that gives the forward of which this is true.
        They are kept out of torch.compile: in a compiled graph the gradient that a backward does not return is lost
        without an error.
        """
        for linear in linears:
            own = getattr(linear, "deferring", None)
            linear.forward = torch.compiler.disable(_Forward(linear, self) if own is None else own(self))


class _Forward:
    """The forward of `linear` through `_Linear`."""

    def __init__(self, linear: nn.Module, queue: WeightGradients) -> None:
        self.linear, self.queue = linear, queue

    def __call__(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.linear.weight, self.linear.bias, self.queue)


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias, whose backward may leave the gradients of weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.weight, ctx.queue = bias, weight, queue
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1] or ctx.queue.take(ctx.weight, ctx.bias, x, grad):
            return dx, None, None, None
        return dx, *_gradients(x, grad, ctx.bias is not None), None


def _gradients(x: Tensor, grad: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Those of weight [out, in] and bias [out], from x [..., in] and `grad` [..., out], as torch's linear computes them."""
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return grad.t() @ x, grad.sum(0) if biased else None


def _found(weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    found = zip((weight, bias), _gradients(x, grad, bias is not None), strict=True)
    return [(one, more) for one, more in found if one is not None and more is not None]


def _add(compute: Callable[[], Sequence[tuple[Tensor, Tensor]]]) -> None:
    """Adds the gradients as a backward pass does: hooks of the weights see them."""
    with torch.no_grad():
        given = compute()
    torch.autograd.backward([one for one, _ in given], [more for _, more in given])
