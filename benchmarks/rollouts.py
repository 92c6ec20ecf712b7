"""GRPO on sums of two digits up to 3, several seeds: how the reward grows, and what writing the answers takes beside training on them.

    python -m benchmarks.rollouts                                    # a CPU: some minutes
    python -m benchmarks.rollouts --device cuda --precision bf16     # one GPU, under 5 minutes: also a model of 1.2 B random weights

A row a seed: the mean reward of the first and the last ten steps, and seconds; then their mean difference with a 95 % interval of
Student's t. `served` compares what the engine over the trained weights writes after the last step with a new engine's on a copy
of them (greedy). On a GPU `speed` trains random weights of Llama 3.2 1B's shape and says tokens/s of writing. Rows are printed and go to
$OUT/rollouts.jsonl if OUT is set. Reads no setting of the device and changes none.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hone.base.run import Run
from hone.data.stage import Data
from hone.feed.load import PackedTokens
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.model.tokenizer import load_tokenizer
from hone.serve.engine import Engine, EngineSpec
from hone.serve.request import SamplingParams
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.base import Setting
from hone.train.optimizers.adamw import AdamW
from hone.train.rollouts.groups import Rollouts, prompts_of
from hone.train.schedules.cosine import Cosine

SHAPE = Shape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=192, max_seq_len=128)
LARGE = Shape(hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, intermediate_size=8192, max_seq_len=1024)
REWARDS = [{"kind": "exact_match"}, {"kind": "pattern", "regex": "[0-9]", "weight": 0.2}]
"""1.2 for the right digit, 0.2 for another."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t of a two-sided 95 % interval of the mean of so many numbers."""


def say(**row: Any) -> None:
    """Prints a row, and stores it."""
    print(json.dumps(row), flush=True)
    if out := os.environ.get("OUT"):
        with open(Path(out) / "rollouts.jsonl", "a", encoding="utf8") as file:
            file.write(json.dumps(row) + "\n")


def sums(folder: Path, tokenizer: dict[str, Any] | None = None) -> PackedTokens:
    """The sixteen sums, four times each, as conversations; `tokenizer`: of the data stage, default: a small one of their own.

    Where `folder` has them they are read, for machines without what data stages need."""
    if not (folder / "data-sums").exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"{one}+{two}", "completion": str(one + two)} for one in range(4) for two in range(4)] * 4
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = {
            "source": str(folder / "sums.jsonl"), "validation_fraction": 0.2,
            "dedups": [],
            "tokenizer": {**(tokenizer or {"vocab_size": 300}), "chat": {"kind": "prompt_completion", "template": "zephyr"}},
        }  # fmt: skip
        Data.read(spec).make(folder / "data-sums", run=Run(quiet=True))
    return PackedTokens(folder / "data-sums")


def learns(args: argparse.Namespace, data: PackedTokens, seed: int) -> float:
    """Trains one seed; how much the reward grew."""
    model = build(SHAPE.config(data.vocab_size, eos=data.eos_token_id), device=args.device, seed=seed)
    first = Trainer(model, steps=60, schedule=Cosine(warmup=3), optimizer=AdamW(lr=4e-3))
    for step in range(60):
        first.step(data.batch(step, 4, 128, seed))
    options = {"kind": "grpo", "num_generations": 16, "max_completion_length": 4, "rewards": REWARDS}
    trainer = Trainer(
        model, steps=args.steps, schedule=Cosine(warmup=3), optimizer=AdamW(lr=1e-3), precision=args.precision,
        objective=OBJECTIVES.read(options), setting=Setting(data.folder, seed),
    )  # fmt: skip
    writing, rewards = _timed(trainer), []
    begun = time.perf_counter()
    for step in range(args.steps):
        trainer.step(data.batch(step, 1, 128, seed))
        rewards.append(trainer.preparer.row["reward"])  # type: ignore[union-attr]
    took = time.perf_counter() - begun
    before, after = (statistics.mean(part) for part in (rewards[:10], rewards[-10:]))
    say(
        part="learns",
        seed=seed,
        first_reward=before,
        final_reward=after,
        steps=args.steps,
        s=took,
        writing_s=sum(writing),
    )
    if seed == 0:
        served(trainer, data)
    return after - before


def served(trainer: Trainer, data: PackedTokens) -> None:
    """Whether the engine writes what the weights say now."""
    tokenizer = load_tokenizer(data.folder)
    prompts = [one.tokens.tolist() for one in prompts_of(data.cut(torch.arange(4).numpy(), 128), 128)][:16]
    params = SamplingParams(max_tokens=4, temperature=0)
    preparer = trainer.preparer
    assert isinstance(preparer, Rollouts) and preparer._generation is not None
    ours = [one.tokens for one in preparer._generation.answers(prompts, [params] * len(prompts), [0] * len(prompts))]
    other = copy.deepcopy(trainer.model)
    fresh = Engine(other, EngineSpec(num_pages=256), tokenizer=tokenizer, device=trainer.device)
    theirs = [one.tokens for one in fresh.generate(prompts, params)]
    say(part="served", prompts=len(prompts), equal=sum(one == two for one, two in zip(ours, theirs)))


def speed(args: argparse.Namespace, data: PackedTokens) -> None:
    """Steps of a large model on its own answers of 128 tokens."""
    model = build(LARGE.config(data.vocab_size, eos=data.eos_token_id), device=args.device, seed=0)
    options = {"kind": "grpo", "num_generations": 32, "max_completion_length": 128, "max_num_seqs": 256}
    trainer = Trainer(
        model, steps=6, schedule=Cosine(warmup=0), optimizer=AdamW(lr=1e-6), precision=args.precision,
        objective=OBJECTIVES.read(options), setting=Setting(data.folder, 0),
    )  # fmt: skip
    writing = _timed(trainer)
    for step in range(6):
        begun = time.perf_counter()
        trainer.step(data.batch(step, 2, 256, 0))
        torch.cuda.synchronize()
        took, row = time.perf_counter() - begun, trainer.preparer.row  # type: ignore[union-attr]
        count = round(row["completion_length"] * 32) * len(prompts_of(data.batch(step, 2, 256, 0), 256))
        peak = torch.cuda.max_memory_allocated() / 2**30
        say(
            part="speed",
            step=step,
            s=took,
            writing_s=writing[-1],
            written_tokens_per_s=count / writing[-1],
            peak_gib=peak,
        )


def _timed(trainer: Trainer) -> list[float]:
    """Seconds that each step writes answers, filled as they are written."""
    found: list[float] = []
    preparer = trainer.preparer
    assert isinstance(preparer, Rollouts)
    written = preparer.written

    def timed(*args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        answers = written(*args, **options)
        found.append(time.perf_counter() - begun)
        return answers

    preparer.written = timed  # type: ignore[method-assign]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", type=Path, help="folder of an earlier run's data; made where it is not there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = sums(args.data or Path(folder))
        grown = [learns(args, data, seed) for seed in range(args.seeds)]
        if len(grown) in T_95:
            half = T_95[len(grown)] * statistics.stdev(grown) / len(grown) ** 0.5
            say(part="reward", grew=statistics.mean(grown), interval_95=half, seeds=len(grown))
        if args.device.startswith("cuda"):
            speed(args, data)


if __name__ == "__main__":
    main()
