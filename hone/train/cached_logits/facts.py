"""Facts of cached logits: which sequences of which data they are of, and what is kept of each token."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, ValidationError

from hone.base.errors import ArtifactError
from hone.base.plan import Facts
from hone.model.folder import read_json

FOLDER, META = "logits", "meta.json"


class LogitsFacts(Facts):
    """Facts of a teacher's log-probabilities, on disk or planned."""

    noun: ClassVar[str] = "cache of logits"
    mark: ClassVar[str] = f"{FOLDER}/{META}"

    k: int = Field(description="Token ids of each position.")
    sampled: bool = Field(
        description="Whether the ids were drawn from the distribution; else they are the most likely."
    )
    temperature: float = Field(description="Temperature of the distribution.")
    seq_len: int = Field(description="Tokens of a sequence.")
    num_sequences: int = Field(description="Sequences.")
    vocab_size: int = Field(description="Ids over which the distribution is one: those of the data's tokenizer.")
    tokenizer: str | None = Field(description="Identity of the tokenizer (`Tokenizer.identity`).")
    data: str = Field(description="Fingerprint of the data; of planned data where they will be.")

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The facts of a finished cache's folder. Raises ArtifactError when meta.json is corrupt."""
        values = read_json(folder / cls.mark)
        try:
            return cls(where=str(folder), **values)
        except (ValidationError, TypeError) as error:
            raise ArtifactError(
                f"{folder / cls.mark} is corrupt: {type(error).__name__}", fix="delete the folder and make it again"
            ) from None

    @property
    def token_bytes(self) -> int:
        """Bytes on disk of a token's ids and log-probabilities."""
        return bytes_of_token(self.k, self.vocab_size, sampled=self.sampled)


def bytes_of_token(k: int, vocab_size: int, *, sampled: bool) -> int:
    """Bytes on disk of a token: k ids of 2 or 4 bytes, k log-probabilities of 2, and of the most likely ones that of all others."""
    return k * (id_bytes(vocab_size) + 2) + (0 if sampled else 2)


def id_bytes(vocab_size: int) -> int:
    """Bytes of a token id on disk."""
    return 2 if vocab_size <= 1 << 16 else 4
