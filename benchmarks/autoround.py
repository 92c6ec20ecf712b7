"""AutoRound beside the auto-round package: perplexity and seconds on one model, the same calibration tokens, bits and groups.

python -m benchmarks.autoround --model FOLDER --calibration FILE --heldout FILE [--bits 4 3 2] [--device cuda]

FILEs are jsonl of {"text": ...}, .gz or not. Needs auto-round and transformers. auto-round minimizes the change of a decoder
layer's outputs, hone that of each linear's; both take 200 turns. hone's GPTQ stands beside them. On a CPU, auto-round's
backpropagation takes hours: a row needs a GPU.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.quality import documents, texts
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.calibration import from_text
from hone.compress.stage import Compress
from hone.eval.score import score
from hone.measure.machine import describe
from hone.model.hf import load


def main() -> None:
    """Runs both for each number of bits; prints the rows of each and adds them to the ledger."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "calibration.txt"
        text.write_text("\n".join(texts(arguments.calibration)), encoding="utf8")
        heldout = documents(arguments.heldout, arguments.model, arguments.tokens)
        dense = _perplexity(arguments.model, heldout, arguments.device)
        _keep([_row("dense", None, dense, "", arguments)], arguments)
        for bits in arguments.bits:
            rows = []
            ours = {kind: _hone(kind, bits, text, heldout, arguments) for kind in ("gptq", "autoround")}
            theirs = _auto_round(bits, text, heldout, arguments)
            for kind, (perplexity, seconds) in ours.items():
                rows.append(
                    _row(f"{kind}, int{bits} g{arguments.group_size}", kind, perplexity, "", arguments, theirs[0])
                )
                rows.append(_row(f"seconds of {kind}, int{bits}", kind, seconds, "s", arguments, theirs[1]))
            _keep(rows, arguments)


def _keep(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    print(ledger.table(rows), flush=True)
    if not arguments.no_ledger:
        ledger.append("compress", rows, arguments.device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--num-sequences", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens that are scored")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-ledger", action="store_true")
    return parser.parse_args()


def _hone(
    kind: str, bits: int, text: Path, heldout: tuple[np.ndarray, np.ndarray], arguments: argparse.Namespace
) -> tuple[float, float]:
    """Perplexity and seconds of one of hone's quantizers."""
    step = {"kind": kind, "bits": bits, "group_size": arguments.group_size}
    if kind == "autoround":
        step["iters"] = arguments.iters
    values = {"steps": [step], "calibration_text": str(text), "num_sequences": arguments.num_sequences}
    spec = Compress.read({**values, "seq_len": arguments.seq_len})
    machine = describe(arguments.device).model_dump(mode="json")
    run = Run(device=arguments.device, quiet=True, machine=machine)
    made = spec.make(text.parent / f"compress-{kind}", {"model": Artifact.read(arguments.model)}, run)
    found = _perplexity(made.folder, heldout, arguments.device), made.figures["time_s"].value
    shutil.rmtree(made.folder)
    return found


def _auto_round(
    bits: int, text: Path, heldout: tuple[np.ndarray, np.ndarray], arguments: argparse.Namespace
) -> tuple[float, float]:
    """Perplexity and seconds of the auto-round package on the tokens of hone's run; its time has no writing in it, hone's has."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    count, length = arguments.num_sequences, arguments.seq_len
    tokens = from_text(text, arguments.model, num_sequences=count, seq_len=length, seed=0).tokens
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in torch.from_numpy(tokens)]
    dtype = torch.bfloat16 if arguments.device.startswith("cuda") else torch.float32
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    begun = time.perf_counter()
    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(arguments.model),
        scheme=f"W{bits}A16",
        group_size=arguments.group_size,
        iters=arguments.iters,
        seqlen=length,
        nsamples=len(rows),
        batch_size=8,
        dataset=torch.utils.data.DataLoader(rows, batch_size=None),
        enable_torch_compile=False,
        device_map=0 if arguments.device.startswith("cuda") else "cpu",
    )
    rounded, _ = rounder.quantize()  # the weights are dense, on the points of the grids
    seconds = time.perf_counter() - begun
    folder = text.parent / "auto-round"
    rounded.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(arguments.model / name, folder / name)
    found = _perplexity(folder, heldout, arguments.device), seconds
    shutil.rmtree(folder)
    return found


def _perplexity(folder: Path, heldout: tuple[np.ndarray, np.ndarray], device: str) -> float:
    model = load(folder, device, torch.float32).eval()
    return score(model, *heldout, window=min(model.config.max_seq_len, 1024)).perplexity


def _row(
    name: str, kind: str | None, value: float, unit: str, arguments: argparse.Namespace, theirs: float | None = None
) -> dict:
    figure = name if unit else f"perplexity beside auto-round, {name}"
    row = {"figure": f"{figure} ({arguments.model.name})", "value": value, "unit": unit, "n": 1}
    if kind is not None:
        row |= {"technique": f"quantizer/{kind}", "peer": "auto-round", "peer_value": theirs, "ratio": value / theirs}
    return row


if __name__ == "__main__":
    main()
