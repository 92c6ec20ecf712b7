"""datatrove's filters over texts: run by an interpreter that has them, apart from hone.

    python peers_signals.py TEXTS.json OUT.json

TEXTS is a list of strings. Writes {filter: {"seconds": process CPU time, "keep": verdict of each text}} for its Gopher
repetition, Gopher quality, C4 (as FineWeb runs it) and FineWeb filters, each over all texts, its tokenizer loaded before.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(source: Path, out: Path) -> None:
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.utils.text import split_into_sentences, split_into_words

    split_into_words("Load the tokenizer."), split_into_sentences("Load it. Now.")
    texts = json.loads(source.read_text())
    filters = {
        "gopher_repetition": GopherRepetitionFilter(),
        "gopher_quality": GopherQualityFilter(),
        "c4": C4QualityFilter(filter_no_terminal_punct=False),
        "fineweb": FineWebQualityFilter(),
    }
    result = {}
    for name, step in filters.items():
        documents = [Document(text=text, id=str(index)) for index, text in enumerate(texts)]
        begun = time.process_time()
        verdicts = [step.filter(document) for document in documents]
        seconds = time.process_time() - begun
        result[name] = {"seconds": seconds, "keep": [verdict is True for verdict in verdicts]}
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
