"""`hone cost money serve`: the price of a million tokens, at the load that there is."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from hone.cost.calculators.sheet import Calculator, Sheet


class ServingMoney(Calculator):
    """What serving costs a million tokens, a month and a year: replicas stand by for the peak, tokens come at the average."""

    tokens_per_s: float = Field(
        gt=0, description="Tokens/s of one replica at its highest load (hone bench measures it)."
    )
    gpus: int = Field(1, ge=1, description="GPUs of a replica.")
    usd_per_gpu_hour: float | None = Field(
        None, gt=0, description="Price of a GPU and hour; `hone hardware NAME` lists prices with source and date."
    )
    load: float = Field(
        1.0, gt=0, le=1, description="Average share of the replicas' rate that is used; in place of the two below."
    )
    average_tokens_per_s: float | None = Field(None, gt=0, description="Tokens/s of all users, on average.")
    peak_tokens_per_s: float | None = Field(
        None, gt=0, description="Tokens/s of all users at the peak, for which replicas stand by."
    )
    headroom: float = Field(1.0, ge=1, description="Replicas over those that the peak needs.")
    watts: float | None = Field(None, gt=0, description="Watts of a GPU, for joules a token.")
    usd_per_gpu: float | None = Field(
        None, gt=0, description="Price of an owned GPU with its share of the server, in place of usd_per_gpu_hour."
    )
    life_years: float = Field(4.0, gt=0, description="Years over which it is written off.")
    pue: float = Field(1.2, ge=1, description="Power of the building over that of the machines.")
    usd_per_kwh: float = Field(0.1, ge=0, description="Price of electricity of owned machines.")
    staff_usd_per_year: float = Field(0.0, ge=0, description="People who run the service.")

    @model_validator(mode="after")
    def _enough_is_given(self) -> Self:
        if (self.usd_per_gpu_hour is None) == (self.usd_per_gpu is None):
            raise ValueError("give usd_per_gpu_hour (rented) or usd_per_gpu (owned), one of the two")
        if self.usd_per_gpu is not None and self.watts is None:
            raise ValueError("an owned GPU needs watts")
        if (self.average_tokens_per_s is None) != (self.peak_tokens_per_s is None):
            raise ValueError("give average_tokens_per_s and peak_tokens_per_s, both or none")
        if self.average_tokens_per_s is not None and self.average_tokens_per_s > (self.peak_tokens_per_s or 0):
            raise ValueError("average_tokens_per_s is above peak_tokens_per_s")
        return self

    def sheet(self) -> Sheet:
        """Replicas, load, price of a million tokens, of a year, and joules of a token."""
        found = Sheet("money of serving")
        replicas, load = 1.0, self.load
        if self.average_tokens_per_s is not None:
            replicas = found.add("replicas", "ceil(peak * headroom / rate)", "", peak=self.peak_tokens_per_s, headroom=self.headroom, rate=self.tokens_per_s)  # type: ignore[arg-type]  # fmt: skip
            load = found.add("average load", "average / (replicas * rate)", "%", average=self.average_tokens_per_s, replicas=replicas, rate=self.tokens_per_s)  # fmt: skip
        price = self.usd_per_gpu_hour or found.add(
            "an hour of an owned GPU", "price / (years * 8760) + watts / 1000 * pue * kwh", "$",
            price=self.usd_per_gpu, years=self.life_years, watts=self.watts, pue=self.pue, kwh=self.usd_per_kwh,  # type: ignore[arg-type]
        )  # fmt: skip
        year = found.add(
            "hardware, a year", "replicas * gpus * usd * 8760", "$", replicas=replicas, gpus=self.gpus, usd=price
        )
        if self.staff_usd_per_year:
            year = found.add(
                "with staff, a year", "hardware + staff", "$", hardware=year, staff=self.staff_usd_per_year
            )
        found.add(
            "a million tokens", "1e6 * year / (8760 * 3600 * replicas * rate * load)", "$",
            year=year, replicas=replicas, rate=self.tokens_per_s, load=load,
        )  # fmt: skip
        if self.watts is not None:
            found.add(
                "energy of a token, at this power and full rate", "gpus * watts / rate", "J",
                gpus=self.gpus, watts=self.watts, rate=self.tokens_per_s,
            )  # fmt: skip
        return found
