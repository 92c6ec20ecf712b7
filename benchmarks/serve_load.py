"""One engine under the loads of serving, on one GPU: `python -m benchmarks.serve_load hone FOLDER`, or `vllm FOLDER`.

The requests are a function of the load alone, so that engines can be compared: `python -m benchmarks.serve --peer vllm`
runs both in turn. FOLDER has a config.json; weights are random. Loads: "throughput", 512 requests of 100..1024 tokens in
and out; "batch 1"; "shared prefix", 128 requests of 4096 shared and 64 own tokens; "prefill", 64 prompts of 4096; and two
that nothing was tuned for: "long answers", many short prompts with lengths from a heavy tail, and "long prompts". Prints one
JSON line per load. This file imports neither engine before it is asked for, so that it runs where only the peer is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

MAX_NUM_SEQS, MAX_MODEL_LEN, MEMORY = 512, 8192, 0.85


class Load(NamedTuple):
    """Prompts and output lengths, and what is warmed up before (a list of prompts of one token each)."""

    prompts: list[list[int]]
    outputs: list[int]
    before: list[list[int]] = []  # noqa: RUF012


def load_of(name: str, vocab_size: int) -> Load:
    """The requests of a load, the same in every process."""
    rng = random.Random(f"hone {name}")

    def text(count: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(count)]

    if name == "throughput":
        lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(512)]
        return Load([text(count) for count, _ in lengths], [count for _, count in lengths])
    if name == "even":
        return Load([text(512) for _ in range(512)], [512] * 512)
    if name == "batch 1":
        return Load([text(128)], [257])
    if name == "shared prefix":
        prefix = text(4096)
        return Load([prefix + text(64) for _ in range(128)], [64] * 128, [prefix + text(64)])
    if name == "shared prefix, cold":
        prefix = text(4096)
        return Load([prefix + text(64) for _ in range(128)], [64] * 128)
    if name == "prefill":
        return Load([text(4096) for _ in range(64)], [1] * 64)
    if name == "long answers":
        outputs = [min(2000, 32 + int(rng.lognormvariate(5.3, 0.8))) for _ in range(700)]
        return Load([text(16 + int(rng.expovariate(1 / 60))) for _ in outputs], outputs)
    assert name == "long prompts", name
    prompts = [text(min(7000, 500 + int(rng.paretovariate(1.2) * 400))) for _ in range(96)]
    return Load(prompts, [rng.choice((20, 60, 180)) for _ in prompts])


LOADS = ("throughput", "batch 1", "shared prefix", "shared prefix, cold", "prefill", "long answers", "long prompts")
EVEN = "even"
"""512 requests of 512 tokens in and out: what `benchmarks.serve_http URL --rates inf` sends over HTTP."""

Go = Callable[[list[list[int]], list[int]], float]
"""Seconds to continue all prompts by exactly these numbers of tokens, drawn at temperature 1."""


def open_hone(folder: str, kv_cache_dtype: str = "auto", part: float = MEMORY) -> tuple[Go, dict[str, float], Any]:
    import torch

    from hone.model.families.config_json import from_hf
    from hone.serve.engine import Engine, EngineSpec
    from hone.serve.request import SamplingParams

    begun = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = part if device == "cuda" else None
    length = min(
        MAX_MODEL_LEN, from_hf(json.loads((Path(folder) / "config.json").read_text(encoding="utf8"))).max_seq_len
    )
    sizes = {"max_num_seqs": MAX_NUM_SEQS, "gpu_memory_utilization": memory, "max_model_len": length}
    spec = EngineSpec.read({"load_format": "dummy", "dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype, **sizes})
    engine = Engine(folder, spec, device=device)

    def go(prompts: list[list[int]], outputs: list[int]) -> float:
        params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=count) for count in outputs]
        start = time.perf_counter()
        done = engine.generate(prompts, params)
        if device == "cuda":
            torch.cuda.synchronize()
        spent = time.perf_counter() - start
        assert [len(one.tokens) for one in done] == outputs, [one.error for one in done if one.error][:1]
        return spent

    go([[5] * 64], [16])
    times = {"start-up": time.perf_counter() - begun}
    begun = time.perf_counter()
    while engine.idle():
        pass
    times["graphs captured while idle"] = time.perf_counter() - begun
    return go, times, engine


def open_vllm(folder: str, kv_cache_dtype: str = "auto", part: float = MEMORY) -> tuple[Go, dict[str, float], Any]:
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    begun = time.perf_counter()
    engine = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=part,
        max_num_seqs=MAX_NUM_SEQS,
        seed=0,
        enable_prefix_caching=True,
        kv_cache_dtype=kv_cache_dtype,
    )

    def go(prompts: list[list[int]], outputs: list[int]) -> float:
        params = [
            SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=count, detokenize=False) for count in outputs
        ]
        start = time.perf_counter()
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    go([[5] * 64], [16])
    return go, {"start-up": time.perf_counter() - begun}, engine


def measure(go: Go, name: str, vocab_size: int) -> dict[str, Any]:
    """The figure of one load."""
    load = load_of(name, vocab_size)
    if load.before:
        go(load.before, [1] * len(load.before))
    if name == "batch 1":
        first = go([prompt[::-1] for prompt in load.prompts], [1])
        return {"value": (go(load.prompts, load.outputs) - first) / (load.outputs[0] - 1) * 1e3, "unit": "ms/token"}
    spent = go(load.prompts, load.outputs)
    if name.startswith("shared prefix"):
        return {"value": len(load.prompts) / spent, "unit": "requests/s", "seconds": spent}
    if name == "prefill":
        return {"value": sum(map(len, load.prompts)) / spent, "unit": "tokens/s", "seconds": spent}
    return {"value": sum(load.outputs) / spent, "unit": "output tokens/s", "seconds": spent}


def limit(
    name: str,
    config: Any,
    read: float,
    products: float,
    *,
    weight_bytes: float = 2.0,
    cache_bytes: float = 2.0,
    product_rate: float = 1.0,
) -> float:
    """The figure of `measure` if weights and keys were read, and products computed, one after another at these rates.

    `read` in bytes/s, `products` in FLOP/s; a weight of a layer has `weight_bytes`, those of embedding and head are bfloat16,
    a number in the cache has `cache_bytes`, and products with weights of layers run at `product_rate` times `products`. Shared pages are read once a step. Steps of fewer sequences than the
    load has at its begin are counted as if all ran to the end: the limit is not reached by any schedule.
    """
    load = load_of(name, config.vocab_size)
    dims = config.dims()
    token = cache_bytes * dims.state_values(1)
    head = config.vocab_size * config.hidden_size
    ends = (1 if config.tie_embeddings else 2) * head
    stored, body, seqs = config.num_params - ends, config.active_params - ends, len(load.prompts)

    def weights(tokens: int) -> float:
        """Bytes of weights that a step of so many sequences reads: of experts those that some of them visit."""
        unread = sum(one.routed.params - one.routed.read(tokens) for one in dims.layers)
        return weight_bytes * (stored - unread) + 2.0 * head

    if name == "batch 1":
        return 1e3 * (weights(1) + token * (len(load.prompts[0]) + load.outputs[0] / 2)) / read
    shared = 4096 if name.startswith("shared") else 0
    own = [len(prompt) - shared for prompt in load.prompts]
    computed = sum(own) + (shared if "cold" in name else 0) + sum(load.outputs) - seqs
    attended = sum(length * (shared + length / 2) for length in own) + ("cold" in name) * shared**2 / 2
    heads = sum(4.0 * layer.mixing.num_heads * layer.mixing.head_dim for layer in dims.layers)
    flops = 2.0 * body * computed / product_rate + 2.0 * head * sum(load.outputs) + heads * attended
    cached = sum(out * (length + out / 2) for length, out in zip(own, load.outputs)) + shared * max(load.outputs)
    most = 300 if body == stored else MAX_NUM_SEQS + 1  # beyond, products take longer than reading weights
    few = sum(
        max(0.0, weights(n) / read - 2.0 * (body / product_rate + head) * n / products)
        for n in _running(load.outputs, most)
    )
    seconds = flops / products + token * cached / read + few
    if name.startswith("shared"):
        return seqs / seconds
    return (sum(map(len, load.prompts)) if name == "prefill" else sum(load.outputs)) / seconds


def _running(outputs: list[int], most: int) -> list[int]:
    """Sequences that still run at each step, if all begin together (at most MAX_NUM_SEQS of them), where fewer than `most` do."""
    running = (sum(end > step for end in outputs) for step in range(max(outputs)))
    return [count for count in running if count < most]


def busy(engine: Any, config: Any, steps: int) -> dict[str, Any]:
    """Share of wall time in which some kernel runs, over `steps` steps of 512 sequences that come and go."""
    import torch

    from hone.serve.request import Request, SamplingParams

    load = load_of("throughput", config.vocab_size)
    for place in range(700):
        prompt, count = [3 + place, *load.prompts[place % 512]], load.outputs[(7 * place) % 512]
        engine.add(Request(f"busy-{place}", prompt, SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=count)))
    for _ in range(130):
        engine.step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    plain = (time.perf_counter() - begun) / steps
    before = engine.stats()["output_tokens"]
    found = kernels_of(engine, steps)
    for place in range(700):
        engine.abort(f"busy-{place}")
    while engine.has_work:
        engine.step()
    tokens = (engine.stats()["output_tokens"] - before) / steps
    return found | {"ms_step_unprofiled": plain * 1e3, "tokens_step": tokens}


def kernels_of(engine: Any, steps: int) -> dict[str, Any]:
    """Share of wall time in which some kernel runs over the next `steps` steps, the longest kernels and the largest gaps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    events = [event for event in found.events() if str(event.device_type).endswith("CUDA")]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    union, end, gaps = 0.0, spans[0][0], []
    for start, stop, name in spans:
        if start > end:
            gaps.append((start - end, name[:50]))
        union, end = union + max(0.0, stop - max(start, end)), max(end, stop)
    wall = end - spans[0][0]
    by_name: dict[str, float] = {}
    for start, stop, name in spans:
        by_name[name[:70]] = by_name.get(name[:70], 0.0) + (stop - start) / 1e3 / steps
    top = dict(sorted(by_name.items(), key=lambda one: -one[1])[:16])
    return {
        "value": union / wall,
        "unit": "of wall time",
        "ms_step": wall / 1e3 / steps,
        "kernels_step": len(spans) / steps,
        "gaps": [f"{size:.0f} us before {name}" for size, name in sorted(gaps, reverse=True)[:6]],
        "top_ms": {name: round(value, 3) for name, value in top.items()},
    }


def decoding(engine: Any, num_seqs: int, steps: int) -> dict[str, Any]:
    """`kernels_of` steps of `num_seqs` sequences that all decode."""
    from hone.serve.request import Request, SamplingParams

    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=2 * steps + 60)
    for place in range(num_seqs):
        engine.add(Request(f"decoding-{place}", [3 + place] * 128, params))
    for _ in range(20):
        engine.step()
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step()
    plain = (time.perf_counter() - begun) / steps
    found = kernels_of(engine, steps)
    for place in range(num_seqs):
        engine.abort(f"decoding-{place}")
    while engine.has_work:
        engine.step()
    return found | {"ms_step_unprofiled": plain * 1e3}


def host_time(engine: Any, config: Any, steps: int) -> dict[str, Any]:
    """Milliseconds of Python in a step of 512 sequences that decode, by part, and its profile."""
    import cProfile
    import io
    import pstats

    from hone.serve.request import Request, SamplingParams

    for place in range(512):
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=steps + 60)
        engine.add(Request(f"host-{place}", [3 + place] * 20, params))
    for _ in range(20):
        engine.step()
    spent = {"launch": 0.0, "step": 0.0}
    real = engine._launch

    def launch() -> Any:
        begun = time.perf_counter()
        found = real()
        spent["launch"] += time.perf_counter() - begun
        return found

    engine._launch = launch
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step()
    spent["step"] = time.perf_counter() - begun
    engine._launch = real
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20):
        engine.step()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(14)
    print(text.getvalue(), flush=True)
    for place in range(512):
        engine.abort(f"host-{place}")
    while engine.has_work:
        engine.step()
    return {"value": spent["launch"] / steps * 1e3, "unit": "ms", "step_ms": spent["step"] / steps * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("hone", "vllm"))
    parser.add_argument("folder", help="folder with config.json")
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=(*LOADS, EVEN))
    parser.add_argument("--rounds", type=int, default=1, help="times that all loads run")
    parser.add_argument("--profile", action="store_true", help="hone: share of time in which the GPU is busy, first")
    parser.add_argument("--kv-cache-dtype", default="auto", help="number format of keys and values")
    parser.add_argument("--memory", type=float, default=MEMORY, help="part of the GPU's memory that the engine may use")
    parser.add_argument("--json", default="", help="file that gets the lines too")
    args = parser.parse_args()
    name = args.folder.rstrip("/").rpartition("/")[2]
    with open(Path(args.folder) / "config.json", encoding="utf8") as file:
        vocab_size = json.load(file)["vocab_size"]

    version = metadata.version("vllm") if args.engine == "vllm" else None

    def say(load: str, row: dict[str, Any]) -> None:
        line = json.dumps({"engine": args.engine, "version": version, "model": name, "load": load, **row})
        print(line, flush=True)
        if args.json:
            with open(args.json, "a", encoding="utf8") as out:
                out.write(line + "\n")

    go, times, engine = (open_hone if args.engine == "hone" else open_vllm)(
        args.folder, args.kv_cache_dtype, args.memory
    )
    for what, value in times.items():
        say(what, {"value": value, "unit": "s"})
    if args.profile:
        assert args.engine == "hone", "--profile is of hone"
        config = engine.model.config
        for num_seqs in (1, 64):
            say(f"busy, batch {num_seqs}", decoding(engine, num_seqs, 40))
        say("host", host_time(engine, config, 60))
        say("busy", busy(engine, config, 60))
    for _ in range(args.rounds):
        for load in args.loads:
            row = measure(go, load, vocab_size)
            assert math.isfinite(row["value"])
            say(load, row)
            if args.engine == "hone":
                engine.pool.clear()
            else:
                engine.reset_prefix_cache()


if __name__ == "__main__":
    main()
