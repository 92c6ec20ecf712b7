"""The hardware catalogue: every value has a source with a date, names are unique, a user's rows are checked, figures of merit agree."""

from __future__ import annotations

import json
import re

import pytest

from hone.base.errors import SpecError
from hone.cli import main
from hone.cost.catalogue.compare import Decode, decode_bound, merit
from hone.cost.catalogue.formats import family_of, formats_of
from hone.cost.catalogue.read import catalogue, own_folder, targets
from hone.cost.catalogue.rows import FORMATS, Accelerator
from hone.cost.roofline import data_sheets


@pytest.fixture(autouse=True)
def no_rows_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    catalogue.cache_clear()
    yield
    catalogue.cache_clear()


def test_every_value_has_a_source_with_a_date():
    rows = catalogue()
    assert len(rows.accelerators) >= 40 and len(rows.links) >= 30 and len(rows.prices) >= 20
    for row in (*rows.accelerators, *rows.links, *rows.prices, *rows.grids, *rows.cooling):
        assert "" in row.sources, row
        for field in type(row).model_fields:
            source = rows.source(row, field)
            assert source.title and re.fullmatch(r"20\d\d(-\d\d(-\d\d)?)?", source.date), (row, field)
            assert source.url.startswith("https://")
    read = [one for one in rows.accelerators if rows.source(one, "bytes_per_s").checked]
    assert len(read) > len(rows.accelerators) / 2 and not rows.sources["liquid"].checked


def test_names_are_unique_and_devices_are_found_by_what_drivers_report():
    rows = catalogue()
    names = [name.lower() for one in rows.accelerators for name in {one.name, *one.names}]
    assert len(names) == len({*names})
    for reported, name in {
        "NVIDIA H200": "NVIDIA H200 SXM",
        "NVIDIA GH200 480GB": "NVIDIA GH200",
        "NVIDIA GB200": "NVIDIA GB200",
        "NVIDIA H100 80GB HBM3": "NVIDIA H100 SXM",
        "NVIDIA H100 PCIe": "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-80GB": "NVIDIA A100 80GB",
        "NVIDIA A100-PCIE-40GB": "NVIDIA A100 40GB",
        "NVIDIA GeForce RTX 4090": "NVIDIA RTX 4090",
        "Tesla V100-SXM2-32GB": "NVIDIA V100 SXM2",
        "AMD Instinct MI300X": "AMD Instinct MI300X",
        "AMD EPYC 9654 96-Core Processor": "AMD EPYC 9654",
    }.items():
        found = rows.of_processor(reported)
        assert found is not None and found.name == name, reported
    for one in rows.accelerators:
        assert rows.of_processor(one.name) == one, "a plan's machine has the row's name"
        assert rows.accelerator(one.short) == one
    assert rows.of_processor("NVIDIA X1") is None
    assert {"H100", "A100", "B200"} <= {row["match"] for row in data_sheets()}


RIDGES = {
    "V100": 139, "A100": 153, "H100": 295, "H200": 206, "B200": 281, "MI300X": 247, "MI355X": 312, "v5e": 240, "v5p": 166,
    "v7": 313, "Trn2": 230, "RTX-5090": 117,
}  # fmt: skip
"""FLOP a byte at 16 bits, by hand."""


@pytest.mark.parametrize(("name", "ridge"), RIDGES.items())
def test_ridge_points(name, ridge):
    row = catalogue().accelerator(name)
    found = row.ridge("float16" if name == "V100" else "bfloat16")
    assert found == pytest.approx(ridge, abs=0.6)


def test_measured_rates_are_below_data_sheets_and_wider_formats_no_faster():
    for row in catalogue().accelerators:
        for dtype, rate in row.measured_flops_per_s.items():
            assert 0.4 * row.flops_per_s[dtype] < rate < row.flops_per_s[dtype], row.name
        rates = row.flops_per_s
        for wide, narrow in (("float32", "bfloat16"), ("bfloat16", "float8"), ("float8", "float4")):
            if wide in rates and narrow in rates:
                assert rates[wide] <= rates[narrow], row.name
        for dtype in rates:
            assert row.rate(dtype) == (rates[dtype], dtype)


def test_a_dtype_is_a_capability():
    v100, a100, h100 = (catalogue().accelerator(name) for name in ("V100", "A100", "H100"))
    assert v100.rate("bfloat16") == (125e12, "float16") and "bfloat16" not in v100.native
    assert a100.rate("float8") == (312e12, "bfloat16") and h100.rate("float8") == (1978.9e12, "float8")
    assert h100.rate("int4") == (1978.9e12, "int8") and a100.rate("int4") == (1248e12, "int4")
    assert catalogue().accelerator("EPYC-9654").rate("bfloat16") is None, "unknown, not 0"
    with pytest.raises(SpecError, match="no number format 'fp9'"):
        h100.rate("fp9")


def test_figures_of_merit():
    rows = catalogue()
    h100 = merit(rows, rows.accelerator("H100"), "bfloat16", Decode(8e9))
    assert h100.usd_per_pflop_h == pytest.approx(2.29 / 0.9894) and h100.j_per_tflop == pytest.approx(700 / 989.4)
    assert h100.tokens_per_s == pytest.approx(3.35e12 / 16e9) and h100.devices == 1
    many = decode_bound(rows.accelerator("H100"), "bfloat16", Decode(8e9, batch=1000))
    assert many[0] == pytest.approx(1000 / (1000 * 16e9 / 989.4e12)), "bound by arithmetic"
    large = decode_bound(rows.accelerator("H100"), "bfloat16", Decode(70e9))
    assert large[1] == 2 and large[0] == pytest.approx(2 * 3.35e12 / 140e9)
    # Of 8 equal experts, 2 a token: two sequences visit 1 - (3/4)^2 of the weights.
    few = decode_bound(rows.accelerator("H200"), "bfloat16", Decode(40e9, batch=2, active=10e9))
    assert few[0] == pytest.approx(2 * 4.8e12 / (80e9 * (1 - 0.75**2)))
    tpu = merit(rows, rows.accelerator("v4"), "bfloat16", Decode(8e9))
    assert tpu.j_per_tflop is None and tpu.usd_per_pflop_h is None, "unknown, not 0"
    with pytest.raises(SpecError, match="is none"):
        decode_bound(rows.accelerator("H100"), "bfloat16", Decode(0))


def test_formats_of_targets():
    hopper = formats_of("nvidia-hopper")
    assert hopper["float8"].native and not hopper["int4"].native and "nvfp4" not in hopper
    assert formats_of("B200")["nvfp4"].native and formats_of("nvidia-blackwell")["mxfp4"].native
    assert formats_of("intel-vnni")["int8"].native and not formats_of("intel-vnni")["int4"].native
    assert formats_of("intel-amx")["bfloat16"].native and formats_of("qualcomm")["int8"].native
    assert formats_of("v7")["float8"].native and not formats_of("google-tpu")["float8"].native
    with pytest.raises(SpecError, match="no target 'nvidia-hoper'") as told:
        formats_of("nvidia-hoper")
    assert "nvidia-hopper" in told.value.fix
    rows = catalogue()
    for family in targets():
        assert {*family.formats, *family.stored} <= {*FORMATS} and not {*family.formats} & {*family.stored}
        for name in family.accelerators:
            row = rows.accelerator(name)
            assert row.name == name and family_of(name) == family
            lacks = {"float8", "int8", "nvfp4", "mxfp4"} & {*family.formats} - {*row.native}
            assert lacks == ({"int8"} if name == "Google TPU v7" else set()), "no rate of it is published"
    assert "not known of" in formats_of("v7")["int8"].why


def test_rows_of_ones_own(tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "accelerators:\n- name: Lab Chip\n  names: [lab]\n  memory_bytes: 64e9\n  bytes_per_s: 2e12\n  flops_per_s: {bfloat16: 4e14}\n"
        "  link: lab-link\n- name: My H100\n  names: [H100]\n  memory_bytes: 94e9\n  bytes_per_s: 3.9e12\n"
        "links:\n- {name: lab-link, reach: domain, bytes_per_s: 1e11}\n"
        "prices:\n- {accelerator: lab, usd_per_h: 0.5, sources: {'': lab-bill}}\n"
        "sources:\n  lab-bill: {title: The lab's bill, date: '2026-11'}\n"
    )
    rows = catalogue(str(mine))
    assert rows.accelerator("lab").ridge() == 200 and rows.accelerator("H100").name == "My H100"
    assert rows.prices_of(rows.accelerator("lab"))[0].usd_per_h == 0.5
    assert rows.source(rows.accelerator("lab"), "memory_bytes").title == "the user's own file"
    assert main(["hardware", "lab", "H200", f"--hardware={mine}"]) == 0
    said = capsys.readouterr().out
    assert "lab" in said and "unknown" in said and "0.50" in said
    own_folder().mkdir(parents=True)
    (own_folder() / "a.yaml").write_text("name: Shop Chip\nyear: 2026\n")
    catalogue.cache_clear()
    assert catalogue().accelerator("shop chip").year == 2026


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("accelerators:\n- name: x\n  memory_gb: 3\n", "no field 'memory_gb'"),
        ("accelerators:\n- name: x\n  memory_bytes: 0\n", "memory_bytes = 0"),
        ("accelerators:\n- name: x\n  flops_per_s: {fp9: 1e12}\n", "no number format 'fp9'"),
        ("accelerators:\n- name: x\n  flops_per_s: {float8: -1}\n", "a rate is positive"),
        ("accelerators:\n- name: x\n  link: nvlink9\n", "x.link names 'nvlink9'"),
        ("accelerators:\n- name: x\n  sources: {'': nowhere}\n", "names 'nowhere'"),
        ("accelerators:\n- name: x\n  sources: {bandwidth: own}\n", "the field 'bandwidth'"),
        ("accelerators: 3\n", "accelerators is 3"),
        ("chips:\n- name: x\n", "a list 'chips'"),
        ("- 3\n", "is no mapping"),
        ("prices:\n- {accelerator: H1000, usd_per_h: 1}\n", "names 'H1000'"),
    ],
)
def test_mistakes_in_ones_own_file_name_the_field(tmp_path, text, what):
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    with pytest.raises(SpecError, match=re.escape(what)):
        catalogue(str(mine))
    with pytest.raises(SpecError, match="no file"):
        catalogue(str(tmp_path / "none.yaml"))


def test_grids_and_what_is_not_there():
    rows = catalogue()
    assert rows.grid("FR").g_per_kwh < rows.grid("DE").g_per_kwh < rows.grid("PL").g_per_kwh
    assert rows.grid("DE", 2020).g_per_kwh == 313.4 and rows.grid("coal").g_per_kwh == 1001
    with pytest.raises(SpecError, match="no grid 'XX'"):
        rows.grid("XX")
    with pytest.raises(SpecError, match="no year 1999"):
        rows.grid("DE", 1999)
    with pytest.raises(SpecError, match="no link 'nvlink9'"):
        rows.link("nvlink9")
    with pytest.raises(SpecError, match="no accelerator 'H10'") as told:
        rows.accelerator("H10")
    assert "H100" in told.value.fix
    assert rows.cooled("direct-liquid").pue_low < rows.cooled("air").pue_low


def test_the_verb(capsys):
    assert main(["hardware"]) == 0
    said = capsys.readouterr().out
    assert "Rubin (announced)" in said and "1.29 (0.45)" in said
    assert main(["hardware", "--json", "H100", "B200"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["accelerator"]["name"] for one in told["compared"]] == ["NVIDIA H100 SXM", "NVIDIA B200"]
    assert "ecologits" in told["compared"][0]["accelerator"]["sources"]
    for name in ("links", "prices", "grids", "cooling"):
        assert main(["hardware", f"--list={name}"]) == 0 and capsys.readouterr().out
        assert main(["hardware", f"--list={name}", "--json"]) == 0 and json.loads(capsys.readouterr().out)
    assert main(["hardware", "--target=apple"]) == 0 and "Metal" not in capsys.readouterr().err
    assert main(["hardware", "--batch=0", "H100"]) == 2 and "batch" in capsys.readouterr().err
    assert main(["hardware", "--list=chips"]) == 2 and main(["hardware", "H10"]) == 2
    assert Accelerator.read({"name": "x"}).native == ()
