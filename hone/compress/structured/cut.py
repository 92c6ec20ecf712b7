"""A cut: the layers, heads and channels of a model that stay, and weights that are only these of the whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hone.model.config import LayerSpec, ModelConfig
from hone.model.hf import config_values
from hone.model.linear_spec import AxisKind, LinearSpec, ParameterSpec, column_axis, is_router
from hone.model.weights.model import ModelSource
from hone.model.weights.source import View, WeightSource
from hone.model.weights.tensors import DeclaredTensor, Module, end_tensors, layer_tensors

Places = tuple[int, ...] | None
"""The rows or columns that stay, ascending; None: all."""


@dataclass(frozen=True)
class Cut:
    """What stays of a model: `layers`, in order; for each of them groups of heads, feed-forward channels and experts; hidden channels."""

    layers: tuple[int, ...]
    kv_heads: tuple[tuple[int, ...], ...] | None = None
    """Key/value heads, each with all the query heads that it serves; None: all."""
    intermediate: tuple[tuple[int, ...], ...] | None = None
    hidden: Places = None
    experts: tuple[tuple[int, ...], ...] | None = None
    """() of a layer without experts."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """The cut that `to_json` described."""
        nested = {
            name: values[name] and tuple(map(tuple, values[name])) for name in ("kv_heads", "intermediate", "experts")
        }
        return cls(tuple(values["layers"]), **nested, hidden=values["hidden"] and tuple(values["hidden"]))

    def config(self, source: ModelConfig) -> ModelConfig:
        """The config of what stays of `source`. Raises SpecError when such a stack is none."""
        layers = [self._layer(source.layers[index], place) for place, index in enumerate(self.layers)]
        hidden = source.hidden_size if self.hidden is None else len(self.hidden)
        # Validated again: a layer that reuses the keys of a removed layer, or balances devices that no longer divide its experts,
        # must be refused.
        values = {"layers": [layer.model_dump(mode="json") for layer in layers], "hidden_size": hidden}
        return ModelConfig.read({**source.model_dump(mode="json"), **values})

    def _layer(self, layer: LayerSpec, place: int) -> LayerSpec:
        update: dict[str, Any] = {}
        if self.kv_heads is not None:
            kept = len(self.kv_heads[place])
            sizes = {"num_heads": kept * layer.mixer.num_heads // num_groups(layer.mixer), "num_kv_heads": kept}
            sizes = {name: size for name, size in sizes.items() if name in type(layer.mixer).model_fields}
            update["mixer"] = layer.mixer.model_copy(update=sizes)
        if self.intermediate is not None:
            size = len(self.intermediate[place])
            update["feed_forward"] = layer.feed_forward.model_copy(update={"intermediate_size": size})
        if self.experts is not None and self.experts[place]:
            fewer = {"num_experts": len(self.experts[place])}
            update["feed_forward"] = update.get("feed_forward", layer.feed_forward).model_copy(update=fewer)
        return layer.model_copy(update=update)


def num_groups(mixer: Any) -> int:
    """Groups of heads that stay or leave together: key/value heads, or heads where each has keys of its own."""
    return getattr(mixer, "num_kv_heads", mixer.num_heads)


class CutTensor(NamedTuple):
    """Where a tensor of the cut model comes from: its name in the whole one, and the rows and columns that stay."""

    name: str
    rows: Places = None
    columns: Places = None

    def read(self, tensor: Tensor) -> Tensor:
        """The part of `tensor` that stays."""
        for axis, places in enumerate((self.rows, self.columns)):
            if places is not None:
                tensor = tensor.index_select(axis, torch.tensor(places, device=tensor.device))
        return tensor

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of that part of a tensor of shape `whole`."""
        axes = (self.rows, self.columns)[: len(whole)]
        kept = (size if places is None else len(places) for size, places in zip(whole, axes, strict=False))
        return (*kept, *whole[len(axes) :])


class CutWeights(View):
    """What a cut leaves of the weights of `source`, which may be cut themselves, under the names of a whole model."""

    def __init__(self, source: WeightSource, sources: dict[str, CutTensor]) -> None:
        super().__init__(source)
        self.sources = sources

    def names(self) -> list[str]:
        return list(self.sources)

    def tensor(self, name: str) -> Tensor:
        return self.sources[name].read(self.source.tensor(self.sources[name].name))

    def file(self, name: str) -> Path:
        return self.source.file(self.sources[name].name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.sources[name].shape(self.source.shape(self.sources[name].name))


def cut_model(source: ModelSource, cut: Cut) -> ModelSource:
    """What `cut` leaves of the model of `source`."""
    config = cut.config(source.config)
    weights = CutWeights(source, dict(_sources(source.config, config, cut)))
    return ModelSource(source.folder, config, config_values(config, source.dtype), weights)


def _sources(whole: ModelConfig, config: ModelConfig, cut: Cut) -> Iterator[tuple[str, CutTensor]]:
    """Every tensor of the cut model by name, and where it comes from."""
    for tensor in end_tensors(config):
        yield tensor.name, CutTensor(tensor.name, *((cut.hidden,) if len(tensor.shape) == 1 else (None, cut.hidden)))
    for place, index in enumerate(cut.layers):
        axes = _Axes(whole, index, cut, place)
        stay = ((tensor, axes.of(tensor)) for tensor in layer_tensors(whole, index))
        stay = (
            (tensor, places) for tensor, places in stay if places[0] != ()
        )  # those of an expert that leaves have no rows
        for (tensor, places), made in zip(stay, layer_tensors(config, place), strict=True):
            yield made.name, CutTensor(tensor.name, *places)


class _Axes:
    """The places that stay on each axis of the tensors of layer `index`, as its linears declare what their rows and columns are."""

    def __init__(self, whole: ModelConfig, index: int, cut: Cut, place: int) -> None:
        self.linears = whole.linears(index)
        self.hidden = cut.hidden
        self.intermediate = None if cut.intermediate is None else cut.intermediate[place]
        self.groups = None if cut.kv_heads is None else cut.kv_heads[place]
        self.num_groups = 1 if self.groups is None else num_groups(whole.layers[index].mixer)
        self.experts = (cut.experts[place] or None) if cut.experts is not None else None
        self.num_experts = {path.partition(".")[0]: one.experts for path, one in self.linears.items() if one.experts}
        self._parts: dict[str, list[tuple[int, int, Places]]] = {}

    def of(self, tensor: DeclaredTensor) -> tuple[Places, Places]:
        """The rows and columns of a tensor."""
        module, parameter = tensor.module, tensor.parameter
        if module is not None:
            rows = self.rows(module)
            if len(tensor.shape) == 1:
                return rows, None
            return rows, self._places(module.path, column_axis(self.linears, module.path), module.linear.in_features)
        if isinstance(parameter, ParameterSpec):
            scores = tensor.shape[0] == self.num_experts.get(tensor.path.partition(".")[0])
            axis = "experts" if scores else parameter.heads and "heads"
            return self._places(tensor.path, axis, tensor.shape[0]), None
        assert parameter is not None, f"{tensor.name} is no tensor of a layer"
        if parameter.over is None:
            return self.hidden if "." not in tensor.path.removesuffix(".weight") else None, None
        over = self.linears[parameter.over.linear]
        return self._places(tensor.path, over.row_axis(over.piece(parameter.over.piece)), tensor.shape[0]), None

    def rows(self, module: Module) -> Places:
        """The rows of a module, whose linear may have more; None: all, (): it leaves."""
        found: list[int] = []
        whole, first = True, module.rows.start
        for begin, count, places in self._parts_of(module.path, module.linear):
            if first <= begin < module.rows.stop:
                whole &= places is None
                found += (begin - first + row for row in (range(count) if places is None else places))
        return None if whole else tuple(found)

    def _parts_of(self, path: str, linear: LinearSpec) -> list[tuple[int, int, Places]]:
        """Of each piece of a linear, of every expert in turn, the first row, the number of rows, and those that stay."""
        if path not in self._parts:
            router, parts, begin = is_router(self.linears, path), [], 0
            for part, count in linear.parts.items():
                *expert, name = part.split(".")
                places = self._places(path, "experts" if router else linear.row_axis(linear.piece(name)), count)
                if expert and self.experts is not None and int(expert[-1]) not in self.experts:
                    places = ()
                parts.append((begin, count, places))
                begin += count
            self._parts[path] = parts
        return self._parts[path]

    def _places(self, path: str, axis: AxisKind | None, size: int) -> Places:
        """What stays of an axis of `size` entries in the block that `path` begins with."""
        if axis == "hidden":
            return self.hidden
        if axis == "experts":
            return self.experts
        if path.startswith("mixer."):
            if self.groups is None or axis not in ("heads", "kv_heads"):
                return None
            return _blocks(self.groups, size // self.num_groups)  # query heads stay with the key head that serves them
        return self.intermediate if axis == "channels" else None


def _blocks(places: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The entries of the blocks of `width` at `places`."""
    return tuple(place * width + offset for place in places for offset in range(width))
