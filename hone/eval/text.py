"""The text on which a model is scored: a split of a data artifact in the model's own tokens, and the bytes of each token."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.base.errors import SpecError
from hone.data.load import PackedTokens
from hone.model.tokenizer import Tokenizer, identity_of, load_tokenizer


class Text(NamedTuple):
    """`tokens` int64 [N], document `starts` int64 [num_documents + 1], UTF-8 `token_bytes` int32 [N] (0: special token).

    `packed`: the tokens are those of the data, whose tokenizer is the model's.
    """

    tokens: np.ndarray
    starts: np.ndarray
    token_bytes: np.ndarray
    how: str
    packed: bool


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
    kept: list[np.ndarray] = []
    total = 0
    for document in documents:
        if max_tokens and total + len(document) > max_tokens:
            document = document[: max_tokens - total]
        kept.append(document)
        total += len(document)
        if max_tokens and total >= max_tokens:
            break
    if not any(len(document) > 1 for document in kept):
        raise SpecError(
            f"the {split} split of {data} has {total} tokens in {len(kept)} documents: nothing to predict",
            fix="give the data stage more text, or a larger validation_fraction",
        )
    tokens = np.concatenate(kept).astype(np.int64)
    starts = np.cumsum([0, *(len(document) for document in kept)]).astype(np.int64)
    return Text(tokens, starts, _lengths(tokenizer, tokens), how, packed)


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
