"""The training step: on a CPU against a plain PyTorch loop over the transformers model, on a GPU a Llama-3-8B shape in bf16.

    python -m benchmarks.train                                    # 2.6 M parameters, 8 x 256, fp32, interleaved with the peer
    python -m benchmarks.train --device cuda --shape llama3-8b    # random weights and tokens; needs one GPU of 140 GB
    python -m benchmarks.train --device cuda --compared           # the same with torch's attention and loss, then with hone.ops
    python -m benchmarks.train --device cuda --shape llama3-1b
    python -m benchmarks.train --device cuda --peer --shape llama3-1b --batch-size 1 --seq-len 8192   # against transformers, compiled
    python -m benchmarks.train --activation-checkpointing                          # what each costs and saves, on a CPU

Random tokens are made here; nothing is downloaded and no tokenizer is needed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch: the 8B run fills the card

import numpy as np
import torch

from benchmarks import ledger
from hone.cost.train.figures import growth_bytes
from hone.cost.train.training import Training
from hone.cost.train.update import adamw
from hone.feed.load import IGNORE, Batch
from hone.measure.window import Window
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder, build
from hone.model.shape import Shape
from hone.ops import dispatch
from hone.train import ACTIVATION_CHECKPOINTINGS
from hone.train.activation_checkpointing import EveryNth, KeepAll
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.cosine import Cosine

SHAPES: dict[str, tuple[Shape, int]] = {
    "tiny": (Shape(), 4096),
    "27m": (Shape(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=1536), 4096),
    "llama3-1b": (
        Shape(hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, intermediate_size=8192,
              max_seq_len=8192, rope_theta=5e5, tie_embeddings=True), 128256,
    ),
    "llama3-8b": (
        Shape(hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336,
              max_seq_len=8192, rope_theta=5e5, tie_embeddings=False), 128256,
    ),
    "llama3-70b": (
        Shape(hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, intermediate_size=28672,
              max_seq_len=8192, rope_theta=5e5, tie_embeddings=False), 128256,
    ),
    "qwen3-30b-a3b": (
        Shape(family="qwen3_moe", hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128,
              intermediate_size=6144, max_seq_len=4096, rope_theta=1e6, tie_embeddings=False,
              feed_forward={"kind": "moe", "num_experts": 128, "intermediate_size": 768,
                            "router": {"kind": "softmax", "top_k": 8}, "balance": ["bias"]}), 151936,
    ),
    "deepseek-v3-16b": (  # torchtitan's flavor "16B" of deepseek_v3
        Shape(hidden_size=2048, num_layers=27, num_dense_layers=1, num_heads=16, num_kv_heads=16, max_seq_len=4096,
              intermediate_size=10944, rope_theta=1e4, tie_embeddings=False,
              mixers=({"kind": "mla", "head_dim": 128, "value_dim": 128, "rope_dim": 64, "latent_dim": 512},),
              feed_forward=({"kind": "moe", "num_experts": 64, "intermediate_size": 1408, "num_shared_experts": 2,
                             "router": {"kind": "softmax", "top_k": 6, "normalize": False}, "balance": ["bias"]},)), 102400,
    ),
}  # fmt: skip


SHAPES |= {
    f"deepseek-lite-{layers}": (SHAPES["deepseek-v3-16b"][0].model_copy(update={"num_layers": layers}), 102400)
    for layers in (5, 14)
}
SHEET_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s of the data sheet, by a part of the GPU's name."""


def random_batch(draw: np.random.Generator, vocab: int, rows: int, seq_len: int) -> Batch:
    """Sequences of one document each, so that a plain causal mask is equal."""
    tokens = draw.integers(0, vocab, (rows, seq_len))
    targets = np.concatenate([tokens[:, 1:], np.full((rows, 1), IGNORE)], axis=1)
    return Batch(tokens, targets, np.zeros((rows, seq_len), np.int32))


def against_transformers(
    shape: str, device: str, rows: int, seq_len: int, repeats: int, *, compiled: bool
) -> list[dict[str, Any]]:
    """hone's step and the peer's on the same batches in turn; both with fused AdamW, clipping, and the loss read out.

    On a GPU in bf16 over float32 masters: hone's precision bf16, torch's autocast.
    """
    import transformers

    from hone.model.hf import save

    sizes, vocab = SHAPES[shape]
    on_gpu = device.startswith("cuda")
    model = random_decoder(sizes.config(vocab), device) if on_gpu else build(sizes.config(vocab))
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    num_params = model.config.num_params
    flat = Cosine(warmup=0, floor=1.0)
    precision = "bf16" if on_gpu else "fp32"
    trainer = Trainer(
        model,
        steps=10**6,
        schedule=flat,
        optimizer=AdamW(lr=1e-4, weight_decay=0.0),
        precision=precision,
        compile=compiled,
    )
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    forward = torch.compile(peer) if compiled else peer
    draw = np.random.default_rng(0)
    ours, theirs, gap = [], [], 0.0
    for repeat in range(repeats + 3):
        batch = random_batch(draw, vocab, rows, seq_len)
        begun = _now(device)
        loss = trainer.step(batch).loss
        between = _now(device)
        tokens = torch.from_numpy(batch.tokens).to(device)
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            peer_loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        peer_loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        gap = max(gap, abs(peer_loss.item() - loss))
        ended = _now(device)
        if repeat >= 3:
            ours.append(between - begun)
            theirs.append(ended - between)
    assert gap < (0.05 if on_gpu else 1e-3), f"the two loops disagree by {gap} nats: they do not train the same model"
    mine, other = (rows * seq_len / statistics.median(times) for times in (ours, theirs))
    half_range = (max(ours) - min(ours)) / 2 / statistics.median(ours) * mine
    return [
        {
            "figure": f"training step, {num_params / 1e6:.1f} M parameters, {precision}, {rows} x {seq_len}{', compiled' * compiled}",
            "value": mine, "unit": "tokens/s", "n": len(ours), "half_range": half_range,
            "peer": "transformers model in a PyTorch loop", "peer_value": other, "ratio": mine / other,
            "note": f"{torch.get_num_threads()} threads, interleaved, medians; losses agree to {gap:.1e}",
        }
    ]  # fmt: skip


def _now(device: str) -> float:
    """Seconds, after all that was started on a GPU has ended."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def random_decoder(config: ModelConfig, device: str) -> Decoder:
    """As `build`, drawn on the device: eight billion numbers take a second there, minutes on the host."""
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for part in model.parameters():
            part.normal_(0.0, 0.02, generator=generator) if part.ndim >= 2 else part.fill_(1.0)
    return model


def matmul_rate(device: str) -> float:
    """Measured bf16 FLOP/s of an 8192 x 8192 x 8192 product."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - begun)


def flops_per_token(config: ModelConfig, seq_len: int) -> tuple[float, float]:
    """(causal-halved, attention counted in full) FLOPs of a training step for one token, recomputation not counted."""
    dims = config.dims()
    mixing = sum(12.0 * layer.widths.mixed * seq_len for layer in dims.layers)  # scores and sums of every pair, thrice
    return 3 * dims.flops_per_token(seq_len), 6.0 * dims.matmul_params + mixing


def whole_logits_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, reduction: str) -> torch.Tensor:
    """The plain form of `hone.ops.linear_cross_entropy`, for the compiler to fuse: x [..., D], weight [V, D]."""
    logits = torch.nn.functional.linear(x, weight).flatten(0, -2).float()
    return torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction, ignore_index=IGNORE)


@contextmanager
def torch_only() -> Iterator[None]:
    """A context in which the trainer runs torch's attention and formulas, with a compiled loss over all logits: hone.ops' peer."""
    kept = dict(dispatch.RULES)
    plain = {"rms_norm": "torch", "rope": "torch", "swiglu": "torch"}
    loss = torch.compile(whole_logits_loss, dynamic=False)
    for op, backend in plain.items():
        dispatch.RULES[op] = lambda where, backend=backend, **_: dispatch.Choice(backend, "the benchmark's peer")
    try:
        with (
            patch("hone.model.context.has_fused", lambda *_: False),
            patch("hone.ops.linear_cross_entropy", loss),
        ):
            yield
    finally:
        dispatch.RULES.update(kept)


def on_gpu(shape: str, device: str, steps: int, cells: list[tuple[int, int, int, bool, str]]) -> list[dict[str, Any]]:
    """Trains random weights for `steps` steps in each cell (rows, seq_len, n: every n-th layer recomputed or 0, compile, ops).

    Memory of bf16 training with one micro-batch: 2 (weights) + 4 (masters) + 8 (moments) + 2 (gradients) = 16 bytes a
    parameter, so 8.03 billion take 119.7 GiB; what is left holds activations, which is why all layers are recomputed.
    A cell that does not fit is reported and left out.
    """
    sizes, vocab = SHAPES[shape]
    config = sizes.config(vocab)
    name = torch.cuda.get_device_name(device)
    peak = next((value for key, value in SHEET_PEAK.items() if key in name), None)
    measured = matmul_rate(device)
    torch.cuda.empty_cache()
    print(f"{name}: bf16 matmul 8192: {measured / 1e12:.0f} TFLOP/s, data sheet {peak and peak / 1e12} TFLOP/s")
    start = torch.cuda.memory_allocated(device)
    model = random_decoder(config, device)
    flat = Cosine(warmup=0, floor=1.0)
    options = {"steps": 10**6, "schedule": flat, "optimizer": AdamW(lr=1e-4), "precision": "bf16"}
    trainer = Trainer(model, **options)
    print(
        f"{config.num_params / 1e9:.2f} B parameters, {torch.cuda.memory_allocated() / 2**30:.1f} GiB before the first step"
    )
    rows = []
    rates: dict[tuple, float] = {}
    for cell in cells:
        row, seq_len, nth, compiled, ops = cell
        label = f"{row} x {seq_len}, {f'recompute every {nth}' if nth else 'no recomputation'}{', compiled' * compiled}"
        try:
            with torch_only() if ops == "torch" else nullcontext():
                made = _cell(trainer, cell, device, steps, start, config, shape, peak, measured)
            rates[cell] = made[0]["value"]
            peer = rates.get((*cell[:4], "torch"))
            if ops == "hone" and peer is not None:
                made[0] |= {
                    "peer": "the same with torch's attention and loss",
                    "peer_value": peer,
                    "ratio": made[0]["value"] / peer,
                }
            rows += made
        except Exception as error:  # a cell that fails must not cost the others
            print(f"{label}: left out, {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            trainer.update.weights.drop_grads()
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def _cell(
    trainer: Trainer,
    cell: tuple[int, int, int, bool, str],
    device: str,
    steps: int,
    start: int,
    config: ModelConfig,
    shape: str,
    peak: float | None,
    measured: float,
) -> list[dict[str, Any]]:
    """Times `steps` steps after two to warm up; prints a line and returns the ledger's rows."""
    rows, seq_len, nth, compiled, ops = cell
    policy = EveryNth(n=nth) if nth else KeepAll()
    trainer.segments = policy.segments(config.num_layers)
    torch._dynamo.reset()  # what was compiled for another cell's attention
    for layer in trainer.model.layers:
        layer._compiled_call_impl = None
        if compiled:
            layer.compile(dynamic=False)
    vocab = config.vocab_size
    draw = np.random.default_rng(1)
    batches = [random_batch(draw, vocab, rows, seq_len) for _ in range(4)]
    losses, times = [], []
    with Window(device) as window:
        for step in range(steps + 2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            losses.append(trainer.step(batches[step % 4]).loss)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    step_s = statistics.median(times[2:])
    rate = rows * seq_len / step_s
    causal, full = flops_per_token(config, seq_len)
    dims = config.dims()
    work = Training(dims, steps, rows, seq_len, "bfloat16", trainer.segments, adamw(dims), packed=False)
    predicted = (start + growth_bytes(work, "cuda").value) / 2**30
    top = torch.cuda.max_memory_allocated(device) if window.peak_memory_bytes == 0 else window.peak_memory_bytes
    gib = top / 2**30
    of = peak or measured
    label = f"{rows} x {seq_len}, {f'recompute every {nth}' if nth else 'keep all'}{', compiled' * compiled}"
    label += ", torch's attention and loss" * (ops == "torch")
    print(
        f"{label}: {rate:,.0f} tokens/s, {step_s:.3f} s a step, "
        f"MFU {causal * rate / of:.1%} causal-halved, {full * rate / of:.1%} full (of {of / 1e12:.0f} TFLOP/s), "
        f"{causal * rate / measured:.1%} of the measured matmul rate; peak {gib:.1f} GiB, predicted {predicted:.1f} GiB "
        f"({predicted / gib - 1:+.1%}); loss {losses[0]:.3f} -> {losses[-1]:.3f}; energy "
        f"{'no sensor' if window.energy_j is None else f'{window.energy_j / (rows * seq_len * (steps + 2)):.3f} J/token'}",
        flush=True,
    )
    name = f"training, {shape} shape, bf16, {label}"
    note = f"1 GPU, random weights and tokens, fp32 masters and moments, {of / 1e12:.0f} TFLOP/s peak"
    return [
        {"figure": name, "value": rate, "unit": "tokens/s", "n": steps, "of_limit": causal * rate / of, "note": note},
        {"figure": f"{name}: MFU, attention in full", "value": full * rate / of, "unit": "fraction", "n": steps},
        {"figure": f"{name}: MFU, causal-halved", "value": causal * rate / of, "unit": "fraction", "n": steps},
        {
            "figure": f"{name}: peak memory",
            "value": gib,
            "unit": "GiB",
            "n": 1,
            "note": f"predicted {predicted:.1f} GiB",
        },
    ]


CHECKPOINTING_CHILD = """
import json, sys, time
import numpy as np
from benchmarks.train import SHAPES, random_batch
from hone.measure.warm import warm_up
from hone.measure.window import Window
from hone.model.decoder import build
from hone.cost.train.update import adamw
from hone.measure.machine import describe
from hone.train import ACTIVATION_CHECKPOINTINGS
from hone.train.activation_checkpointing.sizes import fitted
from hone.train.schedules.cosine import Cosine
from hone.train.loop import Trainer
from hone.cost.train.figures import growth_bytes
from hone.cost.train.training import Training
sizes, vocab = SHAPES["tiny"]
name, share = sys.argv[1:]
facts = sizes.model_copy(update={"num_layers": 9}).config(vocab).dims()
work = Training(facts, 99, 16, 256, "float32", ACTIVATION_CHECKPOINTINGS.read("none").segments(9), adamw(facts), packed=False)
room = float(share) * growth_bytes(work, "cpu").value
options = {"memory_bytes": room} if float(share) else {}
work = fitted(work, ACTIVATION_CHECKPOINTINGS.read({"kind": name, **options}), describe("cpu"))
warm_up("cpu")
times = []
with Window("cpu") as window:
    model = build(sizes.model_copy(update={"num_layers": 9}).config(vocab))
    trainer = Trainer(model, steps=99, schedule=Cosine(), activation_checkpointing=work.segments)
    draw = np.random.default_rng(0)
    for _ in range(4):
        batch = random_batch(draw, vocab, 16, 256)
        begun = time.perf_counter()
        trainer.step(batch)
        times.append(time.perf_counter() - begun)
print(json.dumps([window.memory_growth_bytes / 2**20, 16 * 256 / sorted(times[1:])[1], growth_bytes(work, "cpu").value / 2**20]))
"""


BUDGETS = {"optimal": "0.6", "memory_budget": "0.8"}
"""Memory that these may use, in parts of what the training without recomputation is predicted to need."""


def checkpointings() -> list[dict[str, Any]]:
    """Memory and rate of every policy of activation checkpointing on nine layers, each in a process of its own."""
    found = {}
    for name in ACTIVATION_CHECKPOINTINGS:
        done = subprocess.run(
            [sys.executable, "-c", CHECKPOINTING_CHILD, name, BUDGETS.get(name, "0")],
            capture_output=True,
            text=True,
            check=True,
        )
        found[name] = json.loads(done.stdout.splitlines()[-1])
    rows = []
    for name, (mebibytes, rate, predicted) in found.items():
        base = {"peer": "no recomputation", "technique": f"activation_checkpointing/{name}", "n": 3}
        memory = {"figure": "training memory", "value": mebibytes, "unit": "MiB", "peer_value": found["none"][0]}
        memory["note"] = f"predicted {predicted:.0f} MiB; 9 layers" + (
            f", memory_bytes {BUDGETS[name]} of none's" if name in BUDGETS else ""
        )
        speed = {"figure": "training rate", "value": rate, "unit": "tokens/s", "peer_value": found["none"][1]}
        rows += [{**base, **row, "ratio": row["value"] / row["peer_value"]} for row in (memory, speed)]
    return rows


CELLS = {
    "llama3-8b": [(1, 4096, 1, False, "hone"), (1, 8192, 1, False, "hone"), (1, 8192, 2, False, "hone"),
                  (4, 8192, 1, False, "hone"), (1, 8192, 2, True, "hone"), (4, 8192, 1, True, "hone")],
    "llama3-1b": [(2, 8192, 0, False, "hone"), (2, 8192, 0, True, "hone"), (4, 8192, 1, False, "hone")],
    "deepseek-lite-5": [(1, 4096, 1, False, "hone"), (2, 4096, 1, False, "hone"), (4, 4096, 1, False, "hone")],
    "deepseek-lite-14": [(1, 4096, 1, False, "hone"), (2, 4096, 1, False, "hone")],
    "tiny": [(32, 256, 0, False, "hone")],
}  # fmt: skip
"""(rows, seq_len, recompute every n-th layer or 0, compile, whose attention and loss), the safest first."""

COMPARED = [(1, 8192, 2, True, "torch"), (1, 8192, 2, True, "hone")]


def main() -> None:
    """Runs the benchmark, prints its table, appends to the ledger."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default=None, choices=list(SHAPES))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20, help="steps measured")
    parser.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="compare the policies of activation checkpointing instead",
    )
    parser.add_argument("--compared", action="store_true", help="on a GPU: torch's attention and loss against hone.ops")
    parser.add_argument("--peer", action="store_true", help="on a GPU: against the compiled transformers model")
    parser.add_argument("--no-ledger", action="store_true", help="print only")
    chosen = parser.parse_args()
    if chosen.activation_checkpointing:
        rows = checkpointings()
    elif chosen.device == "cpu" or chosen.peer:
        sizes = chosen.batch_size, chosen.seq_len, chosen.repeats
        rows = against_transformers(chosen.shape or "tiny", chosen.device, *sizes, compiled=chosen.device != "cpu")
    else:
        shape = chosen.shape or "llama3-8b"
        if shape not in CELLS and not chosen.compared:
            parser.error(
                f"--shape {shape} has no cells for one GPU: take one of {', '.join(CELLS)}, or benchmarks.train_layouts"
            )
        rows = on_gpu(shape, chosen.device, min(chosen.repeats, 8), COMPARED if chosen.compared else CELLS[shape])
    print(ledger.table(rows))
    if rows and not chosen.no_ledger:
        print(f"appended to {ledger.append('train', rows, chosen.device)}")


if __name__ == "__main__":
    main()
