"""Reading and writing Hugging Face folders: layer by layer, with fused linears."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.base.errors import SpecError
from hone.model.adapters import peft
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder, DecoderLayer, parts_of
from hone.model.families import FAMILIES
from hone.model.families.config_json import OWN, own_format, to_hf
from hone.model.folder import ADAPTER, CONFIG, copy_tokenizer, model_folder, read_json
from hone.model.quantized.kv_cache import rounding_paths
from hone.model.shards import Shards, write_json, write_tensors
from hone.model.weights.model import ModelSource, fused_linears
from hone.model.weights.source import WeightSource
from hone.model.weights.stacked import ApartExperts, stack_experts
from hone.model.weights.tensors import TABLES, table_name
from hone.model.weights.values import AS_STORED, FLOATS, IN_FLOAT32
from hone.ops.dispatch import say_once


class Checkpoint(ModelSource):
    """A Hugging Face folder, or PEFT's of an adapter, read lazily: only the requested tensors are in memory.

    Raises ArtifactError for a missing or corrupt file or tensor, SpecError for a config hone cannot run and, unless it is to
    `score`, for a reward model.
    """

    def __init__(self, folder: Path | str, *, scores: bool = False) -> None:
        folder = model_folder(folder)
        where, adapter, values, plain, config = peft.opened(folder)
        if not scores:
            config.must_predict_tokens(folder)
        if not plain.tie_embeddings and read_json(where / CONFIG).get("tie_word_embeddings"):
            say_once(
                f"{where} stores a head that differs from the embedding, to which its config.json ties it: the stored head is "
                "used, as in transformers"
            )
        weights = shards_of(where, plain)
        if adapter is not None:
            weights = peft.AdaptedShards(weights, Shards(adapter, peft.weights_of(adapter)), config)
            folder = folder if (folder / "tokenizer.json").exists() else where
        super().__init__(folder, config, values, weights, quantization=values.get("quantization_config"))


def shards_of(folder: Path, config: ModelConfig) -> WeightSource:
    """The tensors of the folder by the names of `config`, whose family may store all experts of a layer as one."""
    shards, stacked = Shards(folder), FAMILIES[config.family].stacked
    return ApartExperts(shards, stacked) if stacked else shards


def load(
    folder: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    sparsity: str = "none",
    scores: bool = False,
) -> Decoder:
    """The model in a Hugging Face folder, plain or quantized (hone.model.quantized); `dtype` None keeps the folder's.

    `scores`: it may be a reward model, too. `sparsity` "2:4" or "auto": linears whose weights are 2:4 are compressed (`hone.model.sparse.sparsify`).
    """
    model = Checkpoint(folder, scores=scores).build(device, dtype)
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
        (name, tensor.to(stored) if tensor.dtype in FLOATS and not name.endswith(AS_STORED + IN_FLOAT32) else tensor)
        for name, tensor in (state(decoder) if tensors is None else tensors)
    )
    adapter, config, added, factors = peft.alone(decoder.config), decoder.config, {}, dict[str, Tensor]()
    if adapter is not None:
        whole = config.model_copy(
            update={"adapters": (peft.beside(adapter),)}
        )  # what it trains of the model lies there
        added, config = peft.keys(whole), config.model_copy(update={"adapters": ()})
    values = write_config(config, folder, stored, decoder.quantization, adapted=adapter is not None)
    named = peft.without(cast, added, factors)
    if values["model_type"] != OWN and FAMILIES[config.family].stacked:
        named = stack_experts(named, FAMILIES[config.family].stacked)
    write_tensors(named, folder, max_shard_bytes)
    if adapter is not None:
        peft.write(folder / ADAPTER, whole, factors)
    if tokenizer_from is not None:
        copy_tokenizer(Path(tokenizer_from), folder)


def write_config(
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    quantization: dict[str, Any] | None = None,
    *,
    adapted: bool = False,
) -> dict[str, Any]:
    """Writes config.json and generation_config.json; `adapted` says that the folder has an adapter. Returns config.json's values."""
    values = config_values(config, dtype, quantization) | ({peft.KEY: ADAPTER} if adapted else {})
    if values["model_type"] == OWN:
        say_once(f"{values['note']} It is the folder {folder}")
    if quantization is not None:
        values["quantization_config"] = quantization
    write_json(folder / CONFIG, values)
    tokens = {name: values[name] for name in ("bos_token_id", "eos_token_id") if values[name] is not None}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
    return values


def config_values(
    config: ModelConfig, dtype: torch.dtype, quantization: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of `config`: for transformers, or in hone's own format where it cannot express the stack or the weights."""
    name = str(dtype).removeprefix("torch.")
    method = None if quantization is None else quantization.get("quant_method")
    if method == "low_rank":
        return own_format(config, name, "its weights are stored as low-rank factors")
    if method not in (None, "mxfp4") and FAMILIES[config.family].stacked:
        return own_format(config, name, f"its class there has one tensor of all experts, which {method} cannot store")
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
        name, rows = table_name(config, path), config.ends()[path].out_features
        yield from ((f"{name}.{suffix}", one) for suffix, one in part.parts([rows])[0].items())
        if path == "embed_tokens" and config.token_rows():
            yield "token_rows", part.rows.detach()
    elif path == "prompt":
        yield from ((f"{path}.{name}", part.get_parameter(name).detach()) for name in config.prompt_parameters())
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
