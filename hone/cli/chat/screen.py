"""Where a chat is shown: a terminal, with Markdown drawn while it grows, or plain text for pipes and scripts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal, among them the begin of its commands, and the direction of letters."""


class Plain:
    """Answers as they are on standard output, each ended by a new line; notes on standard error.

    Where the output is a terminal (and the input none), letters that steer it are taken out.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._shown = 0

    def ask(self) -> str:
        """The next line of standard input. Raises EOFError at its end."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def grow(self, text: str, thought: str = "") -> None:
        """Shows what `text` has more than at the last call."""
        more = text[self._shown :]
        print(_CONTROLS.sub("", more) if sys.stdout.isatty() else more, end="", flush=True)
        self._shown = len(text)

    def end(self, summary: str) -> None:
        """Ends the answer."""
        self._shown = 0
        print(flush=True)

    def note(self, text: str) -> None:
        """Says something that is no answer."""
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def problem(self, what: str, fix: str) -> None:
        """Shows a mistake as every command does."""
        print(f"error: {what}\nfix: {fix}", file=sys.stderr, flush=True)


class Terminal:
    """Answers as Markdown: whole blocks are printed for good, the last one is drawn again while it grows.

    Letters that steer a terminal are taken out of what a model writes.
    """

    def __init__(self, *, markdown: bool) -> None:
        import contextlib

        from rich.console import Console

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (its import gives `input` a history and keys to edit with)
        self._console = Console(highlight=False)
        self._markdown = markdown
        self._live: Any = None
        self._begin()

    def _begin(self) -> None:
        self._text = self._rest = ""
        self._done = self._thought = 0
        self._answers = False

    def ask(self) -> str:
        """What the user writes: a line, or several between two lines of three quotes. Raises EOFError at Ctrl-D."""
        line = input("\001\033[1m\002> \001\033[0m\002" if self._console.is_terminal else "> ")
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(input("\001\033[2m\002. \001\033[0m\002"))
        return "\n".join([*lines[:-1], lines[-1].rstrip()[:-3]]).strip("\n")

    def grow(self, text: str, thought: str = "") -> None:
        """Shows what `text` (and before it the reasoning `thought`) has more than at the last call."""
        if len(thought) > self._thought:
            self._console.print(_CONTROLS.sub("", thought[self._thought :]), end="", style="dim", markup=False)
            self._thought = len(thought)
        self._text = text
        if not text or (self._markdown and "<think>".startswith(text.lstrip())):  # what it is shows later
            return
        if self._thought and not self._answers:
            self._console.print("\n")
        self._answers = True
        plain = self._plain(text)
        if self._done < plain:
            self._console.out(_CONTROLS.sub("", text[self._done : plain]), end="", highlight=False)
            self._done = plain
        if plain < len(text):
            if plain and self._live is None:
                self._console.print()
            self._draw(text)

    def _plain(self, text: str) -> int:
        """Letters of `text` that are shown as they are: all without Markdown, else those of a reasoning at its beginning."""
        if not self._markdown:
            return len(text)
        if not text.lstrip().startswith("<think>"):
            return 0
        end = text.find("</think>")
        return len(text) if end < 0 else end + len("</think>")

    def _draw(self, text: str) -> None:
        from rich.live import Live

        whole = self._done + whole_blocks(text[self._done :])
        if self._live is None:
            self._live = Live(
                self, console=self._console, transient=True, vertical_overflow="crop", refresh_per_second=8
            )
            self._live.start()
        if whole > self._done:
            self._rest = ""
            self._live.console.print(self._block(text[self._done : whole]))
            self._live.console.print()
            self._done = whole
        self._rest = text[self._done :]

    @staticmethod
    def _block(text: str) -> Any:
        from markdown_it import MarkdownIt
        from rich.markdown import Markdown

        shown = Markdown("", hyperlinks=False)  # a link's address is shown beside its text
        parser = MarkdownIt().enable(["strikethrough", "table"]).disable(["html_block", "html_inline"])
        shown.parsed = parser.parse(_CONTROLS.sub("", text))
        return shown

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The block that grows: its last lines, as many as fit."""
        from rich.segment import Segment

        lines = console.render_lines(self._block(self._rest), options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()

    def end(self, summary: str) -> None:
        """Ends the answer, and shows its length and speed."""
        rest, drawn = self._text[self._done :], self._live is not None
        if self._live is not None:
            self._rest = ""
            self._live.stop()
            self._live = None
        if rest.strip():
            self._console.print(self._block(rest))
        elif not drawn:
            self._console.print()
        self._begin()
        if summary:
            self.note(summary)

    def note(self, text: str) -> None:
        """Says something that is no answer."""
        self._console.print(_CONTROLS.sub("", text), style="dim", markup=False, soft_wrap=True)

    def problem(self, what: str, fix: str) -> None:
        """Shows a mistake."""
        self._console.print(f"error: {_CONTROLS.sub('', what)}", style="red", markup=False, soft_wrap=True)
        self._console.print(f"fix: {_CONTROLS.sub('', fix)}", markup=False, soft_wrap=True)


def whole_blocks(text: str) -> int:
    """Letters of `text` up to the last blank line outside a fenced block of code: Markdown that later text does not change."""
    fence, end, place = "", 0, 0
    for line in text.splitlines(keepends=True):
        place += len(line)
        bare = line.strip()
        mark = re.match(r"`{3,}|~{3,}", bare)
        if mark and not fence:
            fence = mark[0]
        elif fence and bare.startswith(fence) and not bare.strip(fence[0]):
            fence = ""
        elif not fence and not bare and line.endswith("\n"):
            end = place
    return end
