"""A model that can be read: its config and a source of its weights, from which it is built whole, layer by layer or part by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from hone.base.errors import ArtifactError
from hone.model.adapters.token_rows import TokenRows
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder, DecoderLayer, parts_of
from hone.model.families.stored import refuse_unread
from hone.model.linear import LINEARS, Dense, ExpertLinears, MakeLinear, make_dense
from hone.model.linear_spec import LinearSpec, Tokens
from hone.model.quantized.hadamard import input_hadamard, multiply_inputs
from hone.model.quantized.kv_cache import add_rounding, rounding_paths
from hone.model.weights import values as checked
from hone.model.weights.source import WeightSource
from hone.model.weights.tensors import TABLES, expert_modules, table_name


class ModelSource:
    """The model of `config` with the weights of a source, read lazily: only the requested tensors are in memory.

    It is a source of weights itself, so that another can be a view of it. Subclasses read other things than whole tensors: they
    may override `build`, `load_layer`, `load_ends`, `load_linear`, `take` and `check`.
    Raises ArtifactError for a missing or corrupt file or tensor.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        values: dict[str, Any],
        weights: WeightSource,
        *,
        quantization: dict[str, Any] | None = None,
        hadamards: Mapping[str, int] | None = None,
    ) -> None:
        """`folder` has its tokenizer; `values` are those of its config.json; `quantization` is the quantization_config by which its
        weights are stored; dense linears in `hadamards` ('layers.3.mixer.out') multiply their inputs by Hadamard matrices of that size."""
        assert not (quantization and hadamards), "a quantization_config says itself which inputs are multiplied"
        self.folder = folder
        self.config = config
        self.values = values
        self.weights = weights
        self.quantization = quantization
        self.hadamards = hadamards or {}
        self.each_expert = False

    def viewed(self, weights: WeightSource) -> ModelSource:
        """The same model with its weights read from `weights`, a view of these."""
        found = copy(self)
        found.weights = weights
        return found

    def reopened(self) -> Self:
        """The same model with memory maps of its own, which are freed with it."""
        found = copy(self)
        found.weights = self.weights.reopened()
        return found

    def names(self) -> list[str]:
        """Every tensor's name."""
        return self.weights.names()

    def file(self, name: str) -> Path:
        """The file that holds the tensor called `name`."""
        return self.weights.file(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor called `name`."""
        return self.weights.shape(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU, in the dtype of the file; its memory is the mapped file."""
        return self.weights.tensor(name)

    def close(self) -> None:
        """Unmaps the files; they are opened again on the next read."""
        self.weights.close()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in config.json, else that of the embedding."""
        return checked.stated_dtype(self.values) or self.tensor("model.embed_tokens.weight").dtype

    def build_layer(
        self, index: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> DecoderLayer:
        """Layer `index` with its weights; `dtype` None keeps the checkpoint's."""
        with torch.device("meta"):
            layer = DecoderLayer(self.config.layers[index], self.config, index, self._maker())
            self._round_caches([layer])
        self.load_layer(layer, index, device, dtype or self.dtype)
        return layer

    def build_ends(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Decoder:
        """A decoder without layers: `embed` and `head` work, `layers` is empty."""
        with torch.device("meta"):
            decoder = Decoder(self.config.model_copy(update={"layers": ()}), self._maker())
        self.load_ends(decoder, device, dtype or self.dtype)
        return decoder

    def build(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Decoder:
        """The whole model. Raises ArtifactError for tensors that are missing, of the wrong shape, or not part of the model."""
        decoder, dtype = self.empty(), dtype or self.dtype
        self.load_ends(decoder, device, dtype)
        for index, layer in enumerate(decoder.layers):
            self.load_layer(layer, index, device, dtype)
            self.close()
        decoder.quantization = self.quantization
        return decoder

    def empty(self) -> Decoder:
        """The model on the meta device, without its weights. Raises ArtifactError as `build` does."""
        with torch.device("meta"):
            decoder = Decoder(self.config, self._maker())
            self._round_caches(decoder.layers)
        self.check(decoder)
        return decoder

    def check(self, decoder: Decoder) -> None:
        """Raises ArtifactError unless the folder has exactly the tensors of `decoder`, by name and shape (headers only)."""
        expected = expected_shapes(decoder)
        for name, shape in expected.items():
            found = self.shape(name)
            if not checked.fits(found, shape):
                raise checked.misfit(self.file(name), name, found, shape)
        refuse_unread({name: self.file(name) for name in self.names()}, expected, self.config)

    def with_each_expert(self) -> Self:
        """The same model with a linear for every expert in place of one for all of them (`ExpertLinears`)."""
        found = copy(self)
        found.each_expert = True
        return found

    def _maker(self) -> MakeLinear:
        """The maker of dense linears, which may multiply their inputs, or of those (and the embedding) that the quantization config describes."""
        if self.quantization is None and not self.hadamards and not self.each_expert:
            return make_dense

        def make(name: str, spec: LinearSpec) -> nn.Module:
            if spec.experts is None:
                return self._make_linear(name, spec, self._modules_of(name))
            made = self._make_experts(name, spec)
            alike = not self.each_expert and all(type(one) is Dense and not input_hadamard(one) for one in made)
            return make_dense(name, spec) if alike else made

        return make

    def _make_experts(self, name: str, spec: LinearSpec) -> ExpertLinears:
        """A linear for every expert. Raises ArtifactError where the checkpoint stores several experts as one module."""
        _, index, path = name.split(".", 2)
        one, names = replace(spec, experts=None), expert_modules(self.config, int(index), path)
        return ExpertLinears(self._make_linear(f"{name}.{expert}", one, list(own)) for expert, own in enumerate(names))

    def _make_linear(self, name: str, spec: LinearSpec, modules: list[str]) -> nn.Module:
        """A linear with one matrix, stored as `modules`; that of an expert has its number at the end of its `name`."""
        if self.quantization is None:
            return multiply_inputs(make_dense(name, spec), self.hadamards.get(name, 0))
        from hone.model.quantized.config import input_hadamard as size_of
        from hone.model.quantized.config import linear_of
        from hone.model.quantized.embedding import make_embedding

        sizes = {size_of(self.quantization, module, spec.in_features) for module in modules}
        schemes = [linear_of(self.quantization, module, spec.in_features) for module in modules]
        if any(one != schemes[0] for one in schemes) or len(sizes) > 1:
            raise ArtifactError(
                f"{self.folder}: {', '.join(modules)} are quantized differently",
                fix="quantize projections of one fused linear with one scheme",
            )
        if not schemes or schemes[0] is None:
            return multiply_inputs(make_dense(name, spec), max(sizes, default=0))
        kind, options = schemes[0]
        if isinstance(spec.reads, Tokens):
            return make_embedding(spec, kind, options, tied=self.config.tie_embeddings, where=self.folder)
        return multiply_inputs(LINEARS[kind](spec.in_features, spec.out_features, spec.bias, **options), *sizes)

    def _round_caches(self, layers: Iterable[nn.Module]) -> None:
        """Gives the layers the rounding of keys and values that the quantization config describes, if it does."""
        if self.quantization is not None and self.quantization.get("kv_cache_scheme"):
            from hone.model.quantized.config import read

            scheme = read(self.quantization).kv_cache
            for layer in layers if scheme is not None else ():
                add_rounding(layer, scheme)

    def _modules_of(self, name: str) -> list[str]:
        """The checkpoint modules inside our linear `name` ('layers.3.mixer.qkv', 'layers.3.feed_forward.down.7' of one expert) or
        embedding."""
        if not name.startswith("layers."):
            return [table_name(self.config, name)]
        _, index, path = name.split(".", 2)
        holder, _, expert = path.rpartition(".")
        if expert.isdigit():
            return list(expert_modules(self.config, int(index), holder)[int(expert)])
        return list(self.config.modules(int(index), path))

    def load_layer(self, layer: DecoderLayer, index: int, device: torch.device | str, dtype: torch.dtype) -> None:
        """Loads the weights of layer `index`."""
        for attribute, names in fused_linears(self.config, index).items():
            self.load_linear(layer.get_submodule(attribute), names, device, dtype)
        for path, name in (self.config.singles(index) | rounding_paths(layer, self.config, index)).items():
            owner, _, attribute = path.rpartition(".")
            self._set(layer.get_submodule(owner), attribute, name, device, dtype)

    def load_ends(self, decoder: Decoder, device: torch.device | str, dtype: torch.dtype) -> None:
        """Loads what is outside the layers: embedding, norm and head."""
        for path in (path for path in parts_of(decoder.config) if not path.startswith("layers.")):
            self.load_part(decoder.get_submodule(path), path, device, dtype)

    def load_part(self, part: Any, path: str, device: torch.device | str, dtype: torch.dtype) -> None:
        """Loads the part of a decoder at `path`: 'layers.3', or one outside of the layers."""
        if path.startswith("layers."):
            self.load_layer(part, int(path.removeprefix("layers.")), device, dtype)
        elif path == "prompt":
            for name in self.config.prompt_parameters():
                owner, _, attribute = name.rpartition(".")
                self._set(part.get_submodule(owner), attribute, f"{path}.{name}", device, dtype)
        elif path in TABLES:
            rows = self.config.ends()[path].out_features
            self.load_linear(part, {table_name(self.config, path): rows}, device, dtype)
            if isinstance(part, TokenRows):
                self._set(part, "rows", "token_rows", device, dtype)
            elif hasattr(part, "like"):  # a quantized embedding, whose scales may have another dtype
                part.like = torch.empty(0, device=device, dtype=dtype)
        else:
            self._set(part, "weight", f"model.{path}.weight", device, dtype)

    def load_linear(
        self, linear: nn.Module, names: dict[str, int], device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Loads checkpoint modules into one fused linear; `names` maps each to its number of rows."""
        if isinstance(linear, ExpertLinears):
            together = linear.load_apart(torch.device(device))
            for one, own in zip(linear, linear.shared_out(list(names.items())), strict=True):
                self.load_linear(one, dict(own), device, dtype)
            if together:
                linear.stack()
            return
        parts = []
        for name, shapes in zip(names, linear.part_shapes(list(names.values())), strict=True):
            parts.append(
                {
                    suffix: self.take(f"{name}.{suffix}", shape, device, dtype, integers=suffix in linear.integers)
                    for suffix, shape in shapes.items()
                }
            )
        linear.load(parts)

    def _set(
        self, module: nn.Module, attribute: str, name: str, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Replaces one parameter or buffer by the tensor `name`."""
        old = getattr(module, attribute)
        taken = self.take(name, tuple(old.shape), device, dtype)
        parameter = isinstance(old, nn.Parameter)
        setattr(module, attribute, nn.Parameter(taken, old.requires_grad) if parameter else taken)

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device | str,
        dtype: torch.dtype,
        integers: bool = False,
    ) -> Tensor:
        """A copy of the tensor `name`; float tensors are converted to `dtype`, codes and scales keep their dtype."""
        mapped = self.tensor(name)
        if not checked.fits(tuple(mapped.shape), tuple(shape)):
            raise checked.misfit(self.file(name), name, tuple(mapped.shape), shape)
        return self.kept(name, mapped, device, dtype, integers=integers)

    def kept(
        self, name: str, stored: Tensor, device: torch.device | str, dtype: torch.dtype, *, integers: bool = False
    ) -> Tensor:
        """A copy of `stored`, all or a part of the tensor `name`, as a model keeps it (see `hone.model.weights.values.kept`)."""
        return checked.kept(self.file(name), name, stored, device, dtype, integers=integers)

    def converted(self, name: str, stored: Tensor, device: torch.device | str, dtype: torch.dtype | None) -> Tensor:
        """The float tensor `name` with the values `stored`, on `device` in `dtype` (see `hone.model.weights.values.converted`)."""
        return checked.converted(self.file(name), name, stored, device, dtype)


def fused_linears(config: ModelConfig, index: int) -> dict[str, dict[str, int]]:
    """The linears of layer `index` ('mixer.qkv'), each with its checkpoint modules in row order and their row counts."""
    return {path: config.modules(index, path) for path in config.linears(index)}


def expected_shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Name and shape of every checkpoint tensor of `decoder`, which may be on the meta device."""
    config, shapes = decoder.config, dict[str, tuple[int, ...]]()
    tables = [path for path in parts_of(config) if path in TABLES]
    ends = config.ends()
    linears = [({table_name(config, path): ends[path].out_features}, decoder.get_submodule(path)) for path in tables]
    for index, layer in enumerate(decoder.layers):
        linears += [(names, layer.get_submodule(path)) for path, names in fused_linears(config, index).items()]
        parameters, names = config.parameters(index), config.singles(index)
        shapes.update({names[path]: parameter.shape for path, parameter in parameters.items()})
        scales = rounding_paths(layer, config, index).items()
        shapes.update({name: tuple(layer.get_buffer(path).shape) for path, name in scales})
    for names, linear in linears:
        for name, parts in zip(names, linear.part_shapes(list(names.values())), strict=True):
            shapes.update({f"{name}.{suffix}": tuple(shape) for suffix, shape in parts.items()})
    if rows := config.token_rows():
        shapes["token_rows"] = (len(rows), config.hidden_size)
    shapes.update({f"prompt.{name}": parameter.shape for name, parameter in config.prompt_parameters().items()})
    shapes["model.norm.weight"] = tuple(decoder.norm.weight.shape)
    return shapes
