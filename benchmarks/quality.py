"""Quality of every compression method on one model: perplexity, divergence and agreement beside the dense model, bits, seconds.

python -m benchmarks.quality --model FOLDER --calibration FILE --heldout FILE [--methods NAME,NAME] [--seeds 3] [--tokens 65536]

FILEs are jsonl of {"text": ...}, .gz or not. The methods are those of benchmarks/quality.yaml. A method that calibrates runs
once for each seed (another choice of calibration sequences); the interval is that of the mean, 95 %, Student's t.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks import ledger
from hone.base.artifact import Artifact
from hone.base.interval import half_width
from hone.base.run import Run
from hone.compress.quantizers.base import quantizer_of
from hone.compress.stage import Compress
from hone.compress.statistics import STATISTICS
from hone.eval.score import Scores, score
from hone.measure.machine import describe
from hone.model.decoder import Decoder
from hone.model.hf import load
from hone.model.tokenizer import load_tokenizer

METHODS = Path(__file__).with_suffix(".yaml")


def main() -> None:
    """Runs the methods in order, prints each, and adds all to the ledger."""
    arguments = _arguments()
    methods = yaml.safe_load(METHODS.read_text(encoding="utf8"))
    wanted = arguments.methods.split(",") if arguments.methods else [one["name"] for one in methods]
    unknown = set(wanted) - {one["name"] for one in methods}
    if unknown:
        raise SystemExit(f"no method {', '.join(sorted(unknown))} in {METHODS}")
    reference = load(arguments.model, arguments.device, torch.float32).eval()
    tokens, starts = documents(arguments.heldout, arguments.model, arguments.tokens)
    dense = _score(reference, None, tokens, starts)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "calibration.txt"
        text.write_text("\n\n".join(texts(arguments.calibration)[::4]), encoding="utf8")  # each run encodes it
        for method in (one for one in methods if one["name"] in wanted):
            try:
                rows.append(_measured(method, reference, dense, text, (tokens, starts), arguments))
            except Exception as error:  # a method that fails must not lose the figures of the others
                if not arguments.keep_going:
                    raise
                print(f"{method['name']}: {type(error).__name__}: {error}", flush=True)
                continue
            row = rows[-1]
            if not arguments.no_ledger:
                ledger.append("quality", [row], arguments.device)
            predicted = "" if row["predicted"] is None else f"  predicted {row['predicted']:.4f}"
            print(
                f"{row['method']:40} ppl {row['value']:8.3f} ± {row['ci95'] or 0:.3f} (dense {row['peer_value']:.3f})  "
                f"kl {row['kl']:.4f}  top-1 {row['top1']:.4f}  {row['bits_per_weight']:.2f} bits  {row['seconds']:.1f} s{predicted}",
                flush=True,
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the dense model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--methods", default="", help="names in benchmarks/quality.yaml, with commas; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens that are scored")
    parser.add_argument("--num-sequences", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep-going", action="store_true", help="print the error of a method and go on")
    parser.add_argument("--no-ledger", action="store_true")
    return parser.parse_args()


def _measured(
    method: dict[str, Any],
    reference: Decoder,
    dense: Scores,
    text: Path,
    heldout: tuple[np.ndarray, np.ndarray],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """The ledger row of one method: means over its seeds."""
    values = {key: value for key, value in method.items() if key not in ("name", "technique", "calibrated")}
    values |= {"num_sequences": arguments.num_sequences, "seq_len": arguments.seq_len, "batch_size": 16}
    spec = Compress.read(values)
    quantizer = quantizer_of(spec.steps)
    calibrates = spec.allocation is not None or any(step.needs & STATISTICS.keys() for step in spec.steps)
    calibrates |= method.get("calibrated", False) or (quantizer is not None and bool(quantizer.input_statistics))
    machine = describe(arguments.device).model_dump(mode="json")
    found: list[tuple[Scores, dict[str, float | None]]] = []
    for seed in range(arguments.seeds if calibrates else 1):
        spec = Compress.read(values | {"seed": seed, "calibration_text": str(text) if calibrates else None})
        out = text.parent / "compress-one"
        run = Run(device=arguments.device, quiet=True, machine=machine)
        made = spec.make(out, {"model": Artifact.read(arguments.model)}, run)
        model = load(made.folder, arguments.device, torch.float32).eval()
        scores = _score(model, reference, *heldout)
        found.append((scores, {name: figure.value for name, figure in made.figures.items()}))
        shutil.rmtree(out)
    perplexities = [scores.perplexity for scores, _ in found]
    mean = statistics.mean(perplexities)
    return {
        "figure": f"perplexity, {arguments.model.name}, {method['name']}",
        "method": method["name"],
        "model": arguments.model.name,
        "value": mean,
        "unit": "",
        "n": len(found),
        "ci95": interval(perplexities),
        "peer": "dense",
        "peer_value": dense.perplexity,
        "ratio": mean / dense.perplexity,
        "technique": method.get("technique"),
        "kl": statistics.mean(scores.mean_kl for scores, _ in found),
        "kl_ci95": interval([scores.mean_kl for scores, _ in found]),
        "top1": statistics.mean(scores.top1_agreement for scores, _ in found),
        "bits_per_weight": found[0][1]["bits_per_weight"],
        "model_bytes": found[0][1]["model_bytes"],
        "seconds": statistics.mean(figures["time_s"] for _, figures in found),
        "sparsity": found[0][1].get("sparsity"),
        "steps": [step.model_dump(mode="json") for step in spec.steps],
        "tokens": found[0][0].num_scored,
        "predicted": made.techniques[-1].get("loss"),
        "calibration": f"{arguments.num_sequences} x {arguments.seq_len}" if calibrates else "none",
    }


def _score(model: Decoder, reference: Decoder | None, tokens: np.ndarray, starts: np.ndarray) -> Scores:
    window = min(model.config.max_seq_len, 1024)
    return score(model, tokens, starts, window=window, reference=reference, batch_tokens=8192)


def interval(values: list[float]) -> float | None:
    """Half the 95 % interval of the mean; None of one value."""
    return half_width(values) if len(values) > 1 else None


def texts(path: Path) -> list[str]:
    """The documents of a jsonl file, .gz or not."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf8") as file:
        return [json.loads(line)["text"] for line in file]


def documents(path: Path, model: Path, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the first documents, `most` in all, and where each document begins."""
    tokenizer, parts, total = load_tokenizer(model), [], 0
    for text in texts(path):
        parts.append(np.asarray(tokenizer.encode(text), np.int64)[: most - total])
        total += len(parts[-1])
        if total >= most:
            break
    return np.concatenate(parts), np.cumsum([0, *(len(part) for part in parts)])


if __name__ == "__main__":
    main()
