"""Generated personal data and secrets with their places in sentences, to measure masks on: `generated(seed, count)`."""

from __future__ import annotations

import base64
import json
import random
import string
from typing import NamedTuple

from hone.text.personal.checks import IBAN_CHARS

_FIRST = (
    "ann",
    "bo",
    "chidi",
    "dana",
    "emre",
    "fatima",
    "george",
    "hana",
    "ivo",
    "jun",
    "katja",
    "li",
    "maria",
    "nils",
)
_LAST = ("okafor", "smith", "mueller", "tanaka", "garcia", "o.neill", "kowalski", "ng", "da-silva", "haddad", "berg")
_HOSTS = ("example.com", "mail.uni-kiel.de", "post.co.uk", "acme.io", "sub.dept.gov.br", "x-y.org", "firma.photography")
_SAYS = {
    "email": ("Write to {} today.", "Contact: <{}>", "{}", "mailto:{}?subject=Hi", "(email {}),", "from {}; thanks"),
    "ip": ("The server {} is down.", "Accepted from {} port 22", "host={}", "[{}] GET /", "ping {}."),
    "phone": ("Call me at {}.", "Phone: {}", "Tel. {}", "Fax: {}, open daily", "tel: {}", "My mobile number {} works"),
    "iban": ("Pay to {} please.", "IBAN: {}", "account {}, due today", "({})"),
    "card": ("Card {} expires soon.", "paid with {}", "Visa: {}.", "number={}"),
    "ssn": ("SSN: {}", "Her number is {}.", "social security number {}", "({})"),
    "secret": ("key = {}", "export KEY={}", 'token: "{}"', "The leaked one was {} again.", "{}"),
}
PLAIN = (
    "Chapter 12 of 1984 has 300 pages, printed 2001-02-03 at 10:15:30.",
    "Version 4.12.0.1 of the tool was released; see section 1.2.3.4 and issue 1234567.",
    "The ratio is 3.14159265358979 and the sum 12 345 678 at 0.4111111111111111.",
    "Order 4111111111111112 shipped; ISBN 978-3-16-148410-0, ISSN 2049-3630, DOI 10.1000/182.",
    "Local hosts are 127.0.0.1, 10.0.0.5 and 192.168.1.20, and ::1 or fe80::1 or 2001:db8::1.",
    "def f(x): return A@B.mean() + w @ v.sum(axis=0)  # std::vector<int>::iterator",
    "@dataclass class Foo: bar: int = 1234567890; hash='d41d8cd98f00b204e9800998ecf8427e'",
    "uuid 123e4567-e89b-12d3-a456-426614174000 and commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
    "password = get_password_from_environment(name)",
    "token: str = field(default_factory=default_token_factory)",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 and 000-00-0000 or 666-12-3456",
    "The years 1914-1918 and 1939-1945; population 8 123 456; $1,234,567.89; 2024-11-23T22:41:30",
    "coordinates 52.520008, 13.404954; score 11-11-2011; 555-1234; pp. 123-456-789",
)


class Made(NamedTuple):
    """A text, and (kind, the string in it) or None when nothing is to be found."""

    text: str
    kind: str | None
    value: str


def luhn(digits: str) -> str:
    """`digits` with Luhn's check digit appended."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 - place % 2)
        total += value - 9 * (value > 9)
    return digits + str(-total % 10)


def _digits(draw: random.Random, count: int) -> str:
    return "".join(draw.choices(string.digits, k=count))


def _email(draw: random.Random) -> str:
    local = draw.choice((f"{draw.choice(_FIRST)}.{draw.choice(_LAST)}", f"{draw.choice(_FIRST)}{draw.randint(1, 99)}", f"{draw.choice(_FIRST)}_{draw.choice(_LAST)}+list"))  # fmt: skip
    return f"{local}@{draw.choice(_HOSTS)}"


def _ip(draw: random.Random) -> str:
    if draw.random() < 0.3:
        groups = [f"{draw.choice(('2001:4860', '2a00:1450', '2606:4700'))}"] + [
            f"{draw.randrange(1, 1 << 16):x}" for _ in range(6)
        ]
        return ":".join(groups) if draw.random() < 0.5 else f"{groups[0]}::{groups[1]}"
    return ".".join(
        map(
            str,
            (
                draw.choice((8, 23, 52, 80, 91, 151, 185, 212)),
                draw.randrange(256),
                draw.randrange(256),
                draw.randrange(1, 255),
            ),
        )
    )


def _phone(draw: random.Random) -> str:
    area, middle, last = (
        f"{draw.randint(2, 9)}{_digits(draw, 2)}",
        f"{draw.randint(2, 9)}{_digits(draw, 2)}",
        _digits(draw, 4),
    )
    rest = _digits(draw, 7)
    return draw.choice(
        (
            f"({area}) {middle}-{last}", f"{area}-{middle}-{last}", f"{area}.{middle}.{last}", f"+1 {area} {middle} {last}",
            f"+44 20 {rest[:4]} {last}", f"+49 30 {rest}", f"+49 (0)89 {rest}", f"+33 1 {rest[:2]} {rest[2:4]} {rest[4:6]} {last[:2]}",
            f"0{draw.randint(1, 9)} {rest[:2]} {rest[2:4]} {rest[4:6]} {last[:2]}", f"020 {rest[:4]} {last}", f"030/{rest}",
            f"+91 9{_digits(draw, 4)} {_digits(draw, 5)}", f"+81-3-{rest[:4]}-{last}", f"0049 40 {rest}", f"+5511 9{rest[:4]}-{last}",
            f"+1{area}{middle}{last}",
        )
    )  # fmt: skip


def _iban(draw: random.Random) -> str:
    country = draw.choice(("DE", "FR", "GB", "NL", "ES", "IT", "CH", "PL", "NO", "SE", "BE", "MT"))
    body = _digits(draw, IBAN_CHARS[country] - 4)
    if country in ("GB", "NL", "MT"):
        body = "".join(draw.choices(string.ascii_uppercase, k=4)) + body[4:]
    check = 98 - int("".join(str(int(char, 36)) for char in body + country + "00")) % 97
    whole = f"{country}{check:02d}{body}"
    return whole if draw.random() < 0.5 else " ".join(whole[at : at + 4] for at in range(0, len(whole), 4))


def _card(draw: random.Random) -> str:
    if draw.random() < 0.2:
        whole = luhn(draw.choice(("34", "37")) + _digits(draw, 12))
        return whole if draw.random() < 0.4 else f"{whole[:4]} {whole[4:10]} {whole[10:]}"
    whole = luhn(draw.choice(("4", "51", "55", "2221", "2720", "6011", "65", "3530"))[:4].ljust(1) + _digits(draw, 14))[
        -19:
    ]
    start = draw.choice(("4", "51", "55", "2229", "6011", "65", "3530"))
    whole = luhn(start + _digits(draw, 15 - len(start)))
    gap = draw.choice(("", " ", "-"))
    return gap.join(whole[at : at + 4] for at in range(0, 16, 4))


def _ssn(draw: random.Random) -> str:
    area = draw.choice([number for number in range(1, 900) if number != 666])
    return f"{area:03d}-{draw.randint(1, 99):02d}-{draw.randint(1, 9999):04d}"


def _secret(draw: random.Random) -> str:
    word = string.ascii_letters + string.digits

    def some(count: int, chars: str = word) -> str:
        return "".join(draw.choices(chars, k=count))

    def part(value: dict[str, str]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    lines = "\n".join(some(64, word + "+/") for _ in range(4))
    return draw.choice(
        (
            "AKIA" + some(16, string.ascii_uppercase + "234567"), "AIza" + some(35), "ghp_" + some(36), "github_pat_" + some(82),
            "xoxb-" + _digits(draw, 12) + "-" + some(24), "sk-proj-" + some(48), "sk-" + some(48), "sk_live_" + some(24), "hf_" + some(34),
            "glpat-" + some(20), "npm_" + some(36), part({"alg": "HS256", "typ": "JWT"}) + "." + part({"sub": some(8)}) + "." + some(43),
            f"-----BEGIN RSA PRIVATE KEY-----\n{lines}\n-----END RSA PRIVATE KEY-----",
            f"-----BEGIN OPENSSH PRIVATE KEY-----\n{lines}\n-----END OPENSSH PRIVATE KEY-----",
        )
    )  # fmt: skip


def _assigned(draw: random.Random) -> tuple[str, str]:
    value = "".join(draw.choices(string.ascii_letters + string.digits, k=draw.randint(20, 40)))
    name = draw.choice(("password", "DB_PASSWORD", "api_key", "client_secret", "auth_token", "aws_secret_access_key"))
    return draw.choice(
        (f'{name} = "{value}"', f"{name}: {value}", f"export {name.upper()}={value}", f'"{name}": "{value}",')
    ), value


_MAKERS = {"email": _email, "ip": _ip, "phone": _phone, "iban": _iban, "card": _card, "ssn": _ssn, "secret": _secret}


def generated(seed: int, count: int) -> list[Made]:
    """`count` texts of each kind, each with one value, and the PLAIN ones, which have none."""
    draw = random.Random(seed)
    rows = [Made(text, None, "") for text in PLAIN]
    for kind, make in _MAKERS.items():
        for number in range(count):
            if kind == "secret" and number % 4 == 0:
                text, value = _assigned(draw)
            else:
                value = make(draw)
                text = draw.choice(_SAYS[kind]).format(value)
            rows.append(Made(text, kind, value))
    return rows
