"""Serving a mixture of experts of Qwen3-30B-A3B's shape on one GPU, hone and then vLLM: `python -m benchmarks.moe_serving --peer vllm`.

Each engine has a process of its own, the same folder of a config.json, random weights in bfloat16, at most 512 sequences and the
same part of the GPU's memory (61 GB of it are weights). Loads are those of `benchmarks.serve_load`: 512 requests of 100..1024
tokens in and out, one request, 64 prompts of 4096. `--form int4` (int8, fp8-block) quantizes the experts and attention, not the
router; `--shape gpt-oss-20b --form mxfp4` is the experts of gpt-oss as they ship. `--profile` says first where hone's decode steps of 1 and 64 sequences go: the part of the time in which some kernel runs, and
the longest kernels. Rows as those of `benchmarks.serve_peer`, in ledger/serve.jsonl; what must hold is printed beside them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from benchmarks.serve_bits import FORMS, write_form
from benchmarks.serve_peer import Run, finish, folder_of, parser_of

SHAPE = "qwen3-30b-a3b"
WANTED = {"throughput": (">=", 1.15), "batch 1": ("<=", 0.8)}
"""Of hone's figure over the peer's."""


def compare(args: argparse.Namespace) -> Run:
    """hone and then the peer, each at most `--leg-seconds`."""
    with tempfile.TemporaryDirectory(prefix="hone-moe-") as work:
        folder = (folder_of if args.form == "bf16" else lambda shape, under: write_form(shape, args.form, under))(
            args.shape, Path(work)
        )
        run = Run(args, Path(work))
        run.ceilings()
        try:
            for place, engine in enumerate(("hone", *((args.peer,) if args.peer != "none" else ()))):
                left = min(args.leg_seconds, run.ends - time.monotonic())
                print(f"{folder.name}: {engine}, at most {left:.0f} s", flush=True)
                run.leg(engine, folder, place, left)
        finally:
            if any("load" in line for line in run.lines):
                finish(run.lines, args)
    return run


def said_of(run: Run) -> list[str]:
    """Each load that has a bound, in words."""
    found: dict[str, dict[str, float]] = {}
    for line in run.lines:
        if line.get("load") in WANTED:
            found.setdefault(line["load"], {})[line["engine"]] = line["value"]
    said = []
    for load, values in found.items():
        peer = next((value for engine, value in values.items() if engine != "hone"), None)
        if peer is None or "hone" not in values:
            continue
        sign, bound = WANTED[load]
        ratio = values["hone"] / peer
        held = ratio >= bound if sign == ">=" else ratio <= bound
        said.append(f"{load}: {ratio:.2f} x the peer, {sign} {bound} wanted: {'holds' if held else 'MISSED'}")
    return said


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--shape", default=SHAPE, help="a name of benchmarks.serve.SHAPES, or a folder with a config.json"
    )
    parser.add_argument("--form", default="bf16", choices=FORMS, help="how weights are stored")
    parser.add_argument("--memory", type=float, default=0.92, help="part of the GPU's memory that an engine may use")
    parser.add_argument("--leg-seconds", type=float, default=330.0, help="most seconds of one engine")
    parser.set_defaults(loads=["batch 1", "prefill", "throughput"], rounds=1)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print("\n".join(said_of(compare(args))))


if __name__ == "__main__":
    main()
