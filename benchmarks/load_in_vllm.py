"""Exported folders in vLLM against the same folders in hone: greedy tokens and their log-probabilities.

python -m benchmarks.load_in_vllm --model FOLDER --text FILE [--formats int4 gptq ...] [--vllm-python PYTHON] [--out FOLDER]

Compresses the model into every format (calibrated on the text of FILE where the format needs it), lets vLLM (its own
interpreter, where it needs one; `--at-once` processes, each `--timeout` seconds at most) write `--tokens` greedy tokens after
every prompt, and scores the same tokens with hone: the mean and largest difference of their log-probabilities, and how many
hone would have chosen too. Beside it the mean difference between hone in the folder's dtype and hone in float32: what rounding
alone does to this format, before an engine computes anything in another way. A random model has near ties; give a trained one.
`--dry-run` makes the folders and scores hone's own greedy tokens in vLLM's place.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_ROWS = {"bits": 8, "group_size": 0}
FORMATS: dict[str, list[dict[str, Any]]] = {
    "bf16": [],
    "int2": [{"kind": "rtn", "bits": 2, "group_size": 32}],
    "int3": [{"kind": "rtn", "bits": 3}],
    "int4": [{"kind": "rtn"}],
    "int4-signed": [{"kind": "rtn", "scale": "signed"}],
    "int4-asymmetric": [{"kind": "rtn", "symmetric": False}],
    "int4-g32": [{"kind": "rtn", "group_size": 32}],
    "int4-rows": [{"kind": "rtn", "group_size": 0}],
    "int6": [{"kind": "rtn", "bits": 6}],
    "int8-g128": [{"kind": "rtn", "bits": 8}],
    "int8-rows": [{"kind": "rtn", **_ROWS}],
    "int8-rows-int-quantized": [{"kind": "rtn", **_ROWS, "layout": "int-quantized"}],
    "gptq-layout": [{"kind": "rtn", "layout": "gptq"}],
    "gptq-layout-signed": [{"kind": "rtn", "layout": "gptq", "scale": "signed"}],
    "gptq-layout-int3": [{"kind": "rtn", "layout": "gptq", "bits": 3}],
    "gptq-layout-int8": [{"kind": "rtn", "layout": "gptq", "bits": 8}],
    "gptq_v2-layout": [{"kind": "rtn", "layout": "gptq_v2"}],
    "awq-layout": [{"kind": "rtn", "layout": "awq"}],
    "gptq": [{"kind": "gptq"}],
    "gptq-rules": [{"kind": "gptq", "rules": [{"match": "re:.*down_proj", "bits": 8}]}],
    "gptq-rules-groups": [{"kind": "gptq", "rules": [{"match": "o_proj", "bits": 8, "group_size": 32}]}],
    "int4-head": [{"kind": "rtn", "rules": [{"match": "lm_head", "bits": 8}]}],
    "gptq-layout-head": [{"kind": "rtn", "layout": "gptq"}],
    "fp8-head": [{"kind": "fp8"}],
    "int4-embedding": [{"kind": "rtn", "rules": [{"match": "embed_tokens", "bits": 8}]}],
    "int4-tied-embedding": [{"kind": "rtn"}],
    "awq-rtn": [{"kind": "awq"}, {"kind": "rtn"}],
    "rotated": [{"kind": "rotation"}, {"kind": "rtn"}],
    "rotated-r4": [{"kind": "rotation", "r4": True}, {"kind": "rtn"}],
    "w8a8-token": [{"kind": "rtn", **_ROWS, "activations": "int8_token"}],
    "w8a8-token-asymmetric": [{"kind": "rtn", **_ROWS, "activations": "int8_token_asymmetric"}],
    "w8a8-tensor": [{"kind": "rtn", **_ROWS, "activations": "int8_tensor"}],
    "w8a8-tensor-mse": [{"kind": "rtn", **_ROWS, "activations": "int8_tensor", "observer": {"kind": "mse"}}],
    "w4a8": [{"kind": "rtn", "activations": "int8_token"}],
    "w4a8-fp8": [{"kind": "rtn", "activations": "fp8_token"}],
    "fp8": [{"kind": "fp8"}],
    "fp8-static": [{"kind": "fp8", "strategy": "tensor", "activations": "fp8_tensor"}],
    "fp8-weights": [{"kind": "fp8", "activations": "none"}],
    "fp8-weights-tensor": [{"kind": "fp8", "strategy": "tensor", "activations": "none"}],
    "fp8-block": [{"kind": "fp8", "strategy": "block"}],
    "fp8-block-ct": [{"kind": "fp8", "strategy": "block", "layout": "float-quantized", "activations": "fp8_group"}],
    "nvfp4-weights": [{"kind": "nvfp4"}],
    "nvfp4": [{"kind": "nvfp4", "activations": "nvfp4"}],
    "mxfp4-weights": [{"kind": "mxfp4"}],
    "mxfp8": [{"kind": "mxfp8", "activations": "mxfp8"}],
    "nf4": [{"kind": "nf4"}],
    "sparse-2of4": [{"kind": "magnitude", "pattern": "2:4"}, {"kind": "rtn"}],
    "depth": [{"kind": "depth", "num_layers": 0.75}],
    "kv-fp8": [{"kind": "kv_cache"}],
    "w8a8-fp8-kv-fp8": [{"kind": "fp8", "activations": "fp8_token"}, {"kind": "kv_cache"}],
}
"""Steps of each. Signed: the scales that hone's search chooses too may be negative. nf4 needs vllm-bnb-plugin."""
TARGETS = {
    "-head": {"targets": [r"\.layers\.", "lm_head"], "ignore": []},
    "-embedding": {"targets": [r"\.layers\.", "lm_head", "embed_tokens"], "ignore": []},
    "-tied-embedding": {"targets": [r"\.layers\.", "embed_tokens"], "ignore": ["lm_head"]},
}
"""What is quantized in formats whose name ends so; the longest ending counts. A tied embedding is the head, too."""
LEDGER = Path(__file__).with_name("ledger") / "load_in_vllm.jsonl"
PROMPTS = [
    "Once upon a time there was a little",
    "The capital of France is",
    "def fibonacci(n):",
    "In 1969, the first people to walk on the moon",
]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",
}
"""Of vLLM's processes. With processes of its own the engine of 0.24 waited for ever; DeepGEMM's warm-up takes minutes."""


def main() -> None:
    """Prints one JSON line for every format and writes the ledger's rows."""
    arguments = _arguments()
    if arguments.generate is not None:
        _generate(json.loads(arguments.generate))
        return
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(arguments.out or scratch)
        folders, results = {}, {}
        for name in arguments.formats:
            result = _or_error(lambda name=name: _exported(name, out, arguments))
            (results if isinstance(result, dict) else folders)[name] = result
            print(f"{name}: {result}", file=sys.stderr, flush=True)
        write = _own if arguments.dry_run else _in_vllm
        with ThreadPoolExecutor(arguments.at_once) as pool:
            tasks = {
                name: pool.submit(_or_error, lambda folder=folder: write(folder, _encoded(folder), arguments))
                for name, folder in folders.items()
            }
        for name, folder in folders.items():
            written = tasks[name].result()
            results[name] = (
                written if isinstance(written, dict) else _scored(folder, _encoded(folder), written, arguments)
            )
        for name in arguments.formats:
            print(json.dumps({"format": name, **results[name]}), flush=True)
        if not arguments.no_ledger:
            _to_ledger(results, arguments)


def _or_error(work: Callable[[], Any]) -> Any:
    """What `work` returns, or {"error": the last lines} where vLLM or hone refuses."""
    from hone.base.errors import HoneError

    try:
        return work()
    except (HoneError, RuntimeError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)[-3000:]}


def _to_ledger(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """A row a format: the mean difference of log-probabilities, None with `refused` where the folder does not load."""
    from benchmarks import ledger

    peer = f"vllm {_vllm_version(arguments)}"
    rows = []
    for name, result in results.items():
        row = {"figure": f"log-probabilities against hone's, {Path(arguments.model).name} as {name}", "format": name}
        row |= {"value": result.get("mean_difference"), "unit": "nats", "n": result.get("tokens", 0), "peer": peer}
        more = ("largest_difference", "same_choice", "of_dtype_alone", "capability")
        row |= {key: result[key] for key in more if key in result}
        if "error" in result:
            row["refused"] = _reason(result["error"])
        rows.append(row)
    print(ledger.append("load_in_vllm", rows, arguments.device))


def _reason(error: str) -> str:
    """Why a process of vLLM ended: the last line that begins with the name of an exception, and the one after it."""
    lines = [line.removeprefix("[rank0]:").strip() for line in error.splitlines()]
    lines = [line for line in lines if line and "destroy_process_group" not in line]
    named = [place for place, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
    return " ".join(lines[named[-1] : named[-1] + 2] if named else lines[-1:])[:300]


def _vllm_version(arguments: argparse.Namespace) -> str:
    """vLLM's version in its interpreter."""
    say = "from importlib.metadata import version; print(version('vllm'))"
    done = subprocess.run([arguments.vllm_python, "-c", say], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"


def _exported(name: str, out: Path, arguments: argparse.Namespace) -> Path:
    """The model in format `name`; the model itself for bf16."""
    from hone.base.artifact import Artifact
    from hone.base.run import Run
    from hone.compress.stage import Compress
    from hone.measure.machine import describe

    if not FORMATS[name]:
        return Path(arguments.model)
    text = {"calibration_text": arguments.text, "num_sequences": 32, "check_sequences": 0}
    ending = max((one for one in TARGETS if name.endswith(one)), key=len, default=None)
    spec = Compress.read({"steps": FORMATS[name], **text, **({} if ending is None else TARGETS[ending])})
    machine = describe(arguments.device).model_dump(mode="json")  # its rates need not be measured: nothing is predicted
    run = Run(device=arguments.device, quiet=True, machine=machine)
    return spec.make(out / f"compress-{name}", {"model": Artifact.read(arguments.model)}, run).folder


def _encoded(folder: Path) -> list[list[int]]:
    """Tokens of the prompts."""
    from hone.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def _in_vllm(folder: Path, prompts: list[list[int]], arguments: argparse.Namespace) -> list[dict[str, list]]:
    """vLLM's greedy tokens and their log-probabilities, from a process of its own, which frees the GPU."""
    task = {"folder": str(folder), "prompts": prompts, "tokens": arguments.tokens}
    if folder.name.endswith("kv-fp8"):
        task["kv_cache_dtype"] = "fp8"
    command = [arguments.vllm_python, str(Path(__file__).resolve()), "--generate", json.dumps(task)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": arguments.timeout}
    done = subprocess.run(command, env=ENVIRONMENT | os.environ, **options)
    lines = [line for line in done.stdout.splitlines() if line.startswith("WRITTEN ")]
    if done.returncode or not lines:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stdout[-1500:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix("WRITTEN "))


def _generate(task: dict[str, Any]) -> None:
    """Runs in vLLM's interpreter, which may have no hone: prints what vLLM writes."""
    from vllm import LLM, SamplingParams

    cache = {"kv_cache_memory_bytes": 1 << 28, "kv_cache_dtype": task.get("kv_cache_dtype", "auto")}
    # A fixed cache: vLLM measures free memory otherwise, which fails beside another process on the GPU.
    model = LLM(
        task["folder"], dtype="auto", enforce_eager=True, gpu_memory_utilization=0.1, max_model_len=512, **cache
    )
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
    """hone's log-probabilities of the same tokens beside theirs, and beside its own in float32."""
    import torch

    model, wide = _loaded(folder, arguments), _loaded(folder, arguments, torch.float32)
    differences, by_dtype, same = [], [], 0
    for prompt, one in zip(prompts, written, strict=True):
        tokens = torch.tensor([prompt + one["tokens"]], device=arguments.device)
        with torch.no_grad():
            rows, exact = (some(tokens)[0, len(prompt) - 1 : -1].float().log_softmax(-1) for some in (model, wide))
        ours, fine = (logprobs.gather(1, tokens[0, len(prompt) :, None]).squeeze(1).cpu() for logprobs in (rows, exact))
        differences.append((ours - torch.tensor(one["logprobs"])).abs())
        by_dtype.append((ours - fine).abs())
        same += int((rows.argmax(-1) == tokens[0, len(prompt) :]).sum())
    every = torch.cat(differences)
    result = {
        "mean_difference": round(float(every.mean()), 5),
        "largest_difference": round(float(every.max()), 5),
        "of_dtype_alone": round(float(torch.cat(by_dtype).mean()), 5),
        "same_choice": same / len(every),
        "tokens": len(every),
    }
    if arguments.device.startswith("cuda"):
        result["capability"] = ".".join(map(str, torch.cuda.get_device_capability(arguments.device)))
    return result


def _loaded(folder: Path, arguments: argparse.Namespace, dtype: Any = None) -> Any:
    """The folder in hone, in the dtype of its config.json or in another."""
    from hone.model.hf import load

    return load(folder, device=arguments.device, dtype=dtype)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder with a tokenizer")
    parser.add_argument("--text", help="text file to calibrate with")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--out", help="where the folders stay; else they are deleted")
    parser.add_argument("--tokens", type=int, default=32, help="greedy tokens after every prompt")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--at-once", type=int, default=1, help="processes of vLLM at the same time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one process of vLLM may take")
    parser.add_argument("--dry-run", action="store_true", help="hone's own tokens in vLLM's place")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate is None and arguments.model is None:
        parser.error("--model is needed")
    return arguments


if __name__ == "__main__":
    main()
