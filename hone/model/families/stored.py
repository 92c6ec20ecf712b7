"""What a checkpoint stores against what its config.json says: a head of its own beside tied embeddings, tensors that no model reads."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hone.base.durable import kind_of
from hone.base.errors import ArtifactError
from hone.model.config import ModelConfig
from hone.model.families.config_json import from_hf
from hone.model.folder import CONFIG, read_json
from hone.model.weights.header import HeaderEntry, read_header

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_CHUNK = 1 << 26
_PREDICTORS = {"num_nextn_predict_layers", "num_mtp_layers"}
"""Fields with the number of layers that predict further tokens. They are not read (hone.model.shards): whoever writes these values has none."""
_IGNORED = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))
"""Buffers that old checkpoints stored."""


def read_config(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """config.json's values and the model that they and the weights describe.

    A stored head that differs from the embedding is the model's head, whatever `tie_word_embeddings` says: transformers 5
    computes with it, and so does whoever reads these values, in which the two are apart.
    """
    values = read_json(folder / CONFIG)
    config = from_hf(values, str(folder / CONFIG))
    values |= dict.fromkeys(_PREDICTORS & values.keys(), 0)
    if config.tie_embeddings and has_own_head(folder):
        return values | {"tie_word_embeddings": False}, config.model_copy(update={"tie_embeddings": False})
    return values, config


def has_own_head(folder: Path) -> bool:
    """Whether the folder stores a head with other bytes than the embedding's. False where a file cannot be read: reading tensors says why."""
    found: dict[str, tuple[Path, HeaderEntry]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            if kind_of(path):
                return False  # opening a pipe would block for ever
            header = read_header(path)
        except (OSError, ArtifactError):
            return False
        found |= {name: (path, header[name]) for name in (HEAD, EMBEDDING) if name in header}
    return len(found) == 2 and not _equal(found[HEAD], found[EMBEDDING])


def _equal(one: tuple[Path, HeaderEntry], other: tuple[Path, HeaderEntry]) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes."""
    (dtype, shape, first, last), (kind, size, start, end) = one[1], other[1]
    if (dtype, shape) != (kind, size):
        return False
    if last - first != end - start:
        return False
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(mmap.mmap(stack.enter_context(open(path, "rb")).fileno(), 0, access=mmap.ACCESS_READ))
            for path in (one[0], other[0])
        )
        return all(
            a[first + step : min(first + step + _CHUNK, last)] == b[start + step : min(start + step + _CHUNK, end)]
            for step in range(0, last - first, _CHUNK)
        )


def refuse_unread(files: Mapping[str, Path], expected: Iterable[str], config: ModelConfig) -> None:
    """Raises ArtifactError for a tensor of `files` (the file by the tensor's name) that the model of `config` does not read.

    Some checkpoints with a tied head store the head too, and old ones buffers that are computed.
    """
    able = {*expected, *((HEAD,) if config.tie_embeddings else ())}
    for name, file in files.items():
        if name not in able and not name.endswith(_IGNORED):
            raise ArtifactError(
                f"{file}: {name} is not a tensor of the {config.num_layers}-layer {config.family} model in {CONFIG}",
                fix="pair the weights with the config.json they were saved with",
            )
