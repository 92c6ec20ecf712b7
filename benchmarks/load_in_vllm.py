"""Exported folders in vLLM against the same folders in hone: greedy tokens and their log-probabilities.

python -m benchmarks.load_in_vllm --model FOLDER [--formats int4 gptq ...] [--vllm-python PYTHON] [--out FOLDER]

Compresses the model into every format with round to nearest, lets vLLM (its own interpreter, where it needs one) write
`--tokens` greedy tokens after every prompt, and scores the same tokens with hone: the mean and largest difference of
their log-probabilities, and how many hone would have chosen too. A random model has near ties; give a trained one.
`--dry-run` makes the folders and scores hone's own greedy tokens in vLLM's place.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int4": {"kind": "rtn"},
    "int4-signed": {"kind": "rtn", "scale": "signed"},
    "int8": {"kind": "rtn", "bits": 8, "group_size": 0},
    "gptq": {"kind": "rtn", "layout": "gptq"},
    "gptq-signed": {"kind": "rtn", "layout": "gptq", "scale": "signed"},
    "gptq-8": {"kind": "rtn", "layout": "gptq", "bits": 8},
    "gptq_v2": {"kind": "rtn", "layout": "gptq_v2"},
    "awq": {"kind": "rtn", "layout": "awq"},
    "fp8-channel": {"kind": "fp8"},
    "fp8-tensor": {"kind": "fp8", "strategy": "tensor"},
    "fp8-block": {"kind": "fp8", "strategy": "block"},
    "nf4": {"kind": "nf4"},
    "int4-rotated": {"kind": "rtn"},
}
"""Signed: the scales that hone's search chooses too may be negative. nf4 needs vllm-bnb-plugin. Rotated: R1, R2 and R4."""
PROMPTS = [
    "Once upon a time there was a little",
    "The capital of France is",
    "def fibonacci(n):",
    "In 1969, the first people to walk on the moon",
]


def main() -> None:
    """Prints one JSON line for every format."""
    arguments = _arguments()
    if arguments.generate is not None:
        _generate(json.loads(arguments.generate))
        return
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(arguments.out or scratch)
        for name in arguments.formats:
            row = {"format": name, **_compared(name, out, arguments)}
            print(json.dumps(row), flush=True)


def _compared(name: str, out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of one format; `error` where vLLM or hone refuses it."""
    from hone.base.errors import HoneError

    try:
        folder = _exported(name, out, arguments)
        prompts = _encoded(folder)
        if arguments.dry_run:
            written = _own(folder, prompts, arguments)
        else:
            written = _in_vllm(folder, prompts, arguments)
        return _scored(folder, prompts, written, arguments)
    except (HoneError, RuntimeError) as error:
        return {"error": str(error)[-2000:]}


def _exported(name: str, out: Path, arguments: argparse.Namespace) -> Path:
    """The model in format `name`; the model itself for bf16."""
    from hone.base.artifact import Artifact
    from hone.base.run import Run
    from hone.compress.stage import Compress

    if not FORMATS[name]:
        return Path(arguments.model)
    rotation = [{"kind": "rotation", "r4": True}] if name.endswith("-rotated") else []
    spec = Compress.read({"steps": [*rotation, FORMATS[name]]})
    run = Run(device=arguments.device, quiet=True)
    return spec.make(out / f"compress-{name}", {"model": Artifact.read(arguments.model)}, run).folder


def _encoded(folder: Path) -> list[list[int]]:
    """Tokens of the prompts."""
    from hone.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def _in_vllm(folder: Path, prompts: list[list[int]], arguments: argparse.Namespace) -> list[dict[str, list]]:
    """vLLM's greedy tokens and their log-probabilities, from a process of its own, which frees the GPU."""
    task = {"folder": str(folder), "prompts": prompts, "tokens": arguments.tokens}
    command = [arguments.vllm_python, str(Path(__file__).resolve()), "--generate", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("WRITTEN ")]
    if done.returncode or not lines:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(lines[-1].removeprefix("WRITTEN "))


def _generate(task: dict[str, Any]) -> None:
    """Runs in vLLM's interpreter, which may have no hone: prints what vLLM writes."""
    from vllm import LLM, SamplingParams

    model = LLM(task["folder"], dtype="auto", enforce_eager=True, gpu_memory_utilization=0.5, max_model_len=512)
    options = SamplingParams(temperature=0, max_tokens=task["tokens"], logprobs=1, ignore_eos=True)
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in task["prompts"]], options)
    written = []
    for output in outputs:
        chosen = output.outputs[0]
        values = [row[token].logprob for token, row in zip(chosen.token_ids, chosen.logprobs, strict=True)]
        written.append({"tokens": list(chosen.token_ids), "logprobs": values})
    print("WRITTEN " + json.dumps(written), flush=True)


def _own(folder: Path, prompts: list[list[int]], arguments: argparse.Namespace) -> list[dict[str, list]]:
    """hone's greedy tokens and their log-probabilities, by one pass a token."""
    import torch

    model, written = _loaded(folder, arguments), []
    for prompt in prompts:
        tokens, values = list(prompt), []
        for _ in range(arguments.tokens):
            with torch.no_grad():
                last = model(torch.tensor([tokens], device=arguments.device))[0, -1].float().log_softmax(-1)
            tokens.append(int(last.argmax()))
            values.append(float(last.max()))
        written.append({"tokens": tokens[len(prompt) :], "logprobs": values})
    return written


def _scored(
    folder: Path, prompts: list[list[int]], written: list[dict[str, list]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """hone's log-probabilities of the same tokens beside theirs."""
    import torch

    model, differences, same = _loaded(folder, arguments), [], 0
    for prompt, one in zip(prompts, written, strict=True):
        tokens = torch.tensor([prompt + one["tokens"]], device=arguments.device)
        with torch.no_grad():
            rows = model(tokens)[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        ours = rows.gather(1, tokens[0, len(prompt) :, None]).squeeze(1).cpu()
        differences.append((ours - torch.tensor(one["logprobs"])).abs())
        same += int((rows.argmax(-1) == tokens[0, len(prompt) :]).sum())
    every = torch.cat(differences)
    return {
        "mean_difference": round(float(every.mean()), 5),
        "largest_difference": round(float(every.max()), 5),
        "same_choice": same / len(every),
        "tokens": len(every),
    }


def _loaded(folder: Path, arguments: argparse.Namespace) -> Any:
    """The folder in hone, in the dtype of its config.json."""
    from hone.model.hf import load

    return load(folder, device=arguments.device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder with a tokenizer")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--out", help="where the folders stay; else they are deleted")
    parser.add_argument("--tokens", type=int, default=32, help="greedy tokens after every prompt")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--dry-run", action="store_true", help="hone's own tokens in vLLM's place")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate is None and arguments.model is None:
        parser.error("--model is needed")
    return arguments


if __name__ == "__main__":
    main()
