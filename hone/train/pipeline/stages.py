"""The stages of a decoder: which layers each has, and the decoder of a rank without what other ranks have."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hone.base.errors import SpecError
from hone.cost.train.timed import Timed
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
from hone.model.parallel.local import joined_layers
from hone.parallel.axis import Axis
from hone.parallel.place import stages_of


def divide(config: ModelConfig, num_stages: int, seq_len: int, timed: Timed | None = None) -> list[range]:
    """The layers of each stage, such that the one that takes longest is as short as possible: in seconds, or where no machine is
    known that was calibrated in operations a token.

    The embedding counts to the first and the head to the last one. Raises SpecError when there are fewer places to divide at,
    because there are fewer layers, or layers read the keys of earlier ones.
    """
    if timed is None:
        dims = config.dims()
        costs = [2.0 * one.matmul_params + one.mixing.mixing_flops(seq_len) for one in dims.layers]
        timed = Timed(tuple(costs), 0.0, 2.0 * dims.vocab_size * dims.hidden_size)
    try:
        return stages_of(timed.layers, num_stages, (timed.embedding, timed.head), joined_layers(config))
    except SpecError as error:
        fix = "lower parallelism.pipeline_parallel_degree, or take a schedule with one stage a rank"
        raise SpecError(error.what, fix=fix) from None


class Elsewhere(nn.Module):
    """In the place of a part of the model that other ranks have. `empty` is that part on the meta device."""

    mixer = None

    def __init__(self, empty: nn.Module) -> None:
        super().__init__()
        self._empty = [empty.to("meta")]  # in a list: its parameters are not this module's

    def made(self, device: torch.device) -> nn.Module:
        """The part with memory on `device`, without values."""
        return copy.deepcopy(self._empty[0]).to_empty(device=device)

    def forward(self, *_: Any) -> Tensor:
        """There is nothing to compute."""
        raise AssertionError("another rank computes this part of the model")


class Stages:
    """The stages `held` of a decoder with `layers` for each stage: what this rank of the axis has of it.

    `holders[name]` are the ranks of the axis that have a weight, in their order.
    """

    def __init__(self, model: Decoder, layers: Sequence[range], held: Sequence[Sequence[int]], axis: Axis) -> None:
        self.layers, self.held, self.axis = list(layers), held[axis.index], axis
        last, tied = len(layers) - 1, model.lm_head is None
        parts = {f"layers.{index}": {stage} for stage, part in enumerate(layers) for index in part}
        parts |= {"embed_tokens": {0, last} if tied else {0}, "norm": {last}}
        parts |= {} if tied else {"lm_head": {last}}
        ranks = {
            path: tuple(rank for rank, own in enumerate(held) if stages & set(own)) for path, stages in parts.items()
        }
        self.holders = {
            name: ranks[path]
            for path in parts
            for name in (f"{path}.{last}" for last, _ in model.get_submodule(path).named_parameters())
        }
        for path in (path for path, owners in ranks.items() if axis.index not in owners):
            _put(model, path, Elsewhere(model.get_submodule(path)))

    def modules(self, model: Decoder) -> dict[int, nn.Module]:
        """The modules of each stage of this rank."""
        found = {}
        for stage in self.held:
            parts = [model.layers[index] for index in self.layers[stage]]
            parts += [model.embed_tokens] if stage == 0 else []
            if stage == len(self.layers) - 1:
                tail = (model.norm, model.embed_tokens if model.lm_head is None else model.lm_head)
                parts += [one for one in tail if all(one is not other for other in parts)]
            found[stage] = nn.ModuleList(parts)
        return found

    @torch.no_grad()
    def gather(self, model: Decoder, path: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The part of `model` at `path` with its weights, which are in `dtype` on `device`; every rank of the axis calls it.

        Those that are not trained, such as biases of routers, are in float32, as ranks hold them.
        """
        part = model.get_submodule(path)
        if isinstance(part, Elsewhere):
            part = part.made(device)
            for parameter in part.parameters():
                parameter.data = parameter.data.to(dtype if parameter.requires_grad else torch.float32)
        for name, parameter in part.named_parameters():
            owners = self.holders[f"{path}.{name}"]
            mine = owners[0] == self.axis.index
            value = parameter.detach().clone() if mine else torch.zeros_like(parameter)
            transfer = self.axis.all_reduce(value)
            if transfer is not None:
                transfer.wait()
            if self.axis.index not in owners:
                parameter.data = value
        return part


def _put(model: nn.Module, path: str, part: nn.Module) -> None:
    """Replaces the part of `model` at `path`."""
    owner, _, last = path.rpartition(".")
    parent = model.get_submodule(owner)
    if isinstance(parent, nn.ModuleList):
        parent[int(last)] = part
    else:
        setattr(parent, last, part)
