"""hone beside llm-compressor in one process on one GPU: the same model and calibration tokens, seconds, memory, quality.

python -m benchmarks.beside_llm_compressor speed [--layers 4] [--peer-layers 2] [--num-sequences 128] [--seq-len 2048] [--methods gptq,awq]
python -m benchmarks.beside_llm_compressor quality --model FOLDER --calibration FILE --heldout FILE [--seeds 3]

speed: random layers of the Llama-3-8B shape, the seconds that one more layer takes; hone's run ends with the written folder,
llm-compressor's with the model in memory. quality: a real model, float32 for both; both models are scored by one function on the same rows of tokens.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ledger
from benchmarks.compress import SHAPES, random_model
from benchmarks.quality import documents, interval, texts
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.calibration import from_data, from_text
from hone.compress.stage import Compress
from hone.measure.machine import describe
from hone.model.hf import load

METHODS: dict[str, list[dict[str, Any]]] = {
    "gptq": [{"kind": "gptq", "bits": 4, "uneven": "nearest"}],
    "awq": [{"kind": "awq"}, {"kind": "rtn", "bits": 4, "scale": "search", "uneven": "nearest"}],
    "smoothquant": [{"kind": "smoothquant"}, {"kind": "rtn", "bits": 8, "group_size": 0, "activations": "int8_token"}],
    "sparsegpt": [{"kind": "sparsegpt", "pattern": "2:4"}],
}
SLOTS = {
    "gptq": "quantizer/gptq",
    "awq": "transform/awq",
    "smoothquant": "transform/smoothquant",
    "sparsegpt": "pruner/sparsegpt",
}
LABELS = {"gptq": "GPTQ W4A16", "awq": "AWQ W4A16", "smoothquant": "SmoothQuant W8A8", "sparsegpt": "SparseGPT 2:4"}
ROW = 512
"""Tokens of a scored row."""


def main() -> None:
    """Runs one of the two comparisons; prints the rows of each method and adds them to the ledger."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        for rows in (_speed if arguments.what == "speed" else _quality)(Path(scratch), arguments):
            print(ledger.table(rows), rows[0].get("ci95", ""), rows[0].get("peer_ci95", ""), flush=True)
            if not arguments.no_ledger:
                ledger.append("compress", rows, arguments.device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "quality"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--peer-layers", type=int, default=2)
    parser.add_argument("--num-sequences", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=0, help="default: 2048, or 512 for quality")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--heldout", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens that are scored")
    parser.add_argument(
        "--device", default="cuda", help="cpu only tries whether the script runs: memory is not measured"
    )
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "quality" and None in (arguments.model, arguments.calibration, arguments.heldout):
        parser.error("quality needs --model, --calibration and --heldout")
    arguments.seq_len = arguments.seq_len or (2048 if arguments.what == "speed" else 512)
    arguments.methods = arguments.methods.split(",")
    return arguments


def _speed(folder: Path, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    options = {"num_sequences": arguments.num_sequences, "seq_len": arguments.seq_len, "seed": 0}
    counts = {1, arguments.layers, arguments.peer_layers}
    models = {count: _random(folder / f"layers-{count}", count, arguments) for count in counts}
    tokens = from_data(models[1][1], **options).tokens
    size = f"llama3-8b, {arguments.num_sequences} x {arguments.seq_len} tokens"
    for method in arguments.methods:

        def ours(count: int, method: str = method) -> dict[str, Any]:
            model, data = models[count]
            fields = options | {"batch_size": 8}
            found = _hone(method, model, {"data": data}, folder, fields, arguments.device)
            shutil.rmtree(found.pop("folder"))
            return found

        def theirs(count: int, method: str = method) -> dict[str, Any]:
            return _llm_compressor(method, models[count][0], tokens, torch.bfloat16, arguments.device)[1]

        ours(1)  # hone's kernels are compiled once a process
        found = {"hone": _a_layer(ours, arguments.layers), "llm-compressor": _a_layer(theirs, arguments.peer_layers)}
        rows = []
        for key, figure, unit in (
            ("seconds", f"seconds a layer, {LABELS[method]} beside llm-compressor", "s"),
            ("memory", f"peak memory, {LABELS[method]} beside llm-compressor", "B"),
        ):
            pair = (found[name][key] for name in ("hone", "llm-compressor"))
            rows.append(_row(method, f"{figure} ({size})", *pair, unit, n=1))
        yield rows


def _random(folder: Path, layers: int, arguments: argparse.Namespace) -> tuple[Path, Path]:
    shape = SHAPES["llama3-8b"]
    return random_model(shape, folder, layers, arguments.num_sequences, arguments.seq_len, torch.bfloat16)


def _a_layer(run: Callable[[int], dict[str, float]], layers: int) -> dict[str, float]:
    """Seconds that a layer adds, peak bytes: what embedding and head take, a 32nd of a whole model, does not count."""
    one, all_layers = run(1), run(layers)
    return {"seconds": (all_layers["seconds"] - one["seconds"]) / (layers - 1), "memory": all_layers["memory"]}


def _quality(folder: Path, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    text, device = folder / "calibration.txt", arguments.device
    text.write_text("\n\n".join(texts(arguments.calibration)), encoding="utf8")
    heldout, _ = documents(arguments.heldout, arguments.model, arguments.tokens)
    scored = torch.from_numpy(heldout[: len(heldout) // ROW * ROW].reshape(-1, ROW)).to(device)
    dense = _perplexity(load(arguments.model, device, torch.float32).eval(), scored)
    for method in arguments.methods:
        found: dict[str, list[float]] = {"ours": [], "theirs": []}
        for seed in range(arguments.seeds):
            options = {"num_sequences": arguments.num_sequences, "seq_len": arguments.seq_len, "seed": seed}
            more = options | {"calibration_text": str(text), "compute_dtype": "float32", "batch_size": 16}
            ours = _hone(method, arguments.model, {}, folder, more, device)
            found["ours"].append(_perplexity(load(ours["folder"], device, torch.float32).eval(), scored))
            shutil.rmtree(ours["folder"])
            tokens = from_text(text, arguments.model, **options).tokens
            model, _ = _llm_compressor(method, arguments.model, tokens, torch.float32, device)
            found["theirs"].append(_perplexity(lambda part, model=model: model(part).logits, scored))
            del model
        means = {name: statistics.mean(values) for name, values in found.items()}
        label = f"perplexity, {arguments.model.name}, {LABELS[method]} beside llm-compressor (dense {dense:.4f})"
        row = _row(method, label, means["ours"], means["theirs"], "", n=arguments.seeds)
        row |= {"ci95": interval(found["ours"]), "peer_ci95": interval(found["theirs"])}
        yield [row]


def _row(method: str, figure: str, ours: float, theirs: float, unit: str, n: int) -> dict[str, Any]:
    row = {"figure": figure, "value": ours, "unit": unit, "n": n, "technique": SLOTS[method]}
    return row | {"peer": "llm-compressor", "peer_value": theirs, "ratio": ours / theirs}


def _hone(
    method: str, model: Path, parents: dict[str, Path], folder: Path, fields: dict[str, Any], device: str
) -> dict[str, Any]:
    """Seconds, peak bytes and folder of hone's run."""
    spec = Compress.read({"steps": METHODS[method], **fields})
    roles = {"model": Artifact.read(model), **{role: Artifact.read(path) for role, path in parents.items()}}
    machine = describe(device).model_dump(mode="json")
    _free(device)
    begun = time.perf_counter()
    made = spec.make(folder / f"compress-{method}", roles, Run(device=device, quiet=True, machine=machine))
    return {
        "seconds": _used(begun, device)["seconds"],
        "memory": made.figures["peak_memory_bytes"].value,
        "folder": made.folder,
    }


def _recipe(method: str) -> list[Any]:
    """The same method in llm-compressor's words."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    linear = {"targets": "Linear", "ignore": ["lm_head"]}
    return {
        "gptq": lambda: [GPTQModifier(scheme="W4A16", **linear)],
        "awq": lambda: [AWQModifier(), QuantizationModifier(scheme="W4A16", **linear)],
        "smoothquant": lambda: [SmoothQuantModifier(), QuantizationModifier(scheme="W8A8", **linear)],
        "sparsegpt": lambda: [SparseGPTModifier(sparsity=0.5, mask_structure="2:4", ignore=["re:.*lm_head"])],
    }[method]()


def _llm_compressor(
    method: str, folder: Path, tokens: np.ndarray, dtype: torch.dtype, device: str
) -> tuple[Any, dict[str, float]]:
    """(the model in memory, its seconds and peak bytes)."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    if device == "cpu":  # its AWQ pins memory, also where there is no accelerator to pin it for
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    rows = tokens.tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    processor = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    _free(device)
    begun = time.perf_counter()
    oneshot(
        model=model, dataset=data, recipe=_recipe(method), max_seq_length=tokens.shape[1],
        num_calibration_samples=len(rows), processor=processor, pipeline="sequential",
    )  # fmt: skip
    return model, _used(begun, device)


def _free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()


def _used(begun: float, device: str) -> dict[str, Any]:
    """Seconds since `begun`, and peak bytes of the GPU."""
    if device == "cpu":
        return {"seconds": time.perf_counter() - begun, "memory": float("nan")}
    torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - begun, "memory": float(torch.cuda.max_memory_allocated())}


@torch.no_grad()
def _perplexity(logits_of: Callable[[Tensor], Tensor], rows: Tensor) -> float:
    """exp of the mean next-token loss over token rows [B, S]."""
    total = 0.0
    for part in rows.split(16):
        logits = logits_of(part)[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return float(np.exp(total / rows[:, 1:].numel()))


if __name__ == "__main__":
    main()
