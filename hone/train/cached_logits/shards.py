"""The files of cached logits: safetensors shards of sequences, each found by a digest of its tokens.

Legend: N sequences of a shard, S tokens of a sequence, k ids of a token.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hone.base.durable import write_atomic
from hone.base.errors import ArtifactError, HoneError
from hone.feed.load import Batch
from hone.train.cached_logits.facts import FOLDER, META, LogitsFacts, id_bytes


class Cached(NamedTuple):
    """What is kept of sequences [B, S]: `ids` int64 [B, S, k], `log_probs` float32 [B, S, k], and `tails` float32 [B, S], the
    log-probability of all other ids together, where the ids are the most likely ones; None where they were drawn."""

    ids: np.ndarray
    log_probs: np.ndarray
    tails: np.ndarray | None


def digests(batch: Batch) -> list[bytes]:
    """16 bytes for each sequence: of its tokens and of where its documents begin. Equal sequences have equal logits."""
    tokens, ids = batch.tokens.astype("<i4"), batch.document_ids.astype("<i4")
    return [
        hashlib.blake2b(row.tobytes() + where.tobytes(), digest_size=16).digest()
        for row, where in zip(tokens, ids, strict=True)
    ]


def shard_path(folder: Path, number: int) -> Path:
    """The file of shard `number`, from 0, in an artifact's folder."""
    return folder / FOLDER / f"{number:05}.safetensors"


def write_shard(path: Path, keys: list[bytes], cached: Cached, vocab_size: int) -> None:
    """Writes the logits of the sequences with digests `keys`, durably: a shard that is there is whole."""
    tensors = {
        "keys": np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16),
        "ids": cached.ids.astype(np.uint16 if id_bytes(vocab_size) == 2 else np.uint32),
        "log_probs": cached.log_probs.astype(np.float16),
    }
    if cached.tails is not None:
        tensors["tails"] = cached.tails.astype(np.float16)
    write_atomic(path, save(tensors))


def write_meta(folder: Path, facts: LogitsFacts) -> None:
    """Writes what `LogitsFacts.of` reads."""
    values = facts.model_dump(mode="json", exclude={"where"})
    write_atomic(folder / FOLDER / META, json.dumps(values, indent=1).encode())


class CachedLogits:
    """Reads the cache in an artifact's folder, sequence by sequence, in any order. Raises ArtifactError for a damaged shard."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.facts = folder, LogitsFacts.of(folder)
        self._files: list[Any] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        for path in sorted((folder / FOLDER).glob("*.safetensors")):
            try:
                file = safe_open(path, framework="np")
                for row, key in enumerate(file.get_tensor("keys")):
                    self._places[key.tobytes()] = (len(self._files), row)
            except (SafetensorError, OSError) as error:
                raise ArtifactError(f"{path} is corrupt: {error}", fix="delete the folder and make it again") from None
            self._files.append(file)

    def of(self, batch: Batch) -> Cached:
        """What is kept of each sequence of `batch`. Raises HoneError for a sequence that the cache does not have."""
        found: dict[str, list[np.ndarray]] = {"ids": [], "log_probs": [], "tails": []}
        for key in digests(batch):
            if key not in self._places:
                raise HoneError(
                    f"{self.folder} has no logits of a sequence that the training reads: it cuts the data in another way",
                    fix="leave mixture and a curriculum that divides documents out, or write the cache of these data again",
                )
            at, row = self._places[key]
            for name in found if self.facts.sampled is False else ("ids", "log_probs"):
                found[name].append(self._files[at].get_slice(name)[row : row + 1])
        ids, log_probs = np.concatenate(found["ids"]), np.concatenate(found["log_probs"])
        tails = np.concatenate(found["tails"]).astype(np.float32) if found["tails"] else None
        return Cached(ids.astype(np.int64), log_probs.astype(np.float32), tails)
