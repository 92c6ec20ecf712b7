"""hone's training step beside torchtitan's: the same shape, layout, batch and GPUs, one after the other in one call.

    python -m benchmarks.train_titan --site FOLDER --assets FOLDER --shape qwen3-30b-a3b --layers 6 --batch 4 --seq-len 4096
    python -m benchmarks.train_titan --site FOLDER --assets FOLDER --ranks 2 --shape deepseek-v3-16b --layers 12 --layout zero2-ep ...

`--site` is a folder in which torchtitan 0.2.2 is installed (`pip install --target`), `--assets` one with `tokenizer/` (a small one does: ids
are read, the embedding keeps its size) and the text `c4_test/`. hone's part is benchmarks.train_layouts, whose options are taken; torchtitan
trains its own flavor with as many layers, compiled, as its documentation advises. Its rate is the median of its lines after the first two.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ledger
from benchmarks.ranks import rows_of

FLAVORS = {
    "llama3-8b": ("llama3", "llama3_args", "8B"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_args", "30B-A3B"),
    "deepseek-v3-16b": ("deepseek_v3", "deepseekv3_args", "16B"),
}
"""Model, the name of its table of flavors, and the flavor in torchtitan, by shape of benchmarks.train."""
LAYOUTS = {
    "ddp": ["--parallelism.data_parallel_replicate_degree={ranks}", "--parallelism.data_parallel_shard_degree=1"],
    "zero2": ["--parallelism.fsdp_reshard_after_forward=never"],
    "zero3": [],
    "zero2-ep": ["--parallelism.fsdp_reshard_after_forward=never", "--parallelism.expert_parallel_degree={ranks}"],
    "zero3-ep": ["--parallelism.expert_parallel_degree={ranks}"],
    "tp": ["--parallelism.tensor_parallel_degree={ranks}", "--training.dtype=bfloat16"],
}
"""torchtitan's options by layout of benchmarks.train_layouts."""
PROGRAM = """
import importlib, os, runpy, sys
from dataclasses import replace
model, table, flavor, layers = sys.argv[1:5]
sys.argv = ["torchtitan.train", *sys.argv[5:]]
flavors = getattr(importlib.import_module(f"torchtitan.models.{model}"), table)
cut = {"n_layers": int(layers) or flavors[flavor].n_layers}
if hasattr(flavors[flavor], "attn_type"):  # a causal mask and no more, as hone's part has
    cut |= {"attn_type": "sdpa", "attn_mask_type": "causal"}
flavors["cut"] = replace(flavors[flavor], **cut)
from torchtitan.components.metrics import DeviceMemoryMonitor as Monitor
stats = Monitor.get_peak_stats
def told(self):
    found = stats(self)
    if os.environ.get("RANK") == "0":
        print(f"peak active {found.max_active_gib:.3f} GiB", flush=True)
    return found
Monitor.get_peak_stats = told
runpy.run_module("torchtitan.train", run_name="__main__")
"""
"""Trains a flavor of torchtitan with so many layers, saying the peak of memory in use at every line of its metrics."""


def main() -> None:
    """Runs both, prints the table, adds it to the ledger."""
    arguments, rest = _arguments().parse_known_args()
    given = ["--shape", arguments.shape, "--layers", str(arguments.layers), "--batch", str(arguments.batch)]
    given += ["--seq-len", str(arguments.seq_len), "--ranks", str(arguments.ranks), "--layouts", arguments.layout]
    rows, code = rows_of("train_layouts", arguments.ranks, [*given, *rest]) if not arguments.peer_only else ([], 0)
    rates, active, reserved = titan(arguments)
    if rates:
        peer = statistics.median(rates)
        said = f"torchtitan 0.2.2: {peer:,.0f} tokens/s a GPU ({min(rates):,.0f} to {max(rates):,.0f}), {active:.1f} GiB in use, {reserved:.1f} reserved"
        print(said, flush=True)
        for row in rows:
            row |= {"peer": "torchtitan 0.2.2", "peer_value": peer, "ratio": row["value"] / peer}
            row["note"] += f"; torchtitan: {active:.1f} GiB in use, {reserved:.1f} reserved"
    if rows:
        print(ledger.table(rows), flush=True)
    if rows and not arguments.no_ledger:
        print(ledger.append("train", rows, stamp=ledger.stamp_of("cuda", arguments.ranks)))
    if code or not rates:
        raise SystemExit(f"hone's ranks ended with status {code}; torchtitan gave {len(rates)} rates")


def titan(arguments: argparse.Namespace) -> tuple[list[float], float, float]:
    """(tokens/s a GPU of its lines after the first two, GiB in use at most, GiB reserved at most); no rates where it failed."""
    model, table, flavor = FLAVORS[arguments.shape]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "titan_cut.py"
        program.write_text(PROGRAM)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        command += ["--local-ranks-filter=0", "--role=rank", "--tee=3", str(program), model, table, flavor]
        command += [str(arguments.layers), f"--model.name={model}", "--model.flavor=cut", "--compile.enable"]
        command += [f"--model.hf_assets_path={arguments.assets / 'tokenizer'}", "--training.dataset=c4_test"]
        command += [
            f"--training.dataset_path={arguments.assets / 'c4_test'}", f"--training.seq_len={arguments.seq_len}",
            f"--training.local_batch_size={arguments.batch}", f"--training.steps={arguments.peer_steps}",
            "--metrics.log_freq=2", "--lr_scheduler.warmup_steps=2",
            f"--activation_checkpoint.mode={arguments.peer_checkpointing}",
        ]  # fmt: skip
        command += (
            ["--activation_checkpoint.selective_ac_option=op"] if arguments.peer_checkpointing == "selective" else []
        )
        command += [one.format(ranks=arguments.ranks) for one in LAYOUTS[arguments.layout] if arguments.ranks > 1]
        env = {**os.environ, "PYTHONPATH": str(arguments.site), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "8"}
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        done = subprocess.run(
            ["timeout", str(arguments.peer_timeout), *command],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=folder,
        )  # fmt: skip
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    rates = [float(one.replace(",", "")) for one in re.findall(r"tps: ([\d,]+)", text)]
    if len(rates) < 3:
        print(f"torchtitan ended with status {done.returncode} after {len(rates)} lines:", flush=True)
        print(
            "\n".join(line[:300] for line in text.splitlines() if "rror" in line or "tps" in line)[-3000:], flush=True
        )
    active = max((float(one) for one in re.findall(r"peak active ([\d.]+)", text)), default=0.0)
    reserved = max((float(one) for one in re.findall(r"memory: *([\d.]+)GiB", text)), default=0.0)
    return rates[2:], active, reserved


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True, help="where torchtitan is installed")
    parser.add_argument("--assets", type=lambda given: Path(given).absolute(), required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=FLAVORS)
    parser.add_argument("--layers", type=int, default=0, help="so many layers instead of the shape's")
    parser.add_argument("--layout", default="ddp", choices=LAYOUTS)
    parser.add_argument("--batch", type=int, default=4, help="sequences a GPU and step")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--peer-checkpointing", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--peer-steps", type=int, default=14)
    parser.add_argument("--peer-timeout", type=int, default=240, help="seconds")
    parser.add_argument("--peer-only", action="store_true")
    parser.add_argument("--no-ledger", action="store_true")
    return parser


if __name__ == "__main__":
    main()
