"""What artifacts cost: time and energy as measured, money and carbon by stated rates, of a run, of a token, and until a loss was reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from hone.report import units
from hone.report.collect import Line, Row, mappings, sound


class Rates(NamedTuple):
    """What whoever asks for a report states: dollars an hour of the machine, g CO2e/kWh with the source, PUE, a loss to reach."""

    usd_per_hour: float | None = None
    g_per_kwh: float | None = None
    source: str = ""
    pue: float = 1.0
    target_loss: float | None = None


class Priced(NamedTuple):
    """One figure of one artifact: its value, None with the reason in `note`."""

    name: str
    value: float | None
    unit: str
    note: str

    @property
    def shown(self) -> str:
        """Value and unit, or that there is none."""
        if self.value is None:
            return "not known"
        if self.unit == "$":
            return f"${units.three(self.value)}"
        return units.show(self.value, self.unit)


class Bill(NamedTuple):
    """An artifact with what it cost."""

    row: Row
    figures: tuple[Priced, ...]


@dataclass(frozen=True)
class Prices:
    """Every artifact whose time or energy was measured."""

    id: ClassVar[str] = "prices"
    title: ClassVar[str] = "Cost"
    stages: ClassVar[tuple[str, ...]] = ()

    said: str
    """The rates, in words."""
    names: tuple[str, ...]
    bills: list[Bill]
    unknown: tuple[str, ...]
    """Why some figures are not known, in sentences."""

    @classmethod
    def of(cls, line: Line) -> Self | None:
        """None without stated rates: nothing is assumed."""
        rates = line.rates
        if rates is None:
            return None
        bills = [Bill(row, _figures(row, rates)) for row in line.rows if "time_s" in row.figures]
        if not bills:
            return None
        said = []
        if rates.usd_per_hour is not None:
            said.append(f"${rates.usd_per_hour:g} an hour of the machine")
        if rates.g_per_kwh is not None:
            said.append(f"{rates.g_per_kwh:.4g} g CO2e/kWh ({rates.source}), PUE {rates.pue:g}, operation alone")
        if rates.target_loss is not None:
            said.append(f"a loss of {rates.target_loss:g}")
        names = tuple(dict.fromkeys(one.name for bill in bills for one in bill.figures))
        return cls("; ".join(said), names, bills, _unknown(bills))


def _unknown(bills: list[Bill]) -> tuple[str, ...]:
    """One sentence for each reason, with the figures and artifacts that it is of."""
    reasons: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for bill in bills:
        for one in bill.figures:
            if one.value is None:
                names, rows = reasons.setdefault(one.note, ({}, {}))
                names[one.name] = rows[bill.row.id] = None
    return tuple(
        f"Not known: {', '.join(names)} of {', '.join(rows)} ({why})." for why, (names, rows) in reasons.items()
    )


def _figures(row: Row, rates: Rates) -> tuple[Priced, ...]:
    energy = row.figures.get("energy_j")
    why = (energy.note if energy is not None else "") or "it has no energy_j"
    found = [
        Priced("time", row.value("time_s"), "s", "its time was not measured"),
        Priced("energy", row.value("energy_j"), "J", why),
    ]
    if rates.usd_per_hour is not None:
        found += _money(row, rates.usd_per_hour)
    if rates.g_per_kwh is not None:
        found += _carbon(row, rates.g_per_kwh * rates.pue / 3.6e6)
    if rates.target_loss is not None and row.kind == "train":
        found.append(_to_loss(row, rates.target_loss))
    return tuple(found)


def _money(row: Row, usd: float) -> list[Priced]:
    time_s = row.value("time_s")
    whole = Priced("price", None if time_s is None else usd * time_s / 3600, "$", "its time was not measured")
    per = "price of a million tokens"
    if row.kind == "serve":  # the whole stage also loads the model: its rate is that of the requests
        rate = row.value("tokens_per_s")
        return [whole, Priced(per, usd * 1e6 / (3600 * rate) if rate else None, "$", "it has no tokens_per_s")]
    tokens = _tokens(row)
    if whole.value is None or not tokens:
        return [whole, Priced(per, None, "$", whole.note if whole.value is None else "it counts no tokens")]
    return [whole, Priced(per, whole.value * 1e6 / tokens, "$", "")]


def _carbon(row: Row, g_per_j: float) -> list[Priced]:
    figure, joules = row.figures.get("energy_j"), row.value("energy_j")
    why = (figure.note if figure is not None else "") or "it has no energy_j"
    whole = Priced("CO2e", None if joules is None else joules * g_per_j, "g", why)
    per = "CO2e of a million tokens"
    each = row.value("joules_per_token")
    if each is None and joules is not None and row.kind != "serve" and (tokens := _tokens(row)):
        each = joules / tokens
    if each is None:
        return [whole, Priced(per, None, "g", why if joules is None else "it counts no tokens")]
    return [whole, Priced(per, each * g_per_j * 1e6, "g", "")]


def _tokens(row: Row) -> float | None:
    """Tokens that a stage went through."""
    names = {"train": "train_tokens", "data": "train_tokens", "eval": "tokens_evaluated"}
    return row.value(names[row.kind]) if row.kind in names else None


def _to_loss(row: Row, target: float) -> Priced:
    """Seconds of steps until the validation loss was first at `target` or below: tokens up to there at the measured rate."""
    name, tokens = "time to the loss", None
    rate = row.value("tokens_per_s")
    best = None
    for entry in mappings(row.content.get("steps.jsonl")):
        tokens = entry["tokens"] if sound(entry.get("tokens")) else tokens
        loss = entry.get("val_loss")
        if not sound(loss):
            continue
        best = loss if best is None else min(best, loss)
        if loss <= target and tokens is not None:
            if not rate:
                return Priced(name, None, "s", "it has no tokens_per_s")
            return Priced(name, tokens / rate, "s", f"{tokens:,.0f} tokens at the measured rate; evaluation left out")
    return Priced(name, None, "s", "no validation loss was logged" if best is None else f"the lowest was {best:.4g}")
