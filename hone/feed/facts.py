"""Facts of a data artifact: tokens of each split, vocabulary and tokenizer, without reading a shard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, SpecError
from hone.base.plan import Facts
from hone.model.folder import read_json

if TYPE_CHECKING:
    from hone.feed.load import Packing


class SplitFacts(BaseModel):
    """Size of one split. Estimates for a data stage that has not run yet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(ge=0, description="Tokens, including the end-of-text token of every document.")
    documents: int = Field(ge=0, description="Documents.")
    bytes: int = Field(ge=0, description="UTF-8 bytes of their text.")

    def num_sequences(self, seq_len: int) -> int:
        """Sequences of `seq_len` tokens that the split is cut into, as a stream; best-fit packing makes a few more."""
        return max(-(-(self.tokens - 1) // seq_len), 0)


class DataFacts(Facts):
    """Facts of packed tokens, on disk or planned."""

    noun: ClassVar[str] = "data set"
    mark: ClassVar[str] = "tokens/meta.json"

    splits: dict[str, SplitFacts] = Field(description="By name: 'train', 'val'.")
    vocab_size: int = Field(description="Tokens of the vocabulary.")
    eos_token_id: int | None = Field(description="The end-of-text token.")
    tokenizer: str | None = Field(
        description="Identity of its tokenizer (`Tokenizer.identity`); for one that is not trained yet, a unique text."
    )
    packing: str = Field("stream", description="How documents are packed into sequences: 'stream' or 'best_fit'.")
    targets: str = Field(
        "all",
        description="Tokens with a target: 'all', 'trained' (of conversations those that are marked), 'pairs' (of answers chosen "
        "and rejected) or 'labels' (of answers that are desirable or not).",
    )
    exact: bool = Field(True, description="False for estimates.")
    fingerprint: str | None = Field(None, description="Of the artifact; None for a planned one.")

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The facts of a data artifact's folder. Raises ArtifactError when meta.json is corrupt."""
        from hone.model.tokenizer import identity_of

        path = folder / cls.mark
        meta = read_json(path)
        try:
            names = SplitFacts.model_fields
            return cls(
                where=str(folder),
                splits={name: {key: row[key] for key in names} for name, row in meta["splits"].items()},
                vocab_size=meta["vocab_size"],
                eos_token_id=meta["eos_token_id"],
                tokenizer=identity_of(folder),
                packing=meta.get("packing", {}).get("kind", "stream"),
                targets=meta.get("targets", "all"),
                fingerprint=Artifact.read(folder).fingerprint,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ArtifactError(
                f"{path} is corrupt: {type(error).__name__} {error}",
                fix="delete the folder and run its data stage again",
            ) from None

    @property
    def same_as(self) -> str:
        """Equal for equal data: the fingerprint; of planned data where they will be."""
        return self.fingerprint or self.where

    @property
    def given(self) -> frozenset[str]:
        """'calibration' where there are tokens to train on."""
        train = self.splits.get("train")
        return frozenset({"calibration"}) if train is not None and train.tokens > 1 else frozenset()

    def split(self, name: str) -> SplitFacts:
        """The split called `name`. Raises SpecError when there is none."""
        if name not in self.splits:
            raise SpecError(f"{self.where} has no split '{name}'", fix=f"its splits are: {', '.join(self.splits)}")
        return self.splits[name]

    def packed(self, name: str, seq_len: int) -> Packing:
        """The packing of the split called `name` into sequences of `seq_len` tokens, counted where it is on disk.

        Of a stage that has not run yet, as a stream of so many tokens: what best-fit packing pads is not known before.
        """
        from hone.feed.load import PackedTokens, Packing

        split = self.split(name)
        if (Path(self.where) / self.mark).is_file():
            return PackedTokens(self.where, name).packing(seq_len)
        count = split.num_sequences(seq_len)
        padding = max(count * seq_len - split.tokens, 0)
        return Packing(count, count * seq_len, padding, min(split.documents, split.tokens))
