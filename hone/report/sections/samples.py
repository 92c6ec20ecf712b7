"""What the models write: texts of serving runs for the same prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from hone.report import arms
from hone.report.collect import Line


class Text(NamedTuple):
    """A text: `same` is what it has in common with the prompt's first text, `other` its rest; `runs` generated it."""

    runs: str
    same: str
    other: str


class Saying(NamedTuple):
    """A prompt with its distinct texts."""

    prompt: str
    texts: list[Text]


@dataclass(frozen=True)
class Samples:
    """For each prompt the distinct texts; `sampling` is how they were drawn: 'temperature 0.7, top p 0.9', or ''."""

    id: ClassVar[str] = "text"
    title: ClassVar[str] = "Generated text"
    stages: ClassVar[tuple[str, ...]] = ("serve",)

    sayings: list[Saying]
    sampling: str

    @classmethod
    def of(cls, line: Line) -> Self | None:
        found = sayings(line)
        return cls(found, _sampling_words(line)) if found else None


def sayings(line: Line, most: int = 6) -> list[Saying]:
    """For each prompt the distinct texts, with the runs that generated them and where they differ from the first."""
    texts: dict[str, dict[str, list[str]]] = {}
    for arm in arms.serving(line):
        for entry in arm.rows[0].content.get("samples.jsonl") or []:
            texts.setdefault(str(entry.get("prompt", "")), {}).setdefault(str(entry.get("text", "")), []).append(
                arm.name
            )
    found = []
    for prompt, by_text in list(texts.items())[:most]:
        order = sorted(by_text, key=lambda text: ("plain" not in by_text[text], -len(by_text[text])))
        different = []
        for text in order:
            same = len(text) if text == order[0] else _agreeing(text, order[0])
            different.append(Text(", ".join(by_text[text]), text[:same], text[same:]))
        found.append(Saying(prompt, different))
    return found


def _sampling_words(line: Line) -> str:
    """The sampling parameters of the texts: 'temperature 0.7, top p 0.9'; '' when the runs have none."""
    drawn = next(
        (entry.get("sampling") for row in line.of("serve") for entry in row.content.get("samples.jsonl") or []), None
    )
    names = ("temperature", "top_p", "repetition_penalty")
    known = drawn if isinstance(drawn, dict) else {}
    return ", ".join(f"{name.replace('_', ' ')} {known[name]}" for name in names if name in known)


def _agreeing(one: str, other: str) -> int:
    """The length of the common prefix of two texts, in characters."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
