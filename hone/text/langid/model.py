"""A language model as a file (a line of JSON, then the int8 table) and as the arrays of the kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.text.langid.alphabet import SCRIPTS, alphabet
from hone.text.langid.kernels import BIAS, BUCKET_BITS, Tables
from hone.text.langid.shipped import SHIPPED

_FORMAT = "hone language model 2"
DEVIATIONS = 3.5
"""A text whose fit is this many standard deviations below the mean of its language is unknown: one in 200 of the language's own."""
STANDARD_GRAMS = 500
"""n-grams of the texts on which the deviations were measured, about 150 characters; shorter texts vary more."""
LEAST_LETTERS = 0.6
"""Least share of letters among the visible characters: below it a text is a table, numbers or program text."""
LEAST_SCORE = 0.3
"""Least probability of an answer: below it the margin is too low to name a language."""


class Script(NamedTuple):
    """The languages of one script, in order of lanes, and their part of the table.

    `rejectors` lanes after them stand for groups of other languages: a text that fits one best is unknown.
    """

    name: str
    languages: tuple[str, ...]
    fit_mean: tuple[float, ...]
    fit_deviation: tuple[float, ...]
    rows: np.ndarray  # int8 [2^BUCKET_BITS, stride]: a lane per language and rejector, the background, then zeros
    rejectors: int = 0

    @property
    def lanes(self) -> int:
        """Lanes before the background."""
        return len(self.languages) + self.rejectors


class Model(NamedTuple):
    """All scripts, and the parameters that turn sums into probabilities: softmax(nats / (temperature * grams^exponent))."""

    scripts: tuple[Script, ...]
    temperature: float
    exponent: float

    @property
    def languages(self) -> tuple[str, ...]:
        """The codes of its languages, sorted."""
        return tuple(sorted(language for script in self.scripts for language in script.languages))

    def save(self, path: Path) -> None:
        """Writes the same bytes for the same model."""
        head = {
            "format": _FORMAT,
            "temperature": self.temperature,
            "exponent": self.exponent,
            "scripts": [{**script._asdict(), "rows": script.rows.shape[1]} for script in self.scripts],
        }
        rows = b"".join(script.rows.tobytes() for script in self.scripts)
        path.write_bytes(json.dumps(head).encode() + b"\n" + rows)

    @classmethod
    def load(cls, path: Path = SHIPPED) -> Model:
        """Reads what `save` wrote."""
        first, _, rest = path.read_bytes().partition(b"\n")
        head = json.loads(first)
        assert head["format"] == _FORMAT, f"{path} is not a '{_FORMAT}'"
        scripts = []
        begin = 0
        for row in head["scripts"]:
            size = row["rows"] << BUCKET_BITS
            rows = np.frombuffer(rest, np.int8, size, begin).reshape(-1, row["rows"])
            begin += size
            lists = [tuple(row[name]) for name in ("languages", "fit_mean", "fit_deviation")]
            scripts.append(Script(row["name"], *lists, rows, row["rejectors"]))
        assert begin == len(rest), f"{path} has {len(rest)} bytes of table, its header says {begin}"
        return cls(tuple(scripts), head["temperature"], head["exponent"])

    def tables(self, candidates: frozenset[str], merged: Mapping[str, str] | None = None) -> Tables:
        """The arrays for the kernels, with only `candidates` allowed as answers; `merged` are languages that answer as another code."""
        merged = merged or {}
        most = max(script.rows.shape[1] for script in self.scripts)
        base = np.full(len(SCRIPTS), -1, np.int64)
        stride = np.zeros(len(SCRIPTS), np.int64)
        count = np.zeros(len(SCRIPTS), np.int64)
        fit = np.zeros((len(SCRIPTS), most, 2))
        allowed = np.zeros((len(SCRIPTS), most), bool)
        group = np.tile(np.arange(most), (len(SCRIPTS), 1))
        begin = 0
        for script in self.scripts:
            number, lanes = SCRIPTS.index(script.name), len(script.languages)
            base[number], stride[number], count[number] = begin, script.rows.shape[1], script.lanes
            fit[number, :lanes] = np.stack([script.fit_mean, script.fit_deviation], 1)
            names = [merged.get(language, language) for language in script.languages]
            allowed[number, :lanes] = [name in candidates for name in names]
            group[number, :lanes] = [names.index(name) for name in names]
            begin += script.rows.size
        rows = np.concatenate([script.rows.ravel() for script in self.scripts]).view(np.uint8) ^ np.uint8(BIAS)
        words = np.empty(rows.size // 8 + 8, np.uint64)
        words = words[-(words.ctypes.data // 8) % 8 :][: rows.size // 8]  # each row of 64 lanes in one cache line
        words[:] = rows.view("<u8")
        limits = np.array(
            [self.temperature, self.exponent, DEVIATIONS, STANDARD_GRAMS, LEAST_LETTERS, LEAST_SCORE], np.float64
        )
        return Tables(alphabet(), rows, words, base, stride, count, fit, allowed, group, limits)

    def codes(self, unknown: str, merged: Mapping[str, str] | None = None) -> np.ndarray:
        """str [scripts, lanes + 1]: the code of each lane; the last lane (also index -1) is `unknown`."""
        merged = merged or {}
        most = max(script.rows.shape[1] for script in self.scripts)
        found = np.full((len(SCRIPTS), most + 1), unknown, object)
        for script in self.scripts:
            found[SCRIPTS.index(script.name), : len(script.languages)] = [
                merged.get(language, language) for language in script.languages
            ]
        return found
