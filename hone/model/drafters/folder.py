"""Folders of draft heads: their sizes and their facts, without reading a tensor or importing torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import Field

from hone.base.errors import ArtifactError, SpecError
from hone.base.plan import Facts
from hone.cost.cache import LayerCache, keys_and_values
from hone.model.config import ModelConfig
from hone.model.folder import CONFIG, heads_kind, read_json, weights_bytes
from hone.model.weights.header import read_header

MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
LAYER = "transformer_layer_config"
"""Where a config.json of speculators has the sizes of the head's layer."""


class MedusaSizes(NamedTuple):
    """The sizes of Medusa heads."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int


def medusa_sizes(folder: Path, values: dict[str, Any]) -> MedusaSizes:
    """The sizes of the heads in `folder`: their numbers from config.json, their widths from the weights, which old folders do not say."""
    path = folder / MEDUSA_WEIGHTS
    if not path.exists():
        raise ArtifactError(f"{folder} has no {MEDUSA_WEIGHTS}", fix="convert the heads to safetensors, or train them")
    counts = [values.get("medusa_num_heads"), values.get("medusa_num_layers", 1)]
    if not all(isinstance(one, int) and one > 0 for one in counts):
        raise ArtifactError(
            f"{folder / CONFIG}: medusa_num_heads and medusa_num_layers are {counts}", fix="give numbers above 0"
        )
    header = read_header(path)
    last = header.get(f"0.{counts[1]}.weight")
    if last is None or len(last.shape) != 2:
        raise ArtifactError(
            f"{path} has no matrix 0.{counts[1]}.weight", fix="give heads and config.json of one training"
        )
    vocab_size, hidden_size = last.shape
    return MedusaSizes(counts[0], counts[1], hidden_size, vocab_size)


class DrafterFacts(Facts):
    """Facts of a folder of draft heads, written by hone or by another library."""

    noun: ClassVar[str] = "folder of draft heads"

    kind: str = Field(description="'medusa' or 'eagle3'.")
    hidden_size: int = Field(description="Width of the hidden states that it reads: the model's.")
    vocab_size: int = Field(description="Tokens of the model that it guesses for.")
    num_params: int = Field(description="Parameters.")
    weights_bytes: int = Field(description="Bytes of the *.safetensors files.")
    tokenizer: str | None = Field(None, description="Identity of its tokenizer; None without one.")
    kv_heads: tuple[int, int] | None = Field(
        None, description="Key/value heads and their width, of the layer whose keys it stores; None: it stores none."
    )

    @classmethod
    def marks(cls, folder: Path) -> bool:
        return heads_kind(folder) is not None

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The facts of a folder of draft heads. Raises ArtifactError for a corrupt file."""
        from hone.model.tokenizer import identity_of

        values, kind = read_json(folder / CONFIG), heads_kind(folder)
        assert kind is not None, "marks() was asked"
        files = sorted(folder.glob("*.safetensors"))
        headers = [one for path in files for one in read_header(path).values()]
        count = sum(math.prod(one.shape) for one in headers if one.dtype in _FLOATS)
        found: dict[str, Any] = {"kind": kind, "num_params": count, "weights_bytes": weights_bytes(folder)}
        if kind == "medusa":
            sizes = medusa_sizes(folder, values)
            found |= {"hidden_size": sizes.hidden_size, "vocab_size": sizes.vocab_size}
        else:
            layer = values.get(LAYER) or values
            heads = layer.get("num_attention_heads") or 1
            width = layer.get("head_dim") or layer["hidden_size"] // heads
            found |= {"hidden_size": values.get("target_hidden_size") or layer["hidden_size"]}
            found |= {"vocab_size": layer["vocab_size"], "kv_heads": (layer.get("num_key_value_heads") or heads, width)}
        named = (folder / "tokenizer.json").exists()
        return cls(where=str(folder), tokenizer=identity_of(folder) if named else None, **found)

    @property
    def cache(self) -> list[LayerCache]:
        """The tensors that it keeps in pages beside the model's."""
        return [] if self.kv_heads is None else [keys_and_values(*self.kv_heads)]


def check_heads_of(facts: DrafterFacts, config: ModelConfig) -> None:
    """Raises SpecError for draft heads that are not of a model of `config`, by their sizes."""
    ours = {"hidden states of width": config.hidden_size, "tokens": config.vocab_size}
    theirs = {"hidden states of width": facts.hidden_size, "tokens": facts.vocab_size}
    for name, size in ours.items():
        if theirs[name] != size:
            raise SpecError(
                f"the draft heads {facts.where} are for a model with {name} {theirs[name]}, the model has {size}",
                fix="give heads that were trained for this model",
            )
