"""MEDU against an endpoint of our own: grades become utilities, failures are retried, and what is no grade is said."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hone.base.errors import HoneError, SpecError
from hone.feed import MIXTURES
from hone.feed.mix.base import Source
from hone.feed.mix.endpoint import Endpoint
from hone.feed.mix.medu import grade, read_examples

pytest.importorskip("openai")


class Fake:
    """An OpenAI-compatible server that answers as told; `fails` first answers are refusals with that status."""

    def __init__(self) -> None:
        self.fails: list[int] = []
        self.seen: list[tuple[str, dict, str]] = []
        self.answer = lambda question: "good"
        self.broken = ""
        lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def reply(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def do_GET(self):
                self.reply(200, json.dumps({"data": [{"id": "first-model"}]}))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    fake.seen.append((self.path, body, self.headers.get("Authorization", "")))
                    if fake.fails:
                        return self.reply(fake.fails.pop(0), "busy")
                if fake.broken:
                    return self.reply(200, fake.broken)
                chat = self.path.endswith("/chat/completions")
                question = body["messages"][0]["content"] if chat else body["prompt"]
                text = fake.answer(question)
                choice = {"message": {"content": text}} if chat else {"text": text}
                return self.reply(200, json.dumps({"choices": [choice]}))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def fake():
    made = Fake()
    yield made
    made.server.shutdown()
    made.server.server_close()


def source(name: str, texts: list[str]) -> Source:
    return Source(name, 1000, lambda count: texts[:count])


def judge(question: str) -> str:
    """A model that knows prose from code and says so at length."""
    if "Describe" in question:
        return "text about numbers" if "2 + 2" in question else "stories for children"
    document = question.split("<document>")[1]
    likes = "1 2 3" if "about numbers" in question else "once upon a time"
    return "**Great.**" if likes in document else "useless"


@pytest.fixture
def medu(fake, tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"question": "2 + 2", "answer": 4}\n\n{"question": "3 + 4", "answer": 7}\n')
    (tmp_path / "tales.txt").write_text("The fox.\n\nThe crow and\nthe cheese.\n")
    fake.answer = judge
    return {
        "kind": "medu",
        "endpoint": {"url": fake.url, "parallel": 4},
        "examples": {"sums": str(tmp_path / "sums.jsonl"), "tales": str(tmp_path / "tales.txt")},
        "num_samples": 4,
        "risk": 0.1,
    }


SOURCES = [
    source("numbers", ["1 2 3 4"] * 6),
    source("stories", ["once upon a time"] * 3 + ["1 2 3"]),
    source("noise", ["zzz"] * 4),
]


def test_grades_become_utilities_and_weights(medu, fake, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    mixture = MIXTURES.read(medu)
    chosen = mixture.weigh(SOURCES, 100)
    assert chosen.notes["utilities"] == {
        "numbers": {"sums": 1.0, "tales": 0.0},
        "stories": {"sums": 0.25, "tales": 0.75},
        "noise": {"sums": 0.0, "tales": 0.0},
    }
    assert chosen.notes["descriptions"]["sums"] == "text about numbers"
    assert chosen.notes["grades"]["stories"]["tales"] == {"great": 3, "useless": 1}
    assert chosen.weights["noise"] == min(chosen.weights.values())
    assert [*mixture.files()] == ["mixture.examples.sums", "mixture.examples.tales"]
    assert len(fake.seen) == 2 + 2 * 12
    assert all(body["model"] == "first-model" and body["temperature"] == 0 for _, body, _ in fake.seen)
    assert not any(key for _, _, key in fake.seen)
    assert chosen == mixture.weigh(SOURCES, 100)


@pytest.mark.slow
def test_refusals_are_asked_again_and_the_key_is_sent(medu, fake, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    fake.fails = [500, 429, 503]
    assert MIXTURES.read(medu).weigh(SOURCES, 100).notes["utilities"]["numbers"]["sums"] == 1.0
    assert len(fake.seen) == 2 + 2 * 12 + 3
    assert all(key == "Bearer secret" for _, _, key in fake.seen)


@pytest.mark.slow
def test_a_final_refusal_is_an_error_with_what_was_said(medu, fake):
    fake.fails = [400]
    with pytest.raises(HoneError, match=r"in 1 attempts: 400 busy"):
        MIXTURES.read(medu).weigh(SOURCES, 100)
    fake.fails = [500] * 100
    with pytest.raises(HoneError, match=r"in 2 attempts: 500 busy"):
        MIXTURES.read({**medu, "endpoint": {**medu["endpoint"], "attempts": 2}}).weigh(SOURCES, 100)
    with pytest.raises(HoneError, match="gave no answer in 2 attempts: ConnectError"):
        Endpoint(url="http://127.0.0.1:9/v1", attempts=2).ask(["x"], 5)
    with pytest.raises(SpecError, match="not a web address"):
        Endpoint(url="localhost:8000").ask(["x"], 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", ["not json", "[]", "{}", '{"choices": []}', '{"choices": [{"message": {"content": null}}]}']
)
def test_an_answer_without_text_is_an_error(medu, fake, broken):
    fake.broken = broken
    with pytest.raises(HoneError, match=r"not a JSON object|without text"):
        Endpoint(url=fake.url, attempts=2, model="m").ask(["x"], 5)


def test_a_model_that_does_not_grade_is_said(medu, fake):
    fake.answer = lambda question: "I would rather not say." if "<document>" in question else "text"
    with pytest.raises(HoneError, match=r"graded 0 of 4 samples of 'numbers' for 'sums'.*rather not say"):
        MIXTURES.read(medu).weigh(SOURCES, 100)


@pytest.mark.parametrize(
    ("answer", "meant"),
    [
        ("good", "good"), (" Useless.\n", "useless"), ("Rating: **okay**", "okay"),
        ("<think>Okay, is it good? Not great.</think>\n\npoor", "poor"), ("Is it great? No.</think> poor", "poor"),
        ("<think>\nOkay", ""), ("Okay, let us see whether", ""), ("Not great. Useless.", ""), ("not good", ""),
        ("good-faith legal text: poor", ""), ("", ""), ("goodness", ""),
    ],
)  # fmt: skip
def test_a_grade_is_an_answer_that_says_nothing_else(answer, meant):
    assert grade(answer) == meant


def test_one_grade_for_everything_is_said(medu, fake):
    fake.answer = lambda question: "okay" if "<document>" in question else "text"
    with pytest.raises(HoneError, match=r"every sample of all 3 sources 'okay', so their utilities do not differ"):
        MIXTURES.read(medu).weigh(SOURCES, 100)
    assert MIXTURES.read(medu).weigh(SOURCES[:1], 100).weights == {"numbers": 1.0}
    fake.seen.clear()
    with pytest.raises(HoneError, match="okay"):
        MIXTURES.read({**medu, "answer_tokens": 2000}).weigh(SOURCES, 100)
    assert {body["max_tokens"] for _, body, _ in fake.seen} == {400, 2000}


def test_completions_for_models_without_a_chat_template(fake):
    fake.answer = str.upper
    answers = Endpoint(url=fake.url, chat=False, model="m", parallel=3).ask([f"a{n}" for n in range(20)], 5)
    assert answers == [f"A{n}" for n in range(20)]
    assert {path for path, _, _ in fake.seen} == {"/v1/completions"}


def test_examples_and_samples_must_be_there(medu, tmp_path):
    assert read_examples(tmp_path / "sums.jsonl")[0] == "question: 2 + 2\nanswer: 4"
    assert read_examples(tmp_path / "tales.txt") == ["The fox.", "The crow and\nthe cheese."]
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    (tmp_path / "empty.txt").write_text("\n\n")
    for name, said in (("none.txt", "no file"), ("bad.jsonl", "cannot be read"), ("empty.txt", "is empty")):
        with pytest.raises(SpecError, match=said):
            MIXTURES.read({**medu, "examples": {"t": str(tmp_path / name)}}).weigh(SOURCES, 100)
    with pytest.raises(SpecError, match="at least one test"):
        MIXTURES.read({**medu, "examples": {}}).weigh(SOURCES, 100)
    with pytest.raises(SpecError, match="no documents for"):
        MIXTURES.read(medu).weigh([Source("a", 10), Source("b", 10)], 10)


@pytest.mark.slow
def test_hones_own_server_is_such_an_endpoint(tiny_llama):
    """Its answers are noise, so the text is only checked to arrive."""
    pytest.importorskip("uvicorn")
    from tests.serve.live import LiveServer

    live = LiveServer(tiny_llama, served_model_name="tiny", engine={"num_pages": 64, "max_num_seqs": 4})
    try:
        url = f"{live.url}/v1"
        answers = Endpoint(url=url, parallel=2).ask(["Is this good?", "And this?"], 8)
        assert len(answers) == 2 and all(isinstance(answer, str) for answer in answers)
        assert answers == Endpoint(url=url, parallel=1).ask(["Is this good?", "And this?"], 8)
        assert isinstance(Endpoint(url=url, chat=False).ask(["once"], 8)[0], str)
    finally:
        live.stop()
