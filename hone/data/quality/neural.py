"""Neural: a small encoder of the model room's layers, which scores words in their order and context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from hone.base.durable import sha256, write_atomic
from hone.base.errors import ArtifactError, MissingExtra, SpecError
from hone.data.quality.seeds import Examples, Known, Seeded
from hone.data.tokens import tokenizer as tokenizers
from hone.data.tokens.spec import Tokenizer
from hone.text.batch import Texts

_WEIGHTS, _TOKENIZER, _ABOUT = "model.safetensors", "tokenizer.json", "about.json"
_CHARS_A_TOKEN = 4
_MOST_CHARS_A_TOKEN = 16
_STEPS = 10_000
"""Scores are rounded to multiples of 1 / _STEPS: finer differences may come from the processor."""


class Neural(Seeded):
    """A small bidirectional transformer with its own tokenizer, trained on good and bad texts. Vaswani et al. 2017, arXiv:1706.03762.

    Reads the beginning of each of a few parts of a text. Costs two hundred times as much as `hashed_logistic` and uses word
    order; in a `cascade` it reads only unclear cases. Needs about a thousand texts per class. The score is the same in any
    batch, thread or worker on one kind of machine.
    """

    paper: ClassVar[str] = "arXiv:1706.03762"

    piece_chars: int = Field(1000, ge=100, description="Longer seeds are cut into pieces, each an example.")
    num_layers: int = Field(2, ge=1, description="Layers.")
    hidden_size: int = Field(128, ge=32, description="Width, a multiple of 32: heads are 32 wide.")
    vocab_size: int = Field(8192, ge=257, description="Largest vocabulary of its byte-level BPE, trained on the seeds.")
    log_pairs: int = Field(16, ge=8, le=24, description="log2 of the number of bigram embeddings.")
    max_tokens: int = Field(256, ge=8, description="Most tokens read per part.")
    windows: int = Field(
        2, ge=1, description="Parts of a long text whose beginnings are read; 1: the beginning of the text."
    )
    epochs: int = Field(3, ge=1, description="Epochs over the seeds.")
    batch: int = Field(32, ge=1, description="Examples of a training step.")
    learning_rate: float = Field(
        1e-3, gt=0, description="Peak of AdamW's learning rate, after warm-up and before cosine decay."
    )
    weight_decay: float = Field(0.1, ge=0, description="AdamW's weight decay of matrices.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Share of tokens and of features masked in training.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Device for training and scoring, in each worker.")

    @field_validator("hidden_size")
    @classmethod
    def _of_whole_heads(cls, value: int) -> int:
        if value % 32:
            raise ValueError(f"{value} is not a multiple of 32")
        return value

    def need(self) -> None:
        """Raises MissingExtra without torch, SpecError without the device."""
        _encoder(self.device)

    def open(self, folder: Path) -> _Opened:
        """The model in `folder`."""
        about = self._about(folder)
        encoder = _encoder(self.device)
        place = folder / self.column
        try:
            model = encoder.loaded(place / _WEIGHTS, encoder.Sizes(**about["sizes"]), self.device)
        except (ValueError, RuntimeError, TypeError) as error:
            raise _damaged(place, error) from None
        return _Opened(self, about["made_by"], model, tokenizers.load(place))

    def known(self, folder: Path) -> Known:
        about = self._about(folder)
        return Known(about["made_by"], about["figures"])

    def _about(self, folder: Path) -> dict[str, Any]:
        """The contents of about.json, which is written last and has the hashes of the other files."""
        place = folder / self.column
        try:
            about = json.loads((place / _ABOUT).read_text(encoding="utf8"))
            for name in (_WEIGHTS, _TOKENIZER):
                if sha256(place / name) != about["files"][name]:
                    raise ValueError(f"{name} is not the file it was written with")
            return {name: about[name] for name in ("made_by", "figures", "sizes")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(place, error) from None

    def fit(self, examples: Examples, made_by: str, folder: Path) -> None:
        """Writes <column>/model.safetensors, tokenizer.json, about.json."""
        encoder = _encoder(self.device)
        place = folder / self.column
        place.mkdir(parents=True, exist_ok=True)
        (place / _ABOUT).unlink(missing_ok=True)
        learn = np.flatnonzero(~examples.held)
        texts = [examples.texts[number] for number in learn]
        vocabulary = Tokenizer(vocab_size=self.vocab_size, max_train_bytes=2 * self.max_bytes)
        tokenizers.train(vocabulary, texts, place)
        tokens = tokenizers.load(place)
        sizes = encoder.Sizes(tokens.vocab_size, self.log_pairs, self.hidden_size, self.num_layers, self.max_tokens)
        how = encoder.Training(self.epochs, self.batch, self.learning_rate, self.weight_decay, self.dropout, self.seed)
        rows = [self._ids(tokens, text) for text in texts]
        model = encoder.fit(sizes, rows, examples.targets[learn], how, self.device)
        encoder.save(model, place / _WEIGHTS)
        tested = Texts.of([examples.texts[number] for number in np.flatnonzero(examples.held)])
        figures = examples.figures(_Opened(self, made_by, model, tokens).columns(tested)[self.column])
        files = {name: sha256(place / name) for name in (_WEIGHTS, _TOKENIZER)}
        about = {"made_by": made_by, "figures": figures, "sizes": sizes._asdict(), "files": files}
        write_atomic(place / _ABOUT, json.dumps(about, indent=1).encode())

    def _ids(self, tokens: tokenizers.Encoder, text: str) -> np.ndarray:
        """The first tokens of `text`."""
        return tokens.encode([text[: _MOST_CHARS_A_TOKEN * self.max_tokens]])[0][: self.max_tokens]

    def parts(self, text: str) -> list[str]:
        """`text` in `windows` equal parts, or fewer for a short text."""
        number = min(self.windows, max(len(text) // (_CHARS_A_TOKEN * self.max_tokens), 1))
        return [text[part * len(text) // number : (part + 1) * len(text) // number] for part in range(number)]


class _Opened(NamedTuple):
    spec: Neural
    made_by: str
    model: Any
    tokens: tokenizers.Encoder

    def __repr__(self) -> str:
        """Identifies the result: all that decides the columns, without the weights themselves."""
        return f"neural {self.spec.column} {self.made_by}"

    def columns(self, texts: Texts) -> dict[str, np.ndarray]:
        """{column: float32 [n]}: the probability that a text is good, at a prior of one half, from the mean margin of its parts."""
        parts = [self.spec.parts(text) for text in texts.strings()]
        counts = np.array([len(some) for some in parts], np.int64)
        rows = [self.spec._ids(self.tokens, part) for some in parts for part in some]
        found = _encoder(self.spec.device).margins(self.model, rows).astype(np.float64)
        whose = np.repeat(np.arange(len(parts)), counts)
        mean = np.bincount(whose, found, len(parts)) / np.maximum(counts, 1)
        scores = np.round(_STEPS / (1 + np.exp(-mean))) / _STEPS
        return {self.spec.column: scores.astype(np.float32)}


def _damaged(place: Path, error: Exception) -> ArtifactError:
    return ArtifactError(f"{place} is not a scorer's model: {error}", fix="delete it and run the data stage again")


def _encoder(device: str) -> Any:
    """The module of the encoder; imported on use, since specs must load without torch."""
    try:
        import torch

        from hone.data.quality import encoder
    except ImportError:
        raise MissingExtra.of("neural", "torch", "data") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError("scorer.device = 'cuda', but torch finds no CUDA device", fix="set device: cpu")
    return encoder
