"""`hone cost money roi`: return and payback of an investment, and which input they hang on."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from hone.cost.calculators.sheet import Calculator, Sheet


class Swing(NamedTuple):
    """The return with one input lower and higher, all others as they are."""

    field: str
    low: float
    high: float
    low_return: float
    high_return: float

    @property
    def swing(self) -> float:
        """How far apart the two returns are."""
        return abs(self.high_return - self.low_return)


class Return(Calculator):
    """Return on an investment over a stated time: (gain - cost) / cost, and the months until it has paid back."""

    cost_usd: float = Field(gt=0, description="What the optimization costs: people, machines, licences.")
    once_usd: float = Field(0.0, ge=0, description="What it saves once, such as a cheaper training.")
    monthly_usd: float = Field(0.0, ge=0, description="What it saves each month, such as cheaper serving.")
    running_usd: float = Field(0.0, ge=0, description="What it costs each month to keep.")
    months: float = Field(12.0, gt=0, description="Months over which the return is counted.")
    discount: float = Field(0.0, ge=0, lt=1, description="Rate of a year by which later savings count less.")
    vary: float = Field(0.2, gt=0, lt=1, description="Share by which each input is lowered and raised.")

    def sheet(self) -> Sheet:
        """Gain, return, payback, and the inputs by how far the return moves with each."""
        found = Sheet(f"return over {self.months:g} months")
        worth = self.months
        if self.discount:
            monthly = found.add("discount of a month", "(1 + year) ** (1 / 12) - 1", "%", year=self.discount)
            worth = found.add(
                "months, discounted", "(1 - (1 + rate) ** (0 - months)) / rate", "", rate=monthly, months=self.months
            )
        gain = found.add(
            "gain", "once + (monthly - running) * months", "$",
            once=self.once_usd, monthly=self.monthly_usd, running=self.running_usd, months=worth,
        )  # fmt: skip
        found.add("return", "(gain - cost) / cost", "%", gain=gain, cost=self.cost_usd)
        net = self.monthly_usd - self.running_usd
        if self.once_usd >= self.cost_usd:
            found.verdicts.append(
                f"It has paid back at once: it saves ${self.once_usd:,.0f} once and costs ${self.cost_usd:,.0f}."
            )
        elif net > 0:
            found.add(
                "payback", "(cost - once) / (monthly - running)", "months",
                cost=self.cost_usd, once=self.once_usd, monthly=self.monthly_usd, running=self.running_usd,
            )  # fmt: skip
        else:
            found.verdicts.append("It never pays back: each month costs as much as it saves.")
        found.verdicts.append(f"The return where one input is {self.vary:.0%} lower or higher, the others as they are:")
        for one in self.swings():
            found.verdicts.append(
                f"  {one.field:12} {one.low:,.6g} to {one.high:,.6g}: return {one.low_return:,.0%} to {one.high_return:,.0%}"
            )
        return found

    def value(self) -> float:
        """The return."""
        return _value(self)

    def swings(self) -> list[Swing]:
        """The return at both ends of each input that is not 0, the largest difference first (a tornado table)."""
        rows = []
        for name in ("cost_usd", "once_usd", "monthly_usd", "running_usd", "months"):
            now = getattr(self, name)
            if now:
                low, high = now * (1 - self.vary), now * (1 + self.vary)
                ends = [_value(self.model_copy(update={name: value})) for value in (low, high)]
                rows.append(Swing(name, low, high, *ends))
        return sorted(rows, key=lambda one: -one.swing)


def _value(spec: Return) -> float:
    rate = (1 + spec.discount) ** (1 / 12) - 1
    months = (1 - (1 + rate) ** -spec.months) / rate if rate else spec.months
    gain = spec.once_usd + (spec.monthly_usd - spec.running_usd) * months
    return (gain - spec.cost_usd) / spec.cost_usd
