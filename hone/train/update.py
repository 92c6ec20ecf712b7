"""The update: applies the rule of each group to its weights, bucket by bucket, and holds the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hone.cost.memory import BUCKET
from hone.model.decoder import Decoder
from hone.train.optimizers.base import Entry, Group, Optimizer
from hone.train.weights import Weights, describe_parameters


class Update:
    """One optimizer over all trained weights of `model`, which compute in `dtype`; see `Weights` for `accumulate` and `zeros`.

    Half-precision gradients are converted to float32 one bucket at a time, to save memory.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: Optimizer,
        dtype: torch.dtype,
        *,
        accumulate: bool,
        zeros: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.parameters = describe_parameters(model)
        self.weights = Weights(model, dtype, accumulate=accumulate, zeros=zeros)
        self.groups = optimizer.groups(self.parameters)
        grouped = [name for group in self.groups for name in group.names]
        assert sorted(grouped) == sorted(self.parameters), "every parameter must belong to exactly one group"
        self.states: dict[str, dict[str, Tensor]] = {}
        """Optimizer state by parameter; empty before the first step."""
        self.count = 0
        """Steps applied; skipped ones are not counted."""

    @torch.no_grad()
    def apply(self, lr: float, factor: float) -> None:
        """One step with learning rate `lr` on the gradients times `factor`; drops the gradients."""
        self.count += 1
        for group in self.groups:
            for names in self._buckets(group):
                grads = self.weights.take_grads(names, factor)
                entries = [self._entry(name, grad, group) for name, grad in zip(names, grads, strict=True)]
                group.rule.step(entries, count=self.count, lr=lr * group.lr_factor, weight_decay=group.weight_decay)
                self.weights.publish(names)

    def _entry(self, name: str, grad: Tensor, group: Group) -> Entry:
        master = self.weights.masters[name]
        if name not in self.states:
            self.states[name] = group.rule.start(master)
        return Entry(master, grad, self.states[name], self.parameters[name])

    def _buckets(self, group: Group) -> Iterator[list[str]]:
        """Names of the group in buckets of about BUCKET numbers; one bucket when no gradient must be converted."""
        names: list[str] = []
        numbers = 0
        for name in group.names:
            size = self.weights.masters[name].numel()
            if names and self.weights.split and numbers + size > BUCKET:
                yield names
                names, numbers = [], 0
            names.append(name)
            numbers += size
        yield names

    def state(self) -> dict[str, Tensor]:
        """'weight.NAME' the float32 weights, 'KEY.NAME' the optimizer state, 'updates' the steps applied."""
        tensors = {f"weight.{name}": master.detach() for name, master in self.weights.masters.items()}
        for name, state in self.states.items():
            tensors |= {f"{key}.{name}": tensor for key, tensor in state.items()}
        tensors["updates"] = torch.tensor(float(self.count))
        return tensors

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restores the result of `state`."""
        self.count, self.states = int(tensors["updates"].item()), {}
        for label, tensor in tensors.items():
            key, _, name = label.partition(".")
            if name in self.parameters:
                master = self.weights.masters[name]
                if key == "weight":
                    master.copy_(tensor)
                else:
                    self.states.setdefault(name, {})[key] = tensor.to(master.device)
        self.weights.publish(list(self.parameters))
