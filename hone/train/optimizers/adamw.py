"""AdamW over float32 weights, or over float32 masters of half-precision ones, updated bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hone.base.lazy import lazy
from hone.base.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor, nn

torch = lazy("torch")

BUCKET_ELEMENTS = 1 << 26
"""Weights updated together: with half-precision weights only one bucket's gradients exist in float32 at a time."""


class AdamW(Spec):
    """AdamW, weight decay on matrices only. Loshchilov and Hutter 2017, arXiv:1711.05101."""

    lr: float = Field(1e-3, gt=0, description="Peak learning rate; the schedule scales it.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the running mean of gradients.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the running mean of squared gradients.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled decay of matrices (vectors such as norms have none).")


class Update:
    """The trained weights of `model` and what AdamW remembers of them.

    With `dtype` float32 the parameters themselves are trained. Otherwise each parameter is replaced by a copy in
    `dtype` and its float32 original becomes the master weight that AdamW trains: 2 + 4 + 8 bytes a weight, plus 2 for
    the gradient, or 4 more when `accumulate` sums the gradients of several micro-batches in float32.
    """

    def __init__(self, model: nn.Module, spec: AdamW, dtype: Any, *, accumulate: bool) -> None:
        self.spec = spec
        self.parameters = {name: part for name, part in model.named_parameters() if part.requires_grad}
        self.split = dtype != torch.float32
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}: build the model in float32"
            self.masters[name] = parameter.detach() if self.split else parameter
            if self.split:
                parameter.data = parameter.detach().to(dtype)
                if accumulate:
                    parameter.register_post_accumulate_grad_hook(_add_to(self.masters[name]))
        self.buckets = [(names, self._adamw(names)) for names in self._cut()]

    def _cut(self) -> Iterator[list[str]]:
        """Names of the parameters in buckets of about BUCKET_ELEMENTS; one bucket when nothing must be converted."""
        names: list[str] = []
        elements = 0
        for name, parameter in self.parameters.items():
            if names and self.split and elements + parameter.numel() > BUCKET_ELEMENTS:
                yield names
                names, elements = [], 0
            names.append(name)
            elements += parameter.numel()
        yield names

    def _adamw(self, names: list[str]) -> Any:
        weights = [self.masters[name] for name in names]
        groups = [
            {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": self.spec.weight_decay},
            {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.spec.lr,
            betas=(self.spec.beta1, self.spec.beta2),
            eps=self.spec.eps,
            fused=True,
        )

    def gradient(self, name: str) -> Tensor | None:
        """The summed gradient of parameter `name`, where it lies: beside the weight, or beside its master."""
        summed = self.masters[name].grad
        return summed if summed is not None else self.parameters[name].grad

    def norm(self) -> Tensor:
        """Float32 norm of all gradients together. A parameter without one is our bug."""
        gradients = []
        for name in self.parameters:
            gradient = self.gradient(name)
            assert gradient is not None, f"{name} got no gradient"
            gradients.append(gradient)
        norms = torch._foreach_norm(gradients, 2, torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))

    def apply(self, lr: float, factor: float) -> None:
        """One AdamW step with learning rate `lr` on the gradients times `factor`; drops the gradients."""
        for names, optimizer in self.buckets:
            for name in names:
                gradient = self.gradient(name)
                # In float32 the gradient is scaled where it lies; a half-precision one is widened first.
                self.masters[name].grad = gradient.float() if self.split else gradient
                self.parameters[name].grad = None if self.split else gradient
            if factor != 1.0:
                torch._foreach_mul_([self.masters[name].grad for name in names], factor)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            if self.split:
                with torch.no_grad():
                    for name in names:
                        self.parameters[name].copy_(self.masters[name])
            optimizer.zero_grad(set_to_none=True)

    def drop(self) -> None:
        """Forgets the gradients of a step that is skipped."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.masters[name].grad = None

    def state(self) -> dict[str, Tensor]:
        """Float32 weights and moments by name: 'weight.NAME', 'exp_avg.NAME', 'exp_avg_sq.NAME', and 'updates'."""
        tensors = {f"weight.{name}": master.detach() for name, master in self.masters.items()}
        updates = 0.0
        for names, optimizer in self.buckets:
            for name in names:
                moments = optimizer.state.get(self.masters[name])
                if moments:
                    tensors[f"exp_avg.{name}"] = moments["exp_avg"]
                    tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
                    updates = moments["step"].item()
        tensors["updates"] = torch.tensor(updates)
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Takes up what `state` gave."""
        updates = tensors["updates"].item()
        with torch.no_grad():
            for names, optimizer in self.buckets:
                for name in names:
                    master = self.masters[name]
                    master.copy_(tensors[f"weight.{name}"])
                    if self.split:
                        self.parameters[name].copy_(master)
                    if updates:
                        optimizer.state[master] = {
                            "step": torch.tensor(updates, device=master.device),
                            "exp_avg": tensors[f"exp_avg.{name}"].to(master.device),
                            "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(master.device),
                        }


def _add_to(master: Tensor) -> Any:
    """A hook that moves a parameter's fresh gradient into its master's float32 sum."""

    def add(parameter: Tensor) -> None:
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add
