"""The weights of one decoder layer while transforms change them: scales move between an input's columns and its source.

Legend: N rows and K columns of a linear, C channels of a source (C < K where query heads share a value head).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hone.base.ranks import Mesh
from hone.compress.statistics import STATISTICS
from hone.model.linear_spec import Input, Norm, NormSpec, outputs_of
from hone.model.weights.model import ModelSource
from hone.model.weights.tensors import matrices

if TYPE_CHECKING:
    from hone.compress.step import Step


@dataclass(frozen=True)
class Producer:
    """Where an input of linears comes from, if a scale per channel can be moved into it: a norm, or rows of another linear."""

    readers: tuple[str, ...]
    """Paths of all linears of the layer that read it."""
    norm: str | None
    """Path of the norm's weight."""
    linear: str | None = None
    """Path of the linear whose output rows it is ..."""
    piece: str = ""
    """... and the piece of that linear."""
    shared: int = 1
    """Readers' heads to one head of the source: grouped key/value heads."""
    head_dim: int = 1


class LayerWeights:
    """Weights of layer `index` as transforms change them, and the statistics of its linears' inputs, which follow.

    `tensors` are the layer's checkpoint tensors (changed in place: those of norms, biases and dense linears); `statistics`
    those of each linear that is compressed (`targets`, by path), empty without calibration; `storing` the step that stores each, by
    path.
    Every rank of `mesh` has the same and makes the same changes.
    """

    def __init__(
        self,
        checkpoint: ModelSource,
        index: int,
        layer: nn.Module,
        tensors: dict[str, Tensor],
        statistics: dict[str, dict[str, Tensor]],
        targets: frozenset[str],
        storing: Mapping[str, Step | None],
        mesh: Mesh | None = None,
    ) -> None:
        config = checkpoint.config
        self.tensors = tensors
        self.statistics = statistics
        self.targets = targets
        self.storing = storing
        self.mesh = mesh or Mesh()
        found = list(matrices(config, index))
        self.specs = {path: spec for path, spec, _ in found}
        self.modules = {path: modules for path, _, modules in found}
        self.parameters = config.parameters(index)
        self.names = config.singles(index)
        self.changed: dict[str, Tensor] = {}
        self._layer = layer

    def weight(self, path: str) -> Tensor:
        """The weight [N, K] of a linear in float32 (float64 if the checkpoint has it), on the layer's device."""
        if path in self.changed:
            return self.changed[path]
        return original(
            self._module(path).weight.detach(), [self.tensors[f"{name}.weight"] for name in self.modules[path]]
        )

    def sources(self) -> list[Producer]:
        """Every input of the layer's linears into whose source a scale can be moved."""
        readers: dict[Input, list[str]] = {}
        for path, spec in self.specs.items():
            readers.setdefault(spec.reads, []).append(path)
        found = [self._source(reads, paths) for reads, paths in readers.items()]
        return [one for one in found if one is not None]

    def rows(self, source: Producer) -> Tensor:
        """The rows [C, K] of the linear that `source` names."""
        assert source.linear is not None
        return self.weight(source.linear)[self._rows_of(source)]

    def inputs(self, readers: list[str], name: str, joined: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The statistic `name` [K] of an input: experts that read it have that of their own tokens, and `joined` makes one of two."""
        found = {id(self.statistics[path]): self.statistics[path][name] for path in readers}  # one where they share it
        return reduce(joined, found.values())

    def largest_read(self, source: Producer) -> Tensor:
        """The largest |weight| [C] by which the readers multiply each channel of `source`."""
        columns = torch.stack([self.weight(path).abs().amax(0) for path in source.readers]).amax(0)
        return self.per_channel(source, columns)

    def per_channel(self, source: Producer, values: Tensor) -> Tensor:
        """Largest of `values` [K] over the input features that belong to one channel of the source: [C]."""
        if source.shared == 1:
            return values
        return values.view(-1, source.shared, source.head_dim).amax(1).flatten()

    def per_feature(self, source: Producer, values: Tensor) -> Tensor:
        """`values` [C] for every input feature: [K]."""
        if source.shared == 1:
            return values
        return values.view(-1, 1, source.head_dim).expand(-1, source.shared, -1).flatten()

    def scale(self, source: Producer, scales: Tensor) -> None:
        """Multiplies the readers' columns by `scales` [C] > 0 and divides the source by them: the layer computes the same.

        A norm's weight is rounded to its stored dtype first, and the columns take the ratio that was reached.
        """
        scales = self._divide_norm(source, scales) if source.norm is not None else self._divide_rows(source, scales)
        wide = self.per_feature(source, scales)
        for path in source.readers:
            self._keep(path, self.weight(path) * wide)
        seen: set[int] = set()
        for path in source.readers:
            values = self.statistics.get(path, {})
            if id(values) not in seen:  # readers of one input share its statistics
                seen.add(id(values))
                values.update({name: STATISTICS[name].scaled(value, 1 / wide) for name, value in values.items()})

    def put(self) -> None:
        """Sets the layer's modules to the changed weights; norms, biases and dense linears as they are stored."""
        for path, weight in self.changed.items():
            _set(self._layer, f"{path}.weight", weight)
        self._put_rest()

    def put_stored(self) -> None:
        """Sets the layer's modules to `tensors`, those of a finished layer, but for linears that are stored as codes."""
        for path, names in self.modules.items():
            if all(f"{name}.weight" in self.tensors for name in names):
                _set(self._layer, f"{path}.weight", torch.cat([self.tensors[f"{name}.weight"] for name in names]))
        self._put_rest()

    def _put_rest(self) -> None:
        """Sets biases, norms and other parameters to `tensors`."""
        for path, spec in self.specs.items():
            if spec.bias:
                names = self.modules[path]
                _set(self._layer, f"{path}.bias", torch.cat([self.tensors[f"{name}.bias"] for name in names]))
        for path, name in self.names.items():
            _set(self._layer, path, self.tensors[name])

    def _module(self, path: str) -> nn.Module:
        return self._layer.get_submodule(path)

    def _source(self, reads: Input, paths: list[str]) -> Producer | None:
        """The source of an input; None when no scale can be moved into it."""
        specs = [self.specs[path] for path in paths]
        if any(spec.share != 1.0 for spec in specs):
            return None
        if isinstance(reads, Norm):
            multiplied = any(getattr(one, "multiplied", False) for one in self.parameters.values())
            return None if multiplied else Producer(tuple(paths), f"{reads.name}.weight")
        last = (None, *outputs_of(reads))[-1]
        if last is None:
            return None
        heads, columns = specs[0].in_heads, specs[0].in_features
        shared, left = divmod(columns, self.specs[last.linear].piece(last.piece).out_features)
        if left or (shared > 1 and heads is None):
            return None
        return Producer(tuple(paths), None, last.linear, last.piece, shared, columns // heads if heads else 1)

    def _divide_norm(self, source: Producer, scales: Tensor) -> Tensor:
        """Divides a norm's weight; the scales that were reached with the weight in its stored dtype."""
        assert source.norm is not None
        norm = self.parameters[source.norm]
        name, offset = self.names[source.norm], norm.offset if isinstance(norm, NormSpec) else 0.0
        stored = self.tensors[name]
        before = stored.to(scales) + offset
        made = (before / scales - offset).to(stored.dtype)
        after = made.to(scales) + offset
        lost = (after == 0) | ~torch.isfinite(after)  # a channel that cannot take its scale keeps its weight
        made = torch.where(lost.to(stored.device), stored, made.to(stored.device))
        self.tensors[name] = made
        return torch.where(lost, torch.ones_like(scales), before / after)

    def _divide_rows(self, source: Producer, scales: Tensor) -> Tensor:
        """Divides the rows (and biases) of a piece of a linear."""
        assert source.linear is not None
        spec, rows = self.specs[source.linear], self._rows_of(source)
        weight = self.weight(source.linear).clone()
        weight[rows] /= scales[:, None].to(weight.dtype)
        self._keep(source.linear, weight)
        if spec.bias:
            names = self.modules[source.linear]
            bias = torch.cat([self.tensors[f"{name}.bias"] for name in names])
            changed = bias.to(scales)
            changed[rows] /= scales
            for name, part in zip(names, changed.to(bias).split(list(names.values())), strict=True):
                self.tensors[f"{name}.bias"] = part.contiguous()
        return scales

    def _rows_of(self, source: Producer) -> slice:
        """The rows of a source's piece in its linear."""
        assert source.linear is not None
        begin = 0
        for piece in self.specs[source.linear].pieces:
            if piece.name == source.piece:
                return slice(begin, begin + piece.out_features)
            begin += piece.out_features
        raise AssertionError(f"{source.linear} has no piece {source.piece}")

    def _keep(self, path: str, weight: Tensor) -> None:
        """Keeps the changed weight of a linear: in float32 when it is compressed, else in the dtype it is stored in."""
        if path not in self.targets:
            names = self.modules[path]
            dtype = self.tensors[f"{next(iter(names))}.weight"].dtype
            weight = weight.to(dtype)
            for name, part in zip(names, weight.split(list(names.values())), strict=True):
                self.tensors[f"{name}.weight"] = part.cpu().contiguous()
            weight = weight.to(torch.promote_types(dtype, torch.float32))
        self.changed[path] = weight


def original(computed: Tensor, stored: list[Tensor]) -> Tensor:
    """The weight in float32 (float64 if the checkpoint has it), from the layer's weight if its dtype is exact."""
    dtype = torch.promote_types(stored[0].dtype, torch.float32)
    if torch.promote_types(stored[0].dtype, computed.dtype) == computed.dtype:
        return computed.to(dtype)
    return torch.cat([one.to(computed.device, dtype) for one in stored])


def _set(layer: nn.Module, path: str, value: Tensor) -> None:
    """Replaces a parameter or buffer of `layer`, in its dtype and on its device."""
    owner, _, attribute = path.rpartition(".")
    module = layer.get_submodule(owner)
    old = getattr(module, attribute)
    new = value.to(old)
    setattr(module, attribute, nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new)
