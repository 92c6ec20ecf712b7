"""Signals counted the plain way, one document at a time with str, re and dict: what the kernels are held to."""

from __future__ import annotations

import functools
import ipaddress
import itertools
import re
from collections.abc import Sequence

import zstandard

from tests.text.dedup import oracles

STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
POLICY_PHRASES = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip
THINGS = {
    "likes", "shares", "comments", "retweets", "reposts", "quotes", "bookmarks", "upvotes", "downvotes", "downloads",
    "views", "followers",
}  # fmt: skip
EDGE = ".,;:!?\"'()[]{}<>*`"
TERMINAL = tuple(".!?‼⁇⁈⁉։؟۔।॥።။፧។៕᠃᠉。．｡！？﹒﹖﹗")
SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]”’]*+(?=\s|\Z)|[‼⁇⁈⁉։؟۔।॥።။፧។៕᠃᠉。．｡！？﹒﹖﹗]")
QUANTITY = re.compile(r"\W*[0-9][0-9.,]*[kmb]?")
CITATION = re.compile(r"(\[[0-9]*\]|\[edit\])+\Z")


def lower(text: str) -> str:
    """Lower case one code point for one."""
    return text.lower() if text.isascii() else "".join(char.lower()[0] for char in text)


def bare(word: str) -> str:
    return lower(word).strip(EDGE)


@functools.lru_cache(100_000)
def parts(run: str) -> tuple[str, ...]:
    return (run,) if run.isascii() else tuple(oracles.parts(run))


def split(text: str) -> list[str]:
    """The words of `text` with the punctuation at them."""
    return [word for run in text.split() for word in parts(run)]


def unspaced(text: str) -> list[bool]:
    """For each word whether it follows another without a space."""
    return [number > 0 for run in text.split() for number in range(len(parts(run)))]


def signals(text: str, lexicon: Sequence[str] = ()) -> dict[str, float | int]:
    """Every column but text_hash."""
    words, lowered = split(text), lower(text)
    all_lines = text.split("\n")
    lines = [line for line in all_lines if line.strip()]
    paragraphs = [part for part in re.split(r"\n{2,}", text) if part.strip()]
    num_words, num_lines, num_chars = max(len(words), 1), max(len(lines), 1), max(len(text), 1)
    forms = [form for form in map(bare, words) if form]
    lettered = [word for word in words if any(char.isalpha() for char in word)]
    sentences = len(SENTENCE_END.findall(text))
    kept = [line for line in lines if c4_keeps(line, punctuated=True)]
    loose = [line for line in lines if c4_keeps(line, punctuated=False)]
    row: dict[str, float | int] = {
        "bytes": len(text.encode()),
        "chars": len(text),
        "words": len(words),
        "lines": len(lines),
        "sentences": sentences,
        "mean_word_chars": sum(map(len, words)) / num_words,
        "max_word_chars": max(map(len, words), default=0),
        "max_line_chars": max(map(len, lines), default=0),
        "hash_ratio": text.count("#") / num_words,
        "ellipsis_ratio": (text.count("...") + text.count("…")) / num_words,
        "bullet_lines": sum(line.lstrip().startswith(tuple("•-●*‣◦")) for line in lines) / num_lines,
        "ellipsis_lines": sum(line.endswith(("...", "…")) for line in lines) / num_lines,
        "alpha_words": len(lettered) / num_words,
        "stop_words": len(STOP_WORDS & set(forms)),
        "language_stop_words": len(STOP_WORDS & set(forms)),
        "punctuated_lines": sum(line.endswith(TERMINAL) for line in lines) / num_lines,
        "short_lines": sum(len(line) <= 30 and sum(unspaced(line)) < 15 for line in lines) / num_lines,
        "newline_ratio": text.count("\n") / num_words,
        "javascript_lines": sum("javascript" in lower(line) for line in lines) / num_lines,
        "policy_lines": sum(any(phrase in lower(line) for phrase in POLICY_PHRASES) for line in lines) / num_lines,
        "lorem_ipsum": lowered.count("lorem ipsum"),
        "braces": text.count("{"),
        "urls": len(re.findall(r"https?://|www\.", lowered)),
        "digit_ratio": len(re.findall(r"[0-9]", text)) / num_chars,
        "upper_ratio": len(re.findall(r"[A-Z]", text)) / num_chars,
        "unique_words": len(set(forms)) / num_words,
        "compression_ratio": len(text.encode()) / compressed(text),
        "mtld": mtld(forms),
        "flesch": 206.835 - 1.015 * len(lettered) / max(sentences, 1)
        - 84.6 * sum(map(syllables, lettered)) / len(lettered) if lettered else 0.0,
        "non_alnum_ratio": sum(not char.isalnum() for char in text) / num_chars,
        "whitespace_ratio": sum(char.isspace() for char in text) / num_chars,
        "paren_ratio": (text.count("(") + text.count(")")) / num_chars,
        "url_ratio": sum(len(word) for word in words if re.search(r"https?://|www\.", lower(word))) / num_chars,
        "number_words": sum(bool(re.search("[0-9]", word)) and not any(map(str.isalpha, word)) for word in words) / num_words,
        "upper_lines": sum(mostly_upper(line) for line in lines) / num_lines,
        "boilerplate_words": sum(map(boilerplate, lines)) / num_words,
        "c4_lines": len(kept) / num_lines,
        "c4_sentences": sum(max(len(SENTENCE_END.findall(line)), 1) for line in kept),
        "c4_loose_sentences": sum(max(len(SENTENCE_END.findall(line)), 1) for line in loose),
        "long_lines": sum(len(line) >= 200 or sum(unspaced(line)) >= 100 for line in lines),
        "toxic_words": toxic(words, lexicon) / num_words,
        "unspaced_words": sum(unspaced(text)) / num_words,
    }  # fmt: skip
    for name, parts in (("line", lines), ("paragraph", paragraphs)):
        again = duplicates(parts)
        row[f"dup_{name}s"] = len(again) / max(len(parts), 1)
        row[f"dup_{name}_chars"] = sum(map(len, again)) / num_chars
    for n in (2, 3, 4):
        row[f"top_{n}gram_chars"] = top_chars(words, n, unspaced(text)) / num_chars
    for n in range(5, 11):
        row[f"dup_{n}gram_chars"] = repeated_chars(words, n, unspaced(text)) / num_chars
    row["emails"] = emails(text)
    row["public_ips"], row["phones"], row["cards"] = numbers(text.encode())
    return row


def compressed(text: str) -> int:
    options = {"write_content_size": False, "write_checksum": False}
    return max(len(zstandard.ZstdCompressor(level=1, **options).compress(text.encode())), 1)


def duplicates(parts: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return [part for part in parts if part in seen or seen.add(part)]


def top_chars(words: Sequence[str], n: int, joined: Sequence[bool] = ()) -> int:
    joined = joined or [False] * len(words)
    grams: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(words) - n + 1):
        size = sum(map(len, words[i : i + n])) + n - 1 - sum(joined[i + 1 : i + n])
        grams.setdefault(tuple(words[i : i + n]), []).append(size)
    most = max(map(len, grams.values()), default=1)
    return max(max(sizes) * most for sizes in grams.values() if len(sizes) == most) if most > 1 else 0


def repeated_chars(words: Sequence[str], n: int, joined: Sequence[bool] = ()) -> int:
    joined = joined or [False] * len(words)
    seen: set[tuple[str, ...]] = set()
    covered = [False] * len(words)
    for i in range(len(words) - n + 1):
        gram = tuple(words[i : i + n])
        if gram in seen:
            covered[i : i + n] = [True] * n
        seen.add(gram)
    spaces = sum(a and b and not near for (a, b), near in zip(itertools.pairwise(covered), joined[1:]))
    return sum(len(word) for word, hit in zip(words, covered) if hit) + spaces


def mtld(forms: Sequence[str]) -> float:
    def one_way(tokens: Sequence[str]) -> float:
        factors, kinds, count = 0.0, set(), 0
        for token in tokens:
            kinds.add(token)
            count += 1
            if 100 * len(kinds) <= 72 * count:
                factors, kinds, count = factors + 1, set(), 0
        if count:
            factors += (1 - len(kinds) / count) / (1 - 0.72)
        return len(tokens) / factors if factors else len(tokens)

    return (one_way(forms) + one_way(forms[::-1])) / 2


def syllables(word: str) -> int:
    form = bare(word)
    groups = len(re.findall("[aeiouy]+", form))
    if groups > 1 and re.search("[^aeiouyl]e$", form):
        groups -= 1
    return max(groups, 1)


def c4_keeps(line: str, punctuated: bool) -> bool:
    words, lowered = split(line), lower(line)
    if len(words) < 3 or max(map(len, words)) > 1000:
        return False
    if "javascript" in lowered or any(phrase in lowered for phrase in POLICY_PHRASES):
        return False
    last = CITATION.sub("", words[-1])
    return not punctuated or (last.endswith((".", "?", "!", '"', "'", *TERMINAL)) and not last.endswith("..."))


def mostly_upper(line: str) -> bool:
    return sum(char.isupper() for char in line) > 0.5 * len(line)


def boilerplate(line: str) -> int:
    """Words that RefinedWeb's line rules take away."""
    words = [lower(word) for word in split(line)]
    if len(words) == 1 or mostly_upper(line):
        return len(words)
    if len(words) == 2 and QUANTITY.fullmatch(words[0]) and words[1].strip(EDGE) in THINGS:
        return 2
    if len(words) > 10:
        return 0
    removed = 1 if words[0].startswith("sign-in") else 0
    removed += 2 if words[-2].strip(EDGE) == "read" and words[-1] in ("more...", "more…") else 0
    runs = zip(words, words[1:], words[2:])
    return removed + 3 * any(a.strip(EDGE) == "items" and b == "in" and c.strip(EDGE) == "cart" for a, b, c in runs)


def toxic(words: Sequence[str], lexicon: Sequence[str]) -> int:
    phrases = {tuple(map(bare, entry.split())) for entry in lexicon}
    forms = list(map(bare, words))
    return sum(
        any(tuple(forms[i : i + len(phrase)]) == phrase for phrase in phrases if phrase) for i in range(len(forms))
    )


def emails(text: str) -> int:
    count = 0
    for found in re.finditer("@", text):
        before = re.search(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]*\Z", text[: found.start()]).group()
        local = re.sub(r"^[^A-Za-z0-9]+", "", before)
        domain = re.match(r"[A-Za-z0-9.-]*", text[found.end() :]).group().rstrip(".-")
        labels = domain.split(".")
        count += (
            0 < len(local) <= 64
            and not local.endswith(".")
            and ".." not in local
            and len(domain) <= 253
            and len(labels) > 1
            and all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", label) for label in labels)
            and bool(re.fullmatch("[A-Za-z]{2,}", labels[-1]))
        )
    return count


def public(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return found.is_global and not found.is_multicast and not address.startswith("192.0.0.")


def luhn(digits: str) -> bool:
    values = [int(digit) for digit in digits]
    doubled = [value if place % 2 == 0 else sum(divmod(2 * value, 10)) for place, value in enumerate(values[::-1])]
    return sum(doubled) % 10 == 0 and len(set(digits)) > 1 and digits[0] in "23456"


def numbers(raw: bytes) -> tuple[int, int, int]:
    """(public IPv4 addresses, telephone-like numbers, card-like numbers)."""
    text = raw.decode("latin-1")
    addresses = phones = cards = place = 0
    start = re.compile(r"(?<![A-Za-z0-9_])[0-9]")
    while found := start.search(text, place):
        place = found.start()
        dotted = re.compile(r"[0-9]+(?:\.[0-9]+)*").match(text, place)
        parts = dotted.group().split(".")
        good = len(parts) == 4 and all(len(p) <= 3 and int(p) < 256 and (p == "0" or p[0] != "0") for p in parts)
        if good and not re.match(r"[A-Za-z0-9_]", text[dotted.end() :]) and text[place - 1 : place] != ".":
            addresses += public(dotted.group())
            place = dotted.end()
            continue
        run = re.compile(r"[0-9]+(?:[ .()-]{1,2}[0-9]+)*").match(text, place)
        groups = re.findall("[0-9]+", run.group())
        seen: list[str] = []
        hits = 0
        for group in groups:
            seen.append(group)
            sizes = [len(part) for part in seen]
            phone = card = False
            if 13 <= sizes[-1] <= 19:
                card = luhn(group)
            elif sizes[-3:] == [3, 3, 4]:
                phone = seen[-3][0] in "23456789" and seen[-2][0] in "23456789"
            elif sizes[-3:] == [4, 6, 5]:
                card = luhn("".join(seen[-3:]))
            elif sizes[-4:] == [4, 4, 4, 4]:
                card = luhn("".join(seen[-4:]))
            phones, cards = phones + phone, cards + card
            if phone or card:
                hits += 1
                seen = []
        digits = "".join(groups)
        if text[place - 1 : place] == "+" and not hits and 8 <= len(digits) <= 15 and digits[0] != "0":
            phones += 1
        place = run.end()
    return addresses, phones, cards
