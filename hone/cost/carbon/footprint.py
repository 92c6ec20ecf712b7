"""`hone cost carbon`: grams of CO2e of a run, from its energy and its hardware, and by token (ISO/IEC 21031)."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from hone.base.errors import SpecError
from hone.base.figure import Estimate
from hone.cost.calculators.sheet import Calculator, Sheet
from hone.cost.catalogue.read import catalogue

SCI = "Software Carbon Intensity, ISO/IEC 21031:2024: (E I + M) / R"
J_PER_KWH = 3.6e6
WITH_SERVER = "a100-embodied"
"""Key of the source in the catalogue whose kg of an accelerator have its share of a server in them."""
SERVER = "a server for 8 accelerators without them: 5,700 kg by EcoLogits' methodology page (p5.48xlarge, Boavizta's method), unchecked"


def embodied_kg(name: str) -> tuple[float, bool, str]:
    """kg CO2e of making `name`, whether its share of a server is in it, and its source. SpecError: it is not known, which is not 0."""
    row = catalogue().accelerator(name)
    if row.embodied_kg is None:
        known = [one.short for one in catalogue().accelerators if one.embodied_kg is not None]
        raise SpecError(
            f"kg CO2e of making '{name}' are not known",
            fix=f"known: {', '.join(known)}; or give accelerator_kg from its maker",
        )
    source = catalogue().source(row, "embodied_kg")
    return row.embodied_kg, row.source_of("embodied_kg") == WITH_SERVER, source.cited


def grid_g_per_kwh(text: str) -> tuple[float, str]:
    """g CO2e/kWh and its source, of '385' (a number), or of a grid or kind of plant of the catalogue, 'DE' in its latest year or 'DE 2020'.

    SpecError: none of them, or a number that is no intensity.
    """
    try:
        number = float(text)
    except ValueError:
        name, _, year = text.rpartition(" ") if text[-4:].isdigit() and " " in text else (text, "", "")
        row = catalogue().grid(name, int(year) if year else None)
        where = f"{row.title}, {row.year}" if row.kind == "country" else row.title
        return row.g_per_kwh, f"{where}: {catalogue().source(row, 'g_per_kwh').cited}"
    if not 0 <= number < 1e5:
        raise SpecError(
            f"grid: {text} is no carbon intensity", fix="give g CO2e/kWh, such as 385, or a grid, such as DE"
        )
    return number, "as given"


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
        description="Where: g CO2e/kWh, a grid of the catalogue in its latest year or one named (DE, 'DE 2020'), or a kind of plant (coal, wind)."
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

    @field_validator("grid", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        """A number stays a number in YAML and on the command line: --grid=385."""
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

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
            each, with_server, source = self.accelerator_kg or 0.0, False, "accelerator as given"
            if self.accelerator:
                each, with_server, source = embodied_kg(self.accelerator)
            if not with_server and "server_kg" not in self.model_fields_set:
                source = f"{source}; {SERVER}"
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
