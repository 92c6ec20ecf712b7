"""The decoder of a rank that has a part of some weights: cut from whole weights, and whole again with those of the other ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder, unmade
from hone.model.linear import MakeLinear
from hone.model.quantized.hadamard import input_hadamard
from hone.model.quantized.nf4 import NF4
from hone.parallel.axis import Axis
from hone.parallel.cut import Cut


class PartDecoder(Decoder):
    """Rank `axis.index` of a decoder whose weights `whole` has (float32, a teacher's in any dtype); it has the layers of `config`, whose
    linears `make` makes, on the meta device until `take`.

    `cuts` are the parts by parameter; parameters without one are held by all ranks.
    """

    def __init__(self, whole: Decoder, config: ModelConfig, axis: Axis, make: MakeLinear) -> None:
        with torch.device("meta"):
            super().__init__(config, make)
        self.whole_config, self.axis = whole.config, axis
        self.cuts: Mapping[str, Cut] = {}
        self._empty: list[Decoder] = []

    def take(self, whole: Decoder, cuts: Mapping[str, Cut]) -> None:
        """Takes the parts `cuts` of the weights of `whole`, which are copied; all others whole."""
        self.cuts = cuts
        self.adopt(self, whole)
        self.maker = None if whole.maker is None else _Cutter(whole, self)

    def adopt(self, own: nn.Module, whole: nn.Module, path: str = "") -> None:
        """Gives `own`, the part of this decoder at `path`, its parts of the parameters of `whole`."""
        given, head = dict(whole.named_parameters()), f"{path}." if path else ""
        for rest, module in list(whole.named_modules()):
            name = head + rest
            if input_hadamard(module) or hasattr(module, "table"):
                raise SpecError(
                    f"{name} is a quantized embedding, or multiplies its inputs by a Hadamard matrix, and ranks divide neither",
                    fix="set parallelism.tensor_parallel_degree to 1; data_parallel zero3 divides what is frozen, too",
                )
            if isinstance(module, NF4):
                every = Cut((module.out_features, module.in_features), 0, ((0, module.out_features),))
                cut = self.cuts.get(f"{name}.weight", every)
                own.set_submodule(rest, module.cut(cut, bias=cut is every or f"{name}.bias" in self.cuts))
        for rest, _ in list(own.named_parameters()):
            name, value = head + rest, given[rest].detach()
            value = self.cuts[name].take(value) if name in self.cuts else value.clone()
            owner, _, last = rest.rpartition(".")
            parameter = nn.Parameter(value, given[rest].requires_grad)
            setattr(own.get_submodule(owner), last, parameter)
            self.adopted(name, parameter)

    def adopted(self, name: str, parameter: nn.Parameter) -> None:
        """After parameter `name` has got its values, or its place on the meta device."""

    def axes_of(self, name: str) -> tuple[Axis, ...]:
        """The axes whose ranks have parts of weight `name`."""
        return (self.axis,)

    def part_of(self, name: str) -> Any:
        """For optimizers that need the whole of weight `name`; None where this rank has all that they need."""
        return None

    @torch.no_grad()
    def gather(self, part: nn.Module, path: str, dtype: torch.dtype, *, keep: bool) -> nn.Module | None:
        """The part of the whole decoder at `path` with the weights of all ranks; None unless `keep`. Every rank of the axes calls it.

        `part` is this rank's, with its weights in `dtype`.
        """
        if not self._empty:
            self._empty.append(unmade(self.whole_config))
        whole, own = copy.deepcopy(self._empty[0].get_submodule(path)), dict(part.named_parameters())
        for name, empty in list(whole.named_parameters()):
            value, device, whole_name = own.get(name), next(iter(own.values())).device, f"{path}.{name}"
            if value is None:  # another rank has it: a bias
                value = self._summed(whole_name, torch.zeros(empty.shape, dtype=dtype, device=device))
            else:
                value = self.joined(whole_name, value)
            if keep:
                owner, _, last = name.rpartition(".")
                setattr(whole.get_submodule(owner), last, nn.Parameter(value.detach(), requires_grad=False))
        return whole if keep else None

    @torch.no_grad()
    def joined(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Parameter `name` with the parts of all ranks, of which `value` is this one's. Every rank of the axes calls it."""
        cut = self.cuts.get(name)
        if cut is None:
            return value.detach()
        found = value.new_zeros(cut.shape)
        cut.put(value, found)
        return self._summed(name, found)

    def _summed(self, name: str, found: torch.Tensor) -> torch.Tensor:
        for axis in self.axes_of(name):
            transfer = axis.all_reduce(found)
            if transfer is not None:
                transfer.wait()
        return found


class _Cutter:
    """Makes the parts of `own` of those of `whole`, each of which it makes, cuts and forgets."""

    def __init__(self, whole: Decoder, own: PartDecoder) -> None:
        self._whole, self._own = whole, own

    def make(self, part: nn.Module, path: str) -> None:
        """As `hone.model.decoder.Maker.make`."""
        whole = self._whole.get_submodule(path)
        assert self._whole.maker is not None, "a decoder on the meta device has a maker"
        self._whole.maker.make(whole, path)
        self._own.adopt(part, whole, path)
        whole.to("meta")
