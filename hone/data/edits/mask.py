"""Masks personal data and secrets: each match is replaced by a placeholder that names its kind."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from hone.base.spec import Spec
from hone.data.edits.base import ByShard, Spans
from hone.data.edits.cuts import compiled
from hone.text.batch import Texts

Kind = Literal["phone", "ssn", "card", "ip", "iban", "email", "secret"]


class Placeholders(Spec):
    """What is written in the place of each kind, named as in Presidio; an empty one cuts the match out."""

    email: str = Field("<EMAIL_ADDRESS>", description="For e-mail addresses.")
    ip: str = Field("<IP_ADDRESS>", description="For public IPv4 and IPv6 addresses.")
    phone: str = Field("<PHONE_NUMBER>", description="For telephone numbers.")
    iban: str = Field("<IBAN_CODE>", description="For bank accounts.")
    card: str = Field("<CREDIT_CARD>", description="For payment cards.")
    ssn: str = Field("<US_SSN>", description="For US social security numbers.")
    secret: str = Field("<SECRET>", description="For keys, tokens and passwords.")

    @field_validator("*")
    @classmethod
    def _fits(cls, value: str) -> str:
        if len(value.encode()) > _MOST_BYTES or "\0" in value:
            raise ValueError(f"a placeholder must be at most {_MOST_BYTES} bytes without a NUL")
        return value


_MOST_BYTES = 64
_ORDER = ("phone", "ssn", "card", "ip", "iban", "email", "secret")
"""Where matches overlap, the placeholder of the later kind is written."""


class Mask(ByShard):
    """Replaces personal data and secrets by placeholders. Soldaini et al. 2024 (Dolma), arXiv:2402.00159, section 5.3.

    E-mail addresses; public IPv4 and IPv6 addresses; telephone numbers (E.164 with a known country code, North American, and
    national ones after a word such as 'phone'); IBANs (length of the country, mod 97); payment cards (issuer's prefix,
    Luhn); US social security numbers; secrets: keys of AWS, Google, GitHub, GitLab, Slack, OpenAI, Anthropic, Stripe, Hugging
    Face, npm and PyPI, JSON web tokens, private key blocks, and values of high entropy assigned to a name such as password.
    A kernel finds candidates in one pass; only these are checked. Columns, URLs and samples of documents that other steps dropped
    keep what they have; samples of this step show placeholders.
    """

    paper: ClassVar[str] = "arXiv:2402.00159"
    unit: ClassVar[str] = "candidates"
    discloses: ClassVar[bool] = False
    kinds: tuple[Kind, ...] = Field(
        ("email", "ip", "phone", "iban", "card", "ssn", "secret"), min_length=1, description="What to mask."
    )
    placeholders: Placeholders = Field(Placeholders(), description="What is written in the place of each kind.")
    min_left_bytes: int = Field(0, ge=0, description="A document of which fewer bytes are left is dropped.")
    when: str = Field("True", description="Expression that selects the documents to mask.")

    @property
    def rule_names(self) -> tuple[str, ...]:
        return _ORDER

    @property
    def fills(self) -> np.ndarray:
        return np.array([getattr(self.placeholders, kind).encode() for kind in _ORDER])

    def find(self, texts: Texts) -> Spans:
        kernels = compiled("hone.text.personal.find", "masking personal data")
        return Spans(*kernels.find(texts, self.kinds, _ORDER))
