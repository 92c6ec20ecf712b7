"""Lottery tickets: iterative magnitude pruning with rewinding against random masks of the same sparsity, from the same early weights.

    python -m benchmarks.lottery --tokenizer FOLDER --text TEXT --held-out TEXT --device cuda

Every seed has initial weights, an order of the data and a random mask of its own. A round trains from the early weights under the
mask so far and drops the smallest of the weights that are left; the last mask is the ticket's (Frankle et al. 2020,
arXiv:1912.05671). `hone run recipes/lottery_ticket.yaml` does the same in stages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import ledger
from benchmarks.structured import documents, write_tokens
from hone.base.artifact import Artifact
from hone.base.interval import welch
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.eval.score import score
from hone.feed.load import PackedTokens
from hone.measure.machine import describe
from hone.model.decoder import Decoder, build
from hone.model.hf import Checkpoint, load, save
from hone.model.shape import Shape
from hone.train import OPTIMIZERS, SCHEDULES
from hone.train.loop import Trainer, fit
from hone.train.mask import zeros_of


def main() -> None:
    """Trains every arm of every seed, prints the table, adds it to the ledger."""
    arguments = _arguments()
    arms: dict[str, list[float]] = {"dense": [], "ticket": [], "random": []}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        write_tokens(arguments.tokenizer, arguments.text, folder / "data")
        held_out = np.concatenate(list(documents(arguments.tokenizer, arguments.held_out)))
        for seed in range(arguments.seeds):
            for arm, loss in _losses(seed, folder, held_out[: arguments.score_tokens or None], arguments).items():
                arms[arm].append(loss)
            print(json.dumps({"seed": seed, **{arm: losses[-1] for arm, losses in arms.items()}}), flush=True)
    rows = _rows(arms, arguments)
    print(ledger.table(rows))
    if not arguments.no_ledger:
        print(ledger.append("lottery", rows, arguments.device))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder whose tokenizer is used")
    parser.add_argument("--text", type=Path, required=True, help="text to train on")
    parser.add_argument("--held-out", type=Path, required=True, help="text to score")
    parser.add_argument("--score-tokens", type=int, default=0, help="tokens of the held-out text; 0: all")
    parser.add_argument(
        "--early-steps", type=int, default=100, help="steps to the weights to which every round rewinds"
    )
    parser.add_argument("--steps", type=int, default=1500, help="steps of a round, and of each arm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sparsity", type=float, default=0.8, help="after the last round")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scratch", type=Path, help="folder for temporary models; default: the system's")
    parser.add_argument("--no-ledger", action="store_true")
    return parser.parse_args()


def _losses(seed: int, folder: Path, held_out: np.ndarray, arguments: argparse.Namespace) -> dict[str, float]:
    """The held-out loss of every arm for one seed."""
    run = Run(device=arguments.device, quiet=True, machine=describe(arguments.device).model_dump(mode="json"))
    config = Checkpoint(arguments.tokenizer).config
    shape = Shape(max_seq_len=arguments.seq_len).config(config.vocab_size, eos=config.eos_token_ids[0])
    model = build(shape, device=arguments.device, seed=seed)
    _train(model, folder, arguments.early_steps, seed, {}, arguments)
    early = folder / "early"
    save(model, early)

    def pruned(source: Path, step: dict[str, Any]) -> dict[str, Tensor]:
        out = folder / "compress-mask"
        Compress.read({"steps": [step]}).make(out, {"model": Artifact.read(source)}, run)
        found = zeros_of(out, arguments.device)
        shutil.rmtree(out)
        return found

    def arm(zeros: dict[str, Tensor]) -> tuple[Path, float]:
        model = load(early, arguments.device, torch.float32)
        _train(model, folder, arguments.steps, seed, zeros, arguments)
        save(model, folder / "trained")
        tokens = 1 << 16 if arguments.device.startswith("cuda") else 1 << 12
        scored = score(model.eval(), held_out, window=arguments.seq_len, join="stream", batch_tokens=tokens)
        return folder / "trained", scored.mean_loss

    trained, found = arm({})
    losses = {"dense": found}
    for number in range(1, arguments.rounds + 1):
        part = 1 - (1 - arguments.sparsity) ** (number / arguments.rounds)
        trained, found = arm(pruned(trained, {"kind": "magnitude", "sparsity": part}))
    losses["ticket"] = found
    _, losses["random"] = arm(pruned(early, {"kind": "random", "sparsity": arguments.sparsity, "seed": seed}))
    return losses


def _train(
    model: Decoder, folder: Path, steps: int, seed: int, zeros: dict[str, Tensor], arguments: argparse.Namespace
) -> None:
    """Trains in float32: weights that are written and read again must be the ones that were trained."""
    optimizer = OPTIMIZERS.read({"kind": "adamw", "lr": arguments.lr})
    trainer = Trainer(model, steps=steps, schedule=SCHEDULES.read("cosine"), optimizer=optimizer, zeros=zeros)
    data = PackedTokens(folder / "data")
    fit(trainer, data, batch_size=arguments.batch_size, seq_len=arguments.seq_len, seed=seed)


def _rows(arms: dict[str, list[float]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The ledger's rows: the ticket's loss beside the random mask's and the dense model's."""
    how = f"{arguments.sparsity:.0%} zeros, {arguments.rounds} rounds of {arguments.steps} steps"
    rows = []
    for peer, named in (("random", "random masks"), ("dense", "without zeros")):
        ours, theirs = statistics.mean(arms["ticket"]), statistics.mean(arms[peer])
        row: dict[str, Any] = {
            "figure": f"held-out loss of a lottery ticket, {how}",
            "value": ours,
            "unit": "nats/token",
        }
        row |= {"n": len(arms["ticket"]), "peer": named, "peer_value": theirs, "ratio": ours / theirs}
        if len(arms["ticket"]) > 1:
            found = welch(arms[peer], arms["ticket"])
            row["note"] = f"difference {found.by:+.4f}, 95 % interval +-{found.half:.4f} (Welch)"
        rows.append({**row, "technique": "pruner/magnitude"} if peer == "random" else row)
    return rows


if __name__ == "__main__":
    main()
