"""Masks of structured output: the kernel against its reference and against the memory, and what grammars cost a step.

`python -m benchmarks.kernels.structured_output [--device cuda]`. Every section has a deadline and prints its JSON row when
it ends. The engine's sections need llguidance; they run a random model over a vocabulary of bytes and pairs of letters.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hone.model.decoder import build
from hone.model.shape import Shape
from hone.model.tokenizer import Tokenizer, load_tokenizer
from hone.ops import apply_token_bitmask
from hone.serve.engine import Engine
from hone.serve.request import Request, SamplingParams
from hone.serve.spec import EngineSpec
from hone.serve.structured.spec import StructuredOutputs

DEADLINE_S = 150
SCHEMA = {
    "type": "array",
    "minItems": 12,
    "maxItems": 12,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 8, "maxLength": 8}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}  # fmt: skip


def kernel(device: str) -> dict[str, Any]:
    """Agreement bit for bit, and microseconds, for a vocabulary of 151,936 and bf16 and float32 logits."""
    vocab, rows = 151_936, []
    for count in (1, 64, 512) if device == "cuda" else (4,):
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.randn(count, vocab, device=device).to(dtype)
            masks = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), device=device).int()
            place = torch.arange(count, device=device)
            place[1::3] = -1
            ours, plain = logits.clone(), logits.clone()
            apply_token_bitmask(ours, masks, place)
            apply_token_bitmask(plain, masks, place, backend="reference")
            assert torch.equal(ours, plain), f"{count} rows of {dtype} differ from the reference"
            seconds = timed(lambda x=ours, m=masks, p=place: apply_token_bitmask(x, m, p), device)
            rows.append({"rows": count, "dtype": str(dtype)[6:], "us": round(seconds * 1e6, 2)})
    return {"equal_to_reference": True, "timings": rows}


def timed(run: Callable[[], None], device: str) -> float:
    """Seconds of one call: the median of 20 rounds of 10."""
    found = []
    for _ in range(22 if device == "cuda" else 4):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(10):
            run()
        synchronize(device)
        found.append((time.perf_counter() - began) / 10)
    return statistics.median(found[2:])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def byte_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level tokenizer of 256 bytes, all pairs of lower-case letters, and an end."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"]
    vocab = {text: place for place, text in enumerate([*letters, *(a + b for a, b in pairs)])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return load_tokenizer(folder)


def engine(device: str, ahead: bool | None, folder: Path) -> Engine:
    """A random model of 8 layers, 512 wide (of 2 layers, 64 wide on a CPU)."""
    tokenizer = byte_tokenizer(folder)
    wide, layers = (512, 8) if device == "cuda" else (64, 2)
    shape = Shape(hidden_size=wide, num_layers=layers, num_heads=wide // 64, num_kv_heads=wide // 64, intermediate_size=2 * wide, max_seq_len=2048)  # fmt: skip
    model = build(shape.config(1024, None, 0), seed=0).to(device)
    if device == "cuda":
        model = model.to(torch.bfloat16)
    spec = {"num_pages": 8192, "max_num_seqs": 128, "async_scheduling": ahead, "enable_prefix_caching": False}
    return Engine(model, EngineSpec.read(spec), tokenizer=tokenizer, device=device)


def grammars(device: str, ahead: bool | None) -> dict[str, Any]:
    """Every output of 64 sequences is of its schema, beside 16 free ones that stay what they are alone."""
    with tempfile.TemporaryDirectory() as name:
        one = engine(device, ahead, Path(name))
        form = StructuredOutputs(json_schema=json.dumps(SCHEMA), disable_any_whitespace=True)
        free = [
            Request(f"f{i}", [i + 1, 2, 3], SamplingParams(max_tokens=64, seed=i, temperature=1.0)) for i in range(16)
        ]
        alone = run(one, free)[0]
        held = [
            Request(f"g{i}", [i + 1, 5], SamplingParams(max_tokens=900, seed=i, structured_outputs=form))
            for i in range(64)
        ]
        mixed = run(one, [*free, *held])[0]
        for request in held:
            people = json.loads(mixed[request.id])
            assert len(people) == 12 and all(len(p["name"]) == 8 and 10 <= p["age"] <= 99 for p in people), people
        same = sum(mixed[request.id] == alone[request.id] for request in free)
        assert same == 16 or device == "cuda", (
            "a batch changed sequences without a grammar"
        )  # products of other sizes may round
        return {"ahead": one._ahead, "valid": len(held), "free_unchanged": same}


def cost(device: str) -> dict[str, Any]:
    """Milliseconds of a decode step of 64 sequences, with and without a grammar, interleaved."""
    with tempfile.TemporaryDirectory() as name:
        one = engine(device, None, Path(name))
        form = StructuredOutputs(json_schema=json.dumps(SCHEMA), disable_any_whitespace=True)
        found: dict[str, list[float]] = {"grammar": [], "free": []}
        for turn in range(4):
            for kind, spec in (("grammar", form), ("free", None)):
                params = SamplingParams(max_tokens=220, seed=1, structured_outputs=spec, ignore_eos=True)
                requests = [Request(f"{kind}{turn}-{i}", [i + 1, 5], params) for i in range(64)]
                seconds = run(one, requests)[1]
                if turn:
                    found[kind].append(seconds)
        return {kind: round(1e3 * statistics.median(values), 3) for kind, values in found.items()}


def run(one: Engine, requests: list[Request]) -> tuple[dict[str, str], float]:
    """The texts, and the median seconds of a step."""
    texts = {request.id: "" for request in requests}
    for request in requests:
        one.add(request)
    seconds = []
    while one.has_work:
        began = time.perf_counter()
        for output in one.step():
            assert output.finish != "error", output.error
            texts[output.request_id] += output.text
        seconds.append(time.perf_counter() - began)
    return texts, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "kernel": lambda: kernel(device),
        "grammars, in turn": lambda: grammars(device, False),
        "grammars, ahead": lambda: grammars(device, True),
        "ms per step of 64": lambda: cost(device),
    }
    for name, section in sections.items():
        signal.alarm(DEADLINE_S)  # ends the process: a section that hangs must not hold the machine
        try:
            row = section()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        finally:
            signal.alarm(0)
        print(json.dumps({"section": name, "device": device, **row}), flush=True)


if __name__ == "__main__":
    main()
