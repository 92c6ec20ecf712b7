"""Calibration: the token sequences that a compressed model is fitted to, from packed tokens or from a text.

Shapes: B sequences, S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hone.base.durable import sha256
from hone.base.errors import ArtifactError, SpecError
from hone.data.load import PackedTokens
from hone.data.readers.formats.kinds import UNKNOWN, kind_of
from hone.model.tokenizer import load_tokenizer

_TOKENS_PER_FEATURE = 4
"""GPTQ's divergence at 3 bits over that of rounding with searched scales: 1.75 with .17 tokens a feature, 1.02 with 1.3, .69
with 4, .63 with 11 (the reference model; benchmarks/ledger/compress.jsonl)."""
_PLAIN = {"text", "code", "tex", UNKNOWN}
"""Formats that are text as they stand."""


@dataclass(frozen=True)
class Calibration:
    """`tokens` int64 [B, S]; `document_ids` int32 [B, S], -1 for padding, None for sequences of one document without padding."""

    tokens: np.ndarray
    document_ids: np.ndarray | None
    source: dict[str, object]
    spare: Calibration | None = None
    """Other sequences of the same text, to check the compressed model on; None where none are left."""

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

    Raises SpecError when it holds no tokens.
    """
    packed = PackedTokens(folder, "train")
    if packed.num_tokens < 2:
        raise SpecError(f"{folder} holds no training tokens to calibrate with", fix="give a data stage with text in it")
    there = packed.num_sequences(seq_len)
    count, end = min(num_sequences, there), min(num_sequences + num_spare, there)
    batch = packed.sequences(np.arange(count), seq_len, seed)
    spare = None
    if end > count:
        others = packed.sequences(np.arange(count, end), seq_len, seed)
        spare = Calibration(others.tokens, others.document_ids, {})
    return Calibration(batch.tokens, batch.document_ids, {"split": "train", "tokens": int(batch.tokens.size)}, spare)


def refuse_markup(path: Path) -> None:
    """Raises SpecError for a file that is no plain text by its name: a model reads no braces of JSON."""
    kind = kind_of(path.name)
    if kind is not None and (kind[1] or kind[0] not in _PLAIN):
        raise SpecError(
            f"calibration_text {path} is {' in '.join(filter(None, kind))}, and is read as it stands: plain text alone",
            fix="read it with `hone data FILE --tokenizer.path=MODEL --out=DATA`, and calibrate with that: --from.data=DATA",
        )


def text_bytes(path: Path) -> int:
    """Size of a calibration text. Raises SpecError when it cannot be read, or is no plain text."""
    refuse_markup(path)
    try:
        return path.stat().st_size
    except OSError as error:
        raise SpecError(f"calibration_text {path}: {error.strerror}", fix="name a text file") from None


def from_text(
    path: Path, model: Path, *, num_sequences: int, seq_len: int, seed: int, num_spare: int = 0
) -> Calibration:
    """Windows of `seq_len` tokens of the text in `path`, drawn without overlap, and `num_spare` others.

    Each begins with the token that the tokenizer puts before a text, if any: models expect it there, and give it keys and
    activations like those of no other token. Raises SpecError when the text is missing, no UTF-8 or shorter than one window.
    """
    refuse_markup(path)
    try:
        text = path.read_text(encoding="utf8")
    except OSError as error:
        raise SpecError(f"calibration_text {path}: {error.strerror}", fix="name a text file") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"calibration_text {path} is not UTF-8: {error}", fix="name a text file") from None
    tokenizer = load_tokenizer(model)
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int64)
    start = np.array(tokenizer.start_ids[: seq_len - 1], np.int64)
    own = seq_len - len(start)
    windows = len(ids) // own
    if windows < 1:
        raise SpecError(
            f"calibration_text {path} has {len(ids)} tokens, one sequence needs {own}",
            fix="give a longer text, or lower seq_len",
        )
    # Raw PCG64 output is equal in every numpy version; that of Generator.permutation is not guaranteed to be.
    order = np.argsort(np.random.PCG64(seed).random_raw(windows), kind="stable")
    cut = np.hstack([np.tile(start, (windows, 1)), ids[: windows * own].reshape(windows, own)])
    tokens, others = (
        cut[np.sort(part)] for part in (order[:num_sequences], order[num_sequences : num_sequences + num_spare])
    )
    spare = Calibration(others, None, {}) if len(others) else None
    return Calibration(tokens, None, {"text_sha256": sha256(path), "tokens": int(tokens.size)}, spare)


def shortage(calibration: Calibration, asked: int, widest: int) -> list[str]:
    """What to say of a calibration with fewer sequences than `asked`, or too few tokens for a Hessian of `widest` input features."""
    count, seq_len = calibration.tokens.shape
    said = []
    if count < asked:
        said.append(f"the calibration source has {count} sequences of {seq_len} tokens, {asked} were asked for")
    wanted = _TOKENS_PER_FEATURE * widest
    if calibration.num_tokens < wanted:
        said.append(
            f"calibrated with {calibration.num_tokens} tokens, the widest matrix has {widest} input features: below {wanted} tokens "
            f"(num_sequences={-(-wanted // seq_len)}) steps fit the text that was drawn and may be worse than rounding; trust the "
            "divergence from the given model, not the errors of layers, which look the better the less text there is"
        )
    return said


def check(calibration: Calibration, vocab_size: int) -> None:
    """Raises ArtifactError when a token id is outside the model's embedding."""
    largest = int(calibration.tokens.max())
    if largest >= vocab_size:
        raise ArtifactError(
            f"calibration token {largest} is outside the model's vocabulary of {vocab_size}",
            fix="calibrate with text or tokens of the model's own tokenizer",
        )
