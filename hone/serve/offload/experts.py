"""Experts whose weights live in host memory: a layer has room for some on the device, and those that its tokens visit are copied there.

While a layer computes, the experts that the next one will probably visit are copied beside: the next layer's router is asked with
this layer's input, as the residual stream changes little from layer to layer (Eliseev and Mazur 2023, arXiv:2312.17238; here the
input is rescaled by the ratio of both norms' weights, so that it is what the next norm would give now). What leaves is the expert
used longest ago (lru), or visited least often (lfu). Results are those of experts on the device: an expert multiplies the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hone.model.context import Context
from hone.model.feed_forwards.moe import MoELayer
from hone.model.linear import ExpertLinears, Experts
from hone.model.routers.routes import ByToken
from hone.serve.offload.pinned import host_memory

_ALIGNED = 256
"""Bytes that each tensor's place in an expert's bytes is a multiple of, as for tensors of their own."""


@dataclass
class CacheCounts:
    """What happened to the caches of all layers since the start."""

    visits: int = 0
    """Experts that had tokens, added up over layers and passes."""
    hits: int = 0
    """Those of them whose weights were on the device, or on their way there."""
    prefetched: int = 0
    """Hits of weights that were copied ahead and not used before."""
    copied_bytes: int = 0
    """Bytes from the host to the device."""
    chosen: int = 0
    """Visits in layers whose router was asked ahead."""
    expected: int = 0
    """Those of them that it then named."""

    @property
    def hit_rate(self) -> float:
        """Of the visits, the part that waited for no copy of its own."""
        return self.hits / max(self.visits, 1)


class ExpertSlots(nn.Module):
    """A linear of E experts of which `num_slots` have their weights on the device. It has the `forward` of `Experts`.

    `load` brings experts; `forward` brings those that have rows, in parts where they are more than slots.
    """

    def __init__(
        self,
        linear: Experts | ExpertLinears,
        num_slots: int,
        eviction: str,
        side: Any,
        counts: CacheCounts,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._dense, self._eviction, self._side, self.counts, self._device = (
            isinstance(linear, Experts),
            eviction,
            side,
            counts,
            device,
        )
        if isinstance(linear, Experts):
            experts = [
                [one[expert] for one in (linear.weight, linear.bias) if one is not None]
                for expert in range(len(linear.weight))
            ]
        else:
            experts = [_tensors(one) for one in linear]
        shapes = [(one.shape, one.stride(), one.dtype) for one in experts[0]]
        assert all([(one.shape, one.stride(), one.dtype) for one in own] == shapes for own in experts), (
            "experts are stored alike"
        )
        begins, end = [], 0
        for one in experts[0]:
            begins.append(end)
            end += -(-one.numel() * one.element_size() // _ALIGNED) * _ALIGNED
        self.expert_bytes = end
        host = host_memory(len(experts) * end, pin=side is not None).view(len(experts), end)
        room = torch.empty(num_slots, end, dtype=torch.uint8, device=device)
        self._host = host
        self.register_buffer("_room", room, persistent=False)
        self.slots = nn.ModuleList()
        self._views: list[list[Tensor]] = []
        for expert, own in enumerate(experts):
            for begin, one in zip(begins, own):
                _view(host[expert], begin, one).copy_(one)
        for slot in range(num_slots):
            views = [_view(room[slot], begin, one) for begin, one in zip(begins, experts[0])]
            self._views.append(views)
            if not self._dense:
                _put(linear[slot], views)
                self.slots.append(linear[slot])
        self.out_features = linear.out_features if isinstance(linear, Experts) else linear[0].out_features
        self.slot_of: dict[int, int] = {}
        self._expert_in: list[int | None] = [None] * num_slots
        self._used, self._turn = [0] * num_slots, 0
        self._ahead = [False] * num_slots
        self._visits = [0] * len(experts)
        self.known: tuple[Tensor, list[int]] | None = None
        """Ends whose values the host has."""
        self.expected: set[int] | None = None
        """The experts that the router was expected to choose."""
        self._arrived = [torch.cuda.Event() for _ in range(num_slots)] if side is not None else []

    @property
    def num_slots(self) -> int:
        """Experts that fit on the device."""
        return len(self._views)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """As `Experts.forward`; waits for the ends."""
        known, self.known = self.known, None
        there = known[1] if known is not None and known[0] is ends else ends.tolist()
        spans = {expert: span for expert, span in enumerate(zip([0, *there], there)) if span[1] > span[0]}
        visited, out = list(spans), []
        for first in range(0, len(visited), self.num_slots):
            some = visited[first : first + self.num_slots]
            self.load(some)
            for expert in some:
                begin, end = spans[expert]
                out.append(self._product(x[begin:end], self.slot_of[expert]))
        return torch.cat(out) if out else x.new_empty(0, self.out_features)

    def visited(self, experts: Iterable[int]) -> None:
        """Counts a pass in which `experts` have rows, before they are loaded."""
        experts = set(experts)
        if self.expected is not None:
            self.counts.chosen += len(experts)
            self.counts.expected += len(experts & self.expected)
            self.expected = None
        for expert in experts:
            slot = self.slot_of.get(expert)
            self._visits[expert] += 1
            self.counts.visits += 1
            if slot is not None:
                self.counts.hits += 1
                self.counts.prefetched += self._ahead[slot]
                self._ahead[slot] = False

    def load(self, experts: Sequence[int], *, ahead: bool = False) -> None:
        """Starts the copies of those of `experts` that are not on the device; at most as many as there are slots."""
        assert len(experts) <= self.num_slots, f"{len(experts)} experts and {self.num_slots} slots"
        self._turn += 1
        for expert in experts:
            if expert in self.slot_of:
                self._used[self.slot_of[expert]] = self._turn
        missing = [expert for expert in experts if expert not in self.slot_of]
        if missing and self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))  # what still reads the slots
        for expert in missing:
            slot = self._leaving(experts)
            gone = self._expert_in[slot]
            if gone is not None:
                del self.slot_of[gone]
            self.slot_of[expert], self._expert_in[slot] = slot, expert
            self._used[slot], self._ahead[slot] = self._turn, ahead
            self._copy(expert, slot)

    def _leaving(self, kept: Sequence[int]) -> int:
        """The slot whose expert leaves: an empty one, else by the eviction, none of `kept`."""
        free = [slot for slot, expert in enumerate(self._expert_in) if expert is None or expert not in kept]
        if self._eviction == "lfu":
            return min(free, key=lambda slot: (self._times(slot), self._used[slot]))
        return min(free, key=lambda slot: (self._expert_in[slot] is not None, self._used[slot]))

    def _times(self, slot: int) -> int:
        expert = self._expert_in[slot]
        return -1 if expert is None else self._visits[expert]

    def _copy(self, expert: int, slot: int) -> None:
        self.counts.copied_bytes += self.expert_bytes
        if self._side is None:
            self._room[slot].copy_(self._host[expert])
            return
        with torch.cuda.stream(self._side):
            self._room[slot].copy_(self._host[expert], non_blocking=True)
        self._arrived[slot].record(self._side)

    def _product(self, x: Tensor, slot: int) -> Tensor:
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived[slot])
        if not self._dense:
            return self.slots[slot](x)
        weight, *bias = self._views[slot]
        return x @ weight.T + bias[0] if bias else x @ weight.T


class ExpertStream:
    """The experts of one model in host memory. `take` each layer in order, then `open`. `device` may be a CPU: copies then end at once."""

    def __init__(
        self, device: torch.device, num_cached: int, *, eviction: Literal["lru", "lfu"] = "lru", prefetch: bool = True
    ) -> None:
        self._device, self._num, self._eviction, self._prefetch = device, num_cached, eviction, prefetch
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._layers: list[tuple[MoELayer, nn.Module]] = []
        self.counts = CacheCounts()

    @property
    def host_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(each._host.numel() for moe, _ in self._layers for each in (moe.gate_up, moe.down))

    def take(self, layer: nn.Module) -> None:
        """Moves the experts of a decoder's layer to host memory, if it has some, as `check_cached` allows. Raises MachineError as `host_memory`."""
        moe = layer.feed_forward
        if not isinstance(moe, MoELayer):
            return
        for name in ("gate_up", "down"):
            own = CacheCounts() if name == "down" else self.counts  # an expert's two matrices are one visit
            setattr(
                moe, name, ExpertSlots(getattr(moe, name), self._num, self._eviction, self._side, own, self._device)
            )
        self._layers.append((moe, layer.feed_forward_norm))

    def open(self) -> None:
        """Makes every layer bring its experts, and ask the router of the next one which it will need."""
        for (moe, norm), (after, after_norm) in zip(self._layers, [*self._layers[1:], (None, None)]):
            turned = None
            if self._prefetch and after is not None:
                before, wanted = (
                    one.weight.detach().float() + getattr(one, "offset", 0.0) for one in (norm, after_norm)
                )
                turned = torch.where(before.abs() > 1e-3, wanted / before, 0)
            _Layer(moe, after, turned)


class _Layer:
    """What a layer does around its experts."""

    def __init__(self, moe: MoELayer, after: MoELayer | None, turned: Tensor | None) -> None:
        self._down, self._after, self._turned = moe.down, after if turned is not None else None, turned
        self._expected: Tensor | None = None
        if self._after is not None:
            moe.register_forward_pre_hook(self._ask)
        moe.gate_up.register_forward_pre_hook(self._bring)

    def _ask(self, _: nn.Module, given: tuple[Tensor, Context]) -> None:
        """Which experts the next layer's router would choose for this layer's input."""
        x, context = given
        assert self._after is not None and self._turned is not None
        seen = (x.float() * self._turned).to(x.dtype)
        routes = self._after._routes(seen.flatten(0, -2), seen, context)
        self._expected = routes.ids if isinstance(routes, ByToken) else None

    def _bring(self, gate_up: ExpertSlots, given: tuple[Tensor, Tensor]) -> None:
        """Starts the copies of this layer's experts, then those of the next one's."""
        ends = given[1].tolist()
        gate_up.known = self._down.known = given[1], ends
        visited = [expert for expert, (begin, end) in enumerate(zip([0, *ends], ends)) if end > begin]
        for one in (gate_up, self._down):
            one.visited(visited)
            if len(visited) <= one.num_slots:
                one.load(visited)
        if self._expected is None or self._after is None:
            return
        expected, self._expected = sorted(set(self._expected.flatten().tolist())), None
        for one in (self._after.gate_up, self._after.down):
            one.expected = set(expected)
            if len(expected) <= one.num_slots:
                one.load(expected, ahead=True)


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of an expert's linear; what only writing the folder again needs is dropped."""
    if getattr(module, "raw", None):
        module.raw = []
    assert not any(isinstance(value, Tensor) for value in vars(module).values()), (
        "all tensors are parameters or buffers"
    )
    return [*module.parameters(), *module.buffers()]


def _put(module: nn.Module, views: Sequence[Tensor]) -> None:
    """Makes `views` the tensors of the module, in the order of `_tensors`."""
    left = iter(views)
    for kind in ("_parameters", "_buffers"):
        for part in module.modules():
            for name, one in getattr(part, kind).items():
                if one is not None:
                    view = next(left)
                    getattr(part, kind)[name] = (
                        nn.Parameter(view, requires_grad=False) if kind == "_parameters" else view
                    )


def _view(memory: Tensor, begin: int, like: Tensor) -> Tensor:
    """A tensor as `like` in the bytes of `memory` from `begin` on."""
    flat = memory[begin : begin + like.numel() * like.element_size()].view(like.dtype)
    return flat.view(like.shape) if like.is_contiguous() else flat.as_strided(like.shape, like.stride())
