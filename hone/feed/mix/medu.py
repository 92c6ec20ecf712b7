"""MEDU mixture: a language model grades how useful samples of each source are for a task, given examples of the task."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from hone.base.durable import input_file
from hone.base.errors import HoneError, SpecError
from hone.feed.mix.base import Source
from hone.feed.mix.endpoint import Endpoint
from hone.feed.mix.utilimax import Portfolio

GRADES = {"great": 1.0, "good": 0.75, "okay": 0.5, "poor": 0.25, "useless": 0.0}
"""The grades that the model may give a document, and their utilities."""

_GRADE = re.compile(rf"\W*(?:(?:answer|rating|grade)\W+)?({'|'.join(GRADES)})\W*", re.IGNORECASE)
_THOUGHT = "think>"
_DESCRIBE = """Below are examples from a test of language models.

{examples}

Describe in at most 120 words what text a model should be trained on to do well in such a test: subjects, skills,
styles and kinds of document. Do not repeat the examples. Answer with the description only."""
_RATE = """A language model is to be trained on text of this description:

{description}

Here is the beginning of a document:

<document>
{document}
</document>

How useful is this document for that purpose? Answer with exactly one word: great, good, okay, poor or useless."""


class Medu(Portfolio):
    """A language model describes the data that a test requires and grades samples of each source. Held et al. 2025, arXiv:2501.11747.

    The mean grade of a source is its utility for that test; the weights are then UtiliMax's. It replaces training
    one model per source at a small part of the cost.
    """

    paper: ClassVar[str] = "arXiv:2501.11747"
    endpoint: Endpoint = Field(Endpoint(), description="The language model.")
    examples: dict[str, str] = Field(
        description="File of examples for each test: .jsonl, or text separated by blank lines."
    )
    num_examples: int = Field(
        16, ge=1, description="Examples in the prompt for a description, spread evenly over the file."
    )
    num_samples: int = Field(64, ge=1, description="Documents of each source to grade.")
    max_chars: int = Field(2000, ge=100, description="Characters of a document in a prompt.")
    answer_tokens: int = Field(
        16, ge=1, description="Most tokens of a grade; a reasoning model needs a thousand or more."
    )

    def files(self) -> dict[str, Path]:
        return {f"mixture.examples.{test}": Path(path).expanduser() for test, path in self.examples.items()}

    def utilities(self, sources: Sequence[Source]) -> tuple[np.ndarray, list[str], dict[str, Any]]:
        """Mean grade of every source for every test. Raises HoneError when fewer than half of the samples get a grade."""
        tests = list(self.examples)
        if not tests:
            raise SpecError("medu needs examples of at least one test", fix="add examples: {NAME: FILE}")
        descriptions = self.endpoint.ask([self._describe(self.examples[test]) for test in tests], max_tokens=400)
        samples = [self._samples(source) for source in sources]
        pairs = [
            (place, row, text) for place in range(len(tests)) for row, texts in enumerate(samples) for text in texts
        ]
        answers = self.endpoint.ask(
            [_RATE.format(description=descriptions[place].strip(), document=text) for place, _, text in pairs],
            max_tokens=self.answer_tokens,
        )
        grades: dict[tuple[int, int], Counter[str]] = {}
        for (place, row, _), answer in zip(pairs, answers):
            grades.setdefault((row, place), Counter())[grade(answer)] += 1
        values = np.zeros((len(sources), len(tests)))
        for (row, place), counts in grades.items():
            graded = counts.total() - counts[""]
            if 2 * graded < counts.total():
                unread = next(answer for answer in answers if not grade(answer))
                raise HoneError(
                    f"{self.endpoint.url} graded {graded} of {counts.total()} samples of '{sources[row].name}' for "
                    f"'{tests[place]}'; another answer: {unread[:120]!r}",
                    fix="take a model that follows instructions, set endpoint.chat to what it was trained for, or raise "
                    "mixture.answer_tokens for one that thinks first",
                )
            values[row, place] = sum(GRADES[name] * count for name, count in counts.items() if name) / graded
        used = {name for counts in grades.values() for name in counts if name}
        if len(sources) > 1 and len(used) == 1:
            raise HoneError(
                f"{self.endpoint.url} called every sample of all {len(sources)} sources '{used.pop()}', so their utilities do not differ",
                fix="take a larger model or other examples, or a mixture that needs no grades, such as unimax",
            )
        notes = {
            "descriptions": dict(zip(tests, descriptions)),
            "grades": {
                source.name: {test: dict(sorted(grades[row, place].items())) for place, test in enumerate(tests)}
                for row, source in enumerate(sources)
            },
        }
        return values, tests, notes

    def _describe(self, path: str) -> str:
        """The prompt for a description, with examples spread evenly over the file."""
        found = read_examples(path)
        places = np.linspace(0, len(found) - 1, min(self.num_examples, len(found))).round().astype(int)
        return _DESCRIBE.format(examples="\n\n".join(found[place][: self.max_chars] for place in places))

    def _samples(self, source: Source) -> list[str]:
        texts = source.sample(self.num_samples) if source.sample is not None else []
        if not texts:
            raise SpecError(
                f"source '{source.name}' has no documents for a language model to grade",
                fix="medu needs the documents/ folder of the data artifact",
            )
        return [text[: self.max_chars] for text in texts]


def grade(answer: str) -> str:
    """The grade in an answer, after any reasoning is removed; "" when the answer is not exactly one grade.

    A grade within a sentence does not count: 'not great' and 'okay, let us see' mean something else.
    """
    before, _, last = answer.rpartition(f"</{_THOUGHT}")
    found = None if f"<{_THOUGHT}" in last and not before else _GRADE.fullmatch(last)
    return found[1].lower() if found else ""


def read_examples(path: Path | str) -> list[str]:
    """The examples in a .jsonl file (the values of each object, by name) or a text file. Raises SpecError when there is none."""
    path = input_file(path, "mixture.examples")
    try:
        text = path.read_text(encoding="utf8")
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            found = ["\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows]
        else:
            found = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    except (ValueError, AttributeError, OSError) as error:
        raise SpecError(
            f"mixture.examples: {path} cannot be read: {error}", fix="give one JSON object a line, or plain text"
        ) from None
    if not found:
        raise SpecError(f"mixture.examples: {path} is empty", fix="give at least one example")
    return found
