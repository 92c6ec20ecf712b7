"""The loop of a chat: questions, answers, commands, and what Ctrl-C means."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from hone.base.errors import FitError, HoneError, SpecError, did_you_mean
from hone.cli.chat.conversation import Answer, Conversation, Messages
from hone.cli.chat.screen import Plain, Terminal
from hone.cli.chat.spec import NOT_SHOWN, TEXT_TOKENS
from hone.serve.http.defaults import GenerationDefaults
from hone.serve.request import SamplingParams

HELP = """/clear          forget the conversation (the system prompt stays)
/system [TEXT]  set the system prompt; without a text, show it
/retry          answer the last question again
/set FIELD=VALUE  change a field of sampling: /set temperature=0.2
/save FILE      write the conversation as JSON; over a file that another wrote with /save --overwrite FILE
/exit           end, as Ctrl-D does
Ctrl-C stops an answer. Between two lines of three quotes (\"\"\") a question may have several lines; one that begins
with / is written with //."""
_COMMANDS = ("/clear", "/system", "/retry", "/set", "/save", "/help", "/exit")


class Model(Protocol):
    """A model to talk to. `interruptible`: an exception may be raised anywhere while it answers. `needs_limit`: of tokens."""

    interruptible: bool
    needs_limit: bool
    defaults: GenerationDefaults
    name: str
    chat: bool
    max_model_len: int | None

    def count(self, prompt: Messages | str) -> int | None: ...
    def pieces(self, prompt: Messages | str, given: SamplingParams, max_tokens: int | None) -> Iterator[Answer]: ...
    def close(self) -> None: ...


class Asked(NamedTuple):
    """What `_listening` heard: `asked()` is whether Ctrl-C was pressed."""

    event: threading.Event

    def __call__(self) -> bool:
        return self.event.is_set()


@contextmanager
def _listening(*, interruptible: bool) -> Iterator[Asked]:
    """A block that notes Ctrl-C; where it is `interruptible`, and at the second one, that raises KeyboardInterrupt."""
    asked = Asked(threading.Event())
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def hear(number: int, frame: object) -> None:
        again = asked()
        asked.event.set()
        if interruptible or again:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class Session:
    """A conversation with `model` on a `screen`. `changes` are the fields of sampling that were given, as typed."""

    def __init__(self, model: Model, screen: Plain | Terminal, changes: dict[str, str], system: str = "") -> None:
        self._model, self._screen, self._changes = model, screen, changes
        self._saved: set[Path] = set()
        self._given = SamplingParams.from_overrides(changes)
        if system and not model.chat:
            raise SpecError(
                "a system prompt is given, and the model has no chat template",
                fix="leave --system out, or give --chat_template=FILE",
            )
        self.conversation = Conversation(model.chat, system)

    def run(self) -> int:
        """Asks and answers until the end of the input; the exit code. Without a terminal the first mistake ends it."""
        while True:
            try:
                line = self._screen.ask()
            except EOFError:
                if isinstance(self._screen, Terminal):
                    print()
                return 0
            except KeyboardInterrupt:
                if isinstance(self._screen, Plain):
                    raise
                self._screen.note("\nCtrl-D or /exit ends the chat")
                continue
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if self._command(line) is False:
                        return 0
                elif line.strip():
                    self.conversation.ask(line[1:] if line.startswith("//") else line)
                    self._answer()
            except HoneError as error:
                self._screen.problem(error.what, error.fix)
                if isinstance(self._screen, Plain):
                    return 2

    def _command(self, line: str) -> bool | None:
        """Does what a line that begins with / says; False ends the chat."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/help":
            self._screen.note(HELP)
        elif name == "/clear":
            self.conversation.clear()
        elif name == "/system":
            self._system(rest)
        elif name == "/retry":
            self.conversation.again()
            self._answer()
        elif name == "/set":
            self._set(rest)
        elif name == "/save":
            self._save(rest)
        else:
            raise SpecError(f"no command {name}", fix=f"{did_you_mean(name, _COMMANDS)}/help lists them")
        return None

    def _system(self, text: str) -> None:
        if not self.conversation.chat:
            raise SpecError("the model has no chat template, so no system prompt", fix="write it into the text")
        if text:
            self.conversation.system = text
        self._screen.note(self.conversation.system or "no system prompt")

    def _set(self, text: str) -> None:
        field, equals, value = text.partition("=")
        field = field.strip().removeprefix("--")
        if not equals:
            field, _, value = field.partition(" ")
        if not field or not value.strip():
            raise SpecError("/set needs a field and its value", fix="write /set temperature=0.2")
        if field in NOT_SHOWN:
            raise SpecError(f"a chat shows no {field}", fix="ask the server for them: hone serve")
        changes = {**self._changes, field: value.strip()}
        self._given, self._changes = SamplingParams.from_overrides(changes), changes

    def _save(self, name: str) -> None:
        path = Path(name.removeprefix("--overwrite").strip())
        if not path.name:
            raise SpecError("/save needs a file", fix="write /save chat.json")
        own = path.absolute() in self._saved or name.startswith("--overwrite")
        if path.is_file() and not own:
            raise SpecError(f"{path} is there already", fix=f"give another name, or write /save --overwrite {path}")
        try:
            self.conversation.save(path)
            self._saved.add(path.absolute())
        except OSError as error:
            raise SpecError(f"cannot write {name}: {error.strerror}", fix="give another file") from None

    def _answer(self) -> None:
        """Answers the last question. A question without an answer leaves the conversation."""
        answer, stopped = Answer(), False
        try:
            max_tokens = self._fitted()
            with _listening(interruptible=self._model.interruptible) as asked:
                try:
                    with closing(self._pieces(max_tokens)) as pieces:
                        for answer in pieces:
                            self._screen.grow(answer.text, answer.thought)
                            if asked() and answer.finish is None:
                                stopped = True
                                break
                except KeyboardInterrupt:
                    if not self._model.interruptible:
                        raise
                    stopped = True
        except BaseException:
            if answer.text:
                self._screen.end("")
            self.conversation.withdraw()
            raise
        self._screen.end("" if stopped else answer.summary)
        self.conversation.answered(answer.text)
        if stopped:
            self._screen.note("stopped" if answer.text else "stopped before the answer began: the question is dropped")
        elif not answer.text:
            self._screen.note("the answer has no text: the question is dropped")

    def _fitted(self) -> int | None:
        """Most tokens of the answer, once the conversation fits the context."""
        wanted = self._given.max_tokens if "max_tokens" in self._given.model_fields_set else None
        most, limit = self._model.defaults.max_new_tokens, self._model.max_model_len
        if wanted is None:
            wanted = most if self.conversation.chat else min(TEXT_TOKENS, most or TEXT_TOKENS)
        if limit is None:
            return wanted
        room, dropped = self.conversation.fit(limit, wanted, self._model.count)
        self._dropped(dropped, limit)
        return wanted if room is None or (wanted is None and not self._model.needs_limit) else room

    def _dropped(self, count: int, limit: int | None) -> None:
        if count:
            of = "" if limit is None else f" of {limit} tokens"
            what = "turn is" if count == 1 else f"{count} turns are"
            self._screen.note(f"the context{of} is full: the oldest {what} dropped")

    def _pieces(self, max_tokens: int | None) -> Iterator[Answer]:
        """The model's answer; where a server refuses the prompt as too long, again without the oldest turn."""
        while True:
            try:
                yield from self._model.pieces(self.conversation.prompt, self._given, max_tokens)
                return
            except FitError:
                if not self.conversation.drop_oldest():
                    raise
                self._dropped(1, self._model.max_model_len)


def introduced(model: Model, where: str) -> str:
    """The first line: the model, its context, its own defaults, and how it is talked to."""
    context = "" if model.max_model_len is None else f", context of {model.max_model_len} tokens"
    defaults = f"; its defaults: {model.defaults}" if str(model.defaults) else ""
    how = "" if model.chat else "; no chat template: it continues the text that you write, /clear begins a new one"
    return f"{model.name}{where}{context}{defaults}{how}"


def screen_of(*, chat: bool, quiet: bool) -> Plain | Terminal:
    """A terminal when input and output are one, else plain text."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return Terminal(markdown=chat)
    return Plain(quiet=quiet)
