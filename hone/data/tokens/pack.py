"""Pack: writes the token ids of documents, concatenated, to memory-mappable files with the documents' starts, and Megatron-LM's index."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hone.base.durable import write_atomic
from hone.base.errors import FitError
from hone.data.corpus import Corpus, publish
from hone.data.tokens.tokenizer import Encoder
from hone.feed.packing import PackingSpec, best_fit_index

_MAGIC = b"MMIDIDX\x00\x00"
_CODES = {"uint16": 8, "uint32": 4}  # ids are below 2^31: uint32 and Megatron's int32 are the same bytes


def write_index(path: Path, starts: np.ndarray, dtype: np.dtype) -> None:
    """Writes the index of documents that begin at `starts` (int64 [num_documents + 1]), each one sequence, to `path`.

    Raises FitError when a document has more tokens than the format can store.
    """
    lengths = np.diff(starts)
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise FitError(
            f"a document of {lengths.max()} tokens is longer than Megatron's index can store",
            fix="set max_document_chars lower, or packing.megatron: false",
        )
    head = _MAGIC + struct.pack("<QBQQ", 1, _CODES[dtype.name], len(lengths), len(starts))
    parts = [lengths.astype("<i4"), (starts[:-1] * dtype.itemsize).astype("<i8"), np.arange(len(starts), dtype="<i8")]
    write_atomic(path, head + b"".join(part.tobytes() for part in parts))


SPLITS = ("train", "val")
_BATCH_CHARS = 1 << 18


def pack(
    corpus: Corpus,
    splits: dict[str, np.ndarray],
    encoder: Encoder,
    state: Path,
    folder: Path,
    shape: PackingSpec,
    *,
    progress: Callable[[int], None] = lambda num_bytes: None,
    durable: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, int]]:
    """Writes `<split>.bin`, `<split>.starts.npy` and meta.json into `folder`; returns {split: {tokens, documents, bytes}}.

    `splits` maps a split to its documents (bool [num_documents]), `shape` selects the indices to write. Each shard is tokenized into `state` first, so
    that a killed run resumes with the next one.
    """
    folder.mkdir(exist_ok=True)
    encode_shards(corpus, splits, encoder, state, progress=progress, durable=durable)
    rows = {}
    for split in SPLITS:
        parts = [state / f"tokens-{number:05d}.{split}" for number in range(len(corpus.shards))]
        lengths = [np.load(f"{part}.npy") for part in parts]
        starts = np.cumsum(np.concatenate([[0], *lengths])).astype(np.int64)
        with open(state / "packed.tmp", "wb") as file:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 22)
        publish(state / "packed.tmp", folder / f"{split}.bin")
        with open(state / "starts.tmp", "wb") as file:
            np.save(file, starts)
        publish(state / "starts.tmp", folder / f"{split}.starts.npy")
        rows[split] = {
            "tokens": int(starts[-1]),
            "documents": len(starts) - 1,
            "bytes": int(corpus.columns["bytes"][splits[split]].sum()),
        }
        size = os.path.getsize(folder / f"{split}.bin")
        assert size == rows[split]["tokens"] * encoder.dtype.itemsize, f"{split}.bin has {size} bytes"
        if shape.kind == "best_fit":
            for seq_len in shape.lengths:
                best_fit_index(starts, seq_len).write(folder, split)
        if shape.megatron:
            write_index(folder / f"{split}.idx", starts, encoder.dtype)
    meta = {
        "dtype": encoder.dtype.name,
        "vocab_size": encoder.vocab_size,
        "eos_token_id": encoder.eos_token_id,
        "packing": {"kind": shape.kind, "lengths": list(shape.lengths) if shape.kind == "best_fit" else []},
        "splits": rows,
    }
    write_atomic(folder / "meta.json", json.dumps(meta, indent=1).encode())
    return rows


def encode_shards(
    corpus: Corpus,
    splits: dict[str, np.ndarray],
    encoder: Encoder,
    state: Path,
    *,
    progress: Callable[[int], None] = lambda num_bytes: None,
    durable: Callable[[], None] = lambda: None,
) -> None:
    """Writes the tokens of each shard to `state`, where `pack` reads them; existing ones are kept."""
    for number, shard, first, _ in corpus.spans():
        for split in SPLITS:
            path = state / f"tokens-{number:05d}.{split}"
            if not (path.exists() and Path(f"{path}.npy").exists()):
                _encode_shard(corpus, shard, first, splits[split], encoder, path, progress)
        durable()


def _encode_shard(
    corpus: Corpus,
    shard: Path,
    first: int,
    chosen: np.ndarray,
    encoder: Encoder,
    path: Path,
    progress: Callable[[int], None],
) -> None:
    """Writes the ids of the chosen documents of one shard to `path` and their counts to `path`.npy, the latter last."""
    lengths: list[int] = []
    with open(f"{path}.tmp", "wb") as file:

        def flush(texts: list[str]) -> None:
            for ids in encoder.encode(texts):
                file.write(ids.tobytes())
                lengths.append(len(ids))
            progress(sum(len(text) for text in texts))

        waiting: list[str] = []
        size = 0
        for _, text in corpus.texts(shard, first, chosen):
            waiting.append(text)
            size += len(text)
            if size > _BATCH_CHARS:
                flush(waiting)
                waiting, size = [], 0
        flush(waiting)
    publish(Path(f"{path}.tmp"), path)
    with open(f"{path}.npy.tmp", "wb") as file:
        np.save(file, np.array(lengths, np.int64))
    publish(Path(f"{path}.npy.tmp"), Path(f"{path}.npy"))
