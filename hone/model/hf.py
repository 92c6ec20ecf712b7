"""Reading and writing Hugging Face folders: layer by layer, with fused linears."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from hone.base.errors import ArtifactError, SpecError
from hone.model.adapters import peft
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder, DecoderLayer, parts_of
from hone.model.families.config_json import OWN, own_format, to_hf
from hone.model.families.stored import read_config, refuse_unread
from hone.model.folder import ADAPTER, CONFIG, copy_tokenizer, model_folder, read_json
from hone.model.linear import LINEARS, MakeLinear, make_dense
from hone.model.linear_spec import LinearSpec
from hone.model.quantized.kv_cache import add_rounding, rounding_paths
from hone.model.shards import TABLES, Shards, write_json, write_tensors
from hone.model.weights import values
from hone.ops.dispatch import say_once


class Module(NamedTuple):
    """One linear of a checkpoint and its place in hone's fused linears."""

    name: str
    """Its checkpoint name: 'model.layers.0.self_attn.q_proj'."""
    attribute: str
    """The fused linear that holds it, below the layer: 'mixer.qkv'."""
    rows: slice
    """Its output rows there; with experts, the rows of all experts in order."""


class Checkpoint:
    """A Hugging Face folder, read lazily: only the requested tensors are in memory.

    Raises ArtifactError for a missing or corrupt file or tensor, SpecError for a config hone cannot run.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = model_folder(folder)
        self.values, plain = read_config(self.folder)
        if not plain.tie_embeddings and read_json(self.folder / CONFIG).get("tie_word_embeddings"):
            say_once(
                f"{self.folder} stores a head that differs from the embedding, to which its config.json ties it: the stored head is "
                "used, as in transformers"
            )
        self.config = peft.with_adapter(plain, self.values, self.folder)
        self.quantization: dict[str, Any] | None = self.values.get("quantization_config")
        self._shards: Shards | peft.AdaptedShards = Shards(self.folder)
        if peft.KEY in self.values:
            adapter = Shards(self.folder / ADAPTER, peft.WEIGHTS)
            self._shards = peft.AdaptedShards(self._shards, adapter, self.config)

    def reopened(self) -> Self:
        """The same checkpoint with memory maps of its own, which are freed with it."""
        return type(self)(self.folder)

    def names(self) -> list[str]:
        """Every tensor's name."""
        return self._shards.names()

    def file(self, name: str) -> Path:
        """The file that holds the tensor called `name`."""
        return self._shards.file(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor called `name`."""
        return self._shards.shape(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU, in the dtype of the file; its memory is the mapped file."""
        return self._shards.tensor(name)

    def close(self) -> None:
        """Unmaps the files; they are opened again on the next read."""
        self._shards.close()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in config.json, else that of the embedding."""
        return values.stated_dtype(self.values) or self.tensor("model.embed_tokens.weight").dtype

    def layer_modules(self, index: int) -> list[Module]:
        """Every linear of layer `index` by its checkpoint name, in the order in which they run."""
        found = []
        for attribute, names in fused_linears(self.config, index).items():
            begin = 0
            for name, count in names.items():
                found.append(Module(name, attribute, slice(begin, begin + count)))
                begin += count
        return found

    def build_layer(
        self, index: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> DecoderLayer:
        """Layer `index` with its weights; `dtype` None keeps the checkpoint's."""
        with torch.device("meta"):
            layer = DecoderLayer(self.config.layers[index], self.config, index, self._maker())
            self._round_caches([layer])
        self._load_layer(layer, index, device, dtype or self.dtype)
        return layer

    def build_ends(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Decoder:
        """A decoder without layers: `embed` and `head` work, `layers` is empty."""
        with torch.device("meta"):
            decoder = Decoder(self.config.model_copy(update={"layers": ()}), self._maker())
        self._load_ends(decoder, device, dtype or self.dtype)
        return decoder

    def build(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Decoder:
        """The whole model. Raises ArtifactError for tensors that are missing, of the wrong shape, or not part of the model."""
        decoder, dtype = self.empty(), dtype or self.dtype
        self._load_ends(decoder, device, dtype)
        for index, layer in enumerate(decoder.layers):
            self._load_layer(layer, index, device, dtype)
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
            if not values.fits(found, shape):
                raise values.misfit(self.file(name), name, found, shape)
        refuse_unread({name: self.file(name) for name in self.names()}, expected, self.config)

    def _maker(self) -> MakeLinear:
        """The maker of dense linears, or of those (and the embedding) that the quantization config describes."""
        if self.quantization is None:
            return make_dense
        from hone.model.quantized.config import input_hadamard, linear_of
        from hone.model.quantized.embedding import make_embedding
        from hone.model.quantized.hadamard import multiply_inputs

        def make(name: str, spec: LinearSpec) -> nn.Module:
            modules = self._modules_of(name)
            sizes = {input_hadamard(self.quantization, module, spec.in_features) for module in modules}
            schemes = [linear_of(self.quantization, module) for module in modules]
            if any(one != schemes[0] for one in schemes) or len(sizes) > 1:
                raise ArtifactError(
                    f"{self.folder}: {', '.join(modules)} are quantized differently",
                    fix="quantize projections of one fused linear with one scheme",
                )
            if not schemes or schemes[0] is None:
                return multiply_inputs(make_dense(name, spec), max(sizes, default=0))
            kind, options = schemes[0]
            if spec.reads == "tokens":
                return make_embedding(spec, kind, options, tied=self.config.tie_embeddings, where=self.folder)
            if spec.experts is not None:
                raise ArtifactError(
                    f"{self.folder}: the experts of {name} are quantized as {kind}, which holds one matrix",
                    fix="load the checkpoint it was made from",
                )
            return multiply_inputs(LINEARS[kind](spec.in_features, spec.out_features, spec.bias, **options), *sizes)

        return make

    def _round_caches(self, layers: Iterable[nn.Module]) -> None:
        """Gives the layers the rounding of keys and values that the quantization config describes, if it does."""
        if self.quantization is not None and self.quantization.get("kv_cache_scheme"):
            from hone.model.quantized.config import read

            scheme = read(self.quantization).kv_cache
            for layer in layers if scheme is not None else ():
                add_rounding(layer, scheme)

    def _modules_of(self, name: str) -> list[str]:
        """The checkpoint modules inside our linear `name` ('layers.3.mixer.qkv') or embedding."""
        if not name.startswith("layers."):
            return [TABLES[name]]
        _, index, path = name.split(".", 2)
        return list(self.config.modules(int(index), path))

    def _load_layer(self, layer: DecoderLayer, index: int, device: torch.device | str, dtype: torch.dtype) -> None:
        for attribute, names in fused_linears(self.config, index).items():
            self._load_linear(layer.get_submodule(attribute), names, device, dtype)
        for path, name in (self.config.singles(index) | rounding_paths(layer, self.config, index)).items():
            owner, _, attribute = path.rpartition(".")
            self._set(layer.get_submodule(owner), attribute, name, device, dtype)

    def _load_ends(self, decoder: Decoder, device: torch.device | str, dtype: torch.dtype) -> None:
        for path in (path for path in parts_of(decoder.config) if not path.startswith("layers.")):
            self.load_part(decoder.get_submodule(path), path, device, dtype)

    def load_part(self, part: Any, path: str, device: torch.device | str, dtype: torch.dtype) -> None:
        """Loads the part of a decoder at `path`: 'layers.3', or one outside of the layers."""
        if path.startswith("layers."):
            self._load_layer(part, int(path.removeprefix("layers.")), device, dtype)
        elif path in TABLES:
            self._load_linear(part, {TABLES[path]: self.config.vocab_size}, device, dtype)
            if hasattr(part, "like"):  # a quantized embedding, whose scales may have another dtype
                part.like = torch.empty(0, device=device, dtype=dtype)
        else:
            self._set(part, "weight", f"model.{path}.weight", device, dtype)

    def _load_linear(
        self, linear: nn.Module, names: dict[str, int], device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Loads checkpoint modules into one fused linear; `names` maps each to its number of rows."""
        parts = []
        for name, shapes in zip(names, linear.part_shapes(list(names.values())), strict=True):
            parts.append(
                {
                    suffix: self._take(f"{name}.{suffix}", shape, device, dtype, integers=suffix in linear.integers)
                    for suffix, shape in shapes.items()
                }
            )
        linear.load(parts)

    def _set(
        self, module: nn.Module, attribute: str, name: str, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Replaces one parameter or buffer by the tensor `name`."""
        old = getattr(module, attribute)
        taken = self._take(name, tuple(old.shape), device, dtype)
        setattr(module, attribute, nn.Parameter(taken) if isinstance(old, nn.Parameter) else taken)

    def _take(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device | str,
        dtype: torch.dtype,
        integers: bool = False,
    ) -> Tensor:
        """A copy of the tensor `name`; float tensors are converted to `dtype`, codes and scales keep their dtype."""
        mapped = self.tensor(name)
        if not values.fits(tuple(mapped.shape), tuple(shape)):
            raise values.misfit(self.file(name), name, tuple(mapped.shape), shape)
        return self.kept(name, mapped, device, dtype, integers=integers)

    def kept(
        self, name: str, stored: Tensor, device: torch.device | str, dtype: torch.dtype, *, integers: bool = False
    ) -> Tensor:
        """A copy of `stored`, all or a part of the tensor `name`, as a model keeps it (see `values.kept`)."""
        return values.kept(self.file(name), name, stored, device, dtype, integers=integers)

    def converted(self, name: str, stored: Tensor, device: torch.device | str, dtype: torch.dtype | None) -> Tensor:
        """The float tensor `name` with the values `stored`, on `device` in `dtype` (see `values.converted`)."""
        return values.converted(self.file(name), name, stored, device, dtype)


def load(
    folder: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    sparsity: str = "none",
) -> Decoder:
    """The model in a Hugging Face folder, plain or quantized (hone.model.quantized); `dtype` None keeps the folder's.

    `sparsity` "2:4" or "auto": linears whose weights are 2:4 are compressed (`hone.model.sparse.sparsify`).
    """
    model = Checkpoint(folder).build(device, dtype)
    if sparsity != "none":
        from hone.model.sparse.sparsify import sparsify

        say_once(sparsify(model, sparsity, where=str(folder)).said)
    return model


def save(
    decoder: Decoder,
    folder: Path | str,
    tokenizer_from: Path | str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Writes `decoder` as a folder that transformers loads: config, generation config, weights, tokenizer files.

    A stack that no transformers class can express is written in hone's own format, with a warning; `load` reads both.
    `dtype` None keeps the decoder's. Weights of more bytes than `max_shard_bytes` are split into numbered shards with
    an index. A LoRA adapter is written as PEFT's folder inside it. `tensors` are read in place of `state(decoder)`, one at a time.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = dtype or decoder.dtype
    cast = (
        (name, tensor.to(stored) if tensor.dtype in values.FLOATS and not name.endswith(values.AS_STORED) else tensor)
        for name, tensor in (state(decoder) if tensors is None else tensors)
    )
    adapter, config, added, factors = peft.alone(decoder.config), decoder.config, {}, dict[str, Tensor]()
    if adapter is not None:
        added, config = peft.keys(config), config.model_copy(update={"adapters": ()})
    write_config(config, folder, stored, decoder.quantization, adapted=adapter is not None)
    write_tensors(peft.without(cast, added, factors), folder, max_shard_bytes)
    if adapter is not None:
        peft.write(folder, adapter, factors)
    if tokenizer_from is not None:
        copy_tokenizer(Path(tokenizer_from), folder)


def write_config(
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    quantization: dict[str, Any] | None = None,
    *,
    adapted: bool = False,
) -> None:
    """Writes config.json and generation_config.json; `adapted` says that the folder has an adapter."""
    values = config_values(config, dtype, quantization) | ({peft.KEY: ADAPTER} if adapted else {})
    if values["model_type"] == OWN:
        say_once(f"{values['note']} It is the folder {folder}")
    if quantization is not None:
        values["quantization_config"] = quantization
    write_json(folder / CONFIG, values)
    tokens = {name: values[name] for name in ("bos_token_id", "eos_token_id") if values[name] is not None}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})


def config_values(
    config: ModelConfig, dtype: torch.dtype, quantization: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of `config`: for transformers, or in hone's own format where it cannot express the stack or the weights."""
    name = str(dtype).removeprefix("torch.")
    if quantization is not None and quantization.get("quant_method") == "low_rank":
        return own_format(config, name, "its weights are stored as low-rank factors")
    try:
        return to_hf(config, name)
    except SpecError as error:
        return own_format(config, name, error.what)


def state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `decoder` under its checkpoint name, one at a time; views of the fused weights."""
    for path in parts_of(decoder.config):
        yield from part_state(decoder.get_submodule(path), decoder.config, path)


def part_state(part: nn.Module, config: ModelConfig, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the part of a decoder at `path` ('layers.3', 'lm_head') under its checkpoint name."""
    if path.startswith("layers."):
        yield from layer_state(part, config, int(path.removeprefix("layers.")))
    elif path in TABLES:
        yield from ((f"{TABLES[path]}.{suffix}", one) for suffix, one in part.parts([config.vocab_size])[0].items())
    else:
        yield f"model.{path}.weight", part.weight.detach()


def layer_state(layer: DecoderLayer, config: ModelConfig, index: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of one layer under its checkpoint name."""
    for attribute, names in fused_linears(config, index).items():
        parts = layer.get_submodule(attribute).parts(list(names.values()))
        for name, part in zip(names, parts, strict=True):
            for suffix, tensor in part.items():
                yield f"{name}.{suffix}", tensor
    for path, name in (config.singles(index) | rounding_paths(layer, config, index)).items():
        owner, _, attribute = path.rpartition(".")
        yield name, getattr(layer.get_submodule(owner), attribute).detach()


def fused_linears(config: ModelConfig, index: int) -> dict[str, dict[str, int]]:
    """The linears of layer `index` ('mixer.qkv'), each with its checkpoint modules in row order and their row counts."""
    return {path: config.modules(index, path) for path in config.linears(index)}


def expected_shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Name and shape of every checkpoint tensor of `decoder`, which may be on the meta device."""
    config, shapes = decoder.config, dict[str, tuple[int, ...]]()
    tables = [path for path in parts_of(config) if path in TABLES]
    linears = [({TABLES[path]: config.vocab_size}, decoder.get_submodule(path)) for path in tables]
    for index, layer in enumerate(decoder.layers):
        linears += [(names, layer.get_submodule(path)) for path, names in fused_linears(config, index).items()]
        parameters, names = config.parameters(index), config.singles(index)
        shapes.update({names[path]: parameter.shape for path, parameter in parameters.items()})
        scales = rounding_paths(layer, config, index).items()
        shapes.update({name: tuple(layer.get_buffer(path).shape) for path, name in scales})
    for names, linear in linears:
        for name, parts in zip(names, linear.part_shapes(list(names.values())), strict=True):
            shapes.update({f"{name}.{suffix}": tuple(shape) for suffix, shape in parts.items()})
    shapes["model.norm.weight"] = tuple(decoder.norm.weight.shape)
    return shapes
