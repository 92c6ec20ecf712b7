"""The settings of a tokenizer, read without the packages that train one."""

from __future__ import annotations

from pydantic import Field

from hone.base.spec import Spec
from hone.feed.conversations.spec import Chat


class Tokenizer(Spec):
    """The tokenizer's source and training."""

    path: str | None = Field(None, description="Folder with a tokenizer.json to reuse; none: train one.")
    vocab_size: int = Field(
        4096, ge=257, description="Size of the vocabulary to train, including 256 bytes and the end-of-text token."
    )
    max_train_bytes: int = Field(
        50_000_000, gt=0, description="Most bytes of text to train on; of more, documents are sampled."
    )
    max_token_chars: int = Field(32, gt=0, description="Longest token in bytes.")
    chat: Chat | None = Field(
        None,
        description="Rows are conversations, tokenized with a chat template for training on answers; empty: they are texts.",
    )
