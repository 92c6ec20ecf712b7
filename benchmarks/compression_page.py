"""Writes the tables of docs/compression.md and hone/plan/quoted.json from the ledger: the text around the tables is written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks.load_in_vllm import FORMATS, LEDGER
from hone.compress import PRUNERS
from hone.plan.fitting import QUOTED, options

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compression.md"


def rows() -> list[dict[str, Any]]:
    """The latest row of each method of benchmarks.quality, in the order of benchmarks/quality.yaml."""
    path = ROOT / "benchmarks" / "ledger" / "quality.jsonl"
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf8").splitlines() if path.exists() else ():
        row = json.loads(line)
        latest.pop((row["model"], row["method"]), None)
        latest[row["model"], row["method"]] = row
    order = [
        line.split("name: ")[1].split(",")[0].strip("\"'{} ")
        for line in Path(__file__).with_name("quality.yaml").read_text(encoding="utf8").splitlines()
        if line.startswith("- {name: ")
    ]
    found = [row for row in latest.values() if row["method"] in order]
    return sorted(found, key=lambda row: (row["model"], order.index(row["method"])))


def table() -> str:
    """Method, bits, perplexity, divergence, agreement and seconds of every row."""
    lines = [
        "| method | bits a weight, whole folder | perplexity | KL, nats | same top token | seconds | calibration seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    found = rows()
    if found:
        lines.append(f"| dense, bfloat16 | 16.00 | {found[0]['peer_value']:.3f} | 0 | 100 % | - | - |")
    for row in found:
        interval = "" if row["ci95"] is None else f" ± {row['ci95']:.3f}"
        pruned = any(step["kind"] in PRUNERS or step.get("sparsity") for step in row["steps"])
        zeros = f", {100 * row['sparsity']:.0f} % zeros" if pruned else ""
        on_gpu = str(row["machine"].get("device", "")).startswith("cuda")
        seconds = f"{row['seconds']:.1f}" if on_gpu else "-"
        lines.append(
            f"| {row['method']} | {row['bits_per_weight']:.2f}{zeros} | {row['value']:.3f}{interval} | {row['kl']:.4f} | "
            f"{100 * row['top1']:.1f} % | {seconds} | {row['n'] if row['calibration'] != 'none' else '-'} |"
        )
    return "\n".join(lines)


GENERATIONS = {
    "int8": "Turing",
    "w4a8": "Turing",
    "w4a8-fp8": "Hopper",
    "fp8": "Ada; older ones round weights alone",
    "fp8-weights": "Turing",
    "kv-fp8": "Ada",
    "w8a8-fp8-kv-fp8": "Ada",
    "nvfp4": "Blackwell; older ones round weights alone",
    "mxfp4": "Ampere",
    "nf4": "Volta",
    "bf16": "Volta",
}
"""The oldest NVIDIA generation by vLLM 0.26's sources, of the longest of these beginnings of a format's name; else Turing."""


def vllm_table() -> str:
    """What vLLM made of every format: the latest row of each in the ledger of benchmarks.load_in_vllm."""
    latest = {row["format"]: row for row in map(json.loads, LEDGER.read_text(encoding="utf8").splitlines())}
    lines = [
        "| steps | on a Hopper GPU | difference from hone, nats | hone in bfloat16 from hone in float32 | same token | runs from |",
        "|---|---|---|---|---|---|",
    ]
    for name, steps in FORMATS.items():
        if name not in latest:
            continue
        row = latest[name]
        said = yaml.safe_dump(steps, default_flow_style=True, width=1000, sort_keys=False).strip()
        said = said[1:-1] if len(steps) < 2 else said
        start = f"| {f'`{said}`' if said else 'dense, bfloat16'} | "
        if row["value"] is None:
            lines.append(f"{start}refused: {row['refused'].split('(')[0].strip()} | - | - | - | - |")
            continue
        known = max((key for key in GENERATIONS if name.startswith(key)), key=len, default="")
        figures = (f"{row['value']:.3f}", f"{row['of_dtype_alone']:.3f}", f"{100 * row['same_choice']:.0f} %")
        lines.append(f"{start}loads | {' | '.join(figures)} | {GENERATIONS.get(known, 'Turing')} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """`text` with the parts between two marks replaced by the tables."""
    for begin, made in (("<!-- quality -->\n", table()), ("<!-- vllm -->\n", vllm_table())):
        before, found, rest = text.partition(begin)
        _, mark, after = rest.partition("<!-- end -->")
        assert found and mark, f"{PAGE} lacks the marks of the table"
        text = f"{before}{begin}{made}\n{mark}{after}"
    return text


def quoted() -> str:
    """The divergences that `--fit` quotes of the reference model, each with its provenance, as the JSON of hone/plan/quoted.json."""
    methods = sorted({option.method for calibrated in (True, False) for option in options(calibrated)} - {""})
    found = {row["method"]: row for row in rows()}
    (name,) = {found[method]["model"] for method in methods}
    sizes = {round(8 * found[method]["model_bytes"] / found[method]["bits_per_weight"]) for method in methods}
    said = {
        "model": {"name": f"hone's {name}", "num_params": sizes.pop()},
        "ledger": "benchmarks/ledger/quality.jsonl, docs/compression.md",
        "kl": {method: _quote(found[method]) for method in methods},
    }
    assert not sizes, "the rows are of models of different sizes"
    return json.dumps(said, indent=1) + "\n"


def _quote(row: dict[str, Any]) -> dict[str, Any]:
    """A row's divergence and where it comes from; `half_width` of its 95 % interval over seeds, None where the ledger has none."""
    return {
        "value": round(row["kl"], 5),
        "half_width": row.get("kl_ci95"),
        "n": row["n"],
        "tokens": row["tokens"],
        "date": row["time"][:10],
        "commit": row["commit"],
    }


if __name__ == "__main__":
    QUOTED.write_text(quoted(), encoding="utf8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf8")), encoding="utf8")
