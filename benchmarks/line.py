"""Writes the figures of finished lines to the ledger, each under the technique that made it.

    hone run recipes/tiny.yaml && hone run recipes/techniques.yaml
    python -m benchmarks.line work/tiny work/techniques

A figure's peer is the same figure of the run without the technique: the uncompressed model, the run without a drafter,
the cosine schedule, no activation checkpointing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import ledger
from hone.base.artifact import Artifact

Rows = list[dict[str, Any]]
USUAL = {"objective": "next_token", "schedule": "cosine", "optimizer": "adamw"}
"""The techniques of a training that shows none."""


def row(
    technique: str, figure: str, value: float, unit: str, peer: str = "", peer_value: float | None = None
) -> dict[str, Any]:
    """One ledger row; the ratio is hone's value over the peer's."""
    made: dict[str, Any] = {"technique": technique, "figure": figure, "value": value, "unit": unit}
    if peer_value:
        made |= {"peer": peer, "peer_value": peer_value, "ratio": value / peer_value}
    return made


def of_filters(artifact: Artifact) -> Rows:
    """Fraction of its input bytes that each filter and deduplication dropped."""
    steps = json.loads((artifact.folder / "stats.json").read_text())["steps"]
    return [
        row(f"{step['slot']}/{step['name']}", f"bytes dropped, {artifact.manifest['spec']['source']} source",
            100 * (1 - step["bytes_out"] / step["bytes_in"]), "%")
        for step in steps if step["slot"] in ("filter", "dedup") and step["bytes_in"]
    ]  # fmt: skip


def of_compression(line: dict[str, Artifact], base: Artifact) -> Rows:
    """Perplexity and size of every compressed model, beside the model it came from."""
    rows = []
    whole = line[f"eval-{base.name}"].figures["perplexity"].value
    for artifact in line.values():
        scored = line.get(f"eval-{artifact.name}")
        if artifact.kind != "compress" or scored is None:
            continue
        step = artifact.techniques[-1]
        name = f"{step['slot']}/{step['kind']}"
        if step["slot"] == "structured pruner":
            part = artifact.figures["num_params"].value / base.figures["num_params"].value
            what = f"{part:.0%} of the parameters"
        else:
            what = f"{step['bits']} bits" if "bits" in step else f"{step['sparsity']:.0%} zeros"
        what += f", {step['pattern']}" if step.get("pattern", "none") != "none" else ""
        rows.append(
            row(name, f"perplexity, tiny, {what}", scored.figures["perplexity"].value, "", "uncompressed", whole)
        )
        rows.append(row(name, f"size, tiny, {what}", artifact.figures["model_bytes"].value / 1e6, "MB", "uncompressed",
                        base.figures["model_bytes"].value / 1e6))  # fmt: skip
    return rows


def of_serving(line: dict[str, Artifact], plain: list[Artifact]) -> Rows:
    """Acceptance and tokens/s of every drafter, means of its runs, beside those of the runs without one."""
    runs: dict[str, list[Artifact]] = {}
    for artifact in line.values():
        drafter = artifact.manifest["spec"].get("engine", {}).get("drafter") if artifact.kind == "serve" else None
        if drafter:
            runs.setdefault(f"drafter/{drafter['kind']}", []).append(artifact)

    def mean(artifacts: list[Artifact], name: str) -> float:
        return fmean(artifact.figures[name].value for artifact in artifacts)

    rows = []
    for name, artifacts in runs.items():
        accepted = mean(artifacts, "acceptance_rate")
        rows.append(row(name, "draft tokens accepted, tiny, 16 at once", accepted, "fraction"))
        rows.append(row(name, "tokens/s, tiny, 16 at once", mean(artifacts, "tokens_per_s"), "tokens/s", "no drafter",
                        mean(plain, "tokens_per_s")))  # fmt: skip
    return rows


def of_training(line: dict[str, Artifact]) -> Rows:
    """Validation loss of schedules, objectives and optimizers, memory and speed of activation checkpointing."""
    rows = []
    trained = [artifact for artifact in line.values() if artifact.kind == "train"]
    kinds = {one.name: {slot: one.manifest["spec"][slot]["kind"] for slot in USUAL} for one in trained}
    plain = {one.figures["train_tokens"].value: one for one in trained if kinds[one.name] == USUAL}
    for artifact in trained:
        spec, figures = artifact.manifest["spec"], artifact.figures
        count = figures["num_steps"].value  # fewer within a time budget
        steps = f"{count:.0f} steps of {spec['batch_size']} x {spec['seq_len']}"
        if spec["activation_checkpointing"]["kind"] != "none" or artifact.name == "none":
            for figure, unit in (("memory_growth_bytes", "B"), ("tokens_per_s", "tokens/s")):
                without = line["train-none"].figures[figure].value
                rows.append(
                    row(
                        f"activation_checkpointing/{spec['activation_checkpointing']['kind']}",
                        f"{figure}, {steps}",
                        figures[figure].value,
                        unit,
                        "none",
                        without,
                    )
                )
            continue
        what, loss = f"validation loss, {artifact.name}, {steps}", figures["val_loss"].value
        without = plain.get(figures["train_tokens"].value)  # as many steps of the same batches
        for slot, kind in kinds[artifact.name].items():
            if artifact is without:
                rows.append(row(f"{slot}/{kind}", what, loss, "nats/token"))
            elif kind != USUAL[slot]:
                peer = without.figures["val_loss"].value if without is not None else None
                rows.append(row(f"{slot}/{kind}", what, loss, "nats/token", USUAL[slot], peer))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tiny", type=Path, help="folder of the line of recipes/tiny.yaml")
    parser.add_argument("techniques", type=Path, help="folder of the line of recipes/techniques.yaml")
    parser.add_argument("--no-ledger", action="store_true", help="print only")
    chosen = parser.parse_args()
    tiny, extra = (
        {path.parent.name: Artifact.read(path.parent) for path in sorted(folder.glob("*/hone.json"))}
        for folder in (chosen.tiny, chosen.techniques)
    )
    rows = [
        found
        for line in (tiny, extra)
        for artifact in line.values()
        if artifact.kind == "data"
        for found in of_filters(artifact)
    ]
    rows += of_compression({**tiny, **extra}, tiny["train-base"]) + of_training({**tiny, **extra})
    rows += of_serving({**tiny, **extra}, [made for name, made in tiny.items() if name.startswith("serve-plain-")])
    for found in rows:
        print(found["technique"], end="  ")
        print(ledger.table([found]).splitlines()[1])
    if not chosen.no_ledger:
        print(ledger.append("line", rows))


if __name__ == "__main__":
    main()
