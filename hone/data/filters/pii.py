"""Personal data: documents with many addresses, telephone or card numbers."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.data.filters.base import Filter, Rule


class PII(Filter):
    """Drops documents with many e-mail or IP addresses, telephone or card numbers. Soldaini et al. 2024, arXiv:2402.00159.

    Such a page is a directory or a leak; five matches are Dolma's limit.
    Each match is checked: the shape of e-mail addresses (RFC 5321), IANA's special IPv4 ranges, E.164 or North American
    grouping of telephone numbers, Luhn's check digit of card numbers. Matches in kept documents stay unless the edit `mask` replaces them.
    """

    paper: ClassVar[str] = "arXiv:2402.00159"
    max_hits: int = Field(5, ge=0, description="Most matches of all kinds together.")
    max_cards: int = Field(0, ge=0, description="Most card numbers.")

    def rules(self) -> list[Rule]:
        return [
            Rule("personal_data", f"emails + public_ips + phones + cards <= {self.max_hits}"),
            Rule("card_numbers", f"cards <= {self.max_cards}"),
        ]
