"""Splits a growing reply into the model's reasoning and its answer, at the marks that models put around the former."""

from __future__ import annotations

from dataclasses import dataclass

from hone.base.errors import SpecError, did_you_mean
from hone.serve.http.tools.parser import open_end


@dataclass(frozen=True)
class ReasoningForm:
    """The marks of a family of models. `always`: a reply begins with reasoning even without the first mark."""

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False


REASONING_PARSERS: dict[str, ReasoningForm] = {
    "deepseek_r1": ReasoningForm(always=True),
    "qwen3": ReasoningForm(),
}
"""Name (vLLM's) to form."""


def reasoning_form(name: str) -> ReasoningForm:
    """The form under a name. Raises SpecError for an unknown one."""
    if name not in REASONING_PARSERS:
        raise SpecError(
            f"reasoning_parser is '{name}'; there are {', '.join(REASONING_PARSERS)}",
            fix=f"{did_you_mean(name, REASONING_PARSERS)}use qwen3 for models that write <think> themselves",
        )
    return REASONING_PARSERS[name]


def ended_by(form: ReasoningForm, prompt: str) -> bool:
    """True when the prompt already ends the reasoning: templates do so where thinking is switched off."""
    tail = prompt.rstrip()
    return tail.endswith(form.end)


class ReasoningSplitter:
    """Takes a reply's text piece by piece, and gives (reasoning, answer) of each."""

    def __init__(self, form: ReasoningForm, prompt: str) -> None:
        self._form = form
        self._held = ""
        self._begun = False
        self._inside: bool | None = None  # None: the first letters decide
        if ended_by(form, prompt):
            self._inside = False
        elif prompt.rstrip().endswith(form.start):
            self._inside, self._begun = True, True

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """What `text` adds to the reasoning and to the answer; at the end (`final`) nothing is held back."""
        if self._inside is False:
            return "", text
        self._held += text
        if not self._begun and not self._begin(final):
            return "", ""
        if not self._inside:
            answer, self._held = self._held, ""
            return "", answer
        place = self._held.find(self._form.end)
        if place >= 0:
            reasoning, answer = self._held[:place], self._held[place + len(self._form.end) :]
            self._held, self._inside = "", False
            return reasoning, answer
        keep = 0 if final else open_end(self._held, self._form.end)
        reasoning, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return reasoning, ""

    def _begin(self, final: bool) -> bool:
        """Decides whether the reply begins with reasoning; False while its first letters may still be the mark."""
        rest = self._held.lstrip()
        if not final and self._form.start.startswith(rest):
            return False
        if rest.startswith(self._form.start):
            self._inside, self._held = True, rest[len(self._form.start) :]
        else:
            self._inside = self._form.always
        self._begun = True
        return True
