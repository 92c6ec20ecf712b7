"""Structured pruning and healing: the loss that fewer or narrower layers cost, and the part that a short training recovers.

    python -m benchmarks.structured --model FOLDER --text CALIBRATION --held-out TEXT --device cuda

Texts are .jsonl.gz files with a field "text", or plain text. Layers are removed by block influence and by loss, feed-forward
channels by activations, down to the same number of parameters. Each is healed with `--tokens` of the calibration text
(repeated), by distillation from the whole model, the first also by plain next-token prediction, and scored on the held-out text.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.eval.score import score
from hone.feed.load import PackedTokens
from hone.measure.machine import describe
from hone.model.decoder import Decoder
from hone.model.folder import copy_tokenizer
from hone.model.hf import Checkpoint, load
from hone.model.tokenizer import load_tokenizer
from hone.train import OBJECTIVES, OPTIMIZERS, SCHEDULES
from hone.train.loop import Trainer, fit
from hone.train.precision import TORCH_NAMES


def main() -> None:
    """Prunes, heals and scores every arm; prints its rows and adds them to the ledger."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for rows in _arms(Path(scratch), arguments):
            print(ledger.table(rows), flush=True)
            if not arguments.no_ledger:
                ledger.append("structured", rows, arguments.device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder with a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="text to calibrate and heal on")
    parser.add_argument("--held-out", type=Path, required=True, help="text to score")
    parser.add_argument("--trained-tokens", type=float, default=288e6, help="tokens that the model was trained on")
    parser.add_argument("--tokens", type=int, default=14_400_000, help="tokens of healing")
    parser.add_argument("--score-tokens", type=int, default=0, help="tokens of the held-out text; 0: all")
    parser.add_argument(
        "--num-sequences", type=int, default=128, help="sequences of 512 tokens that measure importances"
    )
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--intermediate-size", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--alpha", type=float, default=1.0, help="weight of the teacher's distribution; 1: nothing else"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scratch", type=Path, help="folder for temporary models; default: the system's")
    parser.add_argument("--no-ledger", action="store_true")
    return parser.parse_args()


def _arms(folder: Path, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Each arm's rows: losses, and the fraction of the lost quality that each healing recovers."""
    write_tokens(arguments.model, arguments.text, folder / "data")
    held_out = np.concatenate(list(documents(arguments.model, arguments.held_out)))
    held_out = held_out[: arguments.score_tokens or None]
    config = Checkpoint(arguments.model).config
    dense = _loss(arguments.model, held_out, arguments)
    told = f"{config.num_params / 1e6:.3g} M parameters, {config.num_layers} layers"
    print(json.dumps({"dense": dense, "held-out tokens": len(held_out)}), flush=True)
    by_layers = f"{arguments.num_layers} layers left"
    depth = {"kind": "depth", "num_layers": arguments.num_layers}
    distill = {"kind": "distill", "alpha": arguments.alpha}
    arms = {
        f"{by_layers} by block influence": (depth, [distill, {"kind": "next_token"}]),
        f"{by_layers} by loss": ({**depth, "importance": "loss"}, [distill]),
        f"{arguments.intermediate_size} feed-forward channels left": (
            {"kind": "width", "intermediate_size": arguments.intermediate_size},
            [distill],
        ),
    }
    for number, (name, (step, objectives)) in enumerate(arms.items()):
        pruned = folder / f"compress-{number}"
        made = _compress(step, pruned, folder, arguments)
        cost = _loss(pruned, held_out, arguments)
        note = f"{told}; {made.figures['num_params'].value / 1e6:.3g} M left; {made.figures['time_s'].value:.3g} s"
        kept = next((row["layers"] for row in made.techniques if row.get("layers")), None)
        note += f"; layers {kept}" if kept else ""
        shared = {"technique": f"structured pruner/{step['kind']}", "unit": "nats/token", "n": len(held_out)}
        whole = {"peer": "the whole model", "peer_value": dense}
        rows = [
            {**shared, "figure": f"held-out loss, {name}", "value": cost, "ratio": cost / dense, "note": note, **whole}
        ]
        for objective in objectives:
            begun = time.perf_counter()
            healed = _loss(_heal(objective, pruned, folder, arguments), held_out, arguments)
            part = arguments.tokens / arguments.trained_tokens
            how = f"{name}, healed by {objective['kind']} with {part:.1%} of the training tokens"
            said = f"{arguments.tokens} tokens in {time.perf_counter() - begun:.3g} s, lr {arguments.lr:g}, {json.dumps(objective)}"
            rows.append(
                {
                    **shared,
                    "figure": f"held-out loss, {how}",
                    "value": healed,
                    "ratio": healed / dense,
                    "note": said,
                    **whole,
                }
            )
            recovered = (cost - healed) / (cost - dense)
            rows.append({**shared, "figure": f"recovered, {how}", "value": recovered, "unit": "of the lost loss"})
        shutil.rmtree(pruned)
        yield rows


def _compress(step: dict[str, Any], out: Path, folder: Path, arguments: argparse.Namespace) -> Artifact:
    spec = Compress.read(
        {"steps": [step], "num_sequences": arguments.num_sequences, "seq_len": min(512, arguments.seq_len)}
    )
    parents = {"model": Artifact.read(arguments.model), "data": Artifact.read(folder / "data")}
    machine = describe(arguments.device).model_dump(mode="json")
    return spec.make(out, parents, Run(device=arguments.device, quiet=True, machine=machine))


def _heal(objective: dict[str, Any], pruned: Path, folder: Path, arguments: argparse.Namespace) -> Decoder:
    """The pruned model, trained in place of the one that was written."""
    model = load(pruned, arguments.device, torch.float32)
    precision = "bf16" if arguments.device.startswith("cuda") else "fp32"
    teacher = (
        load(arguments.model, arguments.device, getattr(torch, TORCH_NAMES[precision]))
        if objective["kind"] == "distill"
        else None
    )
    trainer = Trainer(
        model,
        steps=-(-arguments.tokens // (arguments.batch_size * arguments.seq_len)),
        schedule=SCHEDULES.read("cosine"),
        optimizer=OPTIMIZERS.read({"kind": "adamw", "lr": arguments.lr}),
        objective=OBJECTIVES.read(objective),
        precision=precision,
        teacher=teacher,
    )
    fit(trainer, PackedTokens(folder / "data"), batch_size=arguments.batch_size, seq_len=arguments.seq_len)
    return model


def _loss(model: Path | Decoder, tokens: np.ndarray, arguments: argparse.Namespace) -> float:
    """Mean loss of `tokens` as one stream, in nats."""
    model = (load(model, arguments.device) if isinstance(model, Path) else model).eval()
    batch_tokens = 1 << 17 if arguments.device.startswith("cuda") else 1 << 12
    return score(model, tokens, window=arguments.seq_len, join="stream", batch_tokens=batch_tokens).mean_loss


def documents(model: Path, path: Path) -> Iterator[np.ndarray]:
    """The tokens of every document, each with the end-of-text token."""
    tokenizer = load_tokenizer(model)
    end = list(Checkpoint(model).config.eos_token_ids[:1])
    if path.name.endswith(".jsonl.gz"):
        with gzip.open(path, "rt", encoding="utf8") as file:
            texts = [json.loads(line)["text"] for line in file]
    else:
        texts = [path.read_text(encoding="utf8")]
    for text in texts:
        yield np.asarray([*tokenizer.encode(text), *end], np.int64)


def write_tokens(model: Path, path: Path, out: Path) -> None:
    """The documents of `path` as a data folder with a training split."""
    texts = list(documents(model, path))
    config = Checkpoint(model).config
    kind = np.dtype("<u2" if config.vocab_size <= 1 << 16 else "<u4")
    (out / "tokens").mkdir(parents=True)
    np.concatenate(texts).astype(kind).tofile(out / "tokens" / "train.bin")
    starts = np.cumsum([0, *map(len, texts)])
    np.save(out / "tokens" / "train.starts.npy", starts.astype(np.int64))
    row = {"tokens": int(starts[-1]), "documents": len(texts), "bytes": path.stat().st_size}
    empty = {"tokens": 0, "documents": 0, "bytes": 0}
    np.empty(0, kind).tofile(out / "tokens" / "val.bin")
    np.save(out / "tokens" / "val.starts.npy", np.zeros(1, np.int64))
    meta = {
        "dtype": kind.name,
        "vocab_size": config.vocab_size,
        "eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "splits": {"train": row, "val": empty},
    }
    (out / "tokens" / "meta.json").write_text(json.dumps(meta), encoding="utf8")
    copy_tokenizer(model, out)


if __name__ == "__main__":
    main()
