"""`hone cost carbon`: grams of CO2e of a run, from its energy and its hardware, and by token (ISO/IEC 21031)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from hone.base.errors import SpecError, did_you_mean
from hone.base.figure import Estimate
from hone.cost.calculators.sheet import Calculator, Sheet
from hone.cost.carbon.intensity import SHIPPED, shipped

SCI = "Software Carbon Intensity, ISO/IEC 21031:2024: (E I + M) / R"
J_PER_KWH = 3.6e6


@functools.cache
def rows() -> dict[str, Any]:
    """Kilograms of making hardware, and grams a kWh of plants over their lives, with sources."""
    return json.loads((Path(__file__).parent / "embodied.json").read_text(encoding="utf8"))


def embodied_kg(name: str) -> tuple[float, bool, str]:
    """kg CO2e of making `name`, whether its share of a server is in it, and its source. SpecError: it is not known, which is not 0."""
    for row in rows()["hardware"]:
        if row["name"].lower() == name.lower():
            return float(row["kg"]), bool(row.get("with_server")), row["source"]
    known = [row["name"] for row in rows()["hardware"] if row["name"] != "server"]
    raise SpecError(
        f"kg CO2e of making '{name}' are not known",
        fix=f"{did_you_mean(name, known)}known: {', '.join(known)}; or give accelerator_kg from its maker",
    )


def plant_g_per_kwh(name: str) -> float:
    """g CO2e/kWh of a kind of plant over its life (IPCC). SpecError: it is not known."""
    for row in rows()["plants"]:
        if row["name"] == name:
            return float(row["g_per_kwh"])
    known = [row["name"] for row in rows()["plants"]]
    raise SpecError(f"no plant '{name}'", fix=f"{did_you_mean(name, known)}known: {', '.join(known)}")


def grid_g_per_kwh(text: str) -> tuple[float, str]:
    """g CO2e/kWh and its source, of '385' (a number), a site of the package (its mean of 2020), or a kind of plant. SpecError: none of them."""
    try:
        return float(text), "as given"
    except ValueError:
        pass
    if text in SHIPPED:
        return shipped(text).mean(), f"mean of 2020, {shipped(text).source}"
    if any(row["name"] == text for row in rows()["plants"]):
        return plant_g_per_kwh(text), rows()["plants_source"]
    known = [*SHIPPED, *(row["name"] for row in rows()["plants"])]
    raise SpecError(
        f"no carbon intensity of '{text}'",
        fix=f"{did_you_mean(text, known)}known: {', '.join(known)}; or give g CO2e/kWh as a number",
    )


def grams_of(energy: Estimate, g_per_kwh: float, pue: float = 1.0) -> Estimate:
    """Grams of an energy in J. A bound stays a bound."""
    return Estimate(
        value=energy.value / J_PER_KWH * pue * g_per_kwh,
        unit="gCO2e",
        formula=f"{energy.value:.4g} J / 3.6e6 x PUE {pue:g} x {g_per_kwh:.4g} g/kWh",
        bound=energy.bound,
        tolerance=energy.tolerance,
    )


class Footprint(Calculator):
    """Carbon of a run: operation by the grid's mean (location-based), embodied, by unit; the market-based figure apart."""

    energy_j: float | None = Field(None, gt=0, description="Measured joules of the devices (energy_j of an artifact).")
    gpus: int = Field(1, ge=1, description="Accelerators that are reserved.")
    hours: float | None = Field(
        None, gt=0, description="Hours for which they are reserved; needed without energy_j, and for what is embodied."
    )
    watts: float | None = Field(
        None, gt=0, description="Modelled watts of one accelerator with its share of the server, in place of energy_j."
    )
    pue: float = Field(
        1.0, ge=1, description="Power of the building over that of the machines; large ones have 1.1 to 1.2."
    )
    grid: str = Field(
        description="Where: g CO2e/kWh, or DE, GB, FR (means of 2020), or coal, gas, solar, nuclear, wind, hydro."
    )
    market_g_per_kwh: float | None = Field(
        None, ge=0, description="Of the contract that was bought; a figure of its own, never added."
    )
    accelerator: str = Field("", description="Its name for what is embodied: H100, A100.")
    accelerator_kg: float | None = Field(None, gt=0, description="kg CO2e of making one, in place of its name.")
    server_kg: float = Field(
        5700.0,
        ge=0,
        description="kg CO2e of making a server without its accelerators; not added where the accelerator's row has its share in it.",
    )
    gpus_per_server: int = Field(8, ge=1, description="Accelerators of a server.")
    life_years: float = Field(3.0, gt=0, description="Years for which the hardware is used.")
    use: float = Field(1.0, gt=0, le=1, description="Share of these years in which it is reserved by anyone.")
    units: float | None = Field(None, gt=0, description="Functional units of the run (R), such as tokens.")
    unit: str = Field("token", description="Name of one of them.")

    @model_validator(mode="after")
    def _energy_is_known(self) -> Self:
        if (self.energy_j is None) == (self.watts is None):
            raise ValueError("give energy_j (measured) or watts (modelled), one of the two")
        if self.watts is not None and self.hours is None:
            raise ValueError("watts need hours")
        if self.accelerator and self.accelerator_kg is not None:
            raise ValueError("give accelerator or accelerator_kg, one of the two")
        if (self.accelerator or self.accelerator_kg) and self.hours is None:
            raise ValueError("what is embodied needs hours")
        return self

    def sheet(self) -> Sheet:
        """Energy, operation, what is embodied, the sum, and by unit. SpecError: a grid or an accelerator is not known."""
        found = Sheet(
            f"carbon of a run, {'energy measured' if self.energy_j is not None else 'energy modelled from watts'}"
        )
        if self.energy_j is not None:
            energy = found.add("energy (E)", "J / 3.6e6 * pue", "kWh", J=self.energy_j, pue=self.pue)
        else:
            energy = found.add(
                "energy (E)", "gpus * watts / 1000 * hours * pue", "kWh",
                gpus=self.gpus, watts=self.watts, hours=self.hours, pue=self.pue,  # type: ignore[arg-type]
            )  # fmt: skip
        intensity, source = grid_g_per_kwh(self.grid)
        grams = found.add(
            "operation, location-based (E I)",
            "E * g",
            "g CO2e",
            f"GHG Protocol Scope 2; intensity: {source}",
            E=energy,
            g=intensity,
        )
        if self.accelerator or self.accelerator_kg is not None:
            each, with_server, source = self.accelerator_kg or 0.0, False, "as given"
            if self.accelerator:
                each, with_server, source = embodied_kg(self.accelerator)
            made = found.add(
                "embodied (M)", "1000 * (kg + server / per) * gpus * hours / (years * 8760 * use)", "g CO2e", f"{SCI}; {source}",
                kg=each, server=0.0 if with_server else self.server_kg, per=self.gpus_per_server, gpus=self.gpus,
                hours=self.hours, years=self.life_years, use=self.use,  # type: ignore[arg-type]
            )  # fmt: skip
            grams = found.add("all (E I + M)", "operation + embodied", "g CO2e", SCI, operation=grams, embodied=made)
        else:
            found.verdicts.append("Without what is embodied: no accelerator is named.")
        if self.units is not None:
            found.add(f"of a {self.unit} (SCI)", "g / R", "g CO2e", SCI, g=grams, R=self.units)
            found.add(f"energy of a {self.unit}", "E * 3.6e6 / R", "J", E=energy, R=self.units)
        if self.market_g_per_kwh is not None:
            found.add(
                "operation, market-based", "E * g", "g CO2e", "GHG Protocol Scope 2", E=energy, g=self.market_g_per_kwh
            )
            found.verdicts.append(
                "The market-based figure counts a contract in place of the grid; mixing the two misstates up to 55 % (arXiv:2402.03550)."
            )
        return found
