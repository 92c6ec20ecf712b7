"""Experts in host memory and on ranks, on a small model that is trained here: prints the tables of docs/serving.md.

`python -m benchmarks.serve_experts [--steps=N]`, a few minutes on a CPU core. Sequences follow the bigrams of eight topics, as in `benchmarks.moe_balance`,
which its routers learn to tell apart; what is served continues such sequences, one after another.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.moe_balance import VOCAB, batch
from hone.cost.serve.offload import expert_hit_rate
from hone.model import hf
from hone.model.decoder import Decoder, build
from hone.model.shape import Shape
from hone.serve.engine import Engine, EngineSpec
from hone.serve.experts.balancing import imbalance, placed
from hone.serve.request import SamplingParams
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.cosine import Cosine

EXPERTS, TOP_K, LAYERS = 16, 2, 4
SIZES = {"max_num_batched_tokens": 64, "num_pages": 256, "block_size": 16, "num_threads": 1}


def trained(steps: int) -> tuple[Decoder, np.ndarray]:
    """The model, and tokens of every expert by layer in the last ten steps."""
    fed = {
        "kind": "moe",
        "num_experts": EXPERTS,
        "intermediate_size": 32,
        "router": {"kind": "softmax", "top_k": TOP_K},
    }
    fed["balance"] = [{"kind": "aux_loss", "weight": 0.003}]
    shape = Shape(
        hidden_size=64, num_layers=LAYERS, num_heads=4, num_kv_heads=4, intermediate_size=96, max_seq_len=128, feed_forward=(fed,)
    )  # fmt: skip
    model = build(shape.config(VOCAB), seed=0)
    trainer = Trainer(model, steps=steps, schedule=Cosine(warmup=min(10, steps)), optimizer=AdamW(lr=4e-3))
    loads = np.zeros((LAYERS, EXPERTS))
    for step in range(steps):
        found = trainer.step(batch(0, step))
        if step >= steps - 10:
            loads += [found.loads.layers[index].experts for index in range(LAYERS)]
    print(f"loss {found.loss:.3f} after {steps} steps")
    return model.eval().requires_grad_(False), loads


def served(folder: Path, num_cached: int, **more: Any) -> Any:
    """The counts of the caches when eight sequences are continued by 40 tokens; their prompts are read before."""
    spec = {**SIZES, "max_num_seqs": 1, "expert_offload": {"num_cached_experts": num_cached, **more}}
    engine = Engine(folder, EngineSpec.read(spec))
    prompts = [one[:8].tolist() for one in batch(0, 10_000).tokens[:8]]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    engine.generate(prompts, params)
    return engine.runner.experts


def main(steps: int) -> None:
    """Trains, serves and prints."""
    model, loads = trained(steps)
    shares = loads / loads.sum(1, keepdims=True) * TOP_K
    with tempfile.TemporaryDirectory() as where:
        hf.save(model, where)
        print(
            "| experts on the device | lru predicted | lru | lfu predicted | lfu | lru, foreseen by the router | named by the router | copied, of none |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for num_cached in (2, 4, 8):
            found = {kind: served(Path(where), num_cached, eviction=kind, prefetch="none") for kind in ("lru", "lfu")}
            wanted = {
                kind: np.mean([expert_hit_rate(one.tolist(), num_cached, kind) for one in shares]) for kind in found
            }
            ahead = served(Path(where), num_cached)
            each = (
                f"{wanted['lru']:.2f} | {found['lru'].hit_rate:.2f} | {wanted['lfu']:.2f} | {found['lfu'].hit_rate:.2f}"
            )
            named = ahead.expected / max(ahead.chosen, 1)
            print(
                f"| {num_cached} of {EXPERTS} | {each} | {ahead.hit_rate:.2f} | {named:.2f} | "
                f"{ahead.copied_bytes / found['lru'].copied_bytes:.2f} |"
            )
    print("\n| ranks | redundant experts | busiest / mean, experts in order | placed |\n|---|---|---|---|")
    for ranks, redundant in ((2, 0), (4, 0), (4, 4), (8, 0), (8, 8)):
        start = np.stack([np.arange(EXPERTS + redundant) % EXPERTS] * LAYERS)
        before, after = (imbalance(loads, one, ranks).mean() for one in (start, placed(loads, ranks, redundant)))
        print(f"| {ranks} | {redundant} | {before:.2f} | {after:.2f} |")


if __name__ == "__main__":
    main(next((int(one.partition("=")[2]) for one in sys.argv if one.startswith("--steps=")), 200))
