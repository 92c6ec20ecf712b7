"""Experts on the ranks of an engine: where they are at first, what tokens asked for since, and moves between two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.families.config_json import from_hf
from hone.model.folder import CONFIG, read_json
from hone.model.linear import ExpertLinears
from hone.model.parallel.experts import PlacedMoELayer, Slots, even_slots
from hone.model.parallel.local import LocalDecoder
from hone.serve.experts.balancing import aligned, imbalance, placed
from hone.serve.spec import EngineSpec

_RECENT = 10
"""Lines of a training's log whose loads are added up: single steps are noisy, and a router changes while it is trained."""


def slots_of(spec: EngineSpec, folder: Path) -> Slots | None:
    """The experts of all ranks' slots when the engine starts, by layer; None where experts are not divided whole.

    Raises SpecError where they cannot be divided among the ranks, or the file of loads does not fit the model.
    """
    if not spec.enable_expert_parallel:
        return None
    config = from_hf(read_json(folder / CONFIG), str(folder / CONFIG))
    given, size = spec.eplb_config, spec.tensor_parallel_size
    slots = even_slots(config, size, given.num_redundant_experts)
    if given.loads is None:
        return slots
    loads = read_loads(Path(given.loads), config)
    return {index: placed(loads[index][None], size, given.num_redundant_experts)[0].tolist() for index in slots}


def read_loads(path: Path, config: ModelConfig) -> dict[int, np.ndarray]:
    """Tokens of every expert by layer, from a training's steps.jsonl or a JSON object. Raises SpecError where they do not fit the model."""
    try:
        text = path.read_text(encoding="utf8")
        rows = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]
        rows = [row.get("expert_loads", None if path.suffix == ".jsonl" else row) for row in rows]
        rows = [row for row in rows if row][-_RECENT:]
        found = {int(index): sum(np.array(row[index], dtype=np.float64) for row in rows) for index in rows[-1]}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise SpecError(
            f"eplb_config.loads {path} has no loads of experts: {type(error).__name__}: {error}",
            fix="give a training's steps.jsonl, or a JSON object {layer: [tokens of each expert]}",
        ) from None
    wanted = {i: one.feed_forward.num_experts for i, one in enumerate(config.layers) if one.feed_forward.sums_once}
    got = {index: np.shape(one) for index, one in found.items()}
    if got != {index: (count,) for index, count in wanted.items()}:
        raise SpecError(
            f"eplb_config.loads {path} is of experts {got} by layer, the model has {wanted}",
            fix="give the loads of this model",
        )
    return found


class ExpertPlacing:
    """The experts of one rank's model: counts of their visits, and moves of their weights. All ranks of the stage count alike."""

    def __init__(self, model: LocalDecoder) -> None:
        self.model = model
        self.layers: dict[int, PlacedMoELayer] = {
            index: layer.feed_forward
            for index, layer in zip(model.stage_layers, model.layers)
            if isinstance(layer.feed_forward, PlacedMoELayer)
        }
        for one in self.layers.values():
            one.count()
        self.moved_bytes = 0
        """Bytes of weights that this rank has received since the start."""

    def check_moves(self) -> None:
        """Raises SpecError where experts stay where they were read."""
        for index, layer in self.layers.items():
            for linear in (layer.gate_up, layer.down):
                if isinstance(linear, ExpertLinears) and not linear.alike:
                    raise SpecError(
                        f"experts of layer {index} are quantized in different formats, so that one's weights do not fit another's place",
                        fix="leave eplb_config.step_interval out, and place them at the start by eplb_config.loads",
                    )

    def loads(self) -> np.ndarray:
        """int64 [L, E]: visits asked for since `clear`. Waits for the device."""
        return torch.stack([one.counts for one in self.layers.values() if one.counts is not None]).cpu().numpy()

    def clear(self) -> None:
        """Begins to count anew."""
        for one in self.layers.values():
            if one.counts is not None:
                one.counts.zero_()

    def planned(self) -> tuple[dict[int, list[int]], str]:
        """The placement by the loads counted so far, and a line about it; layers that would not get better stay."""
        if not self.layers:
            return {}, "a stage without experts"
        loads, size = self.loads(), self.model.place.tensor_size
        before = np.array([one.spec.slots for one in self.layers.values()])
        after = aligned(placed(loads, size, before.shape[1] - loads.shape[1]), before, size)
        was, will = (imbalance(loads, slots, size) for slots in (before, after))
        better = will < was * (1 - 1e-9)
        found = {index: after[at].tolist() for at, index in enumerate(self.layers) if better[at]}
        moves = sum(int((after[at] != before[at]).sum()) for at in np.flatnonzero(better))
        each = sum(one.numel() * one.element_size() for one in _weights(next(iter(self.layers.values())), 0))
        return found, (
            f"experts of {len(found)} of {len(before)} layers move: the busiest rank has {was.mean():.2f} of the mean load, then "
            f"{np.where(better, will, was).mean():.2f}; {moves} experts, {moves * each / 1e6:.1f} MB"
        )

    @torch.inference_mode()
    def move(self, slots: Slots) -> None:
        """Gives every slot the weights of its new expert; all ranks of the stage call it with the same `slots`, between two steps."""
        for index, new in slots.items():
            layer = self.layers[index]
            self._move_layer(layer, tuple(layer.spec.slots), tuple(new))
            layer.arrange(new, layer.counts.device if layer.counts is not None else "cpu")
        self.clear()

    def _move_layer(self, layer: PlacedMoELayer, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        place, each = self.model.place, layer.spec.num_slots
        me, messages, coming = place.tensor_rank, [], []
        for slot, expert in enumerate(new):
            if old[slot] == expert:
                continue
            to, holders = slot // each, [one for one, held in enumerate(old) if held == expert]
            near = [one for one in holders if one // each == to]
            source = near[0] if near else holders[slot % len(holders)]
            sender = source // each
            if to == me:
                staged = [
                    torch.empty_like(one, memory_format=torch.contiguous_format) for one in _weights(layer, slot % each)
                ]
                coming.append((slot % each, staged))
                if sender == me:
                    for one, kept in zip(staged, _weights(layer, source % each)):
                        one.copy_(kept)
                    continue
                messages += [self._message(dist.irecv, one, sender) for one in staged]
                self.moved_bytes += sum(one.numel() * one.element_size() for one in staged)
            elif sender == me:
                messages += [self._message(dist.isend, one.contiguous(), to) for one in _weights(layer, source % each)]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        for slot, staged in coming:  # only now: others may have been sent what was there
            for one, kept in zip(_weights(layer, slot), staged):
                one.copy_(kept)
            for linear in (layer.gate_up, layer.down):
                if isinstance(linear, ExpertLinears):
                    linear.overwritten(slot)

    def _message(self, way: Any, tensor: Tensor, rank: int) -> dist.P2POp:
        peer = self.model.place.stage * self.model.place.tensor_size + rank
        return dist.P2POp(way, tensor.view(torch.uint8), peer, self.model.group.group)


def _weights(layer: PlacedMoELayer, slot: int) -> list[Tensor]:
    """The tensors of one slot's expert, as views: dense weights, or codes with their scales."""
    found: list[Tensor] = []
    for one in (layer.gate_up, layer.down):
        if isinstance(one, ExpertLinears):
            found += one.tensors_of(slot)
        else:
            found += [
                tensor[slot].detach() for tensor in (one.weight, getattr(one, "bias", None)) if tensor is not None
            ]
    return found
