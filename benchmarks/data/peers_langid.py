"""The peers' language identification of texts in a file: run by an interpreter that has them, apart from hone.

    python peers_langid.py {pycld2,py3langid,lingua,fasttext} TEXTS.json OUT.json [fastText model]

Writes {"codes": [n], "passes": [n] whether the peer is sure (reliable, or a probability of at least 0.65), "seconds": CPU}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

_SAME = {"no": "nb", "iw": "he", "zh-Hant": "zh", "zh-hant": "zh", "fil": "tl", "jw": "jv", "un": "unknown"}


def pycld2() -> Callable[[str], tuple[str, bool]]:
    """Compact Language Detector 2; it does not accept control characters."""
    import pycld2

    def identify(text: str) -> tuple[str, bool]:
        clean = "".join(character for character in text if character.isprintable() or character == "\n")
        reliable, _, details = pycld2.detect(clean, bestEffort=False)
        return details[0][1], reliable

    return identify


def py3langid() -> Callable[[str], tuple[str, bool]]:
    """langid.py's model with normalized probabilities."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    model = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def identify(text: str) -> tuple[str, bool]:
        code, score = model.classify(text)
        return str(code), bool(score >= 0.65)

    return identify


def lingua() -> Callable[[str], tuple[str, bool]]:
    """All of its 75 languages, in its accurate mode."""
    from lingua import LanguageDetectorBuilder

    model = LanguageDetectorBuilder.from_all_languages().with_preloaded_language_models().build()

    def identify(text: str) -> tuple[str, bool]:
        values = model.compute_language_confidence_values(text)
        best = values[0]
        return (best.language.iso_code_639_1.name.lower(), best.value >= 0.65) if best.value else ("unknown", False)

    return identify


def fasttext(path: str) -> Callable[[str], tuple[str, bool]]:
    """A language model of fastText, lid.176 for one."""
    import fasttext

    model = fasttext.load_model(path)

    def identify(text: str) -> tuple[str, bool]:
        labels, scores = model.predict(text.replace("\n", " "))
        return (labels[0].removeprefix("__label__"), bool(scores[0] >= 0.65)) if labels else ("unknown", False)

    return identify


def main(peer: str, source: str, out: str, *model: str) -> None:
    """Identifies every text twice; reports the faster pass."""
    texts = json.loads(Path(source).read_text(encoding="utf8"))
    identify = {"pycld2": pycld2, "py3langid": py3langid, "lingua": lingua, "fasttext": fasttext}[peer](*model)
    found, best = [], float("inf")
    for _ in range(2):
        start = time.process_time()
        found = [identify(text) for text in texts]
        best = min(best, time.process_time() - start)
    codes = [_SAME.get(code, code) for code, _ in found]
    Path(out).write_text(json.dumps({"codes": codes, "passes": [sure for _, sure in found], "seconds": best}))


if __name__ == "__main__":
    main(*sys.argv[1:])
