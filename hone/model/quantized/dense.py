"""A quantized folder read as a dense one: the weights of its linears are dequantized one module at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.config import ModelConfig
from hone.model.quantized.config import read as config_of
from hone.model.quantized.hadamard import multiply
from hone.model.quantized.kv_cache import scale_names
from hone.model.quantized.layouts import layout_of, shapes_of
from hone.model.quantized.scheme import Scheme
from hone.model.weights.model import ModelSource
from hone.model.weights.source import View
from hone.model.weights.tensors import modules
from hone.model.weights.values import misfit


class Quantized(NamedTuple):
    """A quantized linear or embedding of a checkpoint."""

    name: str
    rows: int
    columns: int
    scheme: Scheme
    hadamard: int = 0
    """Size of the Hadamard matrices with which its inputs are multiplied; 0 for none."""

    @property
    def tensors(self) -> list[str]:
        """Names of its tensors, without a bias."""
        return [f"{self.name}.{suffix}" for suffix in shapes_of(self.scheme, self.rows, self.columns)]


def quantized_modules(config: ModelConfig, quantization: dict[str, Any]) -> Iterator[Quantized]:
    """Every linear that a `quantization_config` describes, and the embedding. Raises ArtifactError for a config hone cannot run."""
    parsed = config_of(quantization)
    for module in modules(config):
        name, (rows, columns) = module.name, module.shape
        scheme, size = parsed.scheme(name), parsed.hadamard(name, columns)
        if scheme is not None:
            yield Quantized(name, rows, columns, scheme, size)
        elif size:
            raise ArtifactError(
                f"transform_config multiplies the inputs of {name}, which is not quantized",
                fix="start from the checkpoint it was made from",
            )


def cache_scales(config: ModelConfig, quantization: dict[str, Any]) -> set[str]:
    """Names of the scales of the KV cache that a `quantization_config` describes."""
    layers = range(config.num_layers) if config_of(quantization).kv_cache is not None else ()
    return {name for index in layers for name in scale_names(config, index).values()}


class DenseWeights(View):
    """The weights of a quantized folder with a `weight` for each quantized linear and embedding, dequantized to `dtype` when it is read.

    Where inputs were multiplied by Hadamard matrices, the weight is: the inputs of the dense linear are not.
    Scales of a KV cache are left out: its keys and values are not rounded.
    """

    def __init__(self, source: ModelSource) -> None:
        assert source.quantization is not None, f"{source.folder} is not quantized"
        super().__init__(source.weights)
        self.folder, self.dtype = source.folder, source.dtype
        found = quantized_modules(source.config, source.quantization)
        self._modules = {f"{one.name}.weight": one for one in found}
        self._scales = cache_scales(source.config, source.quantization)

    def names(self) -> list[str]:
        """As of a dense folder."""
        stored = self._scales.union(*(one.tensors for one in self._modules.values()))
        return [name for name in self.source.names() if name not in stored] + list(self._modules)

    def tensor(self, name: str) -> Tensor:
        """The stored tensor, or a dequantized weight. Raises ArtifactError when its parts do not fit each other."""
        one = self._modules.get(name)
        if one is None:
            return self.source.tensor(name)
        part = {}
        for suffix, shape in shapes_of(one.scheme, one.rows, one.columns).items():
            stored = f"{one.name}.{suffix}"
            tensor = self.source.tensor(stored)
            if shape != (-1,) and tuple(tensor.shape) != shape:
                raise misfit(self.source.file(stored), stored, tuple(tensor.shape), shape)
            part[suffix] = tensor
        try:
            weight = layout_of(one.scheme).read(one.scheme, part, one.columns).weight(self.dtype)
        except ArtifactError as error:
            raise ArtifactError(f"{self.folder}: {one.name}: {error.what}", fix=error.fix) from None
        return multiply(weight, one.hadamard) if one.hadamard else weight

    def file(self, name: str) -> Path:
        """The file of the tensor, or of the codes of a weight."""
        return self.source.file(self._modules[name].tensors[0] if name in self._modules else name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, from the config where it is dequantized."""
        one = self._modules.get(name)
        return self.source.shape(name) if one is None else (one.rows, one.columns)


def dequantized(source: ModelSource) -> ModelSource:
    """The quantized model of `source` as a dense one, in its dtype."""
    values = {key: value for key, value in source.values.items() if key != "quantization_config"}
    return ModelSource(source.folder, source.config, values, DenseWeights(source))
