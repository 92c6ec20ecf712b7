"""Annotation against an endpoint of our own: columns, drops, rephrasing, limits, resume without asking twice, no key on disk."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pyarrow import parquet

from hone.base.errors import FitError, HoneError, SpecError
from hone.base.run import Run
from hone.data.llm.base import Answer, Journal
from hone.data.llm.techniques import LLMColumns, last_object
from hone.data.stage import Data
from tests.data.stories import story

pytest.importorskip("openai")
QUIET = Run(quiet=True)


class Endpoint:
    """An OpenAI-compatible chat endpoint. `answer(question)` is its text, or a status to refuse with; `seen` what it was asked."""

    def __init__(self) -> None:
        self.answer = lambda question: json.dumps({"score": len(question) % 5, "topic": "t", "good": True})
        self.fails: list[int] = []
        self.seen: list[dict] = []
        self.keys: set[str] = set()
        lock, fake = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    fake.seen.append(body)
                    fake.keys.add(self.headers.get("Authorization", ""))
                    status = fake.fails.pop(0) if fake.fails else 200
                text = fake.answer(body["messages"][-1]["content"])
                if isinstance(text, int):
                    status, text = text, ""
                usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
                said = json.dumps(
                    {"choices": [choice], "usage": usage} if status == 200 else {"error": {"message": "no"}}
                )
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(said.encode())))
                self.end_headers()
                self.wfile.write(said.encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-4711")
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "in").mkdir()
    rows = [json.dumps({"text": story(number, 600)}) for number in range(12)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join([*rows, rows[0]]))
    return tmp_path


def spec(folder: Path, fake: Endpoint, **changes) -> Data:
    asking = {
        "kind": "llm_columns",
        "endpoint": {"url": fake.url, "key_from": "MY_KEY", "parallel": 3, "attempts": 3},
        "model": "judge",
        "prompt": 'Rate this from 0 to 4, as {"score": n}.\nFrom {source}: {text}',
        "fields": {"score": "integer", "topic": "text", "good": "boolean"},
        **changes,
    }
    asking = {name: value for name, value in asking.items() if value is not None}
    given = {"source": str(folder / "in"), "tokenizer": {"vocab_size": 300}, "filters": ["length"], "dedups": ["exact"]}
    return Data.read({**given, "annotations": [asking]})


def stats(folder: Path) -> dict:
    return next(row for row in json.loads((folder / "stats.json").read_text())["steps"] if row["slot"] == "annotation")


def test_answers_are_columns_and_keep_drops_by_them(folder, fake):
    fake.fails = [429, 503]
    made = spec(folder, fake, keep="score >= 2", reason="dull", price_in=1.0, price_out=10.0).make(
        folder / "out", run=QUIET
    )
    assert len(fake.seen) == 12 + 2  # the copy is not asked about, two refusals are tried again
    assert fake.keys == {"Bearer secret-4711"}
    body = fake.seen[0]
    assert body["model"] == "judge" and body["response_format"]["json_schema"]["schema"]["required"] == [
        "score",
        "topic",
        "good",
    ]
    assert "a.jsonl" in body["messages"][0]["content"] and body["messages"][0]["content"].startswith(
        "Rate this from 0 to 4"
    )
    rows = parquet.read_table(made.folder / "documents").to_pylist()
    assert rows and all(row["score"] >= 2 and row["topic"] == "t" and row["good"] == 1 for row in rows)
    signals = parquet.read_table(made.folder / "signals").to_pylist()
    gone = [row for row in signals if row["reason"] == "dull"]
    assert len(gone) == 12 - len(rows) > 0 and all(row["score"] < 2 for row in gone)
    assert [row["score"] for row in signals if row["dropped_by"] == "exact"] == [None]
    row = stats(made.folder)
    assert (
        row["figures"]["asked"] == 12
        and row["figures"]["failed"] == 0
        and row["reasons"]["dull"]["documents"] == len(gone)
    )
    assert row["figures"]["cost"] == pytest.approx(12 * (100 * 1 + 10 * 10) / 1e6)
    assert made.figures["llm_tokens"].value == 12 * 110 and made.figures["llm_tokens"].estimate.value > 0
    for path in made.folder.rglob("*"):
        assert not path.is_file() or b"secret-4711" not in path.read_bytes(), path


def test_a_resumed_run_asks_only_what_has_no_answer(folder, fake):
    served, lock = [], threading.Lock()

    def dies_after_five(question):
        with lock:  # each question has a thread: `seen` may have another order than the answers
            served.append(question)
            refused = len(served) > 5
        return 401 if refused else json.dumps({"score": 1, "topic": "", "good": False})

    fake.answer = dies_after_five
    with pytest.raises(HoneError, match="401"):
        spec(folder, fake).make(folder / "out", run=QUIET)
    paid = set(served[:5])
    fake.seen.clear()
    fake.answer = lambda question: json.dumps({"score": 3, "topic": "", "good": False})
    made = spec(folder, fake, endpoint={"url": fake.url, "parallel": 1}).make(folder / "out", run=QUIET)
    again = {body["messages"][0]["content"] for body in fake.seen}
    assert len(fake.seen) == 12 - 5 and not again & paid
    assert stats(made.folder)["figures"]["answers_from_before"] == 5
    scores = [row["score"] for row in parquet.read_table(made.folder / "documents").to_pylist()]
    assert sorted(scores) == [1.0] * 5 + [3.0] * 7


def test_shards_are_asked_about_at_once(tmp_path, fake, monkeypatch):
    """Two questions must be under way for either to be answered, and no shard has two documents."""
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / "in" / f"{number}.jsonl").write_text(json.dumps({"text": story(number, 600)}))
    monkeypatch.setattr("hone.data.annotate.TASK_BYTES", 10)
    both = threading.Barrier(2, timeout=100)  # less than the client waits; it passes only where two never meet
    fake.answer = lambda question: (both.wait() and "") or json.dumps({"score": 1, "topic": "t", "good": True})
    made = spec(tmp_path, fake).make(tmp_path / "out", run=QUIET)
    assert [row["score"] for row in parquet.read_table(made.folder / "documents").to_pylist()] == [1] * 4
    assert len(fake.seen) == len(list((made.folder / "documents").glob("*.parquet"))) == 4


def test_limits_stop_before_they_are_passed_and_can_be_raised(folder, fake):
    limits = {"max_cost": 0.004, "price_in": 2.0, "price_out": 2.0, "answer_tokens": 100}
    with pytest.raises(FitError, match=r"stopped before max_cost = 0.004: .* in \d+ answers"):
        spec(folder, fake, **limits).make(folder / "out", run=QUIET)
    first = len(fake.seen)
    assert 3 <= first < 12 and first * 110 * 2 / 1e6 <= 0.004
    spec(folder, fake, **{**limits, "max_cost": 1.0}).make(folder / "out", run=QUIET)
    assert len(fake.seen) == 12
    with pytest.raises(FitError, match="max_tokens_total = 200"):
        spec(folder, fake, max_tokens_total=200).make(folder / "other", run=QUIET)
    assert len(fake.seen) == 12


def test_unusable_answers_are_counted_and_too_many_are_an_error(folder, fake):
    count = iter(range(100))
    fake.answer = lambda question: 400 if next(count) == 3 else json.dumps({"score": 1, "topic": "x", "good": False})
    made = spec(folder, fake, keep="score >= 1").make(folder / "out", run=QUIET)
    assert stats(made.folder)["figures"]["failed"] == 1
    rows = parquet.read_table(made.folder / "documents").to_pylist()
    assert len(rows) == 12 and sorted(row["score"] or 0 for row in rows) == [0] + [1] * 11  # no answer: kept
    fake.answer = lambda question: "I cannot rate this."
    with pytest.raises(HoneError, match="12 of 12 documents have no usable answer; one: 'I cannot"):
        spec(folder, fake).make(folder / "bad", run=QUIET)


def test_rephrased_texts_replace_the_documents(folder, fake):
    fake.answer = lambda question: "<think>hm</think> In short: " + question[-1500:]
    texts = [story(number, 600) for number in range(12)]
    most = sorted(len(text.encode()) for text in texts)[6]
    asking = {"kind": "llm_rephrase", "prompt": "Shorter, please: {text}", "fields": None, "max_chars": most}
    made = spec(folder, fake, **asking).make(folder / "out", run=QUIET)
    rows = parquet.read_table(made.folder / "documents").to_pylist()
    short = {text for text in texts if len(text.encode()) <= most}
    assert 0 < len(short) < 12 == len(rows)
    for row in rows:
        if row["rephrased"]:
            assert any(row["text"] == "In short: " + text[-1500:] for text in short)
        else:
            assert row["text"] in texts and row["text"] not in short
        assert row["bytes"] == len(row["text"].encode())
    assert sum(row["rephrased"] for row in rows) == len(short) == stats(made.folder)["figures"]["asked"]
    assert stats(made.folder)["bytes_out"] == sum(row["bytes"] for row in rows)


def test_mistakes_are_said(folder, fake):
    for changes, message in (
        ({"prompt": "Rate this."}, r"no \{text\}"),
        ({"prompt": "{text} {titel}"}, r"prompt has \{titel\}"),
        ({"fields": {"class": "text"}}, "not a keyword"),
        ({"fields": {"words": "number"}}, "would write column 'words'"),
        ({"max_cost": 1.0}, "needs price_in"),
        ({"model": ""}, "model"),
        ({"keep": "score >"}, "not an expression"),
    ):
        with pytest.raises(SpecError, match=message):
            spec(folder, fake, **changes)


def test_the_address_the_prices_and_the_limits_are_not_part_of_the_identity(folder, fake):
    one = spec(folder, fake)
    other = spec(folder, fake, endpoint={"url": "http://elsewhere/v1"}, price_in=3.0, max_tokens_total=5)
    assert one.identity() == other.identity() != spec(folder, fake, model="another").identity()


def test_the_last_object_of_an_answer_counts():
    assert last_object('<think>{"score": 1}</think>```json\n{"score": {"a": 2}, "b": "}"}\n```') == {
        "score": {"a": 2},
        "b": "}",
    }
    assert last_object("none {here") is None and last_object('{"a": NaN}') is None
    read = LLMColumns(model="m", prompt="{text}", fields={"n": "integer", "f": "number", "b": "boolean"}).values_of
    assert read(Answer('{"n": 2.0, "f": 0.5, "b": true}', "", 0, 0)) == {"n": 2.0, "f": 0.5, "b": 1.0}
    for bad in (
        '{"n": 2.5, "f": 1, "b": true}',
        '{"n": 2, "f": "1", "b": true}',
        '{"n": 2, "f": 1, "b": 1}',
        '{"n": 2}',
        "[1]",
    ):
        assert read(Answer(bad, "", 0, 0)) is None


def test_a_journal_survives_a_torn_line(tmp_path):
    path = tmp_path / "log" / "answers.jsonl"
    journal = Journal(path)
    journal.add("a", Answer("one \u00e9", "", 3, 4))
    journal.add("b", Answer("two", "", 5, 6))
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    journal = Journal(path)
    assert "a" in journal and "b" not in journal and journal["a"].text == "one \u00e9" and journal.tokens_in == 3
    journal.add("b", Answer("two", "", 5, 6))
    assert journal["b"].text == "two" and journal["a"].tokens_out == 4 and path.read_bytes() == whole
    journal.close()


@pytest.mark.slow
def test_hones_own_server_fills_columns(folder, fake, tiny_llama):
    """Its judgement is noise, but the schema is enforced: what is not endless white space is a truth value."""
    pytest.importorskip("uvicorn")
    from tests.serve.live import LiveServer

    live = LiveServer(tiny_llama, served_model_name="tiny", engine={"num_pages": 256, "max_num_seqs": 4})
    try:
        asking = {
            "model": "tiny",
            "prompt": "{text}",
            "fields": {"good": "boolean"},
            "max_chars": 100,
            "answer_tokens": 64,
        }
        endpoint = {"url": f"{live.url}/v1", "parallel": 2}
        made = spec(folder, fake, **asking, endpoint=endpoint, max_failures=1.0).make(folder / "out", run=QUIET)
    finally:
        live.stop()
    rows = parquet.read_table(made.folder / "documents").to_pylist()
    answered = [row["good"] for row in rows if row["good"] is not None]
    assert len(rows) == 12 and answered and set(answered) <= {0.0, 1.0}
    assert stats(made.folder)["figures"]["failed"] == 12 - len(answered)
    assert made.figures["llm_tokens"].value > 12 * 20 and fake.seen == []
