"""GGUF files of a model in llama.cpp: size and perplexity of each type, and of GPTQ's own codes, beside hone's own score.

python -m benchmarks.gguf --model FOLDER --calibration FILE --heldout FILE     needs xllamacpp (the dev extra); on a CPU

Rows of 512 tokens of held-out documents are scored one by one, each without what came before it, by both programs.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ledger
from benchmarks.quality import texts
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.exports.api import export
from hone.model.hf import load
from hone.model.tokenizer import load_tokenizer
from tests.exports.gguf.llama_cpp import LlamaCpp

TYPES = ("f16", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0")
CODES = {"kind": "gptq", "bits": 4, "group_size": 32, "scale_dtype": "float16"}
ROW = 512


def main() -> None:
    """Exports and scores every type, prints the table, adds it to the ledger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True, help="jsonl of texts, .gz or not")
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16, help="rows of 512 tokens that are scored")
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    tokenizer, tokens = load_tokenizer(arguments.model), []
    for text in texts(arguments.heldout):
        ids = tokenizer.encode(text)[:ROW]
        tokens += [ids] if len(ids) == ROW else []
        if len(tokens) == arguments.rows:
            break
    with tempfile.TemporaryDirectory() as scratch:
        rows = _rows(arguments, tokens, Path(scratch))
    print(ledger.table(rows))
    if not arguments.no_ledger:
        print(ledger.append("gguf", rows))


def _rows(arguments: argparse.Namespace, tokens: list[list[int]], folder: Path) -> list[dict[str, Any]]:
    name, quiet = arguments.model.name, Run(quiet=True)
    dense = _perplexity(_own(arguments.model), tokens)
    found = []
    for kind in TYPES:
        made = export(arguments.model, folder / f"{kind}.gguf", quiet, type=kind)
        found += _figures(f"{name} as {kind}", made.path, tokens, dense, "hone, float32")
    text = folder / "calibration.txt"
    text.write_text("\n\n".join(texts(arguments.calibration)[::8]), encoding="utf8")
    spec = Compress.read({"steps": [CODES], "num_sequences": 48, "calibration_text": str(text)})
    small = spec.make(folder / "compress-int4", {"model": Artifact.read(arguments.model)}, quiet).folder
    made = export(small, folder / "codes.gguf", quiet)
    own = _perplexity(_own(small), tokens)
    return found + _figures(f"{name} as q4_0, the codes of gptq", made.path, tokens, own, "hone, the same codes")


def _figures(label: str, path: Path, tokens: list[list[int]], own: float, peer: str) -> list[dict[str, Any]]:
    model = LlamaCpp(path)
    value = _perplexity(lambda ids: torch.from_numpy(model.logits(ids)), tokens)
    model.close()
    row = {"figure": f"perplexity in llama.cpp, {label}", "value": value, "unit": "", "n": len(tokens)}
    size = {"figure": f"size, {label}", "value": float(path.stat().st_size), "unit": "B", "n": 1}
    print(f"{label}: {value:.4f} ({peer} {own:.4f}), {path.stat().st_size / 2**20:.1f} MiB", flush=True)
    return [row | {"peer": peer, "peer_value": own, "ratio": value / own}, size]


def _own(folder: Path) -> Callable[[list[int]], Tensor]:
    model = load(folder, dtype=torch.float32)

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        return model(torch.tensor([ids]))[0]

    return logits


def _perplexity(logits_of: Callable[[list[int]], Tensor], tokens: list[list[int]]) -> float:
    total = 0.0
    for ids in tokens:
        logits = logits_of(ids)[:-1].float()
        total += float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
    return math.exp(total / sum(len(ids) - 1 for ids in tokens))


if __name__ == "__main__":
    main()
