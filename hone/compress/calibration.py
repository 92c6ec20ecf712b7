"""Calibration: the token sequences that a compressed model is fitted to, from packed tokens or from a text.

Shapes: B sequences, S tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hone.base.errors import ArtifactError, SpecError
from hone.feed import plain
from hone.feed.load import PackedTokens
from hone.model.tokenizer import load_tokenizer

_TOKENS_PER_FEATURE = 4
"""GPTQ's divergence at 3 bits over that of rounding with searched scales: 1.75 with .17 tokens a feature, 1.02 with 1.3, .69
with 4, .63 with 11 (the reference model; benchmarks/ledger/compress.jsonl)."""
_READ = 32
"""Bytes of text that are read of a source of documents for each token that is wanted: about nine times as many tokens, drawn from."""
_LEAST_READ = 1 << 22


@dataclass(frozen=True)
class Calibration:
    """`tokens` int64 [B, S]; `document_ids` int32 [B, S], -1 for padding, None for sequences of one document without padding."""

    tokens: np.ndarray
    document_ids: np.ndarray | None
    source: dict[str, object]
    spare: Calibration | None = None
    """Other sequences of the same text, to check the compressed model on; None where none are left."""
    notes: tuple[str, ...] = ()
    """What a user must know of how they were drawn."""

    def part(self, rows: slice) -> Calibration:
        """The sequences in `rows`."""
        ids = None if self.document_ids is None else self.document_ids[rows]
        return Calibration(self.tokens[rows], ids, self.source)

    @property
    def num_tokens(self) -> int:
        """Positions that are not padding."""
        return int(self.tokens.size if self.document_ids is None else (self.document_ids >= 0).sum())


def from_data(folder: Path, *, num_sequences: int, seq_len: int, seed: int, num_spare: int = 0) -> Calibration:
    """Shuffled sequences of a data artifact's training split, packed as in training, and `num_spare` others.

    Raises SpecError when it holds fewer.
    """
    packed = PackedTokens(folder, "train")
    if packed.num_tokens < 2:
        raise SpecError(f"{folder} holds no training tokens to calibrate with", fix="give a data stage with text in it")
    there = packed.num_sequences(seq_len)
    _enough(there, num_sequences, seq_len, str(folder))
    count, end = num_sequences, min(num_sequences + num_spare, there)
    batch = packed.sequences(np.arange(count), seq_len, seed)
    spare = None
    if end > count:
        others = packed.sequences(np.arange(count, end), seq_len, seed)
        spare = Calibration(others.tokens, others.document_ids, {})
    return Calibration(batch.tokens, batch.document_ids, {"split": "train", "tokens": int(batch.tokens.size)}, spare)


def from_text(
    source: str | Path, model: Path, *, num_sequences: int, seq_len: int, seed: int, num_spare: int = 0
) -> Calibration:
    """Sequences of `seq_len` tokens of the texts in `source` (see `hone.feed.plain`), and `num_spare` others.

    A plain file is cut into windows, drawn without overlap; documents of rows and of several files are drawn, cut into windows
    where they are longer, and packed, each attending to itself alone. Each begins with the token that the tokenizer puts before
    a text, if any: models expect it there, and give it keys and activations like those of no other token. Raises SpecError when
    there is no text, or less than was asked for.
    """
    tokenizer, wanted = load_tokenizer(model), num_sequences + num_spare
    found = plain.read(str(source), "calibration_text", tokenizer, max(_LEAST_READ, _READ * wanted * seq_len))
    start = () if found.special else tokenizer.start_ids[: seq_len - 1]
    own = seq_len - len(start)
    documents = [np.array(ids, np.int64) for ids in tokenizer.encode_batch(found.documents, add_special_tokens=False)]
    least = own if found.whole else 1  # tokens of the last window of a document
    places = [(ids, begin) for ids in documents for begin in range(0, len(ids) - least + 1, own)]
    # Raw PCG64 output is equal in every numpy version; that of Generator.permutation is not guaranteed to be.
    order = np.argsort(np.random.PCG64(seed).random_raw(max(len(places), 1)), kind="stable")[: len(places)]
    if found.whole:
        order = np.concatenate([np.sort(order[:num_sequences]), np.sort(order[num_sequences:wanted])])
    head = np.array(start, np.int64)
    drawn = (np.concatenate([head, ids[begin : begin + own]]) for ids, begin in (places[place] for place in order))
    tokens, owners = _packed(drawn, seq_len, wanted)
    _enough(len(tokens), num_sequences, seq_len, f"calibration_text {source}", found.notes)
    ids = None if found.whole else owners
    spare = None
    if len(tokens) > num_sequences:
        spare = Calibration(tokens[num_sequences:], None if ids is None else ids[num_sequences:], {})
    tokens, ids = tokens[:num_sequences], None if ids is None else ids[:num_sequences]
    if found.first is not None:
        found.notes.append(f"calibration sequences are drawn from the first {found.first / 1e6:.1f} MB of {source}")
    said = {"text_sha256": found.digest, "tokens": int(tokens.size)}
    return Calibration(tokens, ids, said, spare, tuple(found.notes))


def _packed(drawn: Iterator[np.ndarray], seq_len: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int64 [B, S], document ids int32 [B, S]) of at most `most` sequences of whole documents, of which the last of a
    sequence is cut to fit; a sequence that is not filled is left out."""
    tokens, owners, place = np.zeros((most, seq_len), np.int64), np.zeros((most, seq_len), np.int32), 0
    number = 0
    for document in drawn:
        row, column = divmod(place, seq_len)
        if row == most:
            break
        number = number + 1 if column else 0
        fits = document[: seq_len - column]
        tokens[row, column : column + len(fits)] = fits
        owners[row, column : column + len(fits)] = number
        place += len(fits)
    filled = place // seq_len
    return tokens[:filled], owners[:filled]


def _enough(there: int, asked: int, seq_len: int, where: str, notes: Sequence[str] = ()) -> None:
    """Raises SpecError when fewer sequences are there than were asked for; `notes` tell what was left out."""
    if there < asked:
        raise SpecError(
            "; ".join([f"{where} has {there} sequences of {seq_len} tokens, num_sequences asks for {asked}", *notes]),
            fix=f"set num_sequences={there}, or give more text" if there else "give a longer text, or lower seq_len",
        )


def not_finite(what: str, dtype: object) -> ArtifactError:
    """The error for something that was computed in the torch dtype `dtype` and is not finite: 'the inputs of lm_head'."""
    return ArtifactError(
        f"calibration: {what} are not all finite in {str(dtype).removeprefix('torch.')}",
        fix="set compute_dtype=float32, or check the checkpoint and the calibration text",
    )


def shortage(calibration: Calibration, widest: int) -> list[str]:
    """What to say of too few tokens for a Hessian of `widest` input features."""
    seq_len, wanted = calibration.tokens.shape[1], _TOKENS_PER_FEATURE * widest
    if calibration.num_tokens >= wanted:
        return []
    return [
        f"calibrated with {calibration.num_tokens} tokens, the widest matrix has {widest} input features: below {wanted} tokens "
        f"(num_sequences={-(-wanted // seq_len)}) steps fit the text that was drawn and may be worse than rounding; trust the "
        "divergence from the given model, not the errors of layers, which look the better the less text there is"
    ]


def check(calibration: Calibration, vocab_size: int) -> None:
    """Raises ArtifactError when a token id is outside the model's embedding."""
    largest = int(calibration.tokens.max())
    if largest >= vocab_size:
        raise ArtifactError(
            f"calibration token {largest} is outside the model's vocabulary of {vocab_size}",
            fix="calibrate with text or tokens of the model's own tokenizer",
        )
