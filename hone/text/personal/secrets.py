"""Secrets: keys and tokens of known services by their form, private keys, and values of high entropy assigned to a name such as password."""

from __future__ import annotations

import math
import re
from collections import Counter

_KNOWN = re.compile(
    rb"(?:A(?:KIA|SIA)[A-Z2-7]{16}(?![A-Za-z0-9])"  # Amazon Web Services
    rb"|AIza[0-9A-Za-z_-]{35}(?![0-9A-Za-z_-])"  # Google
    rb"|ya29\.[0-9A-Za-z_-]{20,}"
    rb"|gh[pousr]_[A-Za-z0-9]{36,255}(?![A-Za-z0-9])|github_pat_[A-Za-z0-9_]{40,255}"
    rb"|glpat-[A-Za-z0-9_-]{20,}"
    rb"|xox[abprs]-[A-Za-z0-9-]{10,250}|xapp-\d-[A-Za-z0-9-]{10,250}"  # Slack
    rb"|hooks\.slack\.com/services/T[A-Za-z0-9_]{6,}/B[A-Za-z0-9_]{6,}/[A-Za-z0-9_]{16,}"
    rb"|sk-(?:ant-|proj-|svcacct-|admin-)?(?=[A-Za-z0-9_-]*\d)(?=[A-Za-z0-9_-]*[A-Z])[A-Za-z0-9_-]{20,250}"  # OpenAI, Anthropic
    rb"|[sr]k_(?:live|test)_[A-Za-z0-9]{16,250}"  # Stripe
    rb"|hf_[A-Za-z0-9]{30,40}(?![A-Za-z0-9])|npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])|pypi-AgE[A-Za-z0-9_-]{50,250}"
    rb"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"  # JSON web token (RFC 7519)
)
_BLOCK = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_BLOCK_END = re.compile(rb"-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_LINE = re.compile(rb"(?:\s|\\n){1,4}[A-Za-z0-9+/=]{16,}")
MAX_BLOCK_BYTES = 16_384
_NAME = re.compile(
    rb"(?:passw(?:or)?d|passwd|passphrase|pwd|secret|token|api[_-]?key|apikey|access[_-]?key|auth[_-]?key|private[_-]?key|"
    rb"client[_-]?key|account[_-]?key|encryption[_-]?key|bearer|credentials?)(?:_?(?:key|value|id|prod|dev|live))?\d{0,2}[\"'\]]{0,2} ?\Z",
    re.IGNORECASE,
)
_VALUE = re.compile(rb"[A-Za-z0-9+/=_.~-]{16,256}")
_PLAIN = re.compile(
    rb"(?:[a-z]+://|/[a-z]|\.{1,2}/|[A-Za-z_]\w*\.[A-Za-z_]\w*\Z|xxx|your|my[_-]|example|change|placeholder|test|dummy|\d+\Z)",
    re.IGNORECASE,
)
_WORD = re.compile(rb"\d{0,4}[a-z]+\d{0,4}|[A-Z]+\d{0,4}|(?:[A-Z]?[a-z]{2,}){1,6}\d{0,4}|\d{1,4}")
MIN_BITS = 3.5
"""Least entropy in bits per character of an assigned value: of sixteen different characters 4, of English words joined about 3."""


def known(raw: bytes, start: int, end: int) -> tuple[int, int] | None:
    """The key, token or private key block that begins at `start`; a block without an end is masked up to MAX_BLOCK_BYTES."""
    if raw[start : start + 5] == b"-----":
        opening = _BLOCK.match(raw, start, end)
        if opening is None:
            return None
        most = min(end, opening.end() + MAX_BLOCK_BYTES)
        closing = _BLOCK_END.search(raw, opening.end(), most)
        return start, closing.end() if closing else _unended(raw, opening.end(), most)
    found = _KNOWN.match(raw, start, end)
    return found.span() if found else None


def _unended(raw: bytes, start: int, end: int) -> int:
    """Where the lines of base64 end that follow the first line of a block without a last one."""
    at = start
    while found := _LINE.match(raw, at, end):
        at = found.end()
    return at


def assigned(raw: bytes, start: int, sign: int, end: int) -> tuple[int, int] | None:
    """The value at `start` that '=' or ':' at `sign` assigns to a name such as password or api_key, when its entropy is high."""
    if not _NAME.search(raw, max(0, sign - 50), sign):
        return None
    found = _VALUE.match(raw, start, end)
    if found is None or _PLAIN.match(found.group()):
        return None
    value = found.group()
    if (found.end() < end and raw[found.end()] in b"([{") or not 16 <= len(value) <= 200:
        return None
    kinds = sum(bool(re.search(kind, value)) for kind in (rb"[a-z]", rb"[A-Z]", rb"\d"))
    words = all(_WORD.fullmatch(part) for part in re.split(rb"[_.~/-]", value) if part)
    return found.span() if kinds > 1 and not words and entropy(value) >= MIN_BITS else None


def entropy(value: bytes) -> float:
    """Shannon entropy in bits per byte of the bytes' own frequencies."""
    size = len(value)
    return -sum(count / size * math.log2(count / size) for count in Counter(value).values())
