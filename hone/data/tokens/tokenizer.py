"""The tokenizer of a data artifact: byte-level BPE trained on its text, or copied from a folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from hone.base.durable import write_atomic
from hone.base.errors import ArtifactError, SpecError
from hone.data.tokens.fast import FastBPE, build
from hone.data.tokens.spec import Tokenizer
from hone.readers.texts import END_OF_TEXT

FILES = ("tokenizer.json", "tokenizer_config.json")
OPTIONAL_FILES = ("special_tokens_map.json", "chat_template.jinja")
_PIECE_CHARS = 1 << 18
_TRAIN_PIECE_CHARS = 100_000
_ENDLESS_WORD = re.compile(r"\S{200}")
_NO_LIMIT = 1 << 30


class Encoder(NamedTuple):
    """A loaded tokenizer for packing. `fast` runs it with tiktoken; `why_slow` is the reason when it cannot."""

    core: Any
    eos_token_id: int
    vocab_size: int
    fast: FastBPE | None = None
    why_slow: str = ""

    @property
    def dtype(self) -> np.dtype:
        """Little-endian uint16 when every id fits, else uint32."""
        return _dtype(self.vocab_size)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text, followed by the end-of-text token. '<|endoftext|>' and the like inside a text are plain text."""
        if self.fast is None:
            return self._encode_by_merges(texts)
        closing = np.array([self.eos_token_id], self.dtype)
        results = []
        for text in texts:
            parts = [self.fast.encode(piece) for piece in _pieces(text, _PIECE_CHARS)]
            done = all(part is not None for part in parts)
            results.append(np.concatenate([*parts, closing]) if done else self._encode_by_merges([text])[0])
        return results

    def _encode_by_merges(self, texts: list[str]) -> list[np.ndarray]:
        pieces = [list(_pieces(text, _PIECE_CHARS)) for text in texts]
        flat = self.core.encode_batch_fast([part for parts in pieces for part in parts], add_special_tokens=False)
        ids = iter([encoding.ids for encoding in flat])
        closing = [self.eos_token_id]
        return [
            np.fromiter((token for part in ([*(next(ids) for _ in parts), closing]) for token in part), self.dtype)
            for parts in pieces
        ]


def train(spec: Tokenizer, texts: Iterable[str], folder: Path) -> None:
    """Trains byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) on `texts` and writes FILES into `folder`.

    The result depends on the texts alone, not on threads or their order.
    """
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=spec.max_token_chars,
        show_progress=False,
    )
    core.train_from_iterator((part for text in texts for part in _for_training(text)), trainer)
    write_atomic(folder / "tokenizer.json", core.to_str(pretty=False).encode())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "unk_token": None,
        "bos_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _NO_LIMIT,
    }
    write_atomic(folder / "tokenizer_config.json", json.dumps(config, indent=1).encode())


def take(source: str, folder: Path) -> None:
    """Copies the tokenizer from folder `source` to `folder`. Raises ArtifactError when there is none."""
    for name in (*OPTIONAL_FILES, *FILES):
        path = Path(source).expanduser() / name
        if path.is_file():
            temporary = folder / f"{name}.taking"  # in our own folder: another stage may copy one at the same time
            shutil.copyfile(path, temporary)
            temporary.replace(folder / name)
        elif name == FILES[0]:
            raise ArtifactError(f"{source} has no {name}", fix="set tokenizer.path to a folder with a tokenizer.json")


def load(folder: Path | str) -> Encoder:
    """The tokenizer in `folder`. Raises ArtifactError when it is missing or corrupt, SpecError when it has no end-of-text token."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    try:
        core = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf8"))
    except Exception as error:  # the library raises bare Exception for invalid files
        raise ArtifactError(f"{path} is not a tokenizer: {error}", fix="give a folder with a tokenizer.json") from None
    eos = core.token_to_id(_eos_text(folder))
    if eos is None:
        raise SpecError(f"{folder} has no end-of-text token", fix="set eos_token in its tokenizer_config.json")
    core.encode_special_tokens = True
    core.no_truncation()
    core.no_padding()
    vocab_size = max(core.get_vocab(with_added_tokens=True).values()) + 1
    fast, why_slow = build(core, _dtype(vocab_size))
    return Encoder(core, eos, vocab_size, fast, why_slow)


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _eos_text(folder: Path) -> str:
    """The end-of-text token in the folder's settings; hone's own without one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.exists():
            value = json.loads(path.read_text(encoding="utf8")).get("eos_token")
            if value:
                return value["content"] if isinstance(value, dict) else value
    return END_OF_TEXT


def _for_training(text: str) -> Iterator[str]:
    """`text` in pieces, overlong words split: the trainer's time is quadratic in a word's length."""
    for part in _pieces(text, _TRAIN_PIECE_CHARS):
        yield _ENDLESS_WORD.sub(r"\g<0>\n", part)


def _pieces(text: str, limit: int) -> Iterator[str]:
    """`text` in pieces of at most `limit` characters, cut before line breaks where possible: BPE needs bounded input."""
    while len(text) > limit:
        cut = text.rfind("\n", limit // 2, limit)
        cut = cut if cut > 0 else limit
        yield text[:cut]
        text = text[cut:]
    yield text
