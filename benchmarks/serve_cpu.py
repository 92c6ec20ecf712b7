"""hone's engine beside llama.cpp on a CPU: one stream, eight streams, and a prompt of 512 tokens, in turn, in one process each.

python -m benchmarks.serve_cpu --peer DIR --tokenizer tokenizer.json [--shapes 0.4b 1b] [--formats bf16 int8 int4] [--rounds 5]

DIR is a folder where `npm i --ignore-scripts node-llama-cpp @node-llama-cpp/linux-x64` ran. The same random weights go to both:
bf16 beside F16, int8 (a scale a row) beside Q8_0, int4 (groups of 128) beside Q4_0; hone's embedding and head stay bf16. As many
threads on both sides as torch takes. Rows hold the best of the rounds on either side, since a busy machine only ever slows a run
down, with the medians in their notes. They go to benchmarks/ledger/serve_cpu.jsonl.

With --processor one thread a side runs, and its processor time counts instead of the clock, which other work on the machine changes
less: tokens of a second that the thread really ran, from the least of the rounds with and without the tokens.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.ledger import append, table
from benchmarks.serve import exactly, random_model
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.exports.api import export
from hone.model import hf
from hone.model.shape import Shape
from hone.serve.engine import Engine, EngineSpec

SHAPES = {
    "0.4b": Shape(
        hidden_size=1024, num_layers=24, num_heads=16, num_kv_heads=8, intermediate_size=4096, max_seq_len=2048
    ),
    "1b": Shape(
        hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, intermediate_size=8192, max_seq_len=2048
    ),
}
VOCAB = 32000
FORMATS = {
    "bf16": ("f16", None),
    "int8": ("q8_0", {"bits": 8, "group_size": 0}),
    "int4": ("q4_0", {"bits": 4, "group_size": 128}),
}
NAMES = {"decode": "decode, one stream", "streams": "decode, 8 streams", "prefill": "prefill of 512 tokens"}
TOKENS = 64


class Own:
    """hone's engine; each measurement gives tokens/s."""

    def __init__(self, folder: Path) -> None:
        self._engine = Engine(folder, EngineSpec(enable_prefix_caching=False, dtype="bfloat16"))

    def processor(self, name: str) -> float:
        """Processor seconds of this process for a measurement; `NAME1` is the same with one token."""
        prompts = (
            [_prompt(512, 13)]
            if name == "prefill"
            else [_prompt(64, 7 + i) for i in range(8 if "streams" in name else 1)]
        )
        tokens = 1 if name == "prefill" or name.endswith("1") else TOKENS + 1
        begun = time.process_time()
        self._engine.generate(prompts, exactly(tokens))
        return time.process_time() - begun

    def measure(self, name: str) -> float:
        if name == "prefill":
            return 512 / self._seconds([_prompt(512, 13)], 1)
        prompts = [_prompt(64, 7 + i) for i in range(8 if name == "streams" else 1)]
        first = self._seconds(prompts, 1)
        return TOKENS * len(prompts) / (self._seconds(prompts, TOKENS + 1) - first)

    def _seconds(self, prompts: list[list[int]], tokens: int) -> float:
        begun = time.perf_counter()
        self._engine.generate(prompts, exactly(tokens))
        return time.perf_counter() - begun


class Peer:
    """llama.cpp in a process of node; the same measurements."""

    def __init__(self, modules: Path, file: Path) -> None:
        script = Path(__file__).with_suffix(".mjs")
        command = ["node", str(script), str(modules), str(torch.get_num_threads()), str(file)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, name: str) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def processor(self, name: str) -> float:
        """Processor seconds of the process for a measurement, in steps of 10 ms."""
        before = self._spent()
        self.measure(name)
        return self._spent() - before

    def _spent(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _prompt(count: int, step: int) -> list[int]:
    return [(place * step) % 8000 + 3 for place in range(count)]


def folders(shape: str, tokenizer: Path, root: Path) -> Path:
    """A folder of random bf16 weights, with a tokenizer, which llama.cpp's files need."""
    folder = root / shape
    if not folder.exists():
        hf.save(random_model(SHAPES[shape].config(VOCAB), "cpu", torch.bfloat16), folder)
        shutil.copy(tokenizer, folder / "tokenizer.json")
    return folder


def compared(shape: str, kind: str, args: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Rows of one shape and format."""
    dense, (type_, step) = folders(shape, args.tokenizer, root), FORMATS[kind]
    file = root / f"{shape}-{type_}.gguf"
    if not file.exists():
        export(dense, file, Run(quiet=True), type=type_)
    folder = root / f"{shape}-{kind}" if step else dense
    if not folder.exists():
        spec = Compress.read({"steps": [{"kind": "rtn", **step}]})  # type: ignore[dict-item]
        spec.make(folder, {"model": Artifact.read(dense)}, Run(quiet=True))
    own, peer = Own(folder), Peer(args.peer / "node_modules", file)
    try:
        if args.processor:
            return [
                _processor_row(f"{shape} {kind}, {NAMES[name]}", type_, own, peer, name, args.rounds) for name in NAMES
            ]
        return [
            _row(f"{shape} {kind}, {NAMES[name]}", type_, own.measure, peer.measure, name, args.rounds)
            for name in NAMES
        ]
    finally:
        peer.close()


def _row(
    figure: str, type_: str, own: Callable[[str], float], peer: Callable[[str], float], name: str, rounds: int
) -> dict[str, Any]:
    own(name), peer(name)  # compiles, and brings the weights to memory
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for values, measure in zip(found, (own, peer)):
            values.append(measure(name))
    ours, theirs = map(max, found)
    medians = [round(statistics.median(values), 1) for values in found]
    row = {"figure": figure, "value": ours, "unit": "tokens/s", "n": rounds, "peer": f"llama.cpp {type_.upper()}"}
    print(f"{figure}: {ours:.1f}, llama.cpp {theirs:.1f}; medians {medians}", flush=True)
    return row | {"peer_value": theirs, "ratio": ours / theirs, "note": f"best of {rounds}; medians {medians}"}


def _processor_row(figure: str, type_: str, own: Own, peer: Peer, name: str, rounds: int) -> dict[str, Any]:
    """A row of processor time: the least of the rounds with all tokens, less the least with one."""
    names = [name] if name == "prefill" else [name, f"{name}1"]
    least = {}
    own.processor(name), peer.processor(name)
    for _ in range(rounds):
        for side, one in (("own", own), ("peer", peer)):
            for each in names:
                least[side, each] = min(least.get((side, each), math.inf), one.processor(each))
    tokens = {"prefill": 512, "decode": TOKENS, "streams": 8 * TOKENS}[name]
    ours, theirs = (
        tokens / (least[side, name] - (least[side, names[1]] if len(names) > 1 else 0.0)) for side in ("own", "peer")
    )
    print(f"{figure}: {ours:.1f}, llama.cpp {theirs:.1f} tokens/s of one thread's processor time", flush=True)
    row = {"figure": figure, "value": ours, "unit": "tokens/s of one thread", "n": rounds, "ratio": ours / theirs}
    return row | {
        "peer": f"llama.cpp {type_.upper()}",
        "peer_value": theirs,
        "note": f"processor time, least of {rounds} rounds in turn",
    }


def main() -> None:
    """Measures every shape and format; prints its rows and adds them to the ledger as soon as it has them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where models are kept for the next run")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--processor", action="store_true", help="one thread's processor time instead of the clock")
    args = parser.parse_args()
    if args.processor:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        root = args.folder or Path(scratch)
        for shape in args.shapes:
            for kind in args.formats:
                rows = compared(shape, kind, args, root)
                print(table(rows), flush=True)
                if not args.no_ledger:
                    append("serve_cpu", rows)


if __name__ == "__main__":
    main()
