"""Rows that are conversations: the text that filters and deduplication see, and the conversation itself as metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hone.feed.chat import rendered
from hone.feed.conversations.forms import FormError, conversation
from hone.feed.conversations.spec import CONVERSATION
from hone.readers.documents import Fault, Options, Rows, pick
from hone.text.batch import Texts

FAULT = "no_conversation"
"""The reason under which rows are set aside that are none."""


def chat_rows(rows: Iterable[tuple[int, str, Any]], options: Options) -> Iterator[Rows | Fault]:
    """The conversations among `rows` ((place in the file, name for messages, value)); a Fault for each row that is none.

    The text is 'role: content' of each message, for a preference with the chosen answer, so that the steps of curation read it
    as any other text.
    """
    texts, places, urls, metadata = [], [], [], []
    for place, name, row in rows:
        try:
            found = conversation(row, options.chat)
        except FormError as error:
            yield Fault(FAULT, f"{name}: {error}")
            continue
        text = rendered([*found["messages"], *found.get("chosen", ())])
        if text is None:
            yield Fault(FAULT, f"{name}: all messages are empty")
            continue
        texts.append(text)
        places.append(place)
        url = pick(row, options.url_field) if options.url_field else None
        urls.append(url if isinstance(url, str) else "")
        fields = {field: value for field in options.metadata_fields if (value := pick(row, field)) not in (None, "")}
        metadata.append(json.dumps({**fields, CONVERSATION: found}, default=str))
    if texts:
        yield Rows(Texts.of(texts), urls if any(urls) else None, metadata, np.array(places, np.int64))


def conversation_of(metadata: str) -> dict[str, Any] | None:
    """The conversation in a document's metadata; None for a document that is none, such as a text file's."""
    found = json.loads(metadata).get(CONVERSATION) if metadata else None
    return found if isinstance(found, dict) else None
