"""The peers of cleaning: run by an interpreter that has datatrove, presidio-analyzer or scrubadub, apart from hone.

    python peers_cleaning.py presidio|scrubadub|datatrove|c4_lines|faker TEXTS.json

Prints {"seconds": process CPU time, "spans": per text [[start, end]] in bytes} or, for c4_lines, "texts": what is left of each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def presidio() -> Callable[[str], list[tuple[int, int]]]:
    """Presidio's pattern recognizers of the same kinds; its named-entity models find other things."""
    from presidio_analyzer import predefined_recognizers as known

    every = [
        known.EmailRecognizer(), known.IpRecognizer(), known.PhoneRecognizer(), known.IbanRecognizer(), known.CreditCardRecognizer(),
        known.UsSsnRecognizer(),
    ]  # fmt: skip

    def spans(text: str) -> list[tuple[int, int]]:
        found = []
        for one in every:
            found += [
                (hit.start, hit.end)
                for hit in one.analyze(text, one.supported_entities, None) or []
                if hit.score >= 0.4
            ]
        return found

    return spans


def scrubadub() -> Callable[[str], list[tuple[int, int]]]:
    """scrubadub's default detectors, of the same kinds."""
    import scrubadub as peer

    scrubber = peer.Scrubber()
    for name in list(scrubber._detectors):
        if name not in ("email", "phone", "credit_card", "social_security_number", "credential"):
            scrubber.remove_detector(name)
    return lambda text: [(hit.beg, hit.end) for hit in scrubber.iter_filth(text)]


def datatrove() -> Callable[[str], list[tuple[int, int]]]:
    """datatrove's patterns of e-mail and public IP addresses."""
    from datatrove.pipeline.formatters import PIIFormatter

    formatter = PIIFormatter()
    replacers = [formatter.emails_replacer, formatter.ip_replacer]

    def spans(text: str) -> list[tuple[int, int]]:
        found = []
        for one in replacers:
            for hit in one.regex.finditer(text):
                if one.validator is None or one.validator(hit.group(0)):
                    found.append(hit.span())
        return found

    return spans


def c4_lines(texts: list[str]) -> dict[str, Any]:
    """C4's line rules; documents with a brace or 'lorem ipsum' are edited too."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter

    peer = C4QualityFilter(min_num_sentences=-1, filter_curly_bracket=False, filter_lorem_ipsum=False)
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    begun = time.process_time()
    for document in documents:
        peer.filter(document)
    return {"seconds": time.process_time() - begun, "texts": [document.text for document in documents]}


def faker(texts: list[str]) -> dict[str, Any]:
    """Values of another generator, in forms that nothing here was written for; `texts` is not read."""
    from faker import Faker

    rows = []
    for locale in ("en_US", "en_GB", "de_DE", "fr_FR", "es_ES", "it_IT", "nl_NL", "pl_PL", "pt_BR", "ja_JP"):
        fake = Faker(locale)
        fake.seed_instance(5)
        for _ in range(60):
            rows.append(["email", f"Write to {fake.ascii_safe_email()} today."])
            rows.append(["phone", f"Phone: {fake.phone_number()}\n"])
            rows.append(["iban", f"Pay to {fake.iban()} please."])
            rows.append(["card", f"The card {fake.credit_card_number()} was charged."])
            rows.append(["ip", f"Accepted from {fake.ipv4_public()} port 22"])
            if locale == "en_US":
                rows.append(["ssn", f"SSN: {fake.ssn()}"])
    return {"rows": rows}


def main() -> None:
    """Reads, looks, prints."""
    task, path = sys.argv[1:]
    texts = json.loads(Path(path).read_text(encoding="utf8"))
    if task == "faker":
        print(json.dumps(faker(texts)))
        return
    if task == "c4_lines":
        print(json.dumps(c4_lines(texts)))
        return
    look = {"presidio": presidio, "scrubadub": scrubadub, "datatrove": datatrove}[task]()
    look("Warm up with ann@example.com.")
    begun = time.process_time()
    found = [look(text) for text in texts]
    seconds = time.process_time() - begun
    spans = [
        [(len(text[:low].encode()), len(text[:high].encode())) for low, high in row] for text, row in zip(texts, found)
    ]
    print(json.dumps({"seconds": seconds, "spans": spans}))


if __name__ == "__main__":
    main()
