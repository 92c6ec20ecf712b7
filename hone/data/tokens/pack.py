"""Pack: the tokenizer, and the token ids of documents, concatenated, in memory-mappable files with the documents' starts and Megatron-LM's index."""

from __future__ import annotations

import functools
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.durable import sha256, write_atomic
from hone.base.errors import FitError
from hone.data.conversations.encode import Shard, trained_bytes
from hone.data.corpus import Corpus, Part, publish
from hone.data.executors.task import Task
from hone.data.tokens import tokenizer
from hone.data.tokens.spec import Tokenizer
from hone.data.tokens.tokenizer import FILES, OPTIONAL_FILES, Encoder
from hone.data.work import Work
from hone.feed.packing import PackingSpec, best_fit_index
from hone.model.tokenizer import load_tokenizer

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


def take_or_train(spec: Tokenizer, corpus: Corpus, train: np.ndarray, work: Work) -> Encoder:
    """Copies the tokenizer into the result's folder, or trains it on the documents in `train`, unless it is there already."""
    done = work.place.state / "tokenizer-done"
    if not done.exists():
        if spec.path is not None:
            tokenizer.take(spec.path, work.folder)
        else:
            total = int(corpus.columns["bytes"][train].sum())
            # Families are hashes: those with the highest are a fixed random sample.
            share = min(1.0, spec.max_train_bytes / max(total, 1))
            chosen = train & (corpus.columns["family"] >= np.uint64(int((1 - share) * (2**64 - 1))))
            texts = (text for _, shard, first, _ in corpus.spans() for _, text in corpus.texts(shard, first, chosen))
            tokenizer.train(spec, texts, work.folder)
        write_atomic(done, b"")
    return tokenizer.load(work.folder)


def tokenize(
    shape: PackingSpec,
    corpus: Corpus,
    splits: dict[str, np.ndarray],
    encoder: Encoder,
    work: Work,
    chats: Path | None = None,
    kind: str = "trained",
) -> dict[str, dict[str, int]]:
    """Writes `<split>.bin`, `<split>.starts.npy` and meta.json into tokens/; returns {split: {tokens, documents, bytes}}.

    `splits` maps a split to its documents (bool [num_documents]), `shape` selects the indices to write. `encoder` is the tokenizer
    in the result's folder. Tasks tokenize each shard first, so that a killed run resumes with the next one. `chats` is the folder of
    conversations that are encoded already, of which `kind` are the targets; then `<split>.trained.bin` (uint8) says which tokens are targets.
    """
    state, folder, parts = work.state("tokens"), work.folder / "tokens", corpus.parts()
    folder.mkdir(exist_ok=True)
    which = sha256(work.folder / FILES[0])
    reads = tuple(work.folder / name for name in (*FILES, *OPTIONAL_FILES))
    tasks = []
    for part in parts:
        chosen = {split: members[part.here] for split, members in splits.items()}
        given = {"part": part, "chosen": chosen, "tokenizer_folder": work.folder, "which": which}
        given |= {} if chats is None else {"chats": chats / f"chats-{part.number:05d}.npz"}
        tasks.append(Task.of(f"tokens-{part.number:05d}", state, given, reads=reads))
    size = corpus.columns["bytes"] * np.logical_or.reduce(list(splits.values()))
    sizes = [int(size[part.here].sum()) for part in parts]
    for _ in work.map("tokenize", encode, tasks, sizes=sizes, unit="B"):
        pass
    rows = {}
    for split in SPLITS:
        files = [state / f"tokens-{part.number:05d}.{split}" for part in parts]
        lengths = [np.load(f"{file}.npy") for file in files]
        starts = np.cumsum(np.concatenate([[0], *lengths])).astype(np.int64)
        _joined(files, state, folder / f"{split}.bin")
        if chats is not None:
            _joined([file.with_name(f"{file.name}.trained") for file in files], state, folder / f"{split}.trained.bin")
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
    if chats is not None:
        meta["targets"] = kind
        for split, row in rows.items():
            row |= _trained(folder, split, encoder)
    write_atomic(folder / "meta.json", json.dumps(meta, indent=1).encode())
    return rows


def _joined(files: list[Path], state: Path, out: Path) -> None:
    """Writes the contents of `files`, one after the other, into `out`."""
    with open(state / "packed.tmp", "wb") as packed:
        for file in files:
            with open(file, "rb") as source:
                shutil.copyfileobj(source, packed, 1 << 22)
    publish(state / "packed.tmp", out)


def _trained(folder: Path, split: str, encoder: Encoder) -> dict[str, int]:
    """How many tokens of a split of conversations are targets, and the bytes of their text."""
    ids, marks = (
        np.fromfile(folder / f"{split}.bin", encoder.dtype),
        np.fromfile(folder / f"{split}.trained.bin", np.uint8),
    )
    starts = np.load(folder / f"{split}.starts.npy")
    marks[starts[:-1]] = 0  # nothing comes before the first token of a document
    targets = ids[marks & 1 != 0]
    return {"trained_tokens": len(targets), "trained_bytes": trained_bytes(load_tokenizer(folder.parent), targets)}


def encode(
    folder: Path,
    part: Part,
    chosen: dict[str, np.ndarray],
    tokenizer_folder: Path,
    which: str,
    chats: Path | None = None,
) -> dict[str, Any]:
    """A task: writes the ids of one shard's documents, and their numbers, of each split; `chosen` (bool, the shard's documents) are its own.

    `tokenizer_folder` has the tokenizer, whose file has the hash `which`. `chats`: the shard's conversations, which are encoded.
    """
    if chats is not None:
        whole = Shard.read(chats.parent, part.number)
        for split, here in chosen.items():
            name, own = f"tokens-{part.number:05d}.{split}", whole.part(here)
            own.ids.tofile(folder / name)
            own.trained.tofile(folder / f"{name}.trained")
            np.save(folder / f"{name}.npy", own.sizes)
        return {"rows": int(sum(here.sum() for here in chosen.values()))}
    corpus, encoder = Corpus.of(part), _encoder(tokenizer_folder, which)
    for split, here in chosen.items():
        lengths: list[int] = []
        with open(folder / f"tokens-{part.number:05d}.{split}", "wb") as file:
            for texts in _batches(corpus, part, here):
                for ids in encoder.encode(texts):
                    file.write(ids.tobytes())
                    lengths.append(len(ids))
        np.save(folder / f"tokens-{part.number:05d}.{split}.npy", np.array(lengths, np.int64))
    return {"rows": int(sum(here.sum() for here in chosen.values()))}


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, which: str) -> Encoder:
    """The tokenizer, cached: loading it takes longer than a small task."""
    return tokenizer.load(folder)


def _batches(corpus: Corpus, part: Part, here: np.ndarray) -> Iterator[list[str]]:
    """The texts of the documents `here` (bool, the shard's documents), about _BATCH_CHARS at a time."""
    waiting: list[str] = []
    size = 0
    for _, text in corpus.texts(part.shard, part.first, part.everyone(here)):
        waiting.append(text)
        size += len(text)
        if size > _BATCH_CHARS:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting
