"""A training run for some steps: real steps of `hone.train` on random tokens, their seconds, and the memory they took."""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from hone.plan.search.shapes import Candidate
from hone.plan.search.training.space import SHARDED

if TYPE_CHECKING:
    from hone.feed.load import Batch
    from hone.model.config import ModelConfig
    from hone.model.decoder import Decoder

WARM = 2
"""Steps that are not counted: memory is allocated and kernels are compiled in them."""


class Measured(NamedTuple):
    """What a run took."""

    seconds: float
    """Of a step: the median."""
    fastest_s: float
    num: int
    peak_bytes: float | None
    """Most memory of a GPU; None on a CPU, whose processes have memory of their own."""
    loss: float
    """Of the last step: finite, so that the steps were real."""


def step_seconds(
    candidate: Candidate, train: dict[str, Any], *, seq_len: int, device: str, steps: int, budget_s: float
) -> Measured:
    """Seconds of a step of configuration `train` on one device, of at most `steps` steps after `WARM` or as many as `budget_s` has, at
    least two. Raises HoneError where the loss is not finite, MachineError where memory does not suffice."""
    import numpy as np
    import torch

    from hone.plan.search.recipes import recomputation
    from hone.train import ACTIVATION_CHECKPOINTINGS
    from hone.train.loop import Trainer
    from hone.train.optimizers.adamw import AdamW
    from hone.train.schedules.cosine import Cosine

    assert train["tensor"] * train["stages"] * train["context"] == 1 and not SHARDED[train["sharding"]], "one device"
    on_gpu = device.startswith("cuda")
    config = config_of(candidate)
    draw = np.random.default_rng(0)
    batches = [random_batch(draw, config.vocab_size, train["batch_size"], seq_len) for _ in range(2)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(
        random_model(config, device),
        steps=10**6,
        schedule=Cosine(kind="cosine", warmup=0, floor=1.0),
        optimizer=AdamW(kind="adamw", lr=1e-4),
        activation_checkpointing=ACTIVATION_CHECKPOINTINGS.read(recomputation(train["recomputation"])),
        precision=train["precision"],
        gradient_accumulation_steps=train["passes"],
    )
    times, begun, loss = [], time.perf_counter(), float("nan")
    for number in range(WARM + steps):
        at = time.perf_counter()
        loss = trainer.step(batches[number % 2]).loss
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - at)
        if number >= WARM + 1 and time.perf_counter() - begun > budget_s:
            break
    peak = float(torch.cuda.max_memory_allocated(device)) if on_gpu else None
    del trainer
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    counted = times[WARM:]
    return Measured(statistics.median(counted), min(counted), len(counted), peak, float(loss))


def config_of(candidate: Candidate) -> ModelConfig:
    """The whole config of a model."""
    return candidate.checkpoint().config


def random_batch(draw: Any, vocab_size: int, rows: int, seq_len: int) -> Batch:
    """Sequences of one document each, of tokens drawn evenly."""
    import numpy as np

    from hone.feed.load import IGNORE, Batch

    tokens = draw.integers(0, vocab_size, (rows, seq_len))
    targets = np.concatenate([tokens[:, 1:], np.full((rows, 1), IGNORE)], axis=1)
    return Batch(tokens, targets, np.zeros((rows, seq_len), np.int32))


def random_model(config: ModelConfig, device: str) -> Decoder:
    """A decoder of float32 weights that are drawn on the device: a billion numbers take seconds on the host."""
    import torch

    from hone.model.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(config)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for part in model.parameters():
            part.normal_(0.0, 0.02, generator=generator) if part.ndim >= 2 else part.fill_(1.0)
    return model
