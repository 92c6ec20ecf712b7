"""Encoding through tiktoken beside `tokenizers`, with the tokens compared; best-fit packing beside the stream, with its waste.

    python -m benchmarks.data tokens --data FOLDER

Texts are real documents only, English, code and 75 other languages. Speeds are per second of process CPU time of one thread.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import tokenizers

from benchmarks.data.clock import best_of
from benchmarks.data.corpus import grown
from hone.data.tokens.spec import Tokenizer
from hone.data.tokens.tokenizer import Encoder, load, train
from hone.feed.packing import best_fit_index

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def rows(data: Path, peers: str | None = None, megabytes: float = 10) -> list[dict[str, Any]]:
    """The rows of this benchmark; the peer, `tokenizers`, is hone's own dependency, so that `peers` is not needed.

    Of a corpus of `megabytes` the real documents are taken, two fifths of it.
    """
    made = grown(data, megabytes)
    texts = [text for text, real in zip(made.texts, made.real) if real]
    result = []
    lengths = None
    with tempfile.TemporaryDirectory() as name:
        for kind, encoder in encoders(data, texts, Path(name)):
            found = encoding(kind, encoder, texts)
            result += found[0]
            lengths = found[1] if lengths is None else lengths
    assert lengths is not None
    return [*result, *packing(lengths), placing()]


def encoders(data: Path, texts: list[str], folder: Path) -> Iterator[tuple[str, Encoder]]:
    """(name, encoder) of each available tokenizer, and of one trained here."""
    gpt2, qwen2 = data / "tokenizers" / "gpt2", data / "tokenizers" / "qwen2"
    cores = {
        "gpt2": _core((gpt2 / "encoder.json").read_bytes(), (gpt2 / "vocab.bpe").read_bytes(), None),
        "qwen2": _core(
            *(gzip.decompress((qwen2 / f"{name}.gz").read_bytes()) for name in ("vocab.json", "merges.txt")), _QWEN2
        ),
        "pythia": gzip.decompress((data / "tokenizers" / "pythia-neox" / "tokenizer.json.gz").read_bytes()),
    }
    for kind, raw in cores.items():
        (folder / "tokenizer.json").write_bytes(raw)
        yield kind, load(folder)
    train(Tokenizer(vocab_size=32768, max_train_bytes=2_000_000), texts[::2], folder)
    yield "hone's own, 32768 tokens", load(folder)


def _core(vocab: bytes, merges: bytes, pattern: str | None) -> bytes:
    """A tokenizer.json of a vocabulary and its merges; no pattern: GPT-2's."""
    pairs = [tuple(line.split(" ")) for line in merges.decode("utf8").splitlines() if line[:9] != "#version:" and line]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=json.loads(vocab), merges=pairs))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        core.normalizer = tokenizers.normalizers.NFC()
        core.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    core.add_special_tokens(["<|endoftext|>"])
    return core.to_str().encode()


def encoding(kind: str, encoder: Encoder, texts: list[str]) -> tuple[list[dict[str, Any]], np.ndarray]:
    """(rows of one tokenizer, tokens of each text)."""
    assert encoder.fast is not None, encoder.why_slow
    size = sum(len(text.encode()) for text in texts) / 1e6
    slow = encoder._replace(fast=None)
    quick_s, quick = best_of(2, lambda: encoder.encode(texts))
    slow_s, reference = best_of(1, lambda: slow.encode(texts))
    some = texts[::4]
    raw_s, _ = best_of(1, lambda: encoder.core.encode_batch_fast(some, add_special_tokens=False))
    different = sum(one.tobytes() != other.tobytes() for one, other in zip(quick, reference))
    num_tokens = sum(map(len, reference))
    row = {"unit": "MB/s per core", "n": len(texts), "peer": f"tokenizers {tokenizers.__version__}"}
    peer = max(size / slow_s, sum(len(text.encode()) for text in some) / 1e6 / raw_s)
    return [
        {
            "figure": f"tokenize, {kind}: speed",
            "value": size / quick_s,
            **row,
            "peer_value": peer,
            "ratio": size / quick_s / peer,
            "note": f"{size:.0f} MB, {num_tokens} tokens",
        },
        {
            "figure": f"tokenize, {kind}: texts with other tokens",
            "value": different,
            "unit": "texts",
            "n": len(texts),
            "peer": row["peer"],
        },
    ], np.array([len(ids) for ids in quick])


def packing(lengths: np.ndarray) -> list[dict[str, Any]]:
    """Waste and parted documents of rows of the corpus, best fit against the stream."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    found = []
    for seq_len in (256, 1024, 4096):
        index = best_fit_index(starts, seq_len)
        positions = index.num_sequences * seq_len
        total = int(starts[-1]) - 1
        stream = -(-total // seq_len) * seq_len
        last = starts[:-1] + np.maximum(lengths - 2, 0)
        pairs = {
            "padding": (index.padding / positions, (stream - total) / stream),
            "positions without a target": (index.padding / positions, (stream - total + len(lengths) - 1) / stream),
            "documents parted": (
                float((lengths - 1 > seq_len).mean()),
                float((starts[:-1] // seq_len != last // seq_len).mean()),
            ),
        }
        for figure, (value, other) in pairs.items():
            found.append(
                {
                    "figure": f"pack, rows of {seq_len}, best fit: {figure}",
                    "value": value,
                    "unit": "1",
                    "n": len(lengths),
                    "peer": "stream",
                    "peer_value": other,
                    "ratio": value / other if other else None,
                }
            )
    return found


def placing(num_documents: int = 2_000_000, seq_len: int = 4096) -> dict[str, Any]:
    """Seconds to place many documents of lognormal length."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(6, 1.2, num_documents), 200_000).astype(np.int64) + 2
    starts = np.concatenate([[0], np.cumsum(lengths)])
    seconds, index = best_of(2, lambda: best_fit_index(starts, seq_len))
    least = -(-int((lengths - 1).sum()) // seq_len)
    return {
        "figure": f"pack, {num_documents} documents into rows of {seq_len}",
        "value": seconds,
        "unit": "s",
        "n": num_documents,
        "note": f"{index.num_sequences} rows, {index.num_sequences - least} more than any packing needs",
    }
