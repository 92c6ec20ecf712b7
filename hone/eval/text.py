"""The text on which a model is scored: a split of a data artifact or texts as they are, in the model's own tokens, and the bytes of each token."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.base.errors import SpecError
from hone.feed import plain
from hone.feed.load import PackedTokens
from hone.model.tokenizer import Tokenizer, identity_of, load_tokenizer

_READ = 32
"""Bytes of text that are read for each token wanted: far more than a token of any tokenizer has in a text."""


class Text(NamedTuple):
    """`tokens` int64 [N], document `starts` int64 [num_documents + 1], UTF-8 `token_bytes` int32 [N] (0: special token).

    `packed`: the tokens are those of a data artifact, whose tokenizer is the model's. `notes`: what a user must know of how it was read.
    """

    tokens: np.ndarray
    starts: np.ndarray
    token_bytes: np.ndarray
    how: str
    packed: bool = False
    notes: tuple[str, ...] = ()


def read_text(data: Path, model: Path, *, split: str = "val", max_tokens: int = 0) -> Text:
    """Split `split` of data artifact `data` in the tokens of `model`, whole documents up to `max_tokens` tokens (0: all).

    When the model's tokenizer is not that of the data, the documents' text is tokenized again. Raises SpecError when
    the split has no token to score, or its texts no longer exist.
    """
    tokenizer = load_tokenizer(model)
    packed = tokenizer.identity == identity_of(data)
    if packed:
        documents, how = PackedTokens(data, split).documents(), f"{split} split as packed"
    else:
        documents, how = _tokenized(data, split, tokenizer), f"{split} split in the model's own tokens"
    way = "give the data stage more text, or a larger validation_fraction"
    text = _text(documents, tokenizer, max_tokens, how, f"the {split} split of {data}", way)
    return text._replace(packed=packed)


def read_texts(source: str, model: Path, *, max_tokens: int = 0) -> Text:
    """The texts of `source` (see `hone.feed.plain`) in the tokens of `model`, up to `max_tokens` tokens (0: all).

    A plain file is one document, rows and the files of a folder are one each. Raises SpecError when there is nothing to score.
    """
    tokenizer = load_tokenizer(model)
    found = plain.read(source, "text", tokenizer, max_tokens * _READ if max_tokens else math.inf)
    end = [] if found.special else list(tokenizer.eos_ids[:1])
    documents = (
        np.asarray(tokenizer.encode(text, add_special_tokens=not found.special) + end, np.int64)
        for text in found.documents
    )
    text = _text(documents, tokenizer, max_tokens, f"{source} in the model's own tokens", source, "give a longer text")
    return text._replace(notes=tuple(found.notes))


def _text(documents: Iterable[np.ndarray], tokenizer: Tokenizer, most: int, how: str, where: str, way: str) -> Text:
    """The documents up to `most` tokens (0: all). Raises SpecError, with the way out, when none has two."""
    kept: list[np.ndarray] = []
    total = 0
    for document in documents:
        if most and total + len(document) > most:
            document = document[: most - total]
        kept.append(document)
        total += len(document)
        if most and total >= most:
            break
    if not any(len(document) > 1 for document in kept):
        raise SpecError(f"{where} has {total} tokens in {len(kept)} documents: nothing to predict", fix=way)
    tokens = np.concatenate(kept).astype(np.int64)
    starts = np.cumsum([0, *(len(document) for document in kept)]).astype(np.int64)
    return Text(tokens, starts, _lengths(tokenizer, tokens), how)


def _tokenized(data: Path, split: str, tokenizer: Tokenizer):
    """The split's documents, tokenized with the tokenizer's own template, followed by its end-of-text token if any."""
    import pyarrow.parquet as parquet

    files = sorted((data / "documents").glob("*.parquet"))
    if not files:
        raise SpecError(
            f"the model has another tokenizer than {data}, and the texts of {data} (documents/*.parquet) are missing",
            fix="make the data artifact again, or evaluate on data packed with the model's tokenizer",
        )
    end = list(tokenizer.eos_ids[:1])
    for file in files:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=256, columns=["text", "split"]):
            for row in batch.to_pylist():
                if row["split"] == split:
                    yield np.asarray(tokenizer.encode(row["text"]) + end, np.int64)


def _lengths(tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """UTF-8 bytes of each token; 0 for special tokens."""
    used, place = np.unique(tokens, return_inverse=True)
    special = tokenizer.special_ids
    sizes = [0 if int(token) in special else len(tokenizer.token_bytes(int(token))) for token in used]
    return np.asarray(sizes, np.int32)[place]
