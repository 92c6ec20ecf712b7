"""Which texts pass the rules of a library: run by an interpreter that has it, apart from this package's version.

    python peers_rules.py {hone,datatrove} TEXTS.json OUT.json

TEXTS is {language: [text, ...]}. Writes {language: [whether each text passes Gopher's repetition and quality rules, C4's as FineWeb
runs it, and FineWeb's]}. datatrove's filters get the language, for its tokenizers, and no other option; {} for a language whose
tokenizer is not installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RULES = {"gopher_repetition": {}, "gopher_quality": {}, "c4": {"punctuated_lines": False}, "fineweb": {}}


def hone(texts: dict[str, list[str]]) -> dict[str, list[bool]]:
    """The version of this package that is on the path."""
    import inspect

    import numpy as np

    from hone.data import FILTERS
    from hone.data.signals import signals_of
    from hone.text.batch import Texts

    filters = [FILTERS.read({"kind": name, **options}) for name, options in RULES.items()]
    result = {}
    for language, rows in texts.items():
        codes = [language] * len(rows)
        more = (codes,) if "languages" in inspect.signature(signals_of).parameters else ()
        columns = dict(signals_of(Texts.of(rows), *more))
        columns["kind"], columns["language"] = np.full(len(rows), "text", object), np.array(codes, object)
        result[language] = np.all([one.decide(columns)[0] for one in filters], 0).tolist()
    return result


def datatrove(texts: dict[str, list[str]]) -> dict[str, list[bool]]:
    """Its filters with the language's tokenizer."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.utils.typeshelper import Languages

    names = {
        "en": Languages.english,
        "zh": "cmn_Hani",
        "ja": "jpn_Jpan",
        "th": "tha_Thai",
        "ko": "kor_Hang",
        "de": "deu_Latn",
    }
    names |= {
        "hi": "hin_Deva",
        "ru": "rus_Cyrl",
        "ar": "arb_Arab",
        "lo": "lao_Laoo",
        "km": "khm_Khmr",
        "my": "mya_Mymr",
    }
    result = {}
    for language, rows in texts.items():
        if language not in names:
            continue
        name = names[language]
        try:
            filters = [
                GopherRepetitionFilter(language=name),
                GopherQualityFilter(language=name),
                C4QualityFilter(filter_no_terminal_punct=False, language=name),
                FineWebQualityFilter(language=name),
            ]
            documents = [Document(text=text, id=str(number)) for number, text in enumerate(rows)]
            result[language] = [all(one.filter(document) is True for one in filters) for document in documents]
        except Exception as error:  # a tokenizer that is not installed
            print(language, repr(error)[:200], file=sys.stderr)
    return result


if __name__ == "__main__":
    answer = {"hone": hone, "datatrove": datatrove}[sys.argv[1]](
        json.loads(Path(sys.argv[2]).read_text(encoding="utf8"))
    )
    Path(sys.argv[3]).write_text(json.dumps(answer))
