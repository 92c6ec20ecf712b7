"""Conversations through the data stage and into a training: only answers are targets, what is left out is counted and said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.data.stage import Data
from hone.feed.load import IGNORE, PackedTokens
from hone.model.tokenizer import load_tokenizer

QUIET = Run(quiet=True)
WORDS = [
    "red",
    "blue",
    "green",
    "small",
    "large",
    "old",
    "new",
    "cat",
    "dog",
    "house",
    "tree",
    "road",
    "river",
    "book",
    "lamp",
]


def chat(number: int) -> dict:
    """Two turns; the answers are the words of the questions."""
    first, second = WORDS[number % 15], WORDS[(7 * number + number // 15) % 15]
    said = [("user", f"Say {first}, the {number}th time."), ("assistant", f"Answer {first}.")]
    said += [("user", f"Now {second}."), ("assistant", f"Answer {second}, as number {number} is.")]
    return {"messages": [{"role": role, "content": text} for role, text in said]}


def spec_of(source: Path, **changes) -> Data:
    tokenizer = {"vocab_size": 400, "chat": {"template": "zephyr", **changes.pop("chat", {})}}
    return Data.read({"source": str(source), "tokenizer": tokenizer, "packing": {"lengths": [64]}, **changes})


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("chats")
    rows = [chat(number) for number in range(40)]
    rows.insert(3, {"messages": [{"role": "user", "content": "x"}, {"role": "robot", "content": "y"}]})
    rows.append({"messages": [{"role": "user", "content": "stop"}, {"role": "assistant", "content": "<|endoftext|>"}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return spec_of(folder / "rows.jsonl").make(folder / "data-chats", run=QUIET)


def test_only_answers_and_their_ends_are_targets(made):
    data, tokenizer = PackedTokens(made.folder), load_tokenizer(made.folder)
    assert data.kind == "best_fit"
    (batch,) = data.in_order(1000, 64)
    pieces, end = [], data.eos_token_id
    for row, ids in zip(batch.targets, batch.document_ids):
        for number in range(ids.max() + 1):
            text = tokenizer.decode([token for token in row[ids == number].tolist() if token != IGNORE], False)
            pieces += text.removesuffix("<|endoftext|>").split("<|endoftext|>")
    rows = [chat(number) for number in range(40)]
    answers = {one["content"] for row in rows for one in row["messages"] if one["role"] == "assistant"}
    assert len(pieces) == 2 * data.num_documents and set(pieces) <= answers
    assert (batch.targets == end).sum() == 2 * data.num_documents
    count = int((batch.targets != IGNORE).sum())
    assert (count, data.scored) == (data.meta["splits"]["train"]["trained_tokens"], (count, len("".join(pieces))))
    assert made.figures["trained_tokens"].value == count


def test_a_part_and_a_stream_have_the_same_targets(made):
    data = PackedTokens(made.folder)
    part = data.part(np.arange(5, 9))
    first, last = int(data.starts[5]), int(data.starts[9])
    marks = np.asarray(data.trained[first:last]) != 0
    assert (part._trained(0, last - first) == marks).all() and part.scored[0] == marks.sum()
    assert int((part.cut(np.arange(part.num_sequences(64)), 64).targets != IGNORE).sum()) == marks.sum()
    data.meta["packing"] = {"kind": "stream", "lengths": []}
    streamed = data.cut(np.arange(data.num_sequences(64)), 64)
    assert int((streamed.targets != IGNORE).sum()) == data.scored[0]


def test_what_is_left_out_names_row_and_field(made):
    dropped = {row["reason"]: row for row in read_jsonl(made.folder / "dropped.jsonl")}
    assert dropped["no_conversation"]["text"].startswith('row 4: messages[1].role is "robot"')
    assert "messages[1].content spells the token <|endoftext|>" in dropped["special_token_in_text"]["text"]
    steps = {row["name"]: row for row in json.loads((made.folder / "stats.json").read_text())["steps"]}
    assert steps["conversations"]["reasons"]["special_token_in_text"]["documents"] == 1
    assert steps["conversations"]["figures"] == {"messages_found_by": {"ids": 80}, "cut_off": 0}


def test_tables_of_preferences_and_other_rows(tmp_path):
    row = {"instruction": "Add.", "input": "two and two", "output": "four"}
    rows = [{**row, "output": f"four, and {number}"} for number in range(12)] + [{**row, "output": None}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    made = spec_of(tmp_path / "rows.parquet", chat={"train_on": "all"}).make(tmp_path / "data-table", run=QUIET)
    (bad,) = [row["text"] for row in read_jsonl(made.folder / "dropped.jsonl") if row["step"] == "read"]
    assert bad == "row 13: output is missing"
    data = PackedTokens(made.folder)
    assert data.num_documents + PackedTokens(made.folder, "val").num_documents == 12
    assert data.scored[0] == data.num_tokens - data.num_documents


def test_nothing_to_train_on_is_an_error(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(chat(number)) + "\n" for number in range(6)))
    with pytest.raises(SpecError, match="none of 6 conversations can be trained on: 6 no_trained_token"):
        spec_of(tmp_path / "rows.jsonl", chat={"max_tokens": 3}).make(tmp_path / "data-none", run=QUIET)
    with pytest.raises(SpecError, match=r"edits\.0 .* changes texts"):
        spec_of(tmp_path / "rows.jsonl", edits=["mask"])
    with pytest.raises(SpecError, match="no chat template"):
        spec_of(tmp_path / "rows.jsonl", chat={"template": ""}).make(tmp_path / "data-none", run=QUIET)


def test_answers_with_a_label_keep_it_beside_their_tokens(tmp_path):
    rows = [
        {
            "prompt": f"Say {WORDS[number]}.",
            "completion": WORDS[number] if number % 3 else "No.",
            "label": bool(number % 3),
        }
        for number in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "label": "good"}])
    )
    made = spec_of(tmp_path / "rows.jsonl", chat={"kind": "unpaired"}).make(tmp_path / "data-labels", run=QUIET)
    (bad,) = [row["text"] for row in read_jsonl(made.folder / "dropped.jsonl") if row["step"] == "read"]
    assert bad.startswith("row 13: label is") and "not true (desirable) or false" in bad
    data, tokenizer = PackedTokens(made.folder), load_tokenizer(made.folder)
    batch, found = data.cut(np.arange(data.num_sequences(64)), 64), 0
    for targets, ids in zip(batch.targets, batch.document_ids):
        for number in dict.fromkeys(ids[ids >= 0].tolist()):
            said = tokenizer.decode([one for one in targets[ids == number].tolist() if one != IGNORE], False)
            assert (said == "No.<|endoftext|>") == (number % 2 == 1)
            found += 1
    assert found == data.num_documents
    with pytest.raises(SpecError, match=r"12 other_form.*set tokenizer\.chat=unpaired"):
        spec_of(tmp_path / "rows.jsonl").make(tmp_path / "data-chats", run=QUIET)


def test_preferences_are_pairs_of_both_answers(tmp_path):
    rows = [
        {"prompt": f"Say {WORDS[number]}.", "chosen": f"{WORDS[number]}, of course.", "rejected": "No."}
        for number in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, chat(1)]))
    made = spec_of(tmp_path / "rows.jsonl", chat={"kind": "preference"}).make(tmp_path / "data-pairs", run=QUIET)
    (bad,) = [row["text"] for row in read_jsonl(made.folder / "dropped.jsonl") if row["step"] == "read"]
    assert bad.startswith("row 13: chosen is missing")
    data, tokenizer = PackedTokens(made.folder), load_tokenizer(made.folder)
    batch, found = data.cut(np.arange(data.num_sequences(64)), 64), set()
    for tokens, targets, ids in zip(batch.tokens, batch.targets, batch.document_ids):
        assert ids.max() % 2 == 1
        for number in range(ids.max() + 1):
            said = tokenizer.decode([one for one in targets[ids == number].tolist() if one != IGNORE], False)
            word = tokenizer.decode(tokens[ids == number].tolist(), False).split("Say ")[1].split(".")[0]
            found.add((word, said))
            assert said == ("No.<|endoftext|>" if number % 2 else f"{word}, of course.<|endoftext|>")
    assert len(found) == 2 * data.num_documents
    with pytest.raises(SpecError, match="seq_len 10"):
        data.num_sequences(10)
    other = spec_of(tmp_path / "rows.jsonl").make(tmp_path / "data-chats", run=QUIET)
    steps = {row["name"]: row for row in json.loads((other.folder / "stats.json").read_text())["steps"]}
    assert steps["conversations"]["reasons"]["other_form"]["documents"] == 12
