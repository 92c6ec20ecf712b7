"""Checks of candidates: patterns, check digits and address ranges of personal data; each returns byte spans or none."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

Span = tuple[int, int]

_LOCAL = re.compile(rb"[A-Za-z0-9_](?:[A-Za-z0-9_%+-]|\.(?=[A-Za-z0-9_%+-])){0,63}\Z")
_DOMAIN = re.compile(rb"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![\w@(\[]|-\w)")
_FILES = (b"png", b"jpg", b"jpeg", b"gif", b"svg", b"webp", b"tgz", b"whl")
_IPV4 = re.compile(
    rb"(?<![\w.-])(?:(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)(?![\w-]|\.\d)"
)
_VERSION = re.compile(rb"(?:\b(?:v|ver)|version|release|\bver\.|section|oid)[\s:=\"']*\Z", re.IGNORECASE)
_SSN = re.compile(rb"(?<![\w.-])(?!000|666|9)\d{3}([- ]?)(?!00)\d{2}\1(?!0000)\d{4}(?![\w-]|\.\d)")
_SSN_SAID = re.compile(rb"(?:\bssn|social security)[^\d\n]{0,30}\Z", re.IGNORECASE)
_CARD = re.compile(
    rb"(?<![\w.-])(?:\d{12,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{4,5})(?![\w-]|\.\d)"
)
_EXTENSION = rb"[ ,]{0,2}(?:x|ext(?:ension)?)[. ]{0,2}\d{1,6}"
"""What may follow a telephone number: x52003, ext. 12."""
_EXTENDED = re.compile(_EXTENSION, re.IGNORECASE)
_NORTH = re.compile(
    rb"(?<![\w.+-])(?:\+?1[ .-]?)?(?:\([2-9]\d\d\)[ .-]?|[2-9]\d\d([ .-]))[2-9]\d\d([ .-])\d{4}(?:"
    + _EXTENSION
    + rb")?(?![\w-]|\.\d)",
    re.IGNORECASE,
)
_INTERNATIONAL = re.compile(
    rb"(?<![\w.+])(?:\+|00)[1-9]\d{0,3}(?:[ .-]?\(0?\d{0,4}\))?(?:[ ./-]?\d{1,8}){1,6}(?:"
    + _EXTENSION
    + rb")?(?![\w-]|\.\d)",
    re.IGNORECASE,
)
_NATIONAL = re.compile(
    rb"(?<![\w.+])(?:\(0?\d{1,5}\)|\d{1,12})(?:[ ./-]{1,2}\d{1,8}){0,6}(?:" + _EXTENSION + rb")?(?![\w-]|\.\d)",
    re.IGNORECASE,
)
_CALLED = re.compile(
    rb"(?:(?<![a-z])(?:tel|telephone|phone|phones|fax|mobile|cell|call|dial|whatsapp|sms|hotline|telefon|telefono|mobil|movil|handy|"
    rb"rufnummer|celular|telefax|portable|ring)|t\xc3\xa9l(?:\xc3\xa9phone)?|tel\xc3\xa9fono|m\xc3\xb3vil)"
    rb"(?: ?(?:no|nr|number|us|at|me|on|n\xc2\xb0)){0,3}[\s.:=#()\"'-]{0,6}\Z",
    re.IGNORECASE,
)
_COUNTRIES = re.compile(
    rb"1|7|2(?:0|7|1[1238]|[2346]\d|5\d|9[0178])|3(?:[0-469]|5\d|7\d|8[0-35-79])|4(?:[013-9]|2[013])|5(?:[1-8]|0\d|9\d)|"
    rb"6(?:[0-6]|7[02-9]|8[0-35-9]|9[0-2])|8(?:[1246]|0[08]|5[02356]|7[08]|8[0-368])|9(?:[0-58]|6[0-8]|7[0-79]|9[2-68])"
)
IBAN_CHARS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BR": 29, "BY": 28, "CH": 21,
    "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "DO": 28, "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FO": 18, "FR": 27,
    "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26,
    "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "LY": 25, "MC": 27,
    "MD": 24, "ME": 22, "MK": 19, "MR": 27, "MT": 31, "MU": 30, "NL": 18, "NO": 15, "PK": 24, "PL": 28, "PS": 29, "PT": 25,
    "QA": 29, "RO": 24, "RS": 22, "SA": 24, "SC": 31, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "ST": 25, "SV": 28, "TL": 23,
    "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
}  # fmt: skip
"""Characters of an IBAN by country (SWIFT's registry)."""
_DIGITS = re.compile(rb"\D")
_MAESTRO = {5018, 5020, 5038, 5893, 6304, 6759, 6761, 6762, 6763}


def email(raw: bytes, at: int, end: int) -> Span | None:
    """The address around the '@' at `at`: a local part of up to 64 characters and a domain whose last label is of letters."""
    local = _LOCAL.search(raw, max(0, at - 64), at)
    domain = _DOMAIN.match(raw, at + 1, end)
    if local is None or domain is None or local.group() == b"git":
        return None
    *labels, last = domain.group().lower().split(b".")
    if last in _FILES or all(label.isdigit() for label in labels):
        return None
    return local.start(), domain.end()


def numbers(raw: bytes, start: int, end: int, limit: int) -> Iterator[tuple[str, Span]]:
    """(kind, span) of what is in the run of digits raw[start:end] of a text of `limit` bytes, its sign and bracket included."""
    low = start
    while low > 0 and start - low < 2 and raw[low - 1] in b"+(":
        low -= 1
    high = min(end + 2, limit)
    said = raw[max(0, low - 40) : low]
    taken = end
    extended = _EXTENDED.match(raw, end, limit)
    for found in _IPV4.finditer(raw, start, high):
        if public(found.group()) and not _VERSION.search(raw, max(0, found.start() - 12), found.start()):
            yield "ip", found.span()
            taken = start
    for found in _CARD.finditer(raw, start, high):
        if card(_DIGITS.sub(b"", found.group())):
            yield "card", found.span()
            taken = start
    for found in _SSN.finditer(raw, start, high):
        if found.group(1) == b"-" or _SSN_SAID.search(said):
            yield "ssn", found.span()
            taken = start
    if taken == start:
        return
    span = phone(raw, low, min(extended.end() + 2, limit) if extended else high, said)
    if span:
        yield "phone", span


def phone(raw: bytes, low: int, high: int, said: bytes) -> Span | None:
    """The telephone number in raw[low:high]: E.164 with a country code, North American, or any after a word such as 'phone'."""
    found = _INTERNATIONAL.search(raw, low, high)
    if found:
        text = found.group()
        text = _EXTENDED.split(text)[0]
        digits = _DIGITS.sub(b"", text).removeprefix(b"00" if text[:1] != b"+" else b"")
        apart = not text.lstrip(b"+").isdigit()
        enough = 8 <= len(digits) <= 15 and (apart or len(digits) >= 10)
        if enough and _COUNTRIES.match(digits) and (text[:1] == b"+" or apart or _CALLED.search(said)):
            return found.span()
    found = _NORTH.search(raw, low, high)
    if found and (b"(" in found.group() or found.group(2) != b" " or _CALLED.search(said)):
        return found.span()
    if _CALLED.search(said):
        found = _NATIONAL.match(raw, low, high)
        if found and 7 <= len(_DIGITS.sub(b"", _EXTENDED.split(found.group())[0])) <= 15:
            return found.span()
    return None


def public(text: bytes) -> bool:
    """Whether an IPv4 address is public: not in one of IANA's special ranges, nor multicast."""
    address = ipaddress.IPv4Address(text.decode())
    return address.is_global and not address.is_multicast


def ipv6(raw: bytes, start: int, end: int, limit: int) -> Span | None:
    """The public IPv6 address at raw[start:end]: global unicast (2000::/3) without the ranges kept for special use."""
    while end > start and raw[end - 1] in b".:" and raw[end - 2 : end] != b"::":
        end -= 1
    before = raw[start - 1] if start else 32
    after = raw[end] if end < limit else 32
    if chr(before).isalnum() or before in b"_:.-" or chr(after).isalnum() or after in b"_:":
        return None
    try:
        address = ipaddress.IPv6Address(raw[start:end].decode())
    except ValueError:
        return None
    return (start, end) if address.is_global and 0x2000 <= int(address) >> 112 < 0x4000 else None


def iban(raw: bytes, start: int, limit: int) -> Span | None:
    """The IBAN at `start`: the length of its country, single spaces between characters allowed, check digits (ISO 7064, mod 97)."""
    size = IBAN_CHARS.get(raw[start : start + 2].decode("ascii", "replace"))
    if size is None:
        return None
    at, chars = start, ""
    while at < limit and len(chars) < size:
        byte = chr(raw[at])
        if byte == " " and chars and raw[at - 1] != 32:
            at += 1
            continue
        if not (raw[at] < 128 and (byte.isdigit() or "A" <= byte <= "Z")):
            return None
        chars += byte
        at += 1
    if len(chars) < size or (at < limit and (chr(raw[at]).isalnum() and raw[at] < 128)):
        return None
    turned = chars[4:] + chars[:4]
    return (start, at) if int("".join(str(int(char, 36)) for char in turned)) % 97 == 1 else None


def card(digits: bytes) -> bool:
    """Whether digits are a payment card number: an issuer's prefix with its lengths (ISO/IEC 7812), Luhn's check digit, and not
    one digit over and over."""
    two, three, four, six = (int(digits[:count]) for count in (2, 3, 4, 6))
    size = len(digits)
    issued = (
        (digits[:1] == b"4" and size in (13, 16, 19))
        or (size == 16 and (51 <= two <= 55 or 2221 <= four <= 2720))
        or (size == 15 and (two in (34, 37) or four in (1800, 2131)))
        or (16 <= size <= 19 and (four == 6011 or 644 <= three <= 649 or two == 65 or 622126 <= six <= 622925))
        or (16 <= size <= 19 and 3528 <= four <= 3589)
        or (14 <= size <= 19 and (300 <= three <= 305 or two in (36, 38, 39)))
        or (16 <= size <= 19 and two == 62)
        or (12 <= size <= 19 and four in _MAESTRO)
    )
    if not issued or len(set(digits)) < 2:
        return False
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = (digit - 48) * (1 + place % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0
