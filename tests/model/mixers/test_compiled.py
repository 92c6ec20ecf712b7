"""Mixers in compiled layers, some of them recomputed: the same losses, whole graphs, and as many as kinds of layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from hone.feed.load import Batch
from hone.model.context import Packed
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.train.activation_checkpointing import EveryNth
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine

STACKS = {
    "bigbird": ({"kind": "bigbird", "block": 16, "num_window": 1, "num_global": 1, "num_random": 1},),
    "compressive": ({"kind": "compressive", "segment": 8, "memory": 8, "compressed": 6, "ratio": 2},),
    "longformer": ({"kind": "longformer", "window": 6},),
    "performer": ("performer",),
    "reformer": ({"kind": "reformer", "num_buckets": 4, "chunk": 4},),
    "transformer_xl": ({"kind": "transformer_xl", "segment": 8, "memory": 8},),
    "shared_kv": ("attention", "shared_kv"),
}


def decoder(name: str, dtype: torch.dtype = torch.float32):
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48, "max_seq_len": 96}
    return build(Shape.read({**sizes, "num_layers": 4, "mixers": STACKS[name]}).config(20), seed=1, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STACKS])
def test_compiled_and_recomputed(name):
    rng = np.random.default_rng(0)
    torch.compiler.reset()
    counters.clear()
    plain, compiled = (
        Trainer(decoder(name), steps=20, schedule=Cosine(warmup=2), activation_checkpointing=policy)
        for policy in (None, EveryNth(n=2))
    )
    for layer in compiled.model.layers:
        layer.compile(dynamic=False, backend="aot_eager")
    ids = np.repeat([[0, 1, 2]], [17, 13, 18], axis=1).repeat(2, 0)
    for _ in range(2):
        tokens = rng.integers(0, 20, (2, 49))
        batch = Batch(tokens[:, :-1], tokens[:, 1:], ids)
        one, other = plain.step(batch), compiled.step(batch)
        assert other.loss == pytest.approx(one.loss, abs=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert not counters["graph_break"]
    if name != "shared_kv":  # which layer shares with which is part of its layers' code
        assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("name", ["bigbird", "performer", "reformer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_drawn_to_score_serves_to_train(name, dtype):
    model, tokens = decoder(name, dtype), torch.arange(48)[None] % 20
    ids = (tokens > 9).cumsum(-1)
    for context in (None, Packed(ids)):
        with torch.inference_mode():
            scored = model(tokens, context)
    model(tokens, Packed(ids)).sum().backward()
    with torch.no_grad():
        assert torch.equal(model(tokens, Packed(ids)), scored)
