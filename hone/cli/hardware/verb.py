"""`hone hardware`: lists the catalogue of accelerators, compares some of them, or says which number formats a target has."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hone.cli.options import fields, list_fields

if TYPE_CHECKING:
    from hone.cost.catalogue.compare import Decode, Merit
    from hone.cost.catalogue.read import Catalogue
    from hone.cost.catalogue.rows import Accelerator

_ABOUT = """usage: hone hardware [NAME ...] [--field=value ...]

Lists the accelerators of the catalogue; with names it compares them: ridge point, dollars and joules of arithmetic, the most tokens/s
of a decode, native number formats. Rates are dense and quoted from data sheets; `unknown` is what no source says.
--json prints all fields with their sources.

fields:
"""


def hardware(words: list[str], options: dict[str, str]) -> int:
    """Lists or compares accelerators; returns the exit code."""
    from hone.cli.hardware.spec import HardwareSpec
    from hone.cost.catalogue.compare import Decode, merit
    from hone.cost.catalogue.formats import formats_of
    from hone.cost.catalogue.read import catalogue

    if "help" in options:
        print(f"{_ABOUT}{list_fields(HardwareSpec)}")
        return 0
    spec, as_json = HardwareSpec.from_overrides(fields(options, "json")), "json" in options
    rows = catalogue(spec.hardware or None)
    if spec.target:
        _tell_formats(spec.target, formats_of(spec.target, spec.hardware or None), as_json)
    elif len(words) > 1:
        decode = Decode(spec.params, spec.bits, spec.batch, spec.kv_bytes, spec.active)
        found = [merit(rows, rows.accelerator(name), spec.dtype, decode) for name in words[1:]]
        _tell_merits(rows, found, spec.dtype, decode, as_json)
    elif spec.list == "accelerators":
        _tell_all(rows, as_json)
    else:
        _tell_list(rows, spec.list, as_json)
    return 0


def _tell_all(rows: Catalogue, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_with_sources(rows, one) for one in rows.accelerators], indent=1))
        return
    table = _table("name", "year", "memory", "TB/s", *_RATES.values(), "measured 16", "link GB/s", "W", "$/h (spot)")
    for one in rows.accelerators:
        link = rows.link(one.link)
        table.add_row(
            f"{one.short}{' (announced)' if one.announced else ''}",
            _or_unknown(one.year, "d"),
            f"{_or_unknown(one.memory_bytes, ',.0f', 1e9)} GB {one.memory}"
            if one.memory_bytes
            else one.memory or "unknown",
            _or_unknown(one.bytes_per_s, ",.2f", 1e12),
            *(_rate(one, dtypes) for dtypes in _RATES),
            _or_unknown(one.measured_flops_per_s.get("bfloat16"), ",.0f", 1e12),
            _or_unknown(link.bytes_per_s if link else None, ",.0f", 1e9),
            _or_unknown(one.power_w, ",.0f"),
            _price(rows, one),
        )
    _print(table)
    print(
        "\nRates are dense TFLOP/s of the data sheet (TOP/s of integers), '-' where the device has no such units; 'measured 16' is the "
        "most\nthat products in bfloat16 were measured to reach; links are of one direction. Prices are quoted, not predicted: "
        "--json has the\nsource and date of every value."
    )


_RATES = {("bfloat16", "float16"): "16 bit", ("float8",): "fp8", ("int8",): "int8", ("float4", "int4"): "4 bit"}
"""Columns of rates: the first of the number formats that has one."""


def _rate(one: Accelerator, dtypes: tuple[str, ...]) -> str:
    for dtype in dtypes:
        if dtype in one.flops_per_s:
            return f"{one.flops_per_s[dtype] / 1e12:,.0f}"
    return "unknown" if set(dtypes) & set(one.formats) else "-"


def _price(rows: Catalogue, one: Accelerator) -> str:
    on_demand, spot = (rows.prices_of(one, kind) for kind in ("on_demand", "spot"))
    if not on_demand and not spot:
        return "unknown"
    said = f"{min(each.usd_per_h for each in on_demand):.2f}" if on_demand else "unknown"
    return said + (f" ({min(each.usd_per_h for each in spot):.2f})" if spot else "")


def _tell_merits(rows: Catalogue, found: list[Merit], dtype: str, decode: Decode, as_json: bool) -> None:
    if as_json:
        told = [
            {
                **{k: v for k, v in asdict(one).items() if k != "accelerator"},
                "accelerator": _with_sources(rows, one.accelerator),
            }
            for one in found
        ]
        print(json.dumps({"dtype": dtype, "decode": asdict(decode), "compared": told}, indent=1, default=str))
        return
    table = _table("", *(one.accelerator.short for one in found))
    lines = {
        f"TFLOP/s, {dtype}": [_of_dtype(one.accelerator, dtype) for one in found],
        "measured at most": [
            _or_unknown(one.accelerator.measured_flops_per_s.get(dtype), ",.0f", 1e12) for one in found
        ],
        "memory, GB": [_or_unknown(one.accelerator.memory_bytes, ",.0f", 1e9) for one in found],
        "TB/s": [_or_unknown(one.accelerator.bytes_per_s, ",.2f", 1e12) for one in found],
        "ridge point, FLOP a byte": [_or_unknown(one.ridge, ",.0f") for one in found],
        "W": [_or_unknown(one.accelerator.power_w, ",.0f") for one in found],
        "J a TFLOP": [_or_unknown(one.j_per_tflop, ".2f") for one in found],
        "$ an hour (spot)": [_price(rows, one.accelerator) for one in found],
        "$ a PFLOP/s hour": [_or_unknown(one.usd_per_pflop_h, ".2f") for one in found],
        "decode: devices that hold it": [_or_unknown(one.devices, "d") for one in found],
        "decode: tokens/s at most": [_or_unknown(one.tokens_per_s, ",.0f") for one in found],
        "native formats": [", ".join(one.accelerator.native) for one in found],
    }
    for name, cells in lines.items():
        table.add_row(name, *cells)
    _print(table, wide=False)
    print(f"\ndecode of {decode.params:.3g} weights of {decode.bits:g} bits, {decode.batch} at once:")
    for one in found:
        print(f"  {one.accelerator.short}: {one.why}")
    for one in found:
        if one.accelerator.note:
            print(f"note on {one.accelerator.short}: {one.accelerator.note}")


def _of_dtype(one: Accelerator, dtype: str) -> str:
    rate = one.rate(dtype)
    if rate is None:
        return "unknown"
    return f"{rate[0] / 1e12:,.0f}" + ("" if rate[1] == dtype else f" ({rate[1]})")


def _tell_formats(target: str, found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({name: one._asdict() for name, one in found.items()}, indent=1))
        return
    table = _table("format", target, "")
    for name, one in found.items():
        table.add_row(name, "native" if one.native else "stored", one.why)
    _print(table)


def _tell_list(rows: Catalogue, name: str, as_json: bool) -> None:
    found = getattr(rows, name)
    if as_json:
        print(json.dumps([_with_sources(rows, one) for one in found], indent=1))
        return
    columns = [one for one in type(found[0]).model_fields if one not in ("sources", "note", "measured")]
    table = _table(*(_TITLES.get(one, one) for one in columns), "source", "date")
    for row in found:
        main = row.source_of(next(one for one in columns if one in _MAIN))
        cells = [_cell(one, getattr(row, one)) for one in columns]
        table.add_row(*cells, main, rows.sources[main].date)
    _print(table)


_TITLES = {
    "bytes_per_s": "GB/s", "pair_bytes_per_s": "GB/s a pair", "measured_bytes_per_s": "measured GB/s", "latency_s": "us",
    "usd_per_h": "$/h", "usd_per_h_high": "to", "g_per_kwh": "g/kWh", "max_rack_w": "kW a rack",
    "pue_low": "PUE from", "pue_high": "to",
}  # fmt: skip
_MAIN = ("bytes_per_s", "usd_per_h", "g_per_kwh", "pue_low")
"""The figure of a row whose source is shown."""
_WORDS = ("name", "title", "reach", "accelerator", "kind", "provider", "source", "format", "formats", "")
_SCALES = {
    "bytes_per_s": 1e9,
    "pair_bytes_per_s": 1e9,
    "measured_bytes_per_s": 1e9,
    "latency_s": 1e-6,
    "max_rack_w": 1e3,
}


def _cell(field: str, value: Any) -> str:
    if value is None:
        return (
            "-" if field in ("usd_per_h_high", "pair_bytes_per_s", "latency_s", "measured_bytes_per_s") else "unknown"
        )
    return f"{value / _SCALES[field]:,.4g}" if field in _SCALES else str(value)


def _with_sources(rows: Catalogue, row: Any) -> dict[str, Any]:
    """All fields of a row, and the source of each field that is known: its title, address and date."""
    values = row.model_dump(mode="json", exclude={"sources"})
    told = [field for field, value in values.items() if isinstance(value, int | float | dict) and value]
    used = {row.source_of(field) for field in told}
    return {
        **values,
        "source_of": {field: row.source_of(field) for field in told},
        "sources": {key: rows.sources[key].model_dump(mode="json") for key in sorted(used)},
    }


def _or_unknown(value: float | None, form: str, unit: float = 1) -> str:
    return "unknown" if value is None else format(value if form == "d" else value / unit, form)


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if name in _WORDS else "right", overflow="fold", no_wrap=place == 0)
    return table


def _print(table: Any, wide: bool = True) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if wide:  # names are printed whole: a narrow terminal breaks lines itself
        console.width = max(
            console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum
        )
    console.print(table)
