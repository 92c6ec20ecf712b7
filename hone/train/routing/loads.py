"""How busy the experts of a model were in a training step: counts of its routers, their figures, and the biases that follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.model.context import Context
from hone.model.decoder import Decoder

TIMES = 100
"""Steps of a training whose loads are logged expert by expert."""
_MOST_PASSES = 1 << 24


class LayerLoads(NamedTuple):
    """One layer in one step, summed over micro-batches and ranks."""

    experts: list[float]
    """Tokens that asked for each expert, before any were dropped."""
    dropped: float
    """Visits that a capacity dropped; with expert choice, tokens that no expert took."""
    entropy: float
    """Of the router's scores in nats, summed over tokens."""
    tokens: float
    """Tokens, padding included."""


class Loads(NamedTuple):
    """All layers with experts in one step, by their index."""

    layers: dict[int, LayerLoads]
    whole: bool
    """Whether the loads of every expert are logged, not their figures alone."""

    def row(self) -> dict[str, Any]:
        """Its part of a line of steps.jsonl: `expert_load` (the busiest expert's tokens / the mean's, in the worst layer),
        `expert_drops` (visits dropped / visits), `router_entropy` (nats, mean over layers), in some steps `expert_loads` by layer."""
        layers = self.layers.values()
        visits = sum(sum(one.experts) for one in layers)
        found: dict[str, Any] = {
            "expert_load": max(max(one.experts) * len(one.experts) / max(sum(one.experts), 1.0) for one in layers),
            "expert_drops": sum(one.dropped for one in layers) / max(visits, 1.0),
            "router_entropy": sum(one.entropy / max(one.tokens, 1.0) for one in layers) / len(self.layers),
        }
        if self.whole:
            found["expert_loads"] = {
                str(index): [int(count) for count in one.experts] for index, one in self.layers.items()
            }
        return found


class Routing:
    """The routers of `model`, which is in training: what they counted in a step, and the biases that its balance moves.

    A model without experts has none: `size` is 0. Where layers are compiled (`compiles`), their experts are not: how many rows an
    expert has differs in every pass. Counts are of all layers, those of other pipeline stages 0.
    """

    def __init__(self, model: Decoder, *, compiles: bool = False) -> None:
        self._device = next(model.parameters()).device
        self._elsewhere = any(not hasattr(layer, "feed_forward") for layer in model.layers)
        """Whether other pipeline stages have some of the layers."""
        blocks = {index: getattr(layer, "feed_forward", None) for index, layer in enumerate(model.layers)}
        self._layers: dict[int, Any] = {index: one for index, one in blocks.items() if getattr(one, "routed", False)}
        for one in self._layers.values() if compiles else ():
            one.forward = torch.compiler.disable(one.forward)
        specs = enumerate(layer.feed_forward for layer in model.config.layers)
        self._experts = {index: spec.num_experts for index, spec in specs if spec.kind == "moe"}
        self.size = sum(count + 3 for count in self._experts.values())
        """Numbers that a step's counts are."""
        self.summed: Tensor | None = None
        """The step's counts summed over passes and ranks, float64 [size] on the device; None: not yet."""

    def begin(self, context: Context, done: int, number: int) -> None:
        """Before micro-batch `number`, of those of all data-parallel ranks, of the step after `done` steps: sets what its random
        choices depend on."""
        if self.size:
            context.draw = done * _MOST_PASSES + number

    def counts(self, *passes: Mapping[int, Tensor], before: Tensor | None = None) -> Tensor | None:
        """What `passes` counted (`Context.routing`), added to what those `before` did: float64 [size]; None without experts."""
        if not self.size:
            return None
        for routed in passes:
            every = [
                routed.get(index, torch.zeros(count + 3, dtype=torch.float64, device=self._device))
                for index, count in self._experts.items()
            ]
            before = torch.cat(every) if before is None else before + torch.cat(every)
        return before

    def read(self, numbers: list[float], step: int, steps: int) -> Loads | None:
        """The counts of `step` of `steps`, summed over passes and ranks."""
        if not self.size:
            return None
        found, at = {}, 0
        for index, count in self._experts.items():
            found[index] = LayerLoads(numbers[at : at + count], *numbers[at + count : at + count + 3])
            at += count + 3
        return Loads(found, whole=step % max(1, steps // TIMES) == 0 or step == steps)

    @torch.no_grad()
    def stepped(self, loads: Loads | None) -> None:
        """After a step that changed the weights: moves the biases of layers whose balance has one.

        From `summed`, on the device: what the host knows it would have to copy there, and such a copy waits for all that the GPU was told to do.
        """
        if loads is None or self.summed is None:
            return
        alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        sizes = [part for count in self._experts.values() for part in (count, 3)]
        counted = dict(zip(self._experts, self.summed.split(sizes)[::2], strict=True))
        for index, one in self._layers.items():
            for rule in one.spec.balance:
                if rule.moves_bias:
                    alike.setdefault((rule, len(one.router_bias)), []).append((one.router_bias, counted[index]))
        for (rule, _), pairs in alike.items():
            biases, visits = (torch.stack(each) for each in zip(*pairs, strict=True))
            torch._foreach_copy_([bias for bias, _ in pairs], list(rule.moved(biases, visits)))
        self.summed = None

    def state(self, mesh: Mesh | None = None) -> dict[str, list[float]]:
        """The biases by layer, for a checkpoint: a float32 number is exact as a decimal. With `mesh`, whose ranks all call it, those of
        all pipeline stages."""
        own = {str(index): one.router_bias.tolist() for index, one in self._layers.items() if one.spec.bias}
        every = mesh.gather(own) if mesh is not None and self._elsewhere and self.size else [own]
        return {index: bias for one in every for index, bias in one.items()}

    @torch.no_grad()
    def restore(self, state: dict[str, list[float]]) -> None:
        """Restores what `state` gave."""
        for index, one in self._layers.items():
            if str(index) in state:
                one.router_bias.copy_(torch.tensor(state[str(index)], dtype=one.router_bias.dtype))
