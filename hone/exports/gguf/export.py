"""Export of a model folder as one GGUF file for llama.cpp, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hone.base.errors import ArtifactError, SpecError
from hone.base.run import Run
from hone.exports.base import Exported
from hone.exports.gguf import architectures, container, names
from hone.exports.gguf import source as sources
from hone.exports.gguf import vocabulary as vocabularies
from hone.exports.gguf.formats import FORMATS, fitting
from hone.exports.gguf.source import FileTensor
from hone.model.facts import stores_weights
from hone.model.hf import Checkpoint
from hone.model.quantized import config as config_of
from hone.model.quantized.scheme import Scheme
from hone.model.tokenizer import load_tokenizer
from hone.model.weights.tensors import TABLES, model_tensors

_OF_DTYPE = {"bfloat16": "bf16", "float16": "f16"}
_LARGEST_CHANGE = 0.01
"""Repacked scales may change by less than this where float16 rounds them; a larger change is that of numbers too small."""


class Types(NamedTuple):
    """The types asked for: of the layers' matrices, and of embedding and head."""

    layers: str
    ends: str


def write(
    model: Path, path: Path, run: Run, importance: Mapping[str, Tensor], types: tuple[str, str], pre_tokenizer: str
) -> Exported:
    """Writes the model folder `model`, dense or quantized by hone, as the file `path`; `types` as `Types`.

    Codes of a quantized folder are stored as they are where the type holds them; other weights are rounded by a search for
    least squared error, weighted with `importance` where given: by checkpoint module, float32 [columns], the mean square
    of its inputs; it is of no use for codes that stay. In memory are one tensor's codes and a few rows. The file appears when it is whole.
    Raises SpecError for a model that llama.cpp computes otherwise, ArtifactError for a folder that is no model or a file
    that another process writes, FitError when the disk is too small.
    """
    checkpoint, asked = Checkpoint(model), Types(*types)
    where = str(checkpoint.folder)
    if checkpoint.config.adapters:
        raise SpecError(
            f"{where} has adapters around its linears",
            fix="hone merge writes the model with them in its weights; export that",
        )
    architectures.architecture(checkpoint.values.get("model_type"), where)
    shape, notes = architectures.hyperparameters(checkpoint.config, where)
    tokenizer = load_tokenizer(checkpoint.folder)
    words = vocabularies.vocabulary(tokenizer, checkpoint.config.vocab_size, pre_tokenizer, where)
    name = vocabularies.model_name(checkpoint.folder.resolve().name, tokenizer)
    checkpoint.empty()  # checks names and shapes of all tensors
    parts = list(_sources(checkpoint, asked))
    matrices = {part.module: part.entry.columns for part in parts if part.entry.columns}
    _check_importance(importance, matrices, where)
    entries = [part.entry for part in parts]
    notes += [*words.notes, *_notes(checkpoint, parts, asked)]
    metadata = _general(checkpoint, entries, name) | shape | words.metadata | ({"hone.notes": notes} if notes else {})
    head = container.header(metadata, entries)
    size = container.file_bytes(head, entries)
    with run.progress("export", size, "B") as bar:

        def contents() -> Iterator[Iterator[Any]]:
            for part in parts:
                yield sources.pieces(checkpoint, part, run.device, importance)
                bar.advance(part.entry.num_bytes, part.entry.name)

        container.write(path, head, entries, contents(), replace=run.redo)
    return Exported(path, size, {entry.name: entry.form.name for entry in entries}, notes)


def _check_importance(importance: Mapping[str, Tensor], columns: Mapping[str, int], where: str) -> None:
    """Raises SpecError for an importance of no matrix, or with another length than its `columns`, by checkpoint module."""
    for module, values in importance.items():
        if module not in columns:
            raise SpecError(
                f"importance has '{module}', which is no matrix of {where}",
                fix="name checkpoint modules, such as model.layers.0.mlp.down_proj",
            )
        if tuple(values.shape) != (columns[module],):
            raise SpecError(
                f"importance of '{module}' has the shape {tuple(values.shape)}, the matrix {columns[module]} columns",
                fix="give one number for each column",
            )


def _sources(checkpoint: Checkpoint, types: Types) -> Iterator[FileTensor]:
    """Every tensor of the file, in its order."""
    config = checkpoint.config
    quantization = None
    if checkpoint.quantization is not None:
        quantization = config_of.read(checkpoint.quantization)
        if quantization.hadamards:
            raise ArtifactError(
                f"{checkpoint.folder} multiplies inputs of linears by Hadamard matrices, which llama.cpp does not",
                fix="compress the model with rotation r4=false, or export the model it was made from",
            )

    def matrix(module: str, rows: int, columns: int, end: bool = False, name: str | None = None) -> FileTensor:
        scheme = quantization.scheme(module) if quantization is not None else None
        asked = _asked(types, checkpoint, scheme, columns, end)
        name = name or names.tensor_name(module)
        entry = container.Entry(f"{name}.weight", rows, columns, fitting(asked, columns))
        found = sources.FileTensor(entry, module, scheme=scheme, asked=asked)
        if scheme is None or not found.repacked:
            return found
        change = sources.scales_change(sources.stored_of(checkpoint, module, scheme, rows, columns))
        if not change < _LARGEST_CHANGE:
            raise ArtifactError(
                f"{module}: float16 cannot hold its scales, which {entry.form.name} needs",
                fix="quantize the model with scale_dtype=float16, or export it with type=f16",
            )
        return replace(found, change=change)

    def vector(name: str, module: str, rows: int, leaf: str = "weight", offset: float = 0.0) -> FileTensor:
        return sources.FileTensor(
            container.Entry(f"{name}.{leaf}", rows, 0, FORMATS["f32"]), module, leaf, offset=offset
        )

    for tensor in model_tensors(config):
        module = tensor.module
        if module is None:  # a norm
            norm, path = (name.removesuffix(".weight") for name in (tensor.name, tensor.path))
            yield vector(names.norm_name(norm, path), norm, tensor.shape[0], offset=config.norm_offset)
        elif len(tensor.shape) > 1:
            yield matrix(module.name, *tensor.shape, end=module.path in TABLES)
        else:
            yield vector(names.tensor_name(module.name), module.name, module.num_rows, "bias")
    if config.tie_embeddings and architectures.ARCHITECTURES[config.family].head == "stored":
        yield matrix("model.embed_tokens", config.vocab_size, config.hidden_size, end=True, name="output")
    for name, values in names.rope_factors(config).items():
        yield sources.FileTensor(container.Entry(name, len(values), 0, FORMATS["f32"]), "", values=values)


def _asked(types: Types, checkpoint: Checkpoint, scheme: Scheme | None, columns: int, end: bool) -> str:
    """The type asked for a matrix with rows of `columns`, `end`: the embedding or head; with what 'auto' stands for."""
    wanted = types.ends if end else types.layers
    if wanted == "auto" and end and types.layers != "auto":
        wanted = "q8_0" if FORMATS[types.layers].parts else types.layers
    if wanted != "auto":
        return wanted
    held = None if scheme is None else sources.holding(scheme, columns)
    if held is not None:
        return held.name
    if stores_weights(checkpoint.quantization):
        return "q8_0"
    return _OF_DTYPE.get(str(checkpoint.dtype).removeprefix("torch."), "f32")


def _notes(checkpoint: Checkpoint, parts: list[FileTensor], types: Types) -> list[str]:
    """What a user must know of the tensors: other types than asked for, codes that were kept or were not."""
    notes = []
    uneven: dict[tuple[str, str, int], list[str]] = {}
    lost: dict[tuple[str, str], list[str]] = {}
    kept, change = [], 0.0
    for part in parts:
        entry = part.entry
        if part.asked != entry.form.name and entry.columns:
            uneven.setdefault((part.asked, entry.form.name, entry.columns), []).append(entry.name)
        if part.repacked:
            kept.append(entry.name)
            change = max(change, part.change)
        elif part.scheme is not None:
            lost.setdefault((f"dequantized from {_named(part.scheme)}", entry.form.name), []).append(entry.name)
        elif stores_weights(checkpoint.quantization) and entry.columns and types.layers == "auto":
            lost.setdefault(("not quantized in the folder", entry.form.name), []).append(entry.name)
    for (asked, form, columns), found in uneven.items():
        notes.append(f"{_listed(found)}: {form}, because rows of {columns} are no whole number of {asked} blocks")
    if kept:
        exact = "without loss" if not change else f"their scales rounded to float16 (by up to {change:.1e} of each)"
        notes.append(f"{len(kept)} matrices keep the codes of the folder, {exact}")
    for (what, form), found in lost.items():
        notes.append(f"{_listed(found)}: {what}, stored as {form}")
    if (checkpoint.quantization or {}).get("kv_cache_scheme"):
        notes.append("the scales of the KV cache are left out: GGUF has no place for them")
    return notes


def _named(scheme: Scheme) -> str:
    sign = "" if scheme.symmetric else "asymmetric "
    return f"{sign}{scheme.number}{scheme.bits if scheme.number == 'int' else ''} ({scheme.strategy})"


def _listed(found: list[str]) -> str:
    """Tensor names with the layers' numbers left out: 'blk.*.ffn_down.weight (8)'."""
    counts: dict[str, int] = {}
    for name in found:
        head, dot, rest = name.partition(".")
        short = f"blk.*.{rest.partition('.')[2]}" if head == "blk" and dot else name
        counts[short] = counts.get(short, 0) + 1
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())


def _general(checkpoint: Checkpoint, entries: list[Any], name: str) -> dict[str, Any]:
    """general.* metadata: the file's type is that of most of its matrices' bytes."""
    sizes: dict[str, int] = {}
    for entry in entries:
        if entry.columns:
            sizes[entry.form.name] = sizes.get(entry.form.name, 0) + entry.num_bytes
    most = FORMATS[max(sizes, key=lambda name: sizes[name])]
    return {
        "general.architecture": architectures.ARCHITECTURES[checkpoint.config.family].name,
        "general.type": "model",
        "general.name": name,
        "general.file_type": most.file_type,
        "general.quantization_version": 2,
        "hone.version": version("hone-llm"),
    }
