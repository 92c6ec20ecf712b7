"""Items are found as they are asked and lightly edited; prompts, numbers and common phrases are not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.data.contamination import EDITS, edited, number_runs
from hone.base.errors import SpecError
from hone.data.contamination.evaluation import read_evaluations
from hone.data.contamination.items import Items
from tests.data.contamination.test_ngrams import reported
from tests.data.edits.memory import Memory

HOST = (
    "The road went over the hill and down to the river, where the old mill had been standing still for thirty years. "
    * 4
)
NOUNS = (
    "granite",
    "valley",
    "copper",
    "harbour",
    "lantern",
    "meadow",
    "orchard",
    "pepper",
    "quarry",
    "saddle",
    "timber",
    "walnut",
)


def row(number: int, size: int = 4) -> dict:
    """An item that shares no six words with another."""
    one, two, three, four = (NOUNS[(number // 12**place) % 12] for place in range(4))
    return {
        "id": f"set-{number}",
        "choices": [f"{two} {number % 7}", f"{three} red", f"{four}", f"{one} blue {two}"][:size],
        "question": f"If the {one} of number {number} lies near the {two}, which {three} would a {four} {one} most likely need first?",
        "label": "B",
    }


def write(folder, rows, name="set.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(folder / name)


def hits(folder, rows, texts, **options) -> tuple[dict, list[str], np.ndarray]:
    spec = Items(evaluations=(write(folder, rows),), **options)
    corpus = Memory(texts)
    found = spec.contaminated(corpus, np.ones(len(texts), bool), folder)
    return {number: count for (_, number), count in reported(spec, found).items()}, found.warnings, found.dropped


def asked(one: dict) -> str:
    return "\n".join(
        [one["question"], *(f"{letter}) {choice}" for letter, choice in zip("ABCD", one["choices"])), "Answer: B"]
    )


@pytest.mark.parametrize("edit", EDITS)
def test_items_are_found_after_every_light_edit(edit, tmp_path):
    import random

    rows = [row(number * 37) for number in range(40)]
    texts = [f"{HOST}\n{edited(asked(one), edit, random.Random(number))}\n{HOST}" for number, one in enumerate(rows)]
    found, warnings, dropped = hits(tmp_path, rows, [*texts, HOST])
    assert len(found) >= 39 and all(count == 1 for count in found.values())
    assert dropped.tolist() == [number in found for number in range(40)] + [False]
    assert warnings == []


def test_the_texts_of_an_item_are_joined_in_the_order_of_asking(tmp_path):
    path = write(tmp_path, [row(5)])
    (example,) = read_evaluations((path,), (), items=True)
    assert example.texts == (row(5)["question"], *row(5)["choices"])
    (example,) = read_evaluations((path,), ("choices",), items=True)
    assert example.texts == tuple(row(5)["choices"])


def test_prompts_that_a_set_shares_are_no_part_of_its_items(tmp_path):
    prompt = "The following are multiple choice questions about the history of mining and of stone in the northern lands. Question:"
    rows = [{"question": f"{prompt} {row(number * 37)['question']}"} for number in range(30)]
    texts = [f"{HOST} {prompt} {HOST}", f"{HOST} {row(37)['question']} {HOST}"]
    found, _, dropped = hits(tmp_path, rows, texts)
    assert found == {1: 1} and dropped.tolist() == [False, True]


def test_runs_of_numbers_and_of_one_word_are_no_match(tmp_path):
    rows = [{"question": " ".join(map(str, range(1, 30)))}, {"question": "0 " * 40}, {"question": "na " * 40}, row(3)]
    texts = [*number_runs(40, 0), "na " * 300, " ".join(map(str, range(500)))]
    assert hits(tmp_path, rows, texts)[0] == {}


def test_short_items_need_all_words_but_one(tmp_path):
    rows = [{"question": "Which old harbour keeps granite lanterns", "choices": ["walnut", "copper"]}]
    said = "which old harbour keeps granite lanterns A walnut B copper"
    texts = [f"{HOST} {said} {HOST}", f"{HOST} {said.replace('old', 'new')} {HOST}"]
    found, _, dropped = hits(
        tmp_path, rows, [*texts, f"{HOST} {said.replace('old', 'new').replace('copper', 'iron')} {HOST}"]
    )
    assert found == {0: 2} and dropped.tolist() == [True, True, False]


def test_too_short_items_are_counted_and_said(tmp_path):
    found, warnings, _ = hits(
        tmp_path, [row(1), {"question": "Who was it?"}, {"question": "And why?"}], [HOST + asked(row(1))]
    )
    assert found == {0: 1}
    assert warnings == ["2 of 3 examples have fewer than 8 words and are not searched for: set.jsonl 2"]
    with pytest.raises(SpecError, match="no item of 1 evaluation examples has 8 words"):
        hits(tmp_path, [{"question": "Who was it?"}], [HOST])


def test_common_items_and_spans(tmp_path):
    texts = [f"{HOST}\n{asked(row(1))}\n{HOST}", f"{HOST}\n{asked(row(1))}\n{HOST}", f"{HOST}\n{asked(row(40))}"]
    found, _, dropped = hits(tmp_path, [row(1), row(40)], texts, max_documents=1)
    assert found == {1: 1} and dropped.tolist() == [False, False, True]
    spec = Items(evaluations=(write(tmp_path, [row(1)]),), remove="span")
    corpus = Memory(texts)
    result = spec.contaminated(corpus, np.ones(3, bool), tmp_path)
    left = corpus.after(result.cuts)
    assert row(1)["question"][:40] not in left[0] and left[0].startswith(HOST) and HOST.strip() in left[0][len(HOST) :]
    assert left[2] == texts[2]
