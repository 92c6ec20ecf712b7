"""Compression: GPTQ against round to nearest in quality, seconds and memory, on a real model or on a random one of a given shape.

python -m benchmarks.compress --model FOLDER --text FILE [--tokens-text FILE]   perplexity on text outside the calibration
python -m benchmarks.compress --model FOLDER --text FILE --amounts 1,8,32       divergence by the number of calibration sequences
python -m benchmarks.compress --shape llama3-8b --layers 2 --device cuda        seconds a layer; output error on random weights
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import ledger
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.measure.machine import describe
from hone.model.decoder import build
from hone.model.hf import Checkpoint, load, save
from hone.model.shape import Shape

SHAPES = {
    "tiny": Shape(),
    "llama3-8b": Shape(
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14336,
        max_seq_len=8192,
        rope_theta=500000.0,
        tie_embeddings=True,
    ),
}
LAYERS = {"tiny": 4, "llama3-8b": 32}
VOCABULARY = 4096
"""Rows of a random model's embedding: only layers are compressed, and a full vocabulary takes long to draw."""


class Inputs(NamedTuple):
    """A model; calibration as a data folder (a random model) or a text, and tokens to score (a real one)."""

    model: Path
    data: Path | None
    text: Path | None
    held_out: np.ndarray | None


def main() -> None:
    """Runs round to nearest and GPTQ with the same bits and groups, prints the table, adds it to the ledger."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        inputs = _inputs(arguments, folder)
        rows = (_amounts if arguments.amounts else _quantized)(inputs, folder, arguments)
        print(ledger.table(rows))
        if not arguments.no_ledger:
            print(ledger.append("compress", rows, arguments.device))


def _quantized(inputs: Inputs, folder: Path, arguments: argparse.Namespace) -> list[dict]:
    """Rows of GPTQ beside round to nearest."""
    step = {"bits": arguments.bits, "group_size": arguments.group_size, "uneven": "nearest"}
    steps = {"rtn": {"kind": "rtn", **step}, "rtn searched": {"kind": "rtn", "scale": "search", **step}}
    steps["gptq"] = {"kind": "gptq", **step}
    results = {}
    if inputs.held_out is not None:
        results["dense"] = {"perplexity": _perplexity(inputs.model, inputs.held_out, arguments.device)}
    for name, one in steps.items():
        results[name] = _measure(one, name, inputs, folder, arguments)
        print(json.dumps({name: results[name]}), flush=True)
    return _rows(results, inputs.model, arguments)


def _amounts(inputs: Inputs, folder: Path, arguments: argparse.Namespace) -> list[dict]:
    """Rows of GPTQ's divergence from the given model, a row an amount of calibration, beside round to nearest with searched scales."""
    step = {"bits": arguments.bits, "group_size": arguments.group_size, "uneven": "nearest"}
    inputs = inputs._replace(held_out=None)  # the divergence is measured by the stage itself
    widest = Checkpoint(inputs.model).config.linears(0)["feed_forward.down"].in_features
    rows = []
    for amount in map(int, arguments.amounts.split(",")):
        given = argparse.Namespace(**{**vars(arguments), "num_sequences": amount})
        rtn, gptq = (
            _measure(one, one["kind"], inputs, folder, given)["kl_to_dense"]
            for one in ({"kind": "rtn", "scale": "search", **step}, {"kind": "gptq", **step})
        )
        tokens = f"{amount} x {arguments.seq_len} tokens, {amount * arguments.seq_len / widest:.2g} a feature of the widest matrix"
        label = f"{inputs.model.name}, int{arguments.bits} g{arguments.group_size}, {tokens}"
        row = {"figure": f"divergence from the given model ({label})", "value": gptq, "unit": "nats/token", "n": 1}
        peer = {"peer": "hone rtn searched", "peer_value": rtn, "ratio": gptq / rtn}
        rows.append({**row, "technique": "quantizer/gptq", **peer})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder")
    parser.add_argument("--text", type=Path, help="text: the first half calibrates, the second half is scored")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of a model")
    parser.add_argument("--layers", type=int, default=2, help="layers of the random model")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--num-sequences", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--amounts", help="numbers of calibration sequences to compare, as 1,8,32")
    parser.add_argument("--check-sequences", type=int, default=8, help="sequences that the divergence is measured on")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scratch", type=Path, help="folder for temporary models; default: the system's")
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.shape is None):
        parser.error("give --model with --text, or --shape")
    if arguments.model is not None and arguments.text is None:
        parser.error("--model needs --text")
    return arguments


def _inputs(arguments: argparse.Namespace, folder: Path) -> Inputs:
    if arguments.shape is not None:
        dtype = torch.bfloat16 if arguments.device.startswith("cuda") else torch.float32
        shape = SHAPES[arguments.shape]
        made = random_model(shape, folder, arguments.layers, arguments.num_sequences, arguments.seq_len, dtype)
        return Inputs(*made, None, None)
    from hone.model.tokenizer import load_tokenizer

    text = arguments.text.read_text(encoding="utf8")
    calibration = folder / "calibration.txt"
    calibration.write_text(text[: len(text) // 2], encoding="utf8")
    held_out = np.asarray(load_tokenizer(arguments.model).encode(text[len(text) // 2 :]), np.int64)
    return Inputs(arguments.model, None, calibration, held_out)


def random_model(
    shape: Shape, folder: Path, layers: int, num_sequences: int, seq_len: int, dtype: torch.dtype
) -> tuple[Path, Path]:
    """A random model of `shape` with so many layers, and a data folder of random tokens."""
    shape = shape.model_copy(update={"num_layers": layers})
    save(build(shape.config(VOCABULARY), dtype=dtype), folder / "model")
    tokens = folder / "data" / "tokens"
    tokens.mkdir(parents=True)
    count = num_sequences * seq_len + 1
    np.random.default_rng(0).integers(0, VOCABULARY, count).astype("<u2").tofile(tokens / "train.bin")
    np.save(tokens / "train.starts.npy", np.asarray([0, count], np.int64))
    row = {"tokens": count, "documents": 1, "bytes": count}
    meta = {"dtype": "uint16", "vocab_size": VOCABULARY, "eos_token_id": 0, "splits": {"train": row}}
    (tokens / "meta.json").write_text(json.dumps(meta))
    return folder / "model", folder / "data"


def _measure(
    step: dict, name: str, inputs: Inputs, folder: Path, arguments: argparse.Namespace
) -> dict[str, float | None]:
    """The figures of one compression; the folder it wrote is removed."""
    model, data, text, held_out = inputs
    longest = Checkpoint(model).config.max_seq_len
    spec = Compress.read(
        {
            "steps": [step],
            "num_sequences": arguments.num_sequences,
            "seq_len": min(arguments.seq_len, longest),
            "batch_size": arguments.batch_size,
            "check_sequences": arguments.check_sequences,
            "calibration_text": None if text is None else str(text),
        }
    )
    parents = {"model": Artifact.read(model), **({"data": Artifact.read(data)} if data is not None else {})}
    machine = describe(arguments.device).model_dump(mode="json")
    out = folder / f"compress-{name.replace(' ', '-')}"
    made = spec.make(out, parents, Run(device=arguments.device, quiet=True, machine=machine))
    figures: dict[str, float | None] = {key: figure.value for key, figure in made.figures.items()}
    estimates = {f"{key} estimate": figure.estimate.value for key, figure in made.figures.items() if figure.estimate}
    if held_out is not None:
        figures["perplexity"] = _perplexity(made.folder, held_out, arguments.device)
    shutil.rmtree(out)
    return {**figures, **estimates}


def _perplexity(folder: Path, tokens: np.ndarray, device: str) -> float:
    from hone.eval.score import score

    model = load(folder, device).eval()
    return score(model, tokens, window=min(model.config.max_seq_len, 2048), join="stream").perplexity


def _rows(results: dict[str, dict], model: Path, arguments: argparse.Namespace) -> list[dict]:
    """Ledger rows: GPTQ, round to nearest as its peer."""
    gptq, rtn = results["gptq"], results["rtn"]
    size = f"{arguments.shape}, {arguments.layers} layers" if arguments.shape else model.name
    layers = arguments.layers if arguments.shape else Checkpoint(model).config.num_layers
    tokens = f"{arguments.num_sequences} x {arguments.seq_len} tokens"
    label = f"{size}, int{arguments.bits} g{arguments.group_size}, {tokens}"

    def row(figure: str, key: str, unit: str, scale: float = 1.0, peer: dict | None = rtn) -> dict:
        value = gptq[key] * scale
        found = {"figure": f"{figure} ({label})", "value": value, "unit": unit, "n": 1, "technique": "quantizer/gptq"}
        if peer is not None:
            theirs = peer[key] * scale
            found |= {"peer": "hone rtn", "peer_value": theirs, "ratio": value / theirs if theirs else None}
        return found

    rows = [
        row("seconds a layer", "time_s", "s", 1 / layers),
        row("peak memory", "peak_memory_bytes", "B"),
        row("relative output error", "relative_output_error", "fraction"),
        row("bits a weight, whole folder", "bits_per_weight", "bits"),
    ]
    if "perplexity" in gptq:
        rows.append(row("perplexity", "perplexity", ""))
        dense = {"figure": f"perplexity, dense ({size})", "value": results["dense"]["perplexity"], "unit": "", "n": 1}
        rows.append(dense)
    return rows


if __name__ == "__main__":
    main()
