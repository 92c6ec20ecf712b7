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
from hone.model.linear_spec import LinearSpec
from hone.model.weights.model import ModelSource
from hone.model.weights.source import View, WeightSource
from hone.model.weights.tensors import DeclaredTensor, end_tensors, layer_tensors

Places = tuple[int, ...] | None
"""The rows or columns that stay, ascending; None: all."""


@dataclass(frozen=True)
class Cut:
    """What stays of a model: `layers`, in order; for each of them groups of heads and feed-forward channels; hidden channels."""

    layers: tuple[int, ...]
    kv_heads: tuple[tuple[int, ...], ...] | None = None
    """Key/value heads, each with all the query heads that it serves; None: all."""
    intermediate: tuple[tuple[int, ...], ...] | None = None
    hidden: Places = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """The cut that `to_json` described."""
        nested = {name: values[name] and tuple(map(tuple, values[name])) for name in ("kv_heads", "intermediate")}
        return cls(tuple(values["layers"]), **nested, hidden=values["hidden"] and tuple(values["hidden"]))

    def config(self, source: ModelConfig) -> ModelConfig:
        """The config of what stays of `source`. Raises SpecError when such a stack is none."""
        layers = [self._layer(source.layers[index], place) for place, index in enumerate(self.layers)]
        hidden = source.hidden_size if self.hidden is None else len(self.hidden)
        # Validated again: a layer that reuses the keys of a removed layer must be refused.
        return ModelConfig.read({**source.model_dump(mode="json"), "layers": layers, "hidden_size": hidden})

    def _layer(self, layer: LayerSpec, place: int) -> LayerSpec:
        update: dict[str, Any] = {}
        if self.kv_heads is not None:
            groups = len(self.kv_heads[place])
            heads = groups * layer.mixer.num_heads // layer.mixer.num_kv_heads
            update["mixer"] = layer.mixer.model_copy(update={"num_heads": heads, "num_kv_heads": groups})
        if self.intermediate is not None:
            size = len(self.intermediate[place])
            update["feed_forward"] = layer.feed_forward.model_copy(update={"intermediate_size": size})
        return layer.model_copy(update=update)


class Source(NamedTuple):
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

    def __init__(self, source: WeightSource, sources: dict[str, Source]) -> None:
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


def _sources(whole: ModelConfig, config: ModelConfig, cut: Cut) -> Iterator[tuple[str, Source]]:
    """Every tensor of the cut model by name, and where it comes from."""
    for tensor in end_tensors(config):
        yield tensor.name, Source(tensor.name, *((cut.hidden,) if len(tensor.shape) == 1 else (None, cut.hidden)))
    for place, index in enumerate(cut.layers):
        axes = _Axes(whole.layers[index], cut, place)
        for tensor, made in zip(layer_tensors(whole, index), layer_tensors(config, place), strict=True):
            yield made.name, Source(tensor.name, *axes.of(tensor))


class _Axes:
    """The places that stay on each axis of one layer's tensors. Without a cut of channels it knows no name of a linear."""

    def __init__(self, layer: LayerSpec, cut: Cut, place: int) -> None:
        mixer = layer.mixer
        self.hidden = cut.hidden
        self.intermediate = None if cut.intermediate is None else cut.intermediate[place]
        self.keys = self.queries = None
        if cut.kv_heads is not None:
            groups, width = cut.kv_heads[place], mixer.head_dim
            self.keys = _blocks(groups, width)
            self.queries = _blocks(groups, width * (mixer.num_heads // mixer.num_kv_heads))
        whole = getattr(mixer, "qk_norm_over", "head") == "projection"
        self.norms = {"mixer.q_norm": self.queries, "mixer.k_norm": self.keys} if whole else {}

    def of(self, tensor: DeclaredTensor) -> tuple[Places, Places]:
        """The rows and columns of a tensor."""
        module = tensor.module
        if module is None:
            return self.single(tensor.path), None
        rows = self.rows(tensor.path, module.linear)
        if rows is not None:
            begin, end = module.rows.start, module.rows.stop
            rows = tuple(row - begin for row in rows if begin <= row < end)
        return rows, self.columns(tensor.path) if len(tensor.shape) > 1 else None

    def rows(self, path: str, linear: LinearSpec) -> Places:
        """The output rows of the linear at `path`, with its pieces stacked."""
        if linear.residual:
            return self.hidden
        by_piece = {"mixer.q": self.queries, "mixer.k": self.keys, "mixer.v": self.keys}
        by_piece |= {"feed_forward.gate": self.intermediate, "feed_forward.up": self.intermediate}
        block = path.partition(".")[0]
        found: list[int] = []
        begin, whole = 0, True
        for piece in linear.pieces:
            places = by_piece.get(f"{block}.{piece.name}")
            whole &= places is None
            found += (begin + row for row in (range(piece.out_features) if places is None else places))
            begin += piece.out_features
        return None if whole else tuple(found)

    def columns(self, path: str) -> Places:
        """The input features of the linear at `path`."""
        return {"mixer.out": self.queries, "feed_forward.down": self.intermediate}.get(path, self.hidden)

    def single(self, path: str) -> Places:
        """The entries of the norm or other parameter at `path`."""
        owner = path.rpartition(".")[0]
        if owner in ("mixer.q_norm", "mixer.k_norm"):
            return self.norms.get(owner)
        return self.hidden


def _blocks(places: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The entries of the blocks of `width` at `places`."""
    return tuple(place * width + offset for place in places for offset in range(width))
