"""DeepSpeed's ZeRO-Offload on the shape of a row of `benchmarks.train_offload`, for the same call on the same machine.

    python -m benchmarks.train_offload --device cuda --layers 14 --peer-path FOLDERS   # which starts
    python -m benchmarks.train_offload_peer --layers 14 --json FILE

transformers' Llama with random weights, its layers recomputed, sdpa attention, bf16, DeepSpeed's ZeRO stage 2 with the optimizer
on the CPU in pinned memory, clipping at 1 and its AVX step, which is compiled here (g++ and ninja). By a count of its buffers it needs 20 bytes
a weight of host memory (float32 weights, gradients and two moments; bf16 copies of weights and gradients), where hone needs 12.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.train import SHAPES


def main() -> None:
    """Times steps and writes what `benchmarks.train_offload` reads."""
    arguments = _arguments()
    shape, vocab = SHAPES[arguments.shape]
    shape = shape.model_copy(update={"num_layers": arguments.layers or shape.num_layers})
    config = shape.config(vocab)
    import deepspeed
    import transformers

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29547")
    begun = time.perf_counter()
    model = _model(transformers, shape, vocab, arguments.device)
    count = sum(one.numel() for one in model.parameters())
    assert count == config.num_params, f"{count:,} weights, hone's have {config.num_params:,}"
    print(f"{count:,} weights made in {time.perf_counter() - begun:.0f} s", flush=True)
    begun = time.perf_counter()
    told = _config(arguments)
    if not _compiled():
        told["optimizer"]["params"]["torch_adam"] = True
        told["zero_force_ds_cpu_optimizer"] = False
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=told, dist_init_required=True
    )
    step = type(engine.optimizer.optimizer).__name__  # DeepSpeedCPUAdam, or torch's
    print(f"deepspeed {deepspeed.__version__} with {step} ready after {time.perf_counter() - begun:.0f} s", flush=True)
    whole, updates = _steps(arguments, engine, vocab)
    best = whole.index(min(whole[1:]))
    row = {
        "peer": f"deepspeed {deepspeed.__version__.strip()} ZeRO-2, {step}; transformers {transformers.__version__}",
        "peer_step_s": whole[best],
        "peer_update_s": updates[best],
        "peer_value": arguments.rows * arguments.seq_len / whole[best],
        "peer_n": len(whole) - 1,
        "params": count,
    }
    if arguments.device == "cuda":
        row["peer_peak_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(row), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(row))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", default="llama3-8b", choices=[*SHAPES])
    parser.add_argument("--layers", type=int, help="of the shape; default: all")
    parser.add_argument("--rows", type=int, default=12, help="sequences of a step")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=2, help="timed, after one that is not")
    parser.add_argument("--no-bucket-overlap", action="store_true", help="DeepSpeed's overlap_comm off")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _model(transformers: Any, shape: Any, vocab: int, device: str) -> Any:
    told = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_seq_len,
        tie_word_embeddings=shape.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(told, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _compiled() -> bool:
    """Whether DeepSpeed's step could be compiled; says why not, and that torch's is measured in its place."""
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    begun = time.perf_counter()
    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:
        print(f"DeepSpeed's CPUAdam cannot be compiled, torch's AdamW takes its place: {error}", flush=True)
        return False
    print(f"DeepSpeed's CPUAdam compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    return True


def _config(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": arguments.rows // arguments.micro_batches,
        "gradient_accumulation_steps": arguments.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": arguments.device == "cuda"},
            "overlap_comm": not arguments.no_bucket_overlap,
            "contiguous_gradients": True,
        },
        "steps_per_print": 10**9,
    }


def _steps(arguments: argparse.Namespace, engine: Any, vocab: int) -> tuple[list[float], list[float]]:
    """Seconds of every step and of its update."""
    draw = np.random.default_rng(1)
    rows = arguments.rows // arguments.micro_batches
    whole, updates = [], []
    for step in range(arguments.steps + 1):
        tokens = torch.from_numpy(draw.integers(0, vocab, (arguments.micro_batches, rows, arguments.seq_len)))
        _wait(arguments.device)
        begun = time.perf_counter()
        update = 0.0
        for part in tokens.to(engine.device):
            loss = engine(input_ids=part, labels=part).loss
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                _wait(arguments.device)
            before = time.perf_counter()
            engine.step()
            _wait(arguments.device)
            update = time.perf_counter() - before
        whole.append(time.perf_counter() - begun)
        updates.append(update)
        print(f"step {step} {whole[-1]:.3f} s, update {update:.3f} s, loss {loss.item():.3f}", flush=True)
    return whole, updates


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
