"""Decontamination against plain Python: what is injected is found, and nothing else but what is really shared."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.data.contamination.evaluation import read_evaluations
from hone.data.contamination.ngrams import NGrams
from tests.data.edits.memory import Memory
from tests.data.edits.test_lines import english
from tests.text.dedup.oracles import words


def grams(text: str, size: int = 13, shortest: int = 8) -> set[tuple[str, ...]]:
    row = words(text)
    size = min(size, len(row))
    if len(row) < shortest:
        return set()
    return {tuple(row[place : place + size]) for place in range(len(row) - size + 1)}


def expected(examples: list[tuple[str, ...]], texts: list[str], size=13, shortest=8) -> dict[int, set[int]]:
    """Example number to the documents that hold any of its n-grams."""
    return held([set().union(*(grams(text, size, shortest) for text in example)) for example in examples], texts)


def held(wanted: list[set[tuple[str, ...]]], texts: list[str]) -> dict[int, set[int]]:
    """As `expected`, for the n-grams of each example."""
    lengths = {len(gram) for row in wanted for gram in row}
    owners: dict[tuple[str, ...], list[int]] = {}
    for number, some in enumerate(wanted):
        for gram in some:
            owners.setdefault(gram, []).append(number)
    found: dict[int, set[int]] = {}
    for document, text in enumerate(texts):
        row = words(text)
        here = {tuple(row[at : at + n]) for n in lengths for at in range(len(row) - n + 1)}
        for number in {number for gram in here for number in owners.get(gram, ())}:
            found.setdefault(number, set()).add(document)
    return found


def reported(spec: NGrams, found) -> dict[tuple[str, int], int]:
    return {(row["evaluation"], row["row"]): row["documents"] for row in found.examples}


ALPHABET = [
    "the",
    "The",
    "cat",
    "É",
    "é",
    "日本",
    "ไทย",
    "don't",
    "don’t",
    "x_1",
    "हि",
    ",",
    "--",
    "\n",
    "한글",
    "a\u0301",
]
TEXT = st.lists(st.sampled_from(ALPHABET), max_size=14).map(" ".join)


@settings(max_examples=40)
@given(st.lists(TEXT, min_size=1, max_size=5), st.lists(TEXT, min_size=1, max_size=6), st.integers(2, 5))
def test_as_plain_python(tmp_path_factory, examples, texts, size):
    folder = tmp_path_factory.mktemp("sets")
    examples = [unicodedata.normalize("NFC", text) for text in examples]
    (folder / "set.jsonl").write_text("".join(json.dumps({"q": text}) + "\n" for text in examples))
    spec = NGrams(evaluations=(str(folder),), fields=("q",), words=size, shortest=2)
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    corpus = Memory(texts, borders=(len(texts) // 2, len(texts) - len(texts) // 2), batch=2)
    oracle = expected([(text,) for text in examples], texts, size, 2)
    state = folder / "state"
    state.mkdir()
    if not any(grams(text, size, 2) for text in examples):
        with pytest.raises(SpecError, match="has 2 words"):
            spec.contaminated(corpus, np.ones(len(texts), bool), state)
        return
    found = spec.contaminated(corpus, np.ones(len(texts), bool), state)
    assert reported(spec, found) == {("set.jsonl", number): len(held) for number, held in oracle.items()}
    assert set(np.flatnonzero(found.dropped).tolist()) == set().union(*oracle.values())
    assert any("was found in any" in warning for warning in found.warnings) == (not oracle)


@pytest.fixture(scope="module")
def sets(shared_data, tmp_path_factory) -> Path:
    """The benchmark sets, MMLU's tables unpacked."""
    folder = tmp_path_factory.mktemp("benchmarks")
    for file in (shared_data / "benchmarks").iterdir():
        if file.name.endswith(".tar.gz"):
            with tarfile.open(file) as pack:
                for member in [member for member in pack.getmembers() if member.name.endswith(".csv")][:20]:
                    if member.isfile():
                        raw = pack.extractfile(member).read()
                        (folder / f"mmlu-{Path(member.name).name}").write_bytes(raw)
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_every_injected_example_is_found_and_none_else(sets, shared_data, tmp_path):
    examples = read_evaluations((str(sets),), ())
    names = {example.evaluation for example in examples}
    assert len(names) > 10 and len(examples) > 10_000
    clean = [text[:3000] for text in english(shared_data)]
    wanted = [set().union(*map(grams, example.texts)) for example in examples]
    draw = random.Random(5)
    whole = [number for number, some in enumerate(wanted) if some]
    injected = draw.sample(whole, 300)
    texts = list(clean)
    for number in injected:
        text = draw.choice([text for text in examples[number].texts if grams(text)])
        shouted = text.upper().replace(" ", "  \n") if draw.random() < 0.3 and text.isascii() else text
        home = draw.randrange(len(clean))
        texts.append(f"{clean[home][:200]}\n{shouted}!\n{clean[home][-200:]}")
    spec = NGrams(evaluations=(str(sets),), num_samples=5)
    oracle = held(wanted, texts)
    before = {number for documents in oracle.values() for number in documents if number < len(clean)}
    found = spec.contaminated(Memory(texts), np.ones(len(texts), bool), tmp_path)
    assert found.dropped[len(clean) :].all()
    assert reported(spec, found) == {
        (examples[number].evaluation, examples[number].row): len(held) for number, held in oracle.items()
    }
    assert set(injected) <= set(oracle)
    # The books are clean but for what they truly share with a set, here counted by plain Python.
    assert set(np.flatnonzero(found.dropped[: len(clean)]).tolist()) == before
    assert (
        len(found.warnings) == 1
        and "have fewer than 8 words and are not searched for: arc_easy.jsonl 61" in found.warnings[0]
    )
    rows = found.figures["evaluations"]
    assert sum(row["hit"] for row in rows.values()) == len(oracle) == len(found.examples)
    assert sum(row["examples"] for row in rows.values()) == len(examples)
    assert sum(row["too_short"] for row in rows.values()) == len(examples) - len(whole)
    assert [row for row in found.examples if "samples" in row] == found.examples[:5]
    for row in found.examples[:5]:
        at = {examples[number].row: number for number in oracle if examples[number].evaluation == row["evaluation"]}
        number = at[row["row"]]
        for sample in row["samples"]:
            assert any(tuple(words(sample["text"])) in grams(text) for text in examples[number].texts)


def test_any_shards_and_order_find_the_same(sets, shared_data, tmp_path):
    examples = read_evaluations((str(sets / "gsm8k-test.jsonl"),), ("question",))
    clean = [text[:3000] for text in english(shared_data)]
    texts = [text + (examples[number].texts[0] if number % 3 == 0 else "") for number, text in enumerate(clean)]
    ids = [f"{number:016x}" for number in random.Random(1).sample(range(10**9), len(texts))]
    spec = NGrams(evaluations=(str(sets / "gsm8k-test.jsonl"),), fields=("question",))
    kept = np.ones(len(texts), bool)
    order = random.Random(2).sample(range(len(texts)), len(texts))
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir(), second.mkdir()
    one = spec.contaminated(Memory(texts, ids), kept, first)
    other = Memory([texts[i] for i in order], [ids[i] for i in order], (9, 0, len(texts) - 9), batch=4)
    other.columns["source"] = np.array([f"file-{i}" for i in order], object)
    two = spec.contaminated(other, kept, second)
    assert (two.dropped == one.dropped[order]).all() and two.figures == one.figures and two.examples == one.examples
    assert one.dropped.tolist() == [number % 3 == 0 for number in range(len(texts))]
    kept[0] = False
    third = tmp_path / "three"
    third.mkdir()
    assert not spec.contaminated(Memory(texts, ids), kept, third).dropped[0]


def test_shared_words_are_cut_and_common_phrases_do_not_count(tmp_path):
    question = "How many legs has a cat that lost one leg in a fight with a dog on Sunday"
    phrase = "Which of the following answers is the most correct one of all of the given ones"
    (tmp_path / "set.txt").write_text(f"{question}\n{phrase}\nshort one\n")
    long = "A long story that goes on and on about other things. " * 4
    texts = [f"{long}{question}! {long}", f"Q: {question.lower()}.", *(f"{long} {n} {phrase}" for n in range(4)), long]
    corpus = Memory(texts)
    kept = np.ones(len(texts), bool)
    spec = NGrams(evaluations=(str(tmp_path / "set.txt"),), remove="span", max_documents=3)
    found = spec.contaminated(corpus, kept, tmp_path)
    assert found.dropped.tolist() == [False, True] + [False] * 5
    assert corpus.after(found.cuts)[0] == f"{long}! {long}" and corpus.after(found.cuts)[1:] == texts[1:]
    assert found.figures["evaluations"]["set.txt"] == {"examples": 3, "too_short": 1, "hit": 1, "documents": 2}
    every = spec.model_copy(update={"max_documents": None, "remove": "document"})
    (tmp_path / "every").mkdir()
    assert every.contaminated(corpus, kept, tmp_path / "every").dropped.tolist() == [True] * 6 + [False]


def test_short_texts_count_as_a_whole(tmp_path):
    nine = "What is the name of the river in Egypt"
    (tmp_path / "set.csv").write_text(f'"{nine}","Nile"\n"one two three four five six seven","x"\n')
    spec = NGrams(evaluations=(str(tmp_path),), fields=("0",))
    texts = [f"so: what is the name, of the river in EGYPT? {'and ' * 30}", "What is the name of the river in France?"]
    found = spec.contaminated(Memory([*texts, "one two three four five six seven"]), np.ones(3, bool), tmp_path)
    assert found.dropped.tolist() == [True, False, False]
    assert found.figures["evaluations"]["set.csv"]["too_short"] == 1


def test_every_kind_of_file(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    row = {"question": "one", "choices": {"text": ["two", "three"]}, "number": 4}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    (tmp_path / "b.json").write_text(json.dumps([row]))
    (tmp_path / "c.csv").write_text("question,choices\none,two\n")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo\n"))
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "e.parquet")
    (tmp_path / "ignored.md").write_text("no")
    found = read_evaluations((str(tmp_path),), ("question", "choices"))
    three = ("one", "two", "three")
    assert [(example.evaluation, example.row, example.texts) for example in found] == [
        ("a.jsonl", 0, three), ("a.jsonl", 1, three), ("b.json", 0, three), ("c.csv", 0, ("one", "two")),
        ("d.txt.gz", 0, ("one\n",)), ("d.txt.gz", 1, ("two\n",)), ("e.parquet", 0, three),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name, content, fields, message",
    [
        ("a.jsonl", b'{"q": "x"}\n{"q"', (), "row 1"),
        ("a.jsonl", b'{"q": "x"}\n', ("text",), "its fields are: q"),
        ("a.csv", b"q,a\nx,y\n", ("text",), "its fields are"),
        ("a.csv", b"", (), "is empty"),
        ("a.txt", b"\xff\xfe\xfd", (), "row 0"),
        ("a.parquet", b"nothing", (), "a.parquet"),
        ("a.xyz", b"nothing", (), "unknown format"),
        ("a.jsonl.gz", b"nothing", (), "a.jsonl.gz"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, content, fields, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_evaluations((str(tmp_path / name),), fields)


def test_misuse_is_said(tmp_path):
    corpus, kept = Memory(["a text"]), np.ones(1, bool)
    with pytest.raises(SpecError, match="names no evaluation set"):
        NGrams().contaminated(corpus, kept, tmp_path)
    with pytest.raises(SpecError, match="evaluation set: no file"):
        NGrams(evaluations=(str(tmp_path / "gone"),)).contaminated(corpus, kept, tmp_path)
    with pytest.raises(SpecError, match="holds no evaluation file"):
        NGrams(evaluations=(str(tmp_path),)).contaminated(corpus, kept, tmp_path)


def test_files_of_one_name_are_sets_of_their_own(tmp_path):
    text = " ".join(f"word{number}" for number in range(20))
    other = " ".join(f"other{number}" for number in range(20))
    for name, rows in (("a/test", [text]), ("b/test", [other, other + " more"]), ("c/alone", [other])):
        path = tmp_path / "ev" / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    files = [tmp_path / "ev/a/test.jsonl", tmp_path / "ev/b/test.jsonl", tmp_path / "ev/c"]
    spec = NGrams(evaluations=tuple(map(str, [*files, files[0]])))  # one named twice is read once
    found = spec.contaminated(Memory([text, "nothing of it"]), np.ones(2, bool), tmp_path)
    sets = found.figures["evaluations"]
    assert {name: row["examples"] for name, row in sets.items()} == {
        "a/test.jsonl": 1,
        "b/test.jsonl": 2,
        "alone.jsonl": 1,
    }
    assert {name: row["hit"] for name, row in sets.items()} == {"a/test.jsonl": 1, "b/test.jsonl": 0, "alone.jsonl": 0}
    assert [row["evaluation"] for row in found.examples] == ["a/test.jsonl"]
    folders = NGrams(evaluations=(str(tmp_path / "ev/a"), str(tmp_path / "ev/b")))
    found = folders.contaminated(Memory([text, "nothing of it"]), np.ones(2, bool), tmp_path)
    assert list(found.figures["evaluations"]) == ["a/test.jsonl", "b/test.jsonl"]
