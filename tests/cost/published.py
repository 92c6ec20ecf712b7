"""Trainings that papers measured, as hone plans them: their models, machines and layouts."""

from __future__ import annotations

from typing import Any

from hone.base.plan import MEMORY
from hone.cost.dims import Attending, LayerDims, ModelDims
from hone.cost.roofline import data_sheets
from hone.feed.facts import DataFacts, SplitFacts
from hone.measure.calibration import AttentionRate, Bandwidth, Calibration, KernelRate, MatmulRate
from hone.measure.machine import Gpu, Machine
from hone.train.stage import Train


def gpt(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int = 51200) -> ModelDims:
    """A decoder as Megatron-LM's GPT: a feed-forward of 4 h without a gate, the head tied to the embedding."""
    h, inner = hidden_size, 4 * hidden_size
    layer = LayerDims.attention(
        ((3 * h, h), (h, h), (inner, h), (h, inner)), Attending(num_heads, num_heads, h // num_heads), inner
    )
    num_params = num_layers * (layer.matmul_params + 2 * h) + vocab_size * h + h
    return ModelDims(num_params, num_params, vocab_size, h, 2048, True, (layer,) * num_layers)


def machine(name: str, ranks: int, calibration: Calibration | None = None) -> Machine:
    """`ranks` GPUs that need not be there, with the rates of `calibration` or of the data sheet named `name`."""
    sheet = next(row for row in data_sheets() if row["match"] == name)
    gpu = Gpu(name=sheet["name"], memory_bytes=int(sheet["memory_bytes"]), capability="", num_multiprocessors=0)
    return Machine(
        cpu="cpu", num_cores=64, num_threads=64, ram_bytes=1 << 40, gpus=(gpu,), os="Linux", python="3.12", torch="2.11.0",
        device="cuda", num_ranks=ranks, planned=True, calibration=calibration,
    )  # fmt: skip


def rates(
    flops_per_s: float, bytes_per_s: float, forward: float, train: float, passes: float = 1.0, **more: float
) -> Calibration:
    """A calibration of one rate of large products, one of memory, and those of attention; `more`: products of float8.

    Norms, gates and rotations pass `passes` times over the memory that hone's kernels pass over once."""
    found = [("bfloat16", flops_per_s), *more.items()]
    return Calibration(
        device="as published", threads=1, torch="", read_bytes_per_s=bytes_per_s, op_s=5e-6, exp_per_s=bytes_per_s / 8,
        copies=(Bandwidth(num_bytes=1 << 30, bytes_per_s=bytes_per_s),),
        matmuls=tuple(MatmulRate(dtype=dtype, m=8192, n=8192, k=8192, flops_per_s=rate) for dtype, rate in found),
        attentions=(AttentionRate(dtype="bfloat16", forward_flops_per_s=forward, train_flops_per_s=train),),
        kernels=tuple(
            KernelRate(kernel=kernel, dtype="bfloat16", bytes_per_s=bytes_per_s / passes)
            for kernel in ("rms_norm", "swiglu", "rope")
        ),
    )  # fmt: skip


def data(vocab_size: int) -> DataFacts:
    """More tokens than any of the trainings reads."""
    many = SplitFacts(tokens=10**13, documents=10**10, bytes=4 * 10**13)
    return DataFacts(
        where="data", splits={"train": many}, vocab_size=vocab_size, eos_token_id=0, tokenizer="t", exact=False
    )


def planned(spec: dict[str, Any], vocab_size: int, on: Machine) -> Any:
    """The plan of one step of `spec` on the ranks of `on`."""
    usual = {"steps": 1, "precision": "bf16", "validation": {"sequences": 1}}
    return Train.read({**usual, **spec}).plan({"data": data(vocab_size)}, on)


def step_s(plan: Any, spec: dict[str, Any]) -> float:
    """Seconds of a step."""
    return spec["batch_size"] * spec["seq_len"] / plan.estimates["tokens_per_s"].value


def memory_gib(plan: Any) -> float:
    """GiB of the rank that needs most."""
    return plan.estimates[MEMORY].value / 2**30


def megatron_spec(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    batch_size: int,
    gpus: int,
    tensor: int,
    pipeline: int,
    *,
    stages_per_rank: int = 1,
    sequence: bool = False,
    full: bool = True,
) -> dict[str, Any]:
    """A training of Megatron-LM's GPT in micro-batches of one sequence of 2,048, with gated layers that have as many weights."""
    schedule = {"kind": "interleaved", "stages_per_rank": stages_per_rank} if stages_per_rank > 1 else {"kind": "1f1b"}
    return {
        "model": {
            "hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads, "num_kv_heads": num_heads,
            "head_dim": hidden_size // num_heads, "intermediate_size": round(8 * hidden_size / 3 / 128) * 128,
            "max_seq_len": 2048, "tie_embeddings": True,
        },
        "seq_len": 2048, "batch_size": batch_size, "gradient_accumulation_steps": batch_size * tensor * pipeline // gpus,
        "activation_checkpointing": {"kind": "full" if full else "none"},
        "parallelism": {
            "tensor_parallel_degree": tensor, "enable_sequence_parallel": sequence, "pipeline_parallel_degree": pipeline,
            "pipeline_parallel_schedule": schedule,
        },
    }  # fmt: skip


def llama_spec(
    sizes: tuple[int, int, int, int], batch_size: int, seq_len: int, recomputed: str, **parallelism: Any
) -> dict[str, Any]:
    """A training of Llama 3 of (hidden size, layers, heads, width of the feed-forward), sharded as torchtitan's FSDP."""
    h, num_layers, num_heads, inner = sizes
    more = {"context_parallel": "all_gather"} if parallelism.get("context_parallel_degree", 1) > 1 else {}
    return {
        "model": {
            "hidden_size": h, "num_layers": num_layers, "num_heads": num_heads, "num_kv_heads": 8, "head_dim": 128,
            "intermediate_size": inner, "max_seq_len": seq_len,
        },
        "seq_len": seq_len, "batch_size": batch_size, "activation_checkpointing": {"kind": recomputed},
        "parallelism": {"data_parallel": "zero3", **more, **parallelism},
    }  # fmt: skip
