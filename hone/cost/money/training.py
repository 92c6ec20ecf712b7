"""`hone cost money train`: hardware, people and infrastructure of a training."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from hone.cost.calculators.sheet import Calculator, Sheet


class TrainingMoney(Calculator):
    """What a training costs: rented or owned hardware, people, and what else is paid by the month."""

    gpus: int = Field(ge=1, description="GPUs at once.")
    hours: float | None = Field(
        None, gt=0, description="Wall hours; empty: from parameters, tokens, peak_tflops and mfu."
    )
    usd_per_gpu_hour: float | None = Field(
        None, gt=0, description="Price of a GPU and hour; `hone hardware NAME` lists prices with source and date."
    )
    parameters: float | None = Field(None, gt=0, description="Parameters that a token visits.")
    tokens: float | None = Field(None, gt=0, description="Tokens of the training.")
    peak_tflops: float | None = Field(
        None, gt=0, description="Dense TFLOP/s of a GPU at the precision of the training."
    )
    mfu: float | None = Field(None, gt=0, le=1, description="Share of the peak that 6 N D uses.")
    efficiency: float = Field(
        1.0, gt=0, le=1, description="Share of wall time that is work (hone cost money checkpoints)."
    )
    usd_per_gpu: float | None = Field(
        None,
        gt=0,
        description="Price of an owned GPU with its share of server and network, in place of usd_per_gpu_hour.",
    )
    life_years: float = Field(4.0, gt=0, description="Years over which an owned GPU is written off.")
    use: float = Field(0.8, gt=0, le=1, description="Share of these years in which it works.")
    watts: float | None = Field(None, gt=0, description="Watts of an owned GPU with its share of the server.")
    pue: float = Field(1.2, ge=1, description="Power of the building over that of the machines.")
    usd_per_kwh: float = Field(0.1, ge=0, description="Price of electricity of owned machines.")
    people: float = Field(0.0, ge=0, description="People that work on it.")
    usd_per_person_month: float = Field(0.0, ge=0, description="Price of one of them and month.")
    months: float = Field(0.0, ge=0, description="Months of people and infrastructure.")
    infrastructure_usd_per_month: float = Field(0.0, ge=0, description="Storage, network and tools, by the month.")

    @model_validator(mode="after")
    def _enough_is_given(self) -> Self:
        work = (self.parameters, self.tokens, self.peak_tflops, self.mfu)
        if (self.hours is None) == any(one is None for one in work):
            raise ValueError("give hours, or all of parameters, tokens, peak_tflops and mfu")
        if (self.usd_per_gpu_hour is None) == (self.usd_per_gpu is None):
            raise ValueError("give usd_per_gpu_hour (rented) or usd_per_gpu (owned), one of the two")
        if self.usd_per_gpu is not None and self.watts is None:
            raise ValueError("an owned GPU needs watts")
        return self

    def sheet(self) -> Sheet:
        """Hours, hardware, people and infrastructure, the whole, and per trained token."""
        found = Sheet("money of a training")
        if self.hours is None:
            hours = found.add(
                "wall time", "6 * N * D / (gpus * tflops * 1e12 * mfu) / 3600", "h", "6 N D: Kaplan et al. 2020, arXiv:2001.08361",
                N=self.parameters, D=self.tokens, gpus=self.gpus, tflops=self.peak_tflops, mfu=self.mfu,  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            hours = self.hours
        if self.efficiency < 1:
            hours = found.add(
                "wall time with failures", "hours / efficiency", "h", hours=hours, efficiency=self.efficiency
            )
        price = self.usd_per_gpu_hour or owned_hour(found, self)
        hardware = found.add("hardware", "gpus * hours * usd", "$", gpus=self.gpus, hours=hours, usd=price)
        people = found.add(
            "people",
            "people * usd * months",
            "$",
            people=self.people,
            usd=self.usd_per_person_month,
            months=self.months,
        )
        rest = found.add(
            "infrastructure", "usd * months", "$", usd=self.infrastructure_usd_per_month, months=self.months
        )
        whole = found.add("all", "hardware + people + rest", "$", hardware=hardware, people=people, rest=rest)
        if self.tokens is not None:
            found.add("of a million trained tokens", "1e6 * usd / tokens", "$", usd=whole, tokens=self.tokens)
        return found


def owned_hour(found: Sheet, spec: TrainingMoney) -> float:
    """Adds the price of an hour of an owned GPU to `found` and returns it."""
    return found.add(
        "an hour of an owned GPU", "price / (years * 8760 * use) + watts / 1000 * pue * kwh", "$",
        price=spec.usd_per_gpu, years=spec.life_years, use=spec.use, watts=spec.watts, pue=spec.pue, kwh=spec.usd_per_kwh,  # type: ignore[arg-type]
    )  # fmt: skip
