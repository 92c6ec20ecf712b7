"""Seconds of one forward pass, one training step and one decoding step, composed from matmuls, traffic and operation starts."""

from __future__ import annotations

from hone.base.figure import Estimate
from hone.cost.facts import ModelFacts, mean_positions
from hone.cost.memory import BYTES
from hone.cost.roofline import seconds
from hone.measure.machine import Machine

OPS_PER_LAYER = 40
OPS_AROUND = 10


def forward_seconds(
    facts: ModelFacts,
    machine: Machine,
    *,
    tokens: int,
    seq_len: int,
    dtype: str = "float32",
    logit_tokens: int | None = None,
) -> Estimate:
    """Forward pass over `tokens` (B x S) in sequences of `seq_len`, logits for `logit_tokens` of them (default: all)."""
    rows = tokens if logit_tokens is None else logit_tokens
    shapes = [(tokens, *matmul) for layer in facts.layers for matmul in layer.matmuls]
    shapes.append((rows, facts.vocab_size, facts.hidden_size))
    return _compose(facts, machine, shapes, tokens=tokens, seq_len=seq_len, dtype=dtype, passes=1)


def train_step_seconds(
    facts: ModelFacts,
    machine: Machine,
    *,
    batch_tokens: int,
    seq_len: int,
    dtype: str = "float32",
    micro_batches: int = 1,
    recomputed_layers: int = 0,
) -> Estimate:
    """One optimizer step: `micro_batches` forward and backward passes of `batch_tokens` each, then the update."""
    shapes = []
    for index, layer in enumerate(facts.layers):
        for out_features, in_features in layer.matmuls:
            forward = (batch_tokens, out_features, in_features)
            shapes += [forward] * (2 if index < recomputed_layers else 1)
            shapes += [(batch_tokens, in_features, out_features), (out_features, in_features, batch_tokens)]
    vocab, hidden = facts.vocab_size, facts.hidden_size
    shapes += [(batch_tokens, vocab, hidden), (batch_tokens, hidden, vocab), (vocab, hidden, batch_tokens)]
    once = _compose(facts, machine, shapes, tokens=batch_tokens, seq_len=seq_len, dtype=dtype, passes=3)
    update = seconds(machine, num_bytes=4 * 8 * facts.num_params, num_ops=20)
    value = micro_batches * once.value + update.value
    formula = f"{micro_batches} x ({once.formula}) + update {update.value:.3g} s"
    return Estimate(value=value, unit="s", formula=formula, bound=once.bound)


def decode_step_seconds(
    facts: ModelFacts,
    machine: Machine,
    *,
    rows: int,
    context: int,
    dtype: str = "float32",
    weights_bytes: float | None = None,
) -> Estimate:
    """One decoding step of `rows` sequences that each see `context` cached positions."""
    shapes = [(rows, *matmul) for layer in facts.layers for matmul in layer.matmuls]
    shapes.append((rows, facts.vocab_size, facts.hidden_size))
    return _compose(facts, machine, shapes, tokens=rows, seq_len=context, dtype=dtype, passes=1)


def _compose(
    facts: ModelFacts,
    machine: Machine,
    shapes: list[tuple[int, int, int]],
    *,
    tokens: int,
    seq_len: int,
    dtype: str,
    passes: int,
) -> Estimate:
    width = BYTES[dtype]
    matmuls = [
        seconds(machine, matmul=(m, n, k), num_bytes=width * (m * n + m * k + n * k), num_ops=1, dtype=dtype)
        for m, n, k in shapes
    ]
    attention = 0.0
    traffic = 0.0
    for layer in facts.layers:
        attention += 4.0 * layer.num_heads * layer.head_dim * mean_positions(seq_len, layer.window) * tokens
        traffic += (
            width
            * tokens
            * (8 * facts.hidden_size + 6 * layer.num_heads * layer.head_dim + 4 * layer.intermediate_size)
        )
    rest = seconds(
        machine,
        flops=attention * passes,
        num_bytes=traffic * passes,
        num_ops=passes * (OPS_PER_LAYER * facts.num_layers + OPS_AROUND),
        dtype=dtype,
    )
    product = sum(one.value for one in matmuls)
    formula = f"{len(matmuls)} matmuls {product:.3g} s + attention and element-wise {rest.value:.3g} s: {rest.formula}"
    return Estimate(value=product + rest.value, unit="s", formula=formula, bound=rest.bound)
