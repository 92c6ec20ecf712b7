"""What a step of each form of distillation takes beside plain training: seconds, tokens a second and peak memory.

    python -m benchmarks.distill_speed --device cuda

Student and teacher have random weights and the tokens are random: neither changes the time of a step. Cached logits are read from
safetensors shards on disk as a training reads them. Every arm makes `--warm` steps that are not timed, then `--steps` that are. On
a GPU clocks and power limits are left as they are.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from hone.feed.load import Batch
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.train import ACTIVATION_CHECKPOINTINGS, OBJECTIVES
from hone.train.cached_logits.facts import FOLDER, LogitsFacts
from hone.train.cached_logits.shards import Cached, CachedLogits, digests, shard_path, write_meta, write_shard
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine

SHAPES = {
    "1b": (
        Shape(hidden_size=1024, num_layers=12, num_heads=16, num_kv_heads=8, intermediate_size=2816, max_seq_len=2048),
        Shape(hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, intermediate_size=5632, max_seq_len=2048),
        {"vocab": 32000, "batch": 8, "seq_len": 2048},
    ),
    "tiny": (
        Shape(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=96, max_seq_len=64),
        Shape(hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=128, max_seq_len=64),
        {"vocab": 300, "batch": 2, "seq_len": 64},
    ),
}
"""By name: student, teacher, and the sizes of a step."""
PLAIN = "plain training"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"kind": "next_token"},
    "forward KL": {"kind": "distill"},
    "reverse KL": {"kind": "distill", "divergence": "reverse_kl"},
    "cached, 64 ids": {"kind": "distill", "teacher": "cached"},
    "hidden states": {"kind": "hidden_states"},
    "MiniLM": {"kind": "minilm"},
    "moving average": {"kind": "distill", "alpha": 0.5, "teacher": "moving_average"},
    "peer": {"kind": "distill", "alpha": 0.5, "teacher": "peer"},
    "on-policy, 64 tokens written": {
        "kind": "distill",
        "divergence": "reverse_kl",
        "text": {"kind": "student", "share": 1.0},
    },
}


def batch_of(sizes: dict[str, int], number: int) -> Batch:
    """Random tokens."""
    draw = np.random.default_rng(number)
    rows = draw.integers(0, sizes["vocab"], (sizes["batch"], sizes["seq_len"] + 1))
    return Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), np.zeros((sizes["batch"], sizes["seq_len"]), np.int32))


def written(folder: Path, sizes: dict[str, int], k: int) -> CachedLogits:
    """A cache of random log-probabilities for two batches, a shard each."""
    (folder / FOLDER).mkdir(parents=True)
    draw = np.random.default_rng(0)
    shape = (sizes["batch"], sizes["seq_len"], k)
    for number in range(2):
        ids = draw.integers(0, sizes["vocab"], shape)
        log_probs = np.full(shape, -np.log(2 * k), np.float32)
        cached = Cached(ids, log_probs, np.full(shape[:2], -np.log(2), np.float32))
        write_shard(shard_path(folder, number), digests(batch_of(sizes, number)), cached, sizes["vocab"])
    facts = {"k": k, "sampled": False, "temperature": 1.0, "seq_len": sizes["seq_len"], "tokenizer": None, "data": ""}
    write_meta(
        folder,
        LogitsFacts(where=str(folder), num_sequences=2 * sizes["batch"], vocab_size=sizes["vocab"], **facts),
    )
    return CachedLogits(folder)


def timed(arm: str, arguments: argparse.Namespace, folder: Path) -> tuple[list[float], float | None]:
    """Seconds of each timed step of an arm, and the peak of a GPU's memory."""
    student, larger, sizes = SHAPES[arguments.shape]
    sizes, device, objective = dict(sizes), torch.device(arguments.device), dict(ARMS[arm])
    if "text" in objective:  # a token at a time: of a whole sequence a step would take minutes
        objective["text"] = {**objective["text"], "prompt_tokens": max(sizes["seq_len"] - 64, 1)}
    spec = OBJECTIVES.read(objective)
    model = build(student.config(sizes["vocab"]), device=device)
    teacher: Any = None
    if spec.from_cache:
        teacher = written(folder, sizes, 64)
    elif spec.from_teacher:
        teacher = build(larger.config(sizes["vocab"]), device=device, dtype=arguments.dtype, seed=1)
    trainer = Trainer(
        model,
        steps=1000,
        schedule=Cosine(),
        objective=spec,
        activation_checkpointing=ACTIVATION_CHECKPOINTINGS.read("none"),
        precision="bf16" if arguments.dtype == torch.bfloat16 else "fp32",
        teacher=teacher,
    )
    on_gpu = device.type == "cuda"
    seconds = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for step in range(arguments.warm + arguments.steps):
        batch = batch_of(sizes, step % 2)
        begun = time.perf_counter()
        trainer.step(batch)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    peak = float(torch.cuda.max_memory_allocated()) if on_gpu else None
    return seconds[arguments.warm :], peak


def main() -> None:
    """Times every arm, prints a row for each as it ends, and adds them to the ledger where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=[*SHAPES], help="default: 1b on a GPU, tiny on a CPU")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--arms", nargs="*", default=[*ARMS], help="some of the arms")
    parser.add_argument("--out", type=Path, help="file that keeps the rows, each as it ends")
    parser.add_argument("--commit", help="of the code that runs, for --out where the folder is no checkout")
    parser.add_argument("--from", dest="file", type=Path, help="a file of --out: add its rows to the ledger")
    parser.add_argument("--ledger", action="store_true", help="add the rows to the ledger")
    arguments = parser.parse_args()
    if arguments.file:
        stamp, rows = ledger.Kept.read(arguments.file)
        print(ledger.table(rows), ledger.append("distill_speed", rows, stamp=stamp), sep="\n")
        return
    kept = ledger.Kept(arguments.out, arguments.device, arguments.commit) if arguments.out else None
    on_gpu = arguments.device.startswith("cuda")
    arguments.shape = arguments.shape or ("1b" if on_gpu else "tiny")
    arguments.dtype = torch.bfloat16 if on_gpu else torch.float32
    rows = []
    sizes = SHAPES[arguments.shape][2]
    tokens, plain = sizes["batch"] * sizes["seq_len"], None
    for arm in arguments.arms:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                seconds, peak = timed(arm, arguments, Path(scratch) / "cache")
            except torch.OutOfMemoryError:
                print(f"{arm}: out of memory", flush=True)
                continue
        gc.collect()
        middle = statistics.median(seconds)
        plain = middle if arm == PLAIN else plain
        note = f"{sizes['batch']} x {sizes['seq_len']} tokens, shape {arguments.shape}"
        note += "" if peak is None else f"; peak {peak / 2**30:.2f} GiB"
        row = {"figure": f"tokens/s of a step, {arm}", "value": tokens / middle, "unit": "tokens/s", "n": len(seconds)}
        if plain is not None and arm != PLAIN:
            row |= {"peer": PLAIN, "peer_value": tokens / plain, "ratio": plain / middle}
        rows.append({**row, "note": note})
        if kept:
            kept.add(rows[-1])
        print(ledger.table(rows[-1:]).splitlines()[-1], "|", note, flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    if arguments.ledger:
        ledger.append("distill_speed", rows, arguments.device)


if __name__ == "__main__":
    main()
