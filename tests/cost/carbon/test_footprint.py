"""Footprints: published grams of trainings, the standard's formula, and what is refused."""

from __future__ import annotations

import pytest

from hone.base.errors import SpecError
from hone.base.figure import Estimate
from hone.cost.carbon.footprint import Footprint, grams_of, grid_g_per_kwh
from hone.cost.carbon.intensity import shipped


def test_llama_65b_is_173_tonnes():
    """1,022,362 A100 hours at 400 W, PUE 1.1, 385 g/kWh: 449 MWh and 173 t (arXiv:2302.13971, table 15)."""
    found = Footprint(gpus=2048, hours=1_022_362 / 2048, watts=400, pue=1.1, grid="385").sheet()
    assert found["energy (E)"] == pytest.approx(449_839, rel=1e-4)
    assert found["operation, location-based (E I)"] == pytest.approx(173.2e6, rel=1e-3)


def test_llama_3_1_is_11390_tonnes():
    """39.3M H100 hours at 700 W: 11,390 t location-based by Meta, which is 414 g/kWh (405B's 30.84M hours: 8,930 t)."""
    both = [
        Footprint(hours=hours, watts=700, grid=str(11_390e6 / (39.3e6 * 0.7))).sheet()[
            "operation, location-based (E I)"
        ]
        / 1e6
        for hours in (39.3e6, 30.84e6)
    ]
    assert both == [pytest.approx(11_390), pytest.approx(8_930, rel=2e-3)]


def test_an_h100_hour_embodies_33_grams_and_emits_280():
    found = Footprint(hours=1, watts=700, grid="400", accelerator="H100", units=4.1e7).sheet()
    assert found["embodied (M)"] == pytest.approx(33.35, abs=0.05)
    assert found["operation, location-based (E I)"] == pytest.approx(280)
    assert found["of a token (SCI)"] == pytest.approx((280 + 33.35) / 4.1e7, rel=1e-3)
    with_share = Footprint(hours=1, watts=400, grid="400", accelerator="A100").sheet()
    assert with_share["embodied (M)"] == pytest.approx(318_000 / (3 * 8760))  # its row has the server's share in it


def test_location_and_market_are_two_figures():
    found = Footprint(energy_j=3.6e6, grid="DE 2020", market_g_per_kwh=0).sheet()
    assert found["operation, location-based (E I)"] == pytest.approx(313.4, abs=0.1)
    assert found["operation, market-based"] == 0
    assert any("mixing the two" in one for one in found.verdicts)
    assert "measured" in found.title and "modelled" in Footprint(watts=1, hours=1, grid="wind").sheet().title


def test_what_is_unknown_is_refused():
    with pytest.raises(SpecError, match="no grid 'XX' in the catalogue"):
        Footprint(energy_j=1, grid="XX").sheet()
    with pytest.raises(SpecError, match="kg CO2e of making 'B200' are not known"):
        Footprint(energy_j=1, hours=1, grid="FR", accelerator="B200").sheet()
    with pytest.raises(SpecError, match=r"give energy_j .* or watts"):
        Footprint.read({"grid": "FR"})
    with pytest.raises(SpecError, match="no carbon intensity"):
        Footprint(energy_j=1, grid="-5").sheet()


def test_grids_are_the_catalogues():
    assert (
        Footprint.from_overrides({"energy_j": "3.6e6", "grid": "385"}).sheet()["operation, location-based (E I)"] == 385
    )
    grams, source = grid_g_per_kwh("coal")
    assert grams == 1001 and "IPCC" in source
    assert grid_g_per_kwh("SE")[0] == pytest.approx(40.7) and "Sweden, 2023" in grid_g_per_kwh("SE")[1]
    for site in ("DE", "GB", "FR"):  # the means of the traces in the package
        assert grid_g_per_kwh(f"{site} 2020")[0] == pytest.approx(shipped(site).mean(), abs=0.1)
    with pytest.raises(SpecError, match="no year 2019"):
        grid_g_per_kwh("DE 2019")


def test_a_bound_stays_a_bound():
    grams = grams_of(Estimate(value=7.2e6, unit="J", bound=True), 100, 1.5)
    assert grams.value == pytest.approx(300) and grams.bound and grams.unit == "gCO2e"
