"""`hone chat`: its loop and commands, what it drops when the context is full, Ctrl-C, and the same answers from folder and server."""

from __future__ import annotations

import http.server
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hone.base.errors import FitError, MachineError, SpecError
from hone.base.run import Run
from hone.cli import main
from hone.cli.chat.conversation import Answer, Conversation
from hone.cli.chat.local import StateModel, open_local
from hone.cli.chat.remote import RemoteModel
from hone.cli.chat.screen import Plain, Terminal, whole_blocks
from hone.cli.chat.session import Session
from hone.cli.chat.spec import ChatSpec
from hone.model.decoder import build
from hone.model.hf import save
from hone.model.incremental import write
from hone.model.shape import Shape
from hone.model.tokenizer import load_tokenizer
from hone.serve.http.defaults import GenerationDefaults
from hone.serve.request import SamplingParams
from hone.serve.spec import EngineSpec
from tests.conftest import ROOT
from tests.serve.live import LiveServer

GREEDY = {"temperature": "0", "max_tokens": "8"}


class Echo:
    """Answers with the last question in capitals, a word a piece; a token is a letter."""

    interruptible, needs_limit, name, chat = False, True, "echo", True
    defaults = GenerationDefaults()

    def __init__(self, limit: int | None = None, stop_after: int | None = None, fails: bool = False) -> None:
        self.max_model_len, self._stop_after, self._fails = limit, stop_after, fails
        self.prompts: list = []
        self.closed = 0

    def count(self, prompt) -> int:
        return len(prompt) if isinstance(prompt, str) else sum(len(one["content"]) for one in prompt)

    def pieces(self, prompt, given, max_tokens) -> Iterator[Answer]:
        self.prompts.append((prompt, max_tokens))
        answer = Answer()
        words = (prompt if isinstance(prompt, str) else prompt[-1]["content"]).upper().split(" ")
        try:
            for place, word in enumerate(words):
                if place == self._stop_after:
                    os.kill(os.getpid(), signal.SIGINT)
                if self._fails and place:
                    raise MachineError("the server is gone", fix="start it")
                answer.text += f"{' ' if place else ''}{word}"
                answer.finish = "stop" if place == len(words) - 1 else None
                yield answer
        finally:
            self.closed += 1

    def close(self) -> None:
        pass


def talk(model, text: str, monkeypatch, **more) -> tuple[int, Session]:
    """A session over the lines of `text`."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    session = Session(model, Plain(), more.pop("changes", {}), **more)
    return session.run(), session


def test_lines_are_questions_and_commands(monkeypatch, capsys, tmp_path: Path):
    model, file = Echo(), tmp_path / "chat.json"
    text = (
        f"hello you\n\n/system be brief\n//etc\n/retry\n/set temperature=0.5\n/save {file}\n/clear\nnew\n/exit\nnever\n"
    )
    code, session = talk(model, text, monkeypatch)
    assert code == 0 and capsys.readouterr().out == "HELLO YOU\n/ETC\n/ETC\nNEW\n"
    first, second = {"role": "user", "content": "hello you"}, {"role": "assistant", "content": "HELLO YOU"}
    brief, third = {"role": "system", "content": "be brief"}, {"role": "user", "content": "/etc"}
    assert [prompt for prompt, _ in model.prompts] == [
        [first],
        *[[brief, first, second, third]] * 2,
        [brief, {"role": "user", "content": "new"}],
    ]
    saved = json.loads(file.read_text())["messages"]
    assert saved == [brief, first, second, third, {"role": "assistant", "content": "/ETC"}]
    assert session._given.temperature == 0.5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/clea", "did you mean '/clear'"),
        ("/set tempratur=1", "temperature"),
        ("/set x", "value"),
        ("/retry", "nothing"),
    ],
)
def test_a_mistake_ends_what_no_terminal_reads(monkeypatch, capsys, line: str, words: str):
    code, _ = talk(Echo(), f"{line}\nhello\n", monkeypatch)
    told = capsys.readouterr()
    assert code == 2 and words in told.err and "fix:" in told.err and told.out == ""


def test_save_replaces_no_file_of_another(monkeypatch, capsys, tmp_path: Path):
    """Its own is written again as the conversation goes on; another one when it is told to."""
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    other.write_text("kept")
    code, _ = talk(Echo(), f"a\n/save {own}\nb\n/save {own}\n/save {other}\n", monkeypatch)
    assert code == 2 and len(json.loads(own.read_text())["messages"]) == 4 and other.read_text() == "kept"
    told = capsys.readouterr().err
    assert f"{other} is there already" in told and f"write /save --overwrite {other}" in told
    code, _ = talk(Echo(), f"a\n/save --overwrite {other}\n/save {other}\n", monkeypatch)
    assert code == 0 and len(json.loads(other.read_text())["messages"]) == 2
    code, _ = talk(Echo(), "a\n/save --overwrite\n", monkeypatch)
    assert code == 2 and "/save needs a file" in capsys.readouterr().err


def test_ctrl_c_ends_the_answer_and_not_the_session(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    for interruptible in (False, True):
        model = Echo(stop_after=2)
        model.interruptible = interruptible
        code, session = talk(model, "a b c d\nlater\n", monkeypatch)
        told = capsys.readouterr()
        # Where nothing may be interrupted the piece under way is the last one.
        assert code == 0 and told.out == ("A B\n" if interruptible else "A B C\n") + "LATER\n"
        assert "stopped" in told.err and model.closed == 2
        assert session.conversation.turns[1]["content"] == told.out.splitlines()[0]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_word_drops_the_question(monkeypatch, capsys):
    model = Echo(stop_after=0)
    model.interruptible = True
    code, session = talk(model, "a b\n", monkeypatch)
    assert code == 0 and session.conversation.turns == [] and "dropped" in capsys.readouterr().err


def test_a_failed_answer_can_be_asked_for_again():
    session = Session(Echo(fails=True), Plain(), {})
    session.conversation.ask("a b")
    with pytest.raises(MachineError):
        session._answer()
    assert session.conversation.turns == []
    session._model = Echo()
    session._command("/retry")
    assert [turn["content"] for turn in session.conversation.turns] == ["a b", "A B"]


def test_a_full_context_loses_its_oldest_turns_and_says_so(monkeypatch, capsys):
    model = Echo(limit=80)
    code, session = talk(model, "".join(f"question {place}\n" for place in range(8)), monkeypatch)
    told = capsys.readouterr()
    assert code == 0 and told.out.splitlines() == [f"QUESTION {place}" for place in range(8)]
    assert (
        told.err.count("the context of 80 tokens is full: the oldest 2 turns") == 3
    )  # room for several turns is made at once
    for prompt, room in model.prompts:
        assert model.count(prompt) + room == 80 and room >= 20 and prompt[0]["role"] == "user"
    with pytest.raises(FitError, match="have 80 tokens, the context 80"):
        session.conversation.ask("x" * 80)
        session._answer()


def test_a_server_that_counts_nothing_refuses_and_the_oldest_turn_goes(monkeypatch, capsys):
    class Short(Echo):
        def pieces(self, prompt, given, max_tokens):
            if len(prompt) > 3:
                raise FitError("too long", fix="shorten")
            yield from super().pieces(prompt, given, max_tokens)

    code, session = talk(Short(), "a\nb\nc\n", monkeypatch)
    assert code == 0 and capsys.readouterr().err.count("oldest turn is dropped") == 1
    assert [turn["content"] for turn in session.conversation.turns] == ["b", "B", "c", "C"]


def test_without_a_template_the_text_goes_on(monkeypatch, capsys):
    model = Echo()
    model.chat = False
    talk(model, "one\ntwo\n/clear\nthree\n", monkeypatch)
    assert [prompt for prompt, _ in model.prompts] == ["one", "oneONE\ntwo", "three"]
    assert {most for _, most in model.prompts} == {64}
    conversation = Conversation(False)
    conversation.ask("a\n")
    conversation.answered("b\n")
    conversation.ask("c")
    assert conversation.prompt == "a\nb\nc"


def test_whole_blocks_are_what_later_text_does_not_change():
    assert whole_blocks("one\n\ntwo") == 5 and whole_blocks("one\ntwo") == 0
    assert whole_blocks("a\n\n```py\nx\n\ny") == 3
    assert whole_blocks("```py\nx\n\n```\n\nb") == 14


def test_a_terminal_shows_markdown_and_obeys_no_model(monkeypatch):
    from rich.console import Console

    screen, out = Terminal(markdown=True), io.StringIO()
    screen._console = Console(file=out, width=60, force_terminal=True, color_system=None, highlight=False)
    text = "**bold** <b>\x1b]0;title\x07\n\n```\na <tag>\n\nb\n```\n\nlast"
    for end in range(1, len(text) + 1):
        screen.grow(text[:end])
    screen.end("4 tokens")
    shown = out.getvalue()
    for part in ("bold <b>", "a <tag>", "last", "4 tokens"):
        assert part in shown
    assert "\x1b]" not in shown and "\x07" not in shown and "**" not in shown.split("bold <b>")[-1]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_pipe_into_a_terminal_obeys_no_model(terminal: bool, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    screen = Plain()
    screen.grow("a\x1b[2J")
    screen.grow("a\x1b[2Jb\n")
    screen.end("")
    assert capsys.readouterr().out == ("a[2Jb\n\n" if terminal else "a\x1b[2Jb\n\n")


def test_a_terminal_shows_reasoning_once_and_as_it_is():
    from rich.console import Console

    text = "<think>a **b**</think>**c**"
    for pieces in (
        [(text[:end], "") for end in range(1, len(text) + 1)],
        [*[("", "think"[:end]) for end in range(1, 6)], ("**c", "think"), ("**c**", "think")],
        [("<th", ""), ("<th", "")],
    ):
        screen, out = Terminal(markdown=True), io.StringIO()
        screen._console = Console(file=out, width=60, force_terminal=False, color_system=None, highlight=False)
        for shown, thought in pieces:
            screen.grow(shown, thought)
        screen.end("")
        told = out.getvalue()
        if pieces[0][0] == "<th":
            assert "<th" in told
        else:
            assert told.split() in (["<think>a", "**b**</think>", "c"], ["think", "c"])


# ---- with a model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[LiveServer]:
    live = LiveServer(tiny_llama, api_key="secret")
    yield live
    live.stop()


def answers(model, *questions: str, changes: dict[str, str] = GREEDY) -> list[Answer]:
    conversation, found = Conversation(model.chat), []
    for question in questions:
        conversation.ask(question)
        given = SamplingParams.from_overrides(changes)
        *_, last = model.pieces(conversation.prompt, given, given.max_tokens)
        conversation.answered(last.text)
        found.append(last)
    model.close()
    return found


def test_answers_are_those_of_transformers(tiny_llama: Path, server: LiveServer, monkeypatch):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    questions, messages, expected = ("the quick brown fox jumps", "over the lazy dog"), [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = oracle.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(made, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": expected[-1]})
    monkeypatch.setenv("HONE_API_KEY", "secret")
    for model in (
        open_local(str(tiny_llama), ChatSpec(), Run(quiet=True)),
        RemoteModel(ChatSpec(url=f"{server.url}/v1/")),
    ):
        assert model.chat and model.max_model_len == 512
        found = answers(model, *questions)
        assert [one.text for one in found] == expected
        assert [one.num_tokens for one in found] == [8, 8] and found[0].finish == "length"
        first, second = found
        assert second.num_cached >= first.num_prompt // 16 * 16 > 0  # the second turn finds the pages of the first


def test_an_answer_that_is_left_ends_in_the_engine(tiny_llama: Path):
    model = open_local(str(tiny_llama), ChatSpec(), Run(quiet=True))
    given = SamplingParams(ignore_eos=True, temperature=0)
    pieces = model.pieces([{"role": "user", "content": "the"}], given, 100)
    next(pieces)
    pieces.close()
    assert not model.engine.has_work and model.engine.pool.num_used == 0
    assert model.params(SamplingParams(top_k=3), 9).model_dump(include={"top_k", "max_tokens"}) == {
        "top_k": 3,
        "max_tokens": 9,
    }


def test_a_model_of_recurrent_states(tiny_llama: Path, tmp_path: Path):
    """The engine does not serve it; the answers are those of `hone generate`."""
    tokenizer = load_tokenizer(tiny_llama)
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 48, "max_seq_len": 128}
    config = Shape.read({**sizes, "num_layers": 2, "mixers": ["retnet"]}).config(tokenizer.vocab_size)
    with pytest.warns(RuntimeWarning, match="Only hone reads"):
        save(build(config, seed=3), tmp_path, tokenizer_from=tiny_llama)
    model = open_local(str(tmp_path), ChatSpec(), Run(quiet=True))
    assert isinstance(model, StateModel) and model.max_model_len == 128
    prompt = tokenizer.chat([{"role": "user", "content": "the quick"}])
    assert [one.text for one in answers(model, "the quick")] == [write(tmp_path, prompt, 8)]
    with pytest.raises(SpecError, match="mixer 'retnet'"):
        open_local(str(tmp_path), ChatSpec(engine=EngineSpec(max_num_seqs=2)), Run(quiet=True))


def test_a_model_without_template_continues_text(tiny_llama: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_llama, tmp_path / "base")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    local = open_local(str(folder), ChatSpec(), Run(quiet=True))
    live = LiveServer(folder)
    try:
        remote = RemoteModel(ChatSpec(url=live.url))
        assert not local.chat and not remote.chat
        text = live.post("/v1/completions", prompt="the quick", temperature=0, max_tokens=8).json()["choices"][0][
            "text"
        ]
        for model in (local, remote):
            assert [one.text for one in answers(model, "the quick")] == [text]
    finally:
        live.stop()


def test_what_a_server_refuses_is_told(server: LiveServer, capsys):
    for options, words in (
        (["--api_key=wrong"], "API key"),
        (["--api_key=secret", "--model=other"], "has no model 'other'"),
        (["--engine.max_num_seqs=2"], "for a folder"),
        (["--temprature=1"], "did you mean '--temperature'"),
        (["--logprobs=1"], "no option --logprobs"),
        (["--url=nothing"], "given twice"),
    ):
        assert main(["chat", f"--url={server.url}", *options]) == 2
        assert words in capsys.readouterr().err
    assert main(["chat", "--url=http://127.0.0.1:9"]) == 2 and "cannot be reached" in capsys.readouterr().err
    assert main(["chat", "--model=x", "folder"]) == 2 and "is for a server" in capsys.readouterr().err
    model = RemoteModel(ChatSpec(url=server.url, api_key="secret"))
    with pytest.raises(FitError, match="maximum context length"):
        [*model.pieces([{"role": "user", "content": "x" * 600}], SamplingParams(), None)]
    assert model.count([{"role": "user", "content": "the quick brown"}]) > 10


class Foreign(http.server.BaseHTTPRequestHandler):
    """A server that is not hone's: it counts nothing, sends no usage, and a model without a template refuses messages."""

    template, asked = True, []

    def do_GET(self):
        self._reply(200, {"data": [{"id": "m"}]}) if self.path == "/v1/models" else self._reply(404, {"detail": "no"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body))
        if self.path == "/tokenize":
            self._reply(404, {}) if self.template else self._reply(400, {"error": {"message": "set a chat template"}})
        elif len(body.get("messages", ())) > 1:
            self._reply(400, {"error": {"message": "This model's maximum context length is 9 tokens"}})
        else:
            deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "a "}, {"content": "b"}]
            texts = [{"delta": one, "text": one.get("content", "")} for one in deltas]
            events = [{"choices": [one]} for one in (*texts, {"delta": {}, "finish_reason": "stop"})]
            lines = [b": ping", *(b"data: " + json.dumps(one).encode() for one in events), b"data: [DONE]"]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"\n\n".join(lines) + b"\n\n")

    def _reply(self, status: int, value: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("template", [True, False])
def test_a_server_that_is_not_hones(monkeypatch, capsys, template: bool):
    monkeypatch.setattr(Foreign, "template", template)
    monkeypatch.setattr(Foreign, "asked", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        model = RemoteModel(ChatSpec(url=f"http://127.0.0.1:{there.server_port}"))
        changes = {"top_k": "3", "include_stop": "true", "structured_outputs": "{json_schema: '{}'}"}
        code, _ = talk(model, "one\ntwo\n", monkeypatch, changes=changes)
        there.shutdown()
    told = capsys.readouterr()
    assert (code, told.out, model.chat, model.max_model_len) == (0, "a b\na b\n", template, None)
    path, body = Foreign.asked[-1]
    given = {"top_k": 3, "include_stop_str_in_output": True, "structured_outputs": {"json": "{}"}}
    assert given.items() <= body.items() and "temperature" not in body
    if template:
        assert path == "/v1/chat/completions" and body["messages"] == [{"role": "user", "content": "two"}]
        assert "max_tokens" not in body and "oldest turn is dropped" in told.err
    else:
        assert path == "/v1/completions" and body["prompt"] == "onea b\ntwo" and body["max_tokens"] == 64


class Odd(Foreign):
    """A server whose answers have another form: `cards` of models, `event` of a stream."""

    cards, event = "", ""

    def do_GET(self):
        self._said(self.cards)

    def do_POST(self):
        self._said(f"data: {self.event}\n\n")

    def _said(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


CARDS = '{"data": [{"id": "m", "max_model_len": "many"}, {}, 3]}'
ODD = {
    "no JSON": ("hello", "", "does not answer as OpenAI's API does"),
    "no list": ('{"data": {"a": 1}}', "", "names no model"),
    "no objects": ('{"data": ["a"]}', "", "names no model"),
    "number": (CARDS, "5", "an event in another form: 5"),
    "null": (CARDS, "null", "an event in another form"),
    "choices": (CARDS, '{"choices": ["a"]}', "an event in another form"),
    "text": (CARDS, '{"choices": [{"delta": {"content": 5}}]}', "an event in another form"),
    "cut off": (CARDS, '{"choices": [{"delta": {"content": "a"}}]}', "ended the answer in the middle"),
    "error": (CARDS, '{"error": "bad"}', "bad"),
}


@pytest.mark.parametrize("odd", ODD)
def test_answers_in_another_form_are_one_error(monkeypatch, capsys, odd: str):
    cards, event, says = ODD[odd]
    monkeypatch.setattr(Odd, "cards", cards)
    monkeypatch.setattr(Odd, "event", event)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        assert main(["chat", f"--url=http://127.0.0.1:{there.server_port}"]) == 2
        there.shutdown()
    assert says in capsys.readouterr().err


def test_an_address_that_is_none_is_said(capsys):
    assert main(["chat", "--url=http://[::1"]) == 2 and "is no address of a server" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_in_a_terminal_and_in_a_pipe(tiny_llama: Path):
    command = [sys.executable, "-m", "hone.cli", "chat", str(tiny_llama), *(f"--{k}={v}" for k, v in GREEDY.items())]
    piped = subprocess.run(
        [*command, "--quiet"], input="the quick\n", capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert piped.returncode == 0 and piped.stdout.strip()
    assert all(line.startswith("note: ") for line in piped.stderr.splitlines())

    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)

    told = b""

    def until(mark: bytes) -> bytes:
        """What is printed up to `mark`; what follows is for the next call."""
        nonlocal told
        while mark not in told:
            told += os.read(ours, 4096)
        before, _, told = told.partition(mark)
        return before

    until(b"> ")
    os.write(ours, b"the quick\n")
    assert b"8 tokens" in until(b"cut by max_tokens")
    until(b"> ")
    os.write(ours, b"\x04")
    assert process.wait(600) == 0
    os.close(ours)
