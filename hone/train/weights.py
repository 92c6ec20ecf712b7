"""The trained weights: float32, or half precision with float32 masters, and the location of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hone.model.decoder import Decoder
from hone.train.optimizers.base import Entry, Parameter, Rule


class Weights:
    """The trained parameters of `model` by name, and their float32 masters.

    With `dtype` float32 a parameter is its own master. Otherwise each parameter is replaced by a copy in `dtype` and its
    float32 original becomes the master that the optimizer updates: 2 + 4 bytes per weight, plus 2 for the gradient, or 4
    more when `accumulate` sums the gradients of several micro-batches in float32.

    `zeros` maps parameters to bool masks of their shape: where a mask is True the weight is zero from the start, gets no
    gradient and stays zero, whatever the optimizer does.
    """

    delays = False
    """Whether an update may go on beside the passes of the next step."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a run says of where they are."""
        return ()

    def __init__(
        self, model: Decoder, dtype: torch.dtype, *, accumulate: bool, zeros: Mapping[str, Tensor] | None = None
    ) -> None:
        self.parameters = {name: part for name, part in model.named_parameters() if part.requires_grad}
        self.split = dtype != torch.float32
        """Whether parameters and masters are different tensors."""
        self.masters: dict[str, Tensor] = {}
        self.pieces: dict[str, tuple[int, int]] = {}
        """The elements of a weight, start to stop, that its master holds, where it does not hold all."""
        self.zeros = dict(zeros or {})
        for name, mask in self.zeros.items():
            self.parameters[name].data.masked_fill_(mask, 0)
            self.parameters[name].register_hook(partial(filled, mask))
        for name, parameter in self.parameters.items():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}: build the model in float32"
            self.masters[name] = parameter.detach() if self.split else parameter
            if self.split:
                parameter.data = parameter.detach().to(dtype)
                if accumulate:
                    parameter.register_post_accumulate_grad_hook(_add_to(self.masters[name]))

    def before_backward(self, last: bool) -> None:
        """To be called before every backward pass; `last`: it is the last one of the step."""

    def after_backward(self) -> None:
        """To be called after every backward pass."""

    def grad(self, name: str) -> Tensor:
        """The summed gradient of `name`, stored with its master or with the parameter."""
        found = self.masters[name].grad
        found = self.parameters[name].grad if found is None else found
        assert found is not None, f"{name} got no gradient"
        return found

    def holds(self, name: str) -> bool:
        """Whether this rank, of all that hold the same part of `name`, is the one that writes it into checkpoints."""
        return True

    def squared_norm(self) -> Tensor:
        """Squared norm of all gradients together: a float64 scalar, because it is summed over ranks."""
        grads = [self.grad(name) for name in self.parameters]
        norms = torch._foreach_norm(grads, 2, torch.promote_types(grads[0].dtype, torch.float32))
        return torch.stack(norms).double().square().sum()  # in which order, float32 does not see

    def take_grads(self, names: Sequence[str], factor: float | Tensor | None) -> list[Tensor]:
        """The gradients of `names` times `factor` (a number, or a float32 scalar on the device), float32; with None as they are.

        Clears them on the weights.
        """
        # In float32 a gradient is scaled in place; a half-precision one is converted first.
        grads = [self.grad(name) if factor is None else self.grad(name).float() for name in names]
        self.drop_grads(names)
        return scaled(grads, factor)

    def rounded(self, name: str) -> Tensor | None:
        """Where a step may write the new weight `name` in half precision, so that it need not be published; None: nowhere."""
        return self.parameters[name].detach() if self.split and name not in self.zeros else None

    def start(self, rule: Rule, name: str, parameter: Parameter) -> dict[str, Tensor]:
        """The state of `name` before its first step, as `Rule.start` has it, where its master is."""
        return rule.start(self.masters[name], parameter)

    def run(self, update: Callable[[], None], *, count: int, last: bool) -> None:
        """Runs an `update`, which `count` came before and which is the training's `last` one or not."""
        update()

    def settle(self) -> None:
        """To be called before masters and states are read or written: waits for an update that runs beside passes."""

    def delayed(self) -> dict[str, Tensor]:
        """The weights with which the next step computes, where they are not the rounded masters."""
        return {}

    def delay(self, weights: Mapping[str, Tensor]) -> None:
        """Restores `delayed`, after the masters."""

    def begin(self, buckets: Sequence[Sequence[str]], factor: float | Tensor) -> None:
        """To be called before an update, with the buckets in the order of their steps and the `factor` of `take_grads`."""

    def step(self, rule: Rule, entries: Sequence[Entry], names: Sequence[str], **numbers: Any) -> None:
        """The step of `rule` on a bucket; `numbers` as `Rule.step` has them."""
        rule.step(entries, **numbers)

    def drop_grads(self, names: Sequence[str] | None = None) -> None:
        """Clears the gradients of `names` (None: all)."""
        for name in self.parameters if names is None else names:
            self.parameters[name].grad = self.masters[name].grad = None

    @torch.no_grad()
    def publish(self, names: Sequence[str]) -> None:
        """Copies the masters of `names` to their parameters, with zeros where weights stay zero."""
        for name in names:
            if name in self.zeros:  # a step that mixes the entries of a gradient, as Muon's, reaches them too
                self.masters[name].masked_fill_(self.zeros[name], 0)
        if self.split:
            for name in names:
                self.parameters[name].copy_(self.masters[name])

    def stepped(self, names: Sequence[str]) -> None:
        """To be called in an update when the step of `names` is made and published."""

    def published(self) -> None:
        """To be called after an update, when the masters of all weights are published."""

    def ready(self) -> None:
        """To be called before weights are read that a pass has not waited for; those that are freed stay so."""

    @contextmanager
    def whole(self, path: str, *, wide: bool) -> Iterator[None]:
        """Inside, the weights of the part of the model at `path` ('layers.3', 'norm') are in memory, for it to be saved.

        With `wide` their float32 masters are in the parameters' place. Every rank calls it.
        """
        chosen = [name for name in self.parameters if name.startswith(f"{path}.")] if wide else []
        computed = {name: self.parameters[name].data for name in chosen}
        for name in chosen:
            self.parameters[name].data = self.masters[name].detach()
        try:
            yield
        finally:
            for name, values in computed.items():
                self.parameters[name].data = values


def scaled(grads: list[Tensor], factor: float | Tensor | None) -> list[Tensor]:
    """`grads` times `factor`, in place."""
    if isinstance(factor, Tensor) or factor not in (None, 1.0):
        torch._foreach_mul_(grads, factor)
    return grads


def describe_parameters(model: Decoder) -> dict[str, Parameter]:
    """The optimizer's description of each trained parameter of `model`."""
    config, cuts = getattr(model, "whole_config", model.config), getattr(model, "cuts", {})
    pieces = {
        f"layers.{index}.{path}.weight": tuple(piece.out_features for piece in linear.pieces)
        for index in range(config.num_layers)
        for path, linear in config.linears(index).items()
    }
    kinds: dict[str, Any] = dict.fromkeys(pieces, "matrix")
    kinds |= {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
    return {
        name: Parameter(
            kinds.get(name, "other"), cuts[name].shape if name in cuts else tuple(parameter.shape), pieces.get(name, ())
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def filled(mask: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient with zeros where `mask` is True; it may not be changed in place. None: a pipeline computes it later."""
    return None if gradient is None else gradient.masked_fill(mask, 0)


def _add_to(master: Tensor) -> Any:
    """A hook that adds a parameter's new gradient to its master's float32 sum."""

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None, "a gradient's hook without a gradient"
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add
