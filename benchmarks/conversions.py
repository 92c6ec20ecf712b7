"""Conversions of a checkpoint: the loss that another attention costs, and the part that a short training heals.

    python -m benchmarks.conversions --model FOLDER --text TRAINING --held-out TEXT --device cuda --part heads

Texts are as those of `benchmarks.structured`. Parts: `heads` pools key/value heads by mean, by the first of a group and at random;
`latent` sweeps the rank of TransMLA; `linear` replaces every second layer; `context` extends the sequence. Every arm is scored on the
held-out text before and after it is healed with `--tokens` of the training text (repeated), in the order of each seed. An
arm that would begin after `--limit-s` seconds is left out, which is said.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.structured import documents, write_tokens
from hone.base.artifact import Artifact
from hone.base.interval import half_width
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.eval.score import score
from hone.feed.load import PackedTokens
from hone.measure.machine import describe
from hone.model.decoder import Decoder
from hone.model.hf import Checkpoint, load
from hone.train import OBJECTIVES, OPTIMIZERS, SCHEDULES
from hone.train.loop import Trainer, fit
from hone.train.precision import TORCH_NAMES

DISTILL, TEXT = {"kind": "distill", "alpha": 1.0}, {"kind": "next_token"}
LAYERS = {"kind": "hidden_states", "alpha": 1.0}


def main() -> None:
    """Converts, heals and scores the arms of a part; prints their rows and adds them to the ledger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder with a tokenizer")
    parser.add_argument("--text", type=Path, help="text to calibrate and heal on")
    parser.add_argument("--held-out", type=Path, help="text to score")
    parser.add_argument("--part", choices=("heads", "latent", "linear", "context"))
    parser.add_argument("--only", default="", help="a regular expression that an arm's name matches")
    parser.add_argument("--out", type=Path, help="file that keeps the rows, each as it ends, in place of the ledger")
    parser.add_argument("--commit", help="of the code that runs, for --out where the folder is no checkout")
    parser.add_argument("--from", dest="file", type=Path, help="a file of --out: add its rows to the ledger")
    parser.add_argument("--trained-tokens", type=float, help="tokens that the model was trained on, for the share")
    parser.add_argument("--tokens", type=int, default=14_400_000, help="tokens of healing; 0: none")
    parser.add_argument("--score-tokens", type=int, default=0, help="tokens of the held-out text; 0: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sequence, as the model was trained")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--limit-s", type=float, default=480, help="no arm begins later")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scratch", type=Path, help="folder for temporary models; default: the system's")
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    if arguments.file:
        stamp, found = ledger.Kept.read(arguments.file)
        rows = [*{row["figure"]: row for row in found}.values()]  # the newest of each: a row comes again with each seed
        print(ledger.table(rows), ledger.append("conversions", rows, stamp=stamp), sep="\n")
        return
    if not all((arguments.model, arguments.text, arguments.held_out, arguments.part)):
        parser.error("give --model, --text, --held-out and --part, or --from")
    kept = ledger.Kept(arguments.out, arguments.device, arguments.commit) if arguments.out else None
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        bench = Bench(Path(scratch), arguments)
        rows = {}
        for row in getattr(bench, arguments.part)():
            print(json.dumps({name: row[name] for name in ("figure", "value", "note")}), flush=True)
            rows[row["figure"]] = row
            if kept:
                kept.add(row)
    print(ledger.table([*rows.values()]), flush=True)
    if not (arguments.no_ledger or kept):
        ledger.append("conversions", [*rows.values()], arguments.device)


class Bench:
    """The arms, all of one model."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments, self.begun = folder, arguments, time.perf_counter()
        self.cuda = arguments.device.startswith("cuda")
        write_tokens(arguments.model, arguments.text, folder / "data")
        held_out = np.concatenate(list(documents(arguments.model, arguments.held_out)))
        self.held_out = held_out[: arguments.score_tokens or None]
        self.config = Checkpoint(arguments.model).config
        self.precision = "bf16" if self.cuda else "fp32"
        self.whole = self.loss(arguments.model)
        print(json.dumps({"given model": self.whole, "held-out tokens": len(self.held_out)}), flush=True)

    def heads(self) -> Iterator[dict[str, Any]]:
        """Pooled key/value heads: half of them and one, by the three ways; healed by distillation and on the text alone."""
        given = self.config.layers[0].mixer.num_kv_heads
        for count in (given // 2, 1):
            for pooling in ("mean", "first", "random"):
                step = {"kind": "gqa", "num_kv_heads": count, "pooling": pooling}
                how = (
                    [DISTILL, TEXT]
                    if pooling == "mean" and count > 1
                    else [DISTILL]
                    if count > 1 or pooling == "mean"
                    else []
                )
                yield from self.arm(f"key/value heads {given} to {count}, {pooling}", step, how)

    def latent(self) -> Iterator[dict[str, Any]]:
        """TransMLA: without loss, then less and less of the cache; some of these healed."""
        mixer = self.config.layers[0].mixer
        every = mixer.num_kv_heads
        full = 2 * every * mixer.head_dim - mixer.head_dim
        yield from self.arm("latent attention, all keys rotated, whole latent, no norm", {
            "kind": "transmla", "rope_heads": every, "latent_norm": False})  # fmt: skip
        for share in (1.0, 0.75, 0.5, 0.375, 0.25, 0.125):
            rank = round(share * full)
            for norm in (False, True):
                step = {"kind": "transmla", "kv_rank": rank, "latent_norm": norm}
                healed = [DISTILL] if share in ((0.25,) if norm else (0.5, 0.25, 0.125)) else []
                told = "normed" if norm else "no norm"
                yield from self.arm(f"latent attention, latent {rank} of {full}, {told}", step, healed)

    def linear(self) -> Iterator[dict[str, Any]]:
        """Every second layer without softmax; healed by the teacher's distribution, and by its layers too."""
        for mixer in ("gated_linear", "linear_attention", "retnet"):
            how = [DISTILL, LAYERS] if mixer == "gated_linear" else [DISTILL]
            yield from self.arm(f"every second layer {mixer}", {"kind": "linearize", "mixer": mixer}, how)

    def context(self) -> Iterator[dict[str, Any]]:
        """Sequences of twice and four times the length, without a scaling and with each; the longest ones trained."""
        old = self.arguments.seq_len
        yield self.row("extend_context", f"held-out loss of {old} tokens, given model", self.whole, "")
        for times in (2, 4):
            unscaled = self.loss(self.arguments.model, times * old)
            yield self.row("extend_context", f"held-out loss of {times * old} tokens, given model", unscaled, "")
            for scaling in ("yarn", "linear", "ntk", "llama3", "longrope"):
                step = {"kind": "extend_context", "scaling": scaling, "factor": times, "original_max_seq_len": old}
                how = [TEXT] if times == 4 and scaling in ("yarn", "linear", "ntk") else []
                name = f"{scaling} x {times}, {times * old} tokens"
                yield from self.arm(name, step, how, length=times * old, lost_from=unscaled)

    def arm(
        self,
        name: str,
        step: dict[str, Any],
        objectives: list[dict[str, Any]] | None = None,
        length: int | None = None,
        lost_from: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        """The rows of one conversion; those of healing again after each seed, of all until then. `length`: tokens of the sequences, else as trained; `lost_from`: the given model's loss at it."""
        if not re.search(self.arguments.only, name) or self.late(name):
            return
        out = self.folder / "compress-arm"
        made = self.convert(step, out, length)
        cost = self.loss(out, length)
        kept = made.figures.get("kv_bytes_per_token")
        note = f"{made.figures['time_s'].value:.3g} s" + (f"; {kept.value:g} B a token in the cache" if kept else "")
        yield self.row(step["kind"], f"held-out loss, {name}", cost, note)
        for objective in objectives or [] if self.arguments.tokens else []:
            losses, begun = [], time.perf_counter()
            for seed in range(self.arguments.seeds):
                if self.late(f"{name}, healed, seed {seed}"):
                    break
                losses.append(self.loss(self.heal(objective, out, seed, length or self.arguments.seq_len), length))
                said = f"seeds {losses}; lr {self.arguments.lr:g}; {time.perf_counter() - begun:.3g} s"
                yield from self.healed(f"{name}, healed by {objective['kind']}", step, losses, said, cost, lost_from)
        shutil.rmtree(out)

    def healed(
        self, name: str, step: dict[str, Any], losses: list[float], said: str, cost: float, lost_from: float | None
    ) -> Iterator[dict[str, Any]]:
        """The rows of the `losses` after healing, one a seed, of what a conversion `cost`."""
        part = self.arguments.tokens / (self.arguments.trained_tokens or float("nan"))
        share = f" ({part:.1%} of the first training)" if self.arguments.trained_tokens else ""
        how = f"{name} with {self.arguments.tokens} tokens{share}"
        yield self.row(step["kind"], f"held-out loss, {how}", statistics.fmean(losses), said, losses)
        if lost_from is None:
            shares = [(cost - one) / (cost - self.whole) for one in losses]
            row = self.row(
                step["kind"], f"healed share of the lost loss, {how}", statistics.fmean(shares), said, shares
            )
            yield {**row, "unit": "of the lost loss", "peer_value": None, "ratio": None}

    def late(self, name: str) -> bool:
        """Whether an arm is left out because time is up."""
        over = time.perf_counter() - self.begun > self.arguments.limit_s
        if over:
            print(json.dumps({"left out, time is up": name}), flush=True)
        return over

    def row(self, kind: str, figure: str, value: float, note: str, values: list[float] | None = None) -> dict[str, Any]:
        """A row of the ledger, the mean of `values` where there are several, beside the given model's loss."""
        spread = f"; +-{half_width(values):.4g} (95 %, {len(values)} seeds)" if values and len(values) > 1 else ""
        return {
            "technique": f"conversion/{kind}",
            "figure": figure,
            "value": value,
            "unit": "nats/token",
            "n": len(self.held_out),
            "ratio": value / self.whole,
            "peer": "the given model",
            "peer_value": self.whole,
            "note": f"{self.config.num_params / 1e6:.3g} M parameters; {note}{spread}",
        }

    def convert(self, step: dict[str, Any], out: Path, length: int | None) -> Artifact:
        """The converted model, calibrated where it is measured on sequences of `length` tokens, else of up to 256."""
        arguments = self.arguments
        sizes = {"num_sequences": 8, "seq_len": length} if length else {"num_sequences": 128, "seq_len": 256}
        spec = Compress.read({"steps": [step], **sizes, "check_sequences": 0})
        parents = {"model": Artifact.read(arguments.model), "data": Artifact.read(self.folder / "data")}
        machine = describe(arguments.device).model_dump(mode="json")
        return spec.make(out, parents, Run(device=arguments.device, quiet=True, machine=machine))

    def heal(self, objective: dict[str, Any], converted: Path, seed: int, length: int) -> Decoder:
        """The converted model, trained in place of the one that was written."""
        arguments, teacher = self.arguments, None
        if objective["kind"] != "next_token":
            teacher = load(arguments.model, arguments.device, getattr(torch, TORCH_NAMES[self.precision]))
        batch = max(1, arguments.batch_size * arguments.seq_len // length)
        model = load(converted, arguments.device, torch.float32)
        trainer = Trainer(
            model,
            steps=-(-arguments.tokens // (batch * length)),
            schedule=SCHEDULES.read("cosine"),
            optimizer=OPTIMIZERS.read({"kind": "adamw", "lr": arguments.lr}),
            objective=OBJECTIVES.read(objective),
            precision=self.precision,
            teacher=teacher,
        )
        fit(trainer, PackedTokens(self.folder / "data"), batch_size=batch, seq_len=length, seed=seed)
        return model

    def loss(self, model: Path | Decoder, length: int | None = None) -> float:
        """Mean loss of the held-out tokens as one stream, in nats, in windows of `length` tokens."""
        model = (load(model, self.arguments.device) if isinstance(model, Path) else model).eval()
        window = length or self.arguments.seq_len
        tokens = max(1 << 17 if self.cuda else 1 << 12, window)
        return score(model, self.held_out, window=window, join="stream", batch_tokens=tokens).mean_loss


if __name__ == "__main__":
    main()
