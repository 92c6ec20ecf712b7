"""Encodes the conversations of a corpus with a chat template, shard by shard, and drops those that cannot be trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.base.durable import sha256, write_atomic
from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.data.chain import Chain
from hone.data.corpus import Part
from hone.data.executors.task import Task
from hone.data.tokens.spec import Tokenizer as TokenizerSpec
from hone.data.tokens.tokenizer import FILES, OPTIONAL_FILES, Encoder
from hone.data.work import Work
from hone.feed.conversations.spans import Encoded, Spans, Unusable
from hone.feed.conversations.spec import Chat
from hone.feed.conversations.templates import template_of
from hone.model.tokenizer import Tokenizer, load_tokenizer
from hone.readers.conversations import conversation_of

parquet = lazy("pyarrow.parquet")
STEP = "conversations"
_KEPT = ""
_SAMPLES = 3


class Shard(NamedTuple):
    """The encoded conversations of one shard: ids of all, one after the other, `trained` uint8 beside them, and each document's `sizes`.

    A document that is not encoded has size 0.
    """

    ids: np.ndarray
    trained: np.ndarray
    sizes: np.ndarray

    @classmethod
    def read(cls, state: Path, number: int) -> Shard:
        with np.load(state / f"chats-{number:05d}.npz") as found:
            return cls(found["ids"], found["trained"], found["sizes"])

    def part(self, here: np.ndarray) -> Shard:
        """The documents where `here` (bool) alone."""
        chosen = np.repeat(here, self.sizes)
        return Shard(self.ids[chosen], self.trained[chosen], self.sizes[here])


def check_template(tokenizer: TokenizerSpec) -> None:
    """Raises SpecError when conversations are wanted and there is no chat template to write them with."""
    if tokenizer.chat is None:
        return
    if tokenizer.chat.template:
        template_of(tokenizer.chat.template)
    elif tokenizer.path is None or not load_tokenizer(Path(tokenizer.path).expanduser()).has_chat_template:
        raise SpecError(
            "the tokenizer has no chat template, which writes the conversations",
            fix="set tokenizer.path to the folder of a chat model, or tokenizer.chat.template to a Jinja file or 'zephyr'",
        )


def _use_template(chat: Chat, folder: Path) -> None:
    """Gives the tokenizer in `folder` the template that `chat` names, if it names one."""
    if chat.template:
        write_atomic(folder / "chat_template.jinja", template_of(chat.template).encode())


def encode_all(chain: Chain, encoder: Encoder, work: Work) -> Path:
    """Encodes all kept conversations; `chain` drops those that cannot be trained on. Returns the folder with the shards.

    Raises SpecError when no conversation is left.
    """
    chat, corpus, state = chain.spec.tokenizer.chat, chain.corpus, work.state(STEP)
    assert chat is not None, "conversations are encoded for a spec that has them"
    _use_template(chat, work.folder)
    files = [work.folder / name for name in (*FILES, *OPTIONAL_FILES)]
    which = [sha256(path) for path in files if path.exists()]
    tasks = []
    for part in corpus.parts():
        given = {"part": part, "kept": chain.kept[part.here], "chat": chat, "eos_id": encoder.eos_token_id}
        given |= {"tokenizer_folder": work.folder, "which": which, "dtype": encoder.dtype.str}
        tasks.append(Task.of(f"chats-{part.number:05d}", state, given, reads=tuple(files)))
    reasons, whys, ways, cut = np.full(len(corpus), _KEPT, object), [], Counter[str](), 0
    for summary, part in zip(work.map(STEP, encode, tasks), corpus.parts()):
        for reason, numbers in summary["reasons"].items():
            reasons[np.array(numbers, np.int64) + part.first] = reason
        whys += [(number + part.first, reason, why) for number, reason, why in summary["whys"]]
        ways.update(summary["ways"])
        cut += summary["cut"]
    chain.drop(STEP, "chat", reasons, whys[: _SAMPLES * 8], {"messages_found_by": dict(ways), "cut_off": cut})
    return state


def encode(
    folder: Path,
    part: Part,
    kept: np.ndarray,
    chat: Chat,
    eos_id: int,
    tokenizer_folder: Path,
    which: list[str],
    dtype: str,
) -> dict[str, Any]:
    """A task: encodes the conversations of one shard where `kept` (bool). The summary: rows, reasons {name: documents}, whys, ways, cut."""
    tokenizer = load_tokenizer(tokenizer_folder)
    spans = Spans(tokenizer, eos_id, chat.train_on)
    ids, trained, sizes = [np.empty(0, dtype)], [np.empty(0, np.uint8)], np.zeros(len(kept), np.int64)
    reasons: dict[str, list[int]] = {}
    whys: list[tuple[int, str, str]] = []
    ways, cut = Counter[str](), 0
    column = parquet.read_table(part.shard, columns=["metadata"]).column(0).to_pylist()
    for number in np.flatnonzero(kept).tolist():
        try:
            one, labels, how, too_long = _labelled(spans, chat, conversation_of(column[number] or ""))
        except Unusable as error:
            reasons.setdefault(error.reason, []).append(number)
            if len(reasons[error.reason]) <= _SAMPLES:
                whys.append((number, error.reason, error.why))
            continue
        ids.append(one.astype(dtype))
        trained.append(labels)
        sizes[number] = len(one)
        cut += too_long
        ways.update(how)
    file = folder / f"chats-{part.number:05d}.npz"
    np.savez(file, ids=np.concatenate(ids), trained=np.concatenate(trained), sizes=sizes)
    rows = int((sizes > 0).sum())
    return {"rows": rows, "reasons": reasons, "whys": whys, "ways": dict(ways), "cut": cut}


def _labelled(
    spans: Spans, chat: Chat, found: dict[str, Any] | None
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], bool]:
    """(ids, labels uint8, how messages were found, whether it was cut off) of one conversation; of a preference the chosen one with the
    rejected one after it, whose labels have 2 added, as those of an undesirable answer have."""
    if found is None:
        raise Unusable("no_conversation", "a text, not a conversation")
    messages, tools, pairs = found["messages"], found.get("tools"), chat.targets == "pairs"
    form = "preference" if "chosen" in found else "unpaired" if "label" in found else ""
    if form != {"pairs": "preference", "labels": "unpaired"}.get(chat.targets, ""):
        here = {"preference": "a preference", "unpaired": "an answer with a label"}.get(form, "a conversation")
        way = f"set tokenizer.chat={form}" if form else f"not one of form {chat.kind}"
        raise Unusable("other_form", f"{here}: {way}")
    if form == "unpaired":
        encoded = spans.encode(messages, tools, first=found["num_prompt"])
        ids, labels, ways, cut = _cut_off(encoded, chat.max_tokens, "")
        return ids, labels if found["label"] else labels | 2, ways, cut
    if not pairs:
        return _cut_off(spans.encode(messages, tools), chat.max_tokens, "")
    most = chat.max_tokens and chat.max_tokens // 2
    chosen, rejected = (
        _cut_off(spans.encode([*messages, *found[name]], tools, first=len(messages)), most, f" in {name}")
        for name in ("chosen", "rejected")
    )
    labels = np.concatenate([chosen[1], rejected[1] | 2])
    return np.concatenate([chosen[0], rejected[0]]), labels, chosen[2] + rejected[2], chosen[3] or rejected[3]


def _cut_off(encoded: Encoded, most: int | None, where: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], bool]:
    """`_labelled` of one conversation, its first `most` tokens. Raises Unusable when none of these is trained on."""
    ids, labels = encoded.ids[:most], encoded.trained[:most].astype(np.uint8)
    if not labels[1:].any():  # nothing comes before the first token, so that it is no target
        raise Unusable("no_trained_token", f"no token is trained on{where}")
    return ids, labels, encoded.ways, len(ids) < len(encoded.ids)


def trained_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """UTF-8 bytes of the text of `ids`, special tokens left out."""
    numbers, counts = np.unique(ids, return_counts=True)
    special = tokenizer.special_ids
    sizes = [0 if one in special else len(tokenizer.token_bytes(one)) for one in numbers.tolist()]
    return int(np.dot(sizes, counts)) if len(numbers) else 0
