"""Trains the language model on a file of sentences.

    python -m hone.text.langid.train SENTENCES OUT [OTHERS]

SENTENCES is a .jsonl (or .jsonl.gz) file of {"lang": code, "text": sentence}. Each language belongs to the script of
most of its sentences. A model of four fifths of the sentences is evaluated on the fifth to calibrate the
temperature and each language's expected fit; then the table is built from all sentences. Deterministic. OTHERS is a file of the
same form in languages that the model is not to name: groups of similar ones become its rejectors.

A language's entry for a bucket is the log likelihood ratio of naive Bayes with additive smoothing to noise, as in Lui and
Baldwin 2012 (langid.py), but over all hashed 2- to 4-grams (and 1-grams of Han) of characters instead of selected ones.
"""

from __future__ import annotations

import gzip
import json
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from hone.text.batch import Texts
from hone.text.langid.alphabet import OTHER, SCRIPTS, alphabet
from hone.text.langid.kernels import STEPS, WIDE, count, frozen, weigh
from hone.text.langid.model import Model, Script

_SMOOTHING = 0.2
_NOISE = 0.8
"""Share of noise in the background to which a text's fit is compared."""
HELD_OUT = 5
_PIECE = 150
_ROUNDS = 20
_FEW = 6
"""Rejectors of a script with few languages, whose rows are read lane by lane."""
_LENGTHS = (20, 50, 100, _PIECE)
_THINNED = 4


def read(path: Path) -> dict[str, list[str]]:
    """{language: sentences in order}, NFC."""
    rows = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf8") if path.suffix == ".gz" else path.open(encoding="utf8") as file:
        for line in file:
            row = json.loads(line)
            rows[row["lang"]].append(unicodedata.normalize("NFC", row["text"]))
    return dict(sorted(rows.items()))


def split(sentences: Mapping[str, list[str]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(four fifths, every fifth sentence) of each language."""
    kept = {name: [text for i, text in enumerate(texts) if i % HELD_OUT] for name, texts in sentences.items()}
    return kept, {name: texts[::HELD_OUT] for name, texts in sentences.items()}


def pieces(texts: Iterable[str], length: int = _PIECE) -> list[str]:
    """`texts` joined and cut into pieces of `length` characters; the rest is left out."""
    whole = " ".join(" ".join(texts).split())
    return [whole[at : at + length] for at in range(0, len(whole) - length + 1, length)]


def train(sentences: Mapping[str, list[str]], others: Mapping[str, list[str]] | None = None) -> Model:
    """The model of `sentences`, calibrated on a fifth of them that its first version was not trained on.

    `others` are texts of languages that the model does not name; groups of them become its rejectors.
    """
    kept, held = split(sentences)
    return _count(sentences, others or {}, _calibrate(_count(kept, others or {}, None), held))


def _members(texts: Mapping[str, list[str]]) -> dict[int, dict[str, np.ndarray]]:
    """{script: {language: counts of n-grams}}."""
    members: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for name, own in texts.items():
        counts = count(*frozen(Texts.of(own)), alphabet())
        script = int(counts[1:OTHER].sum(1).argmax()) + 1
        if counts[script].any():
            members[script][name] = counts[script]
    return members


def _grouped(others: np.ndarray, most: int) -> np.ndarray:
    """Counts [buckets, groups] of at most `most` groups of similar languages, from `others` [languages, buckets].

    k-means of the roots of their frequencies (Hellinger distance), begun with languages that are far apart.
    """
    shares = np.sqrt(others / others.sum(1, keepdims=True))
    centers = [shares.mean(0)]
    while len(centers) < min(most, len(shares)) + 1:
        gaps = np.min([((shares - center) ** 2).sum(1) for center in centers], 0)
        centers.append(shares[gaps.argmax()])
    found = np.stack(centers[1:])
    for _ in range(_ROUNDS):
        nearest = (shares @ found.T * 2 - (found**2).sum(1)).argmax(1)
        groups = [shares[nearest == group].mean(0) for group in range(len(found)) if (nearest == group).any()]
        found = np.stack(groups)
    nearest = (shares @ found.T * 2 - (found**2).sum(1)).argmax(1)
    return np.stack([others[nearest == group].sum(0) for group in np.unique(nearest)], 1)


def _count(sentences: Mapping[str, list[str]], others: Mapping[str, list[str]], calibrated: Model | None) -> Model:
    """The table of `sentences` and the rejectors, with the calibration of the model `calibrated`."""
    members, strangers = _members(sentences), _members(others)
    fits = {} if calibrated is None else _fits(calibrated)
    scripts = []
    for script, languages in sorted(members.items()):
        own = np.stack(list(languages.values()), 1).astype(np.float64)
        rejectors = np.empty((len(own), 0))
        if script in strangers:
            free = -(-(len(languages) + 1) // WIDE) * WIDE - len(languages) - 1 if len(languages) + 1 >= WIDE else _FEW
            rejectors = _grouped(np.stack(list(strangers[script].values())).astype(np.float64), free)
        rows = _rows(own, rejectors)
        found = [fits.get(name, (0.0, 0.0)) for name in languages]
        scripts.append(
            Script(
                SCRIPTS[script],
                tuple(languages),
                tuple(m for m, _ in found),
                tuple(d for _, d in found),
                rows,
                rejectors.shape[1],
            )
        )
    if calibrated is None:
        return Model(tuple(scripts), 1.0, 0.0)
    return Model(tuple(scripts), calibrated.temperature, calibrated.exponent)


def _rows(counts: np.ndarray, rejectors: np.ndarray) -> np.ndarray:
    """int8 [buckets, lanes] from counts [buckets, languages] and those of rejectors, then the background and padding for the kernel."""
    num_languages = counts.shape[1]
    seen = np.count_nonzero(counts.any(1))
    counts = np.concatenate([counts, rejectors], 1)
    num_buckets, lanes = counts.shape
    ratios = (counts + _SMOOTHING) / (counts.sum(0) + _SMOOTHING * seen) * num_buckets
    background = (1 - _NOISE) * ratios[:, :num_languages].mean(1, keepdims=True) + _NOISE
    stride = lanes + 1 if lanes + 1 < WIDE else -(-(lanes + 1) // WIDE) * WIDE
    rows = np.zeros((num_buckets, stride), np.int8)
    nats = np.log(np.concatenate([ratios, background], 1))
    rows[:, : lanes + 1] = np.clip(np.rint(nats * STEPS), -128, 127)
    return rows


def _fits(model: Model) -> dict[str, tuple[float, float]]:
    return {
        name: (mean, deviation)
        for script in model.scripts
        for name, mean, deviation in zip(script.languages, script.fit_mean, script.fit_deviation)
    }


def _calibrate(model: Model, held: Mapping[str, list[str]]) -> Model:
    """`model` with the fit of each language's held-out pieces, and the temperature and exponent of highest likelihood."""
    places = {name: (script, lane) for script in model.scripts for lane, name in enumerate(script.languages)}
    tables = model.tables(frozenset(places))
    fits: dict[str, tuple[float, float]] = {}
    gaps: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    most = tables.fit.shape[1]
    for name, texts in held.items():
        script, lane = places[name]
        number, lanes = SCRIPTS.index(script.name), script.lanes
        for length in _LENGTHS:
            cut = pieces(texts, length) if length == _PIECE else [text[:length] for text in texts]
            scripts, grams, sums = weigh(*frozen(Texts.of(cut)), tables)
            own = (scripts == number) & (grams > 0)
            nats = sums[own] / STEPS
            if length == _PIECE:
                right = nats[:, : len(script.languages)].argmax(1) == lane
                fit = ((nats[:, lane] - nats[:, lanes]) / grams[own])[right]
                fits[name] = (round(float(fit.mean()), 4), round(float(fit.std()), 4))
            gap = np.full((len(nats), most), -np.inf)
            gap[:, :lanes] = nats[:, :lanes] - nats[:, lane, None]
            gaps.append(gap)
            sizes.append(grams[own])
    temperature, exponent = _likeliest(np.concatenate(gaps), np.concatenate(sizes))
    scripts = tuple(
        script._replace(
            fit_mean=tuple(fits[name][0] for name in script.languages),
            fit_deviation=tuple(fits[name][1] for name in script.languages),
        )
        for script in model.scripts
    )
    return Model(scripts, temperature, exponent)


def _likeliest(gaps: np.ndarray, grams: np.ndarray) -> tuple[float, float]:
    """(temperature, exponent) on a grid that give the correct languages, whose gap is 0, the highest probability."""
    gaps, grams = gaps[::_THINNED], grams[::_THINNED]
    best = (np.inf, 1.0, 0.0)
    for exponent in np.arange(0.2, 0.85, 0.05):
        for temperature in 2.0 ** np.arange(-3, 2, 0.25):
            heat = temperature * grams[:, None] ** exponent
            loss = float(np.logaddexp.reduce(gaps / heat, axis=1).mean())
            best = min(best, (round(loss, 9), round(float(temperature), 4), round(float(exponent), 2)))
    return best[1], best[2]


def main(arguments: list[str]) -> None:
    """Trains on the file arguments[0], with rejectors from arguments[2], and writes arguments[1]."""
    if len(arguments) not in (2, 3):
        raise SystemExit("usage: python -m hone.text.langid.train SENTENCES OUT [OTHERS]")
    others = read(Path(arguments[2])) if arguments[2:] else {}
    model = train(read(Path(arguments[0])), others)
    model.save(Path(arguments[1]))
    print(
        f"{len(model.languages)} languages, {sum(script.rejectors for script in model.scripts)} rejectors, temperature "
        f"{model.temperature}, exponent {model.exponent}: {arguments[1]}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
