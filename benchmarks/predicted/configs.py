"""Configurations of the ledger's rows: as a row records one, else as its name says it; or why there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.serve_load import LOADS

Config = dict[str, Any]
Row = Mapping[str, Any]

QUALITY = "a loss, a quality or a count, which no cost estimate is of"
PEER = "measures a peer's code"
PART = "a kernel or a part of a stage, which has no estimate of its own"
VIEW = "another view of a row that counts (MFU, a share, a ratio)"
SLEEPS = "passes that sleep: it measures an order, not a model"
STARTS = "start-up, graphs or Python's own time, which no plan says"
UNSAID = "its options are not in the row"
NO_RATES = "on a CPU whose rates were not recorded: only a bound could be said"
HOST = "the host's and the disk's rates of that call are not in the row"
GONE = "the first engine, which had no CUDA graphs: code that is gone"
OLDER = "measured again later, by newer code"
CUT = "the run was cut off before its requests had ended"

LAYERS = r"(?:, (?P<layers>\d+) layers)?"
COMPILED = r"(?P<compiled>, compiled)?"
ENGINE = {"max_num_seqs": 512, "max_model_len": 8192, "gpu_memory_utilization": 0.85}
"""Of benchmarks.serve_load."""
FIRST_ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
"""Of benchmarks.serve."""
FIRST_CALL = "2026-11-21T03"
"""When benchmarks.serve measured the first engine."""
FORMATS = {"-int4": "int4 g128", "-fp8": "fp8"}
MICRO_BATCHES = {"two micro-batches of one sequence each": 2}
"""What the end of a note says of them; without it a step is one."""
DECODE_CONTEXT = 512 + 4 + 32
"""Of benchmarks.serve: a prompt, the steps before, half of the steps."""


def config_of(benchmark: str, row: Row) -> Config | str:
    """The configuration of a row as `benchmarks.predicted.estimates` takes it, or the reason why none can be made."""
    if isinstance(row.get("config"), dict):
        return dict(row["config"])
    for pattern, made in RULES.get(benchmark, ()):
        found = re.search(pattern, row["figure"])
        if found:
            return made if isinstance(made, str) else made({k: v for k, v in found.groupdict().items() if v}, row)
    return QUALITY


def _numbers(found: Mapping[str, str]) -> dict[str, Any]:
    return {name: int(value) if value.isdigit() else value for name, value in found.items()}


def _one_gpu(found: Mapping[str, str], row: Row) -> Config:
    at = _numbers(found)
    kept = {"kind": "every_nth", "n": at["nth"]} if "nth" in at else {"kind": "none"}
    config = {"room": "training", "shape": at["shape"], "batch_size": at["rows"], "seq_len": at["seq"]}
    return config | {"precision": "bf16", "recomputation": kept, "compiled": "compiled" in at}


def _layout(found: Mapping[str, str], row: Row) -> Config | str:
    from benchmarks.train_layouts import LAYOUTS

    at = _numbers(found)
    given = LAYOUTS.get(at["layout"])
    if given is None:
        return PEER
    passes = MICRO_BATCHES.get((row.get("note") or "").rpartition("; ")[2], 1)
    if at["layout"].startswith("pp-"):
        return "a pipeline whose number of micro-batches is not in the row"
    ranks = at["ranks"]
    config = {"room": "training", "shape": at["shape"], "batch_size": at["rows"] * ranks, "seq_len": at["seq"]}
    config |= {"precision": at["precision"], "ranks": ranks, "passes": passes, "compiled": "compiled" in at}
    config["parallelism"] = {name: ranks if value == -1 else value for name, value in given.items()}
    return config | ({"layers": at["layers"]} if "layers" in at else {})


def _pipeline(found: Mapping[str, str], row: Row) -> Config | str:
    at = _numbers(found)
    if str(at["schedule"]).startswith("Schedule"):
        return PEER
    config = {"room": "training", "shape": at["shape"], "layers": at["layers"], "seq_len": at["seq"]}
    config |= {
        "batch_size": at["passes"] * at["rows"],
        "passes": at["passes"],
        "precision": "bf16",
        "ranks": at["ranks"],
    }
    degrees = {"pipeline_parallel_degree": at["ranks"], "pipeline_parallel_schedule": at["schedule"]}
    return config | {"parallelism": degrees, "timed_cut": "operations" not in at}


def _offload(found: Mapping[str, str], row: Row) -> Config | str:
    at = _numbers(found)
    passes = re.search(r"(\d+) micro-batches", row.get("note", ""))
    if passes is None:
        return UNSAID
    if at["place"] != "none":
        return HOST
    config = {"room": "training", "shape": at["shape"], "batch_size": at["rows"], "seq_len": at["seq"]}
    config |= {"precision": "bf16", "passes": int(passes[1]), "recomputation": {"kind": "full"}}
    return config | ({"layers": at["layers"]} if "layers" in at else {})


def _by_size(found: Mapping[str, str], row: Row) -> Config | str:
    at = _numbers(found)
    shape = {"1235.8": "llama3-1b"}.get(found["millions"])
    if shape is None:
        return NO_RATES
    config = {"room": "training", "shape": shape, "batch_size": at["rows"], "seq_len": at["seq"]}
    return config | {"precision": at["precision"], "compiled": "compiled" in at}


def _fp8(found: Mapping[str, str], row: Row) -> Config | str:
    names = {
        "fp8 (rowwise)": "fp8",
        "fp8_tensorwise": "fp8_tensorwise",
        "fp8_rowwise_with_gw_hp": "fp8_rowwise_with_gw_hp",
    }
    config = {
        "room": "training",
        "shape": "llama3-8b",
        "layers": 8,
        "vocab_size": 32768,
        "batch_size": 1,
        "seq_len": 8192,
    }
    return config | {"precision": names[found["recipe"]]}


def _load(found: Mapping[str, str], row: Row) -> Config | str:
    if found["load"] not in LOADS:
        return STARTS
    form = found.get("form", "")
    engine = dict(ENGINE) | ({"kv_cache_dtype": "fp8"} if form == "-kv-fp8" else {})
    if found["shape"] == "qwen3-30b-a3b":
        engine["gpu_memory_utilization"] = 0.92  # of benchmarks.moe_serving
    config = {"room": "serving", "shape": found["shape"], "load": found["load"], "engine": engine}
    return config | {"format": FORMATS.get(form, "16 bit")}


def _decode(found: Mapping[str, str], row: Row) -> Config | str:
    if row["time"].startswith(FIRST_CALL):
        return GONE
    step = {"decoding": int(found["batch"]), "context": DECODE_CONTEXT}
    return {"room": "serving", "shape": found["shape"], "load": "", "engine": FIRST_ENGINE, "step": step}


def _prefill(found: Mapping[str, str], row: Row) -> Config | str:
    if row["time"].startswith(FIRST_CALL):
        return GONE
    load = {"requests": 64, "prompt_tokens": 2048, "output_tokens": 1, "repeated": 0}
    return {"room": "serving", "shape": found["shape"], "load": load, "engine": FIRST_ENGINE}


def _gptq(found: Mapping[str, str], row: Row) -> Config | str:
    if found["shape"] != "llama3-8b":
        return NO_RATES
    at = _numbers(found)
    step = {"kind": "gptq", "bits": at["bits"], "group_size": at["group"], "uneven": "nearest"}
    config = {"room": "compression", "shape": "llama3-8b", "layers": at.get("layers", 2), "vocab_size": 4096}
    return config | {"steps": [step], "num_sequences": at["count"], "seq_len": at["seq"], "ranks": at.get("ranks", 1)}


Rule = tuple[str, str | Callable[[Mapping[str, str], Row], Config | str]]
SIZES = r"(?P<rows>\d+) x (?P<seq>\d+)"
GPTQ = r"\((?P<shape>[\w.-]+)" + LAYERS + r", int(?P<bits>\d) g(?P<group>\d+), (?P<count>\d+) x (?P<seq>\d+) tokens\)"

RULES: dict[str, list[Rule]] = {
    "train": [
        (r"MFU", VIEW),
        (r"torch's attention and loss|a thread a replica|: fsdp2$", PEER),
        (r"^executor of|^54,000 weights", SLEEPS),
        (r"^training, (?P<shape>[\w.-]+) shape, bf16, " + SIZES + r", (?:recompute every (?P<nth>\d+)|keep all)" + COMPILED, _one_gpu),
        (r"^(?P<shape>[\w.-]+)" + LAYERS + r" on (?P<ranks>\d+) GPUs, (?P<precision>\w+), " + SIZES + r" a GPU" + COMPILED + r"(?:, exact sizes)?: (?P<layout>[\w-]+)$", _layout),
        (r"^(?P<shape>[\w.-]+)" + LAYERS + r" on (?P<ranks>\d+) cuda pipeline ranks, bf16, (?P<passes>\d+) micro-batches of " + SIZES + r": (?P<schedule>\w+)(?P<operations>, layers by operations)?$", _pipeline),
        (r"offload nvme$", HOST),
        (r"^training step, (?P<shape>llama3-8b)" + LAYERS + r", bf16, " + SIZES + r", offload (?P<place>\w+)$", _offload),
        (r"^training step, tiny, bf16, .* optimizer", UNSAID),
        (r"^training step, (?P<millions>[\d.]+) M parameters, (?P<precision>\w+), " + SIZES + COMPILED + "$", _by_size),
        (r"^training step on 1 GPU, 8 layers of Llama-3 8B, 1 x 8192: (?P<recipe>.+)$", _fp8),
        (r" ranks, fp32, \d+ x \d+ each: ", NO_RATES),
        (r"beside an earlier hone|a step waits for a checkpoint", UNSAID),
        (r"^adamw_step|^widen|^nine products|^a layer's linears", PART),
    ],
    "serve": [
        (r"^(?P<shape>llama3-8b|qwen3-0\.6b|qwen3-30b-a3b|llama3-1b)(?P<form>-int4|-fp8|-kv-fp8)?, serve_load: (?P<load>.+)$", _load),
        (r"no graphs$", "the engine without CUDA graphs, which no plan chooses"),
        (r"transformers .* generate", PEER),
        (r"beside an earlier hone", UNSAID),
        (r"^(?P<shape>llama3-8b|qwen3-0\.6b): decode, batch (?P<batch>\d+)$", _decode),
        (r"^(?P<shape>llama3-8b|qwen3-0\.6b): prefill$", _prefill),
        (r"^(?:llama3-8b|qwen3-0\.6b): throughput$", CUT),
        (r"start-up|random weights|KV cache|ceiling read|preemptions|^soak", STARTS),
        (r"^decode tokens/s", NO_RATES),
        (r"^paged decode", PART),
    ],
    "compress": [
        (r"^seconds a layer(?: on (?P<ranks>\d) cuda)? " + GPTQ, _gptq),
        (r"^peak memory of one of 2 cuda", "of rank 0, where the estimate is of the rank that needs most"),
        (r"^peak memory(?: of one of (?P<ranks>1) cuda)? " + GPTQ, _gptq),
        (r"beside llm-compressor", "under its peer's settings, which are not in the row"),
        (r"^Cholesky factor|^search of scales|^sweep", PART),
        (r"^bits a weight", "a size, which the plan says to the byte"),
    ],
    "serve_cpu": [(r"", NO_RATES)],
    "line": [(r"tokens_per_s|tokens/s|memory_growth_bytes", UNSAID), (r"^hone --help|make demo", STARTS)],
}  # fmt: skip
"""Of each benchmark, the first pattern that a figure's name has; without one it is no cost."""
