"""hone and vLLM in turn on one GPU, every load of `benchmarks.serve_load`: `python -m benchmarks.serve --peer vllm`.

Each engine runs in a process of its own and has all memory: hone, vllm, hone, vllm for each of `--shapes` (names of
`benchmarks.serve.SHAPES`, or folders with a config.json; both engines read the same folder, weights are random). When the
time of `--seconds` is short it stops after hone, vllm, hone or after one of each and says so. The vLLM that is measured is
that of `--peer-python`, with `--peer-path` (folders of its packages) first on its path; hone never sees these.
Read bandwidth and the rate of matrix products are measured first, in the same run; `serve_load.limit` makes of them the
figure that no schedule exceeds. Lines as they come go to `--json`; `--from FILE...` makes table and rows of such lines
elsewhere (a GPU machine may have no repository to commit to).

Row in ledger/serve.jsonl: `figure` "SHAPE, serve_load: LOAD", `value` hone's median, `unit`, `n` runs, `half_range` (half of
highest less lowest), `peer`, `peer_value`, `peer_n`, `peer_half_range`, `ratio` (hone over peer) and `better` ("higher" or "lower"
figures), `limit`, `of_limit` and `peer_of_limit` (1 is the roofline), `order` ("ABAB": A is hone), `ceilings`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ledger import append, stamp_of, table
from benchmarks.serve_load import LOADS, limit

ROOT = Path(__file__).resolve().parents[1]
LOWER = ("s", "ms", "ms/token")
"""Units of which fewer are better."""
PYTHON = sys.executable
"""The interpreter that has hone."""
Lines = list[dict[str, Any]]


def folder_of(shape: str, under: Path) -> Path:
    """A folder with the config.json of a named shape, and no weights; a folder that exists is itself."""
    from benchmarks.serve import SHAPES

    if (Path(shape) / "config.json").is_file():
        return Path(shape).resolve()
    if shape not in SHAPES:
        raise SystemExit(f"--shapes {shape}: neither a folder with config.json nor one of {', '.join(SHAPES)}")
    import torch

    from hone.model.hf import write_config

    folder = under / shape
    folder.mkdir()
    found, vocab_size = SHAPES[shape]
    write_config(found.config(vocab_size, None, 0), folder, torch.bfloat16)
    return folder


def measure_ceilings() -> dict[str, Any]:
    """Line with bytes/s of reading and FLOP/s of bfloat16 products, of this machine's GPU or else its CPU, and its stamp."""
    import torch

    if torch.cuda.is_available():
        from benchmarks.kernels.timing import ceilings

        found = ceilings()
        return {"ceilings": {"read": found.read, "products": found.gemm}, "stamp": stamp_of("cuda")}
    from hone.measure.calibrate import calibrate

    rates = calibrate("cpu", "float32")
    peak = rates.peak_flops_per_s("float32")
    assert peak is not None, "calibrate measures the dtype it is asked for"
    return {"ceilings": {"read": rates.read_bytes_per_s, "products": peak}, "stamp": stamp_of("cpu")}


# ---- one process after another --------------------------------------------------------------------------------------


def run_to_end(
    command: list[str], env: dict[str, str], log: Path, seconds: float, each: Callable[[], None] = lambda: None
) -> str:
    """Runs `command` for at most `seconds`, and `each` four times a second; "" or what went wrong. What it started ends with it."""
    ends = time.monotonic() + max(1.0, seconds)
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while (code := process.poll()) is None and time.monotonic() < ends:
                time.sleep(0.25)
                each()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code is None:
        return f"stopped after {seconds:.0f} s: {_tail(log)}"
    return "" if code == 0 else f"ended with {code}: {_tail(log)}"


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf8", errors="replace")[-1500:].strip()


class Run:
    """All processes of one comparison, their lines, and the clock."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.ends = time.monotonic() + args.seconds
        self.lines: Lines = []

    def say(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        print("  " + json.dumps({name: value for name, value in line.items() if name != "stamp"}), flush=True)
        if self.args.json:
            with open(self.args.json, "a", encoding="utf8") as file:
                file.write(json.dumps(line) + "\n")

    def ceilings(self) -> None:
        """Measured in a process of its own, which leaves no memory behind."""
        out = self.work / "ceilings.json"
        command = [PYTHON, "-m", "benchmarks.serve_peer", "--peer", "none", "--measure-ceilings", str(out)]
        wrong = run_to_end(command, self._env(""), self.work / "log", self.ends - time.monotonic())
        if wrong:
            raise SystemExit(f"bandwidth and products were not measured: {wrong}")
        self.say(json.loads(out.read_text(encoding="utf8")))

    def shape(self, shape: str, ends: float, kv_cache_dtype: str = "auto") -> None:
        """hone and the peer in turn on one shape, as many legs of `--rounds` as fit before `ends`."""
        folder = folder_of(shape, self.work)
        peers = () if self.args.peer == "none" else (self.args.peer,)
        legs = [engine for _ in range(self.args.rounds) for engine in ("hone", *peers)]
        took: dict[str, float] = {}
        for place, engine in enumerate(legs):
            left = ends - time.monotonic()
            if left < max(10.0, took.get(engine, 0.0)):
                print(f"{folder.name}: {left:.0f} s are left, so {' '.join(legs[place:])} did not run", flush=True)
                return
            print(f"{folder.name}: {engine}, at most {left:.0f} s", flush=True)
            begun = time.monotonic()
            self.leg(engine, folder, place, left, kv_cache_dtype)
            took[engine] = time.monotonic() - begun

    def leg(self, engine: str, folder: Path, place: int, seconds: float, kv_cache_dtype: str = "auto") -> None:
        """One engine under all loads; lines of loads that ended count even if a later one failed."""
        args, out = self.args, self.work / f"{folder.name}-{place}.jsonl"
        python = args.peer_python if engine == args.peer else PYTHON
        command = [python, "-m", "benchmarks.serve_load", engine, str(folder), "--json", str(out)]
        if getattr(args, "memory", None) is not None:
            command += ["--memory", str(args.memory)]
        command += ["--kv-cache-dtype", kv_cache_dtype, "--loads", *args.loads]
        if args.profile and engine == "hone" and place == 0:
            command.append("--profile")
        said = 0

        def follow() -> None:
            nonlocal said
            text = out.read_text(encoding="utf8") if out.exists() else ""
            for line in text[: text.rfind("\n") + 1].splitlines()[said:]:
                said += 1
                self.say(json.loads(line) | {"folder": str(folder), "leg": place, **bytes_of(folder, kv_cache_dtype)})

        env = self._env(args.peer_path if engine == args.peer else "")
        wrong = run_to_end(command, env, self.work / "log", seconds, follow)
        follow()
        if wrong:
            print(f"  {engine} {wrong}", flush=True)

    def _env(self, path: str) -> dict[str, str]:
        parts = (str(ROOT), path, os.environ.get("PYTHONPATH", ""))
        return os.environ | {"PYTHONPATH": os.pathsep.join(part for part in parts if part)}


def bytes_of(folder: Path, kv_cache_dtype: str) -> dict[str, float]:
    """What `serve_load.limit` takes: bytes of a weight of a layer and of a number in the cache, where these are not two, and
    the rate of products of 8-bit numbers, twice that of bfloat16."""
    values = json.loads((folder / "config.json").read_text(encoding="utf8")).get("quantization_config", {})
    groups = list(values.get("config_groups", {}).values())
    found = {"weight_bytes": groups[0]["weights"]["num_bits"] / 8} if groups else {}
    if groups and groups[0].get("input_activations"):
        found["product_rate"] = 2.0
    return found | ({} if kv_cache_dtype == "auto" else {"cache_bytes": 1.0})


# ---- lines to rows ----------------------------------------------------------------------------------------------------


def read_lines(paths: Iterable[str | Path]) -> Lines:
    return [json.loads(line) for path in paths for line in Path(path).read_text(encoding="utf8").splitlines() if line]


def rows_of(lines: Lines, configs: dict[str, Any]) -> Lines:
    """Rows of the ledger; `configs`: ModelConfig by the name of its folder, for the limits."""
    ceilings = next((line["ceilings"] for line in lines if "ceilings" in line), None)
    note = next((line["note"] for line in lines if "stamp" in line and line.get("note")), None)
    found: dict[tuple[str, str], Lines] = {}
    for line in lines:
        if "load" in line:
            found.setdefault((line["model"], line["load"]), []).append(line)
    rows = []
    for (model, load), here in found.items():
        mine = [line for line in here if line["engine"] == "hone"]
        theirs = [line for line in here if line["engine"] != "hone"]
        if not mine:
            continue
        row = {"figure": f"{model}, serve_load: {load}", **_values(mine), "unit": mine[0]["unit"]}
        row["better"] = "lower" if row["unit"] in LOWER else "higher"
        if theirs:
            other = _values(theirs)
            row["peer"] = f"{theirs[0]['engine']} {theirs[0].get('version') or ''}".strip()
            row |= {f"peer_{name}": value for name, value in other.items()}
            row["ratio"] = row["value"] / other["value"]
        if ceilings and load in LOADS and model in configs:
            held = {name: mine[0][name] for name in ("weight_bytes", "cache_bytes", "product_rate") if name in mine[0]}
            bound = limit(load, configs[model], ceilings["read"], ceilings["products"], **held)
            row |= {"limit": bound, "of_limit": _fraction(row["value"], bound, row["better"])}
            if theirs:
                row["peer_of_limit"] = _fraction(row["peer_value"], bound, row["better"])
            row["ceilings"] = ceilings
        kept = ("engine", "version", "model", "load", "value", "unit", "seconds", "folder", "leg")
        row |= {name: value for name, value in mine[0].items() if name not in kept}  # what a profile says beside
        row["order"] = "".join("A" if line["engine"] == "hone" else "B" for line in here)
        rows.append(row | ({"note": note} if note else {}))
    return rows


def _values(lines: Lines) -> dict[str, Any]:
    values = [line["value"] for line in lines]
    half_range = (max(values) - min(values)) / 2 if len(values) > 1 else None
    return {"value": statistics.median(values), "n": len(values), "half_range": half_range}


def _fraction(value: float, bound: float, better: str) -> float:
    return bound / value if better == "lower" else value / bound


def configs_of(lines: Lines) -> dict[str, Any]:
    """ModelConfig by name of folder: of a folder that a line names, or else of a shape of that name."""
    from benchmarks.serve import SHAPES
    from hone.model.families.config_json import from_hf

    configs = {}
    for line in lines:
        name, path = line.get("model", ""), Path(line.get("folder", "")) / "config.json"
        shape = next((one for one in SHAPES if name == one or name.startswith(f"{one}-")), None)  # "-": a form of it
        if shape:
            configs[name] = SHAPES[shape][0].config(SHAPES[shape][1], None, 0)
        elif name and path.is_file():
            configs[name] = from_hf(json.loads(path.read_text(encoding="utf8")))
    return configs


def finish(lines: Lines, args: argparse.Namespace) -> None:
    """Prints the table and adds the rows to the ledger."""
    rows = rows_of(lines, configs_of(lines))
    print(table(rows))
    if any(row.get("better") == "lower" for row in rows):
        print("ratio is hone over its peer; of figures in s and ms lower ones are better. of limit: hone's, 1 at most")
    stamp = next((line["stamp"] for line in lines if "stamp" in line), None)
    if stamp is None:
        raise SystemExit("the lines do not say where they were measured (a line with `stamp`): nothing was added")
    if not args.no_ledger:
        print(append("serve", rows, stamp=stamp))


def compare(args: argparse.Namespace, cache_dtypes: Sequence[str] = ()) -> None:
    """All shapes, each with its share of the time that is left. `cache_dtypes`: of each shape's cache, "auto" by default."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end, and what came is kept
    with tempfile.TemporaryDirectory(prefix="hone-peer-") as work:
        run = Run(args, Path(work))
        try:
            run.ceilings()
            for place, shape in enumerate(args.shapes):
                now = time.monotonic()
                kept = cache_dtypes[place] if cache_dtypes else "auto"
                run.shape(shape, now + (run.ends - now) / (len(args.shapes) - place), kept)
        finally:
            if any("load" in line for line in run.lines):
                finish(run.lines, args)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options of a comparison, but for what it compares."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="vllm", choices=("vllm", "none"), help="none: hone alone")
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=LOADS)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each engine")
    parser.add_argument("--seconds", type=float, default=540.0, help="most seconds of all")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that runs the peer")
    parser.add_argument("--peer-path", default="", help="folder of the peer's packages, first on its path")
    parser.add_argument("--profile", action="store_true", help="hone's first run: GPU-busy share and host time")
    parser.add_argument("--json", default="", help="file that gets the lines as they come")
    parser.add_argument("--no-ledger", action="store_true")
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="*", default=["llama3-8b", "qwen3-0.6b"], help="names or folders")
    parser.add_argument("--from", dest="source", nargs="*", default=[], help="files of --json: no run, table and rows")
    parser.add_argument("--measure-ceilings", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_ceilings:
        Path(args.measure_ceilings).write_text(json.dumps(measure_ceilings()), encoding="utf8")
    elif args.source:
        finish(read_lines(args.source), args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
