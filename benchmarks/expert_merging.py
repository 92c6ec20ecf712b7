"""Fewer experts, of a model from scratch and of an upcycled one: what the loss on held-out text costs where they are removed, and where they are merged.

    python -m benchmarks.expert_merging --data FOLDER_OR_TAR_XZ --out OUT --minutes 3    # on the machine with a GPU; writes OUT/result.json
    python -m benchmarks.expert_merging --page OUT/result.json      # here: the table of docs/compression.md, benchmarks/ledger/expert_merging.jsonl
    python -m benchmarks.expert_merging --data FOLDER --out OUT --small                  # the same on a CPU in seconds: nothing of it is a figure

Both models are trained here, as `benchmarks.moe_twin` trains them, with its options. Every arm measures the same calibration sequences of the
training data, and none is healed.
"""

from __future__ import annotations

import argparse
import json
import math
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.moe_twin import DENSE, SCRATCH, UPCYCLED, Twins, parser_of, sized
from hone.base.durable import write_atomic
from hone.base.run import Run
from hone.compress import STRUCTURED_PRUNERS
from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.model.hf import Checkpoint, save

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compression.md"
BEGIN, END = "<!-- expert_merging: written by `python -m benchmarks.expert_merging --page` -->\n", "<!-- end -->"
REMOVED = "`experts` (REAP)"
ARMS: dict[str, dict[str, Any]] = {
    REMOVED: {"kind": "experts"},
    "`experts`, `importance: frequency`": {"kind": "experts", "importance": "frequency"},
    "`expert_merging`": {"kind": "expert_merging"},
    "`expert_merging`, `align: false`": {"kind": "expert_merging", "align": False},
    "`expert_merging`, `router: fitted`": {"kind": "expert_merging", "router": "fitted"},
    "`expert_merging`, `align: false`, `router: fitted`": {"kind": "expert_merging", "align": False, "router": "fitted"},
    "`expert_merging`, `align: false`, `router: dominant`": {"kind": "expert_merging", "align": False, "router": "dominant"},
    "M-SMoE's": {"kind": "expert_merging", "similarity": "router", "grouping": "dominant", "router": "dominant"},
}  # fmt: skip
SHARES = (0.75, 0.5)
MODELS = {SCRATCH: "from scratch", UPCYCLED: "upcycled"}


def trained(twins: Twins) -> Iterator[tuple[str, Path]]:
    """The folders of both models, which it trains."""
    folder, half = twins.folder, twins.steps // 2
    twins.run(DENSE, 0, twins.made(DENSE, 0), 0)
    for arm in MODELS:
        model, first = twins.made(SCRATCH, 0), 0
        if arm == UPCYCLED:
            model, first = twins.upcycle(folder / "half-0", 0.0, 0), half
        save(twins.run(arm, 0, model, first).model, folder / arm)
        yield arm, folder / arm


def measured(options: argparse.Namespace) -> None:
    """Trains both models and compresses each by every arm."""
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        if options.data.suffix == ".xz":
            with tarfile.open(options.data) as archive:
                archive.extractall(scratch, filter="data")
            options.data = Path(scratch)
        twins = Twins(options, Path(scratch))
        twins.choose_steps()
        first = twins.train.num_sequences(twins.sizes["seq_len"]) - options.calibration_sequences
        read = np.arange(first, first + options.calibration_sequences)
        tokens = twins.train.sequences(read, twins.sizes["seq_len"], 0).tokens
        calibration = Calibration(np.ascontiguousarray(tokens), None, "the end of the training data")
        found: dict[str, Any] = {}
        for model, folder in trained(twins):
            dtype = torch.float32 if options.small else torch.bfloat16
            found[model] = {"whole": _loss(twins, Checkpoint(folder), dtype), "arms": {}}
            for share in SHARES:
                for arm, step in ARMS.items():
                    flow = Flow(calibration, 8, options.device, dtype)
                    pruner = STRUCTURED_PRUNERS.read({**step, "num_experts": share})
                    state = twins.folder / f"{model}-{share}-{len(found[model]['arms'])}.json"
                    made, _ = pruner.rewrite(Checkpoint(folder), flow, (), state, Run(quiet=True))
                    loss = _loss(twins, made, dtype)
                    found[model]["arms"][f"{arm} {share}"] = loss
                    twins.say(f"{model}: {arm} {share}: {loss:.4f} nats, whole {found[model]['whole']:.4f}")
            result = json.loads((options.out / "result.json").read_text())
            write_atomic(options.out / "merging.json", json.dumps({**result, "merging": found}, indent=1).encode())
    print(table(json.loads((options.out / "merging.json").read_text())))


def _loss(twins: Twins, source: Any, dtype: torch.dtype) -> float:
    """Nats a token on the val split."""
    return twins.loss(source.build(twins.device, dtype))


def _bits(result: dict[str, Any], nats: float) -> float:
    return nats / math.log(2) / result["bytes_per_token"]


def _arms(result: dict[str, Any]) -> list[str]:
    """The arms that were measured."""
    return [
        arm
        for arm in ARMS
        if all(f"{arm} {share}" in found["arms"] for found in result["merging"].values() for share in SHARES)
    ]


def table(result: dict[str, Any]) -> str:
    """Bits a byte of every arm, in Markdown."""
    heads = [f"{name}, {share:.0%} of the experts" for name in MODELS.values() for share in SHARES]
    lines = [f"| technique | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    found = result["merging"]
    whole = [_bits(result, found[model]["whole"]) for model in MODELS for _ in SHARES]
    lines.append(f"| (all experts) | {' | '.join(f'{one:.4f}' for one in whole)} |")
    for arm in _arms(result):
        own = [_bits(result, found[model]["arms"][f"{arm} {share}"]) for model in MODELS for share in SHARES]
        cells = (f"{one:.4f} ({one - base:+.4f})" for one, base in zip(own, whole, strict=True))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def words(result: dict[str, Any]) -> str:
    """What was measured, in a paragraph."""
    sizes, machine, model = result["sizes"], result["stamp"]["machine"], result["models"][SCRATCH]
    where = machine["gpus"][0]["name"] if machine.get("gpus") else machine["cpu"]
    tokens = result["steps"] * sizes["batch_size"] * sizes["seq_len"]
    return (
        f"Bits a byte on held-out text, without healing, of two models of {model['params'] / 1e6:.1f} M weights ({sizes['num_experts']} experts a layer, "
        f"{sizes['granularity']} of them a token) trained on {tokens / 1e6:.1f} M tokens of {result['text'] or 'text'}, one from scratch, one upcycled at half; "
        f"{where}, one seed."
    )


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The ledger's rows: each arm against REAP's, with as many experts."""
    found, kept = result["merging"], []
    for model, name in MODELS.items():
        for share in SHARES:
            peer = _bits(result, found[model]["arms"][f"{REMOVED} {share}"])
            for arm in _arms(result):
                step, value = ARMS[arm], _bits(result, found[model]["arms"][f"{arm} {share}"])
                whole = _bits(result, found[model]["whole"])
                row = {
                    "figure": f"{share:.0%} of the experts of a model {name}, {arm.replace('`', '')}: val loss", "value": value,
                    "unit": "bits/byte", "n": 1, "note": f"{words(result)} All experts: {whole:.4f}",
                }  # fmt: skip
                if arm != REMOVED:
                    row |= {"peer": "experts (REAP)", "peer_value": peer, "ratio": value / peer}
                if arm in (REMOVED, "`expert_merging`", "`expert_merging`, `router: fitted`"):
                    row["technique"] = f"structured pruner/{step['kind']}"
                kept.append(row)
    return kept


def write_page(path: Path, *, keep: bool = True) -> None:
    """Puts the table into docs/compression.md and, with `keep`, the rows into the ledger."""
    result = json.loads(path.read_text(encoding="utf8"))
    ledger.put_between(PAGE, BEGIN, END, f"{words(result)}\n\n{table(result)}\n\n")
    if keep:
        print(ledger.append("expert_merging", rows(result), stamp=result["stamp"]))


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    parser = parser_of(__doc__ or "", minutes=3)
    parser.add_argument("--calibration-sequences", type=int, default=0, help="0: 128, with --small 16")
    options = parser.parse_args(arguments)
    if options.page:
        write_page(options.page)
        return
    sized(parser, options)
    options.seeds, options.calibration_sequences = 1, options.calibration_sequences or (16 if options.small else 128)
    measured(options)


if __name__ == "__main__":
    main()
