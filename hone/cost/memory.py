"""Bytes that training and serving add to a process or a GPU, in closed form."""

from __future__ import annotations

from hone.base.figure import Estimate, human_bytes
from hone.cost.facts import LayerFacts, ModelFacts

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number by format name."""


def train_bytes(
    facts: ModelFacts,
    *,
    batch_tokens: int,
    seq_len: int,
    dtype: str = "float32",
    optimizer: str = "adamw",
    kept_layers: int | None = None,
    kept_inputs: int = 0,
    loss_chunk: int | None = None,
    model_loaded: bool = False,
    device: str = "cpu",
) -> Estimate:
    """What training adds at its peak: weights, gradients, optimizer state, activations of one micro-batch, loss.

    `batch_tokens` is one micro-batch (B x S) of sequences of `seq_len`. `dtype` is the format of activations; weights,
    gradients and state are float32 (master weights). `kept_layers` (default: all) is how many layers have their inner
    activations alive at once and `kept_inputs` how many layer inputs are kept for recomputation. `loss_chunk` is the
    number of tokens whose logits are alive at once (default: all). `model_loaded`: the weights were there before.
    """
    layers = facts.layers if kept_layers is None else facts.layers[:kept_layers]
    width = BYTES[dtype]
    states = {"adamw": 2, "sgd": 0}[optimizer]
    weights = 0 if model_loaded else 4 * facts.num_params
    gradients = 4 * facts.num_params
    state = 4 * states * facts.num_params
    copy = 0 if dtype == "float32" else width * facts.num_params
    activations = (
        batch_tokens
        * width
        * (sum(saved_values_per_token(layer, facts.hidden_size) for layer in layers) + kept_inputs * facts.hidden_size)
    )
    logits = min(loss_chunk or batch_tokens, batch_tokens) * facts.vocab_size * (2 * 4 + (0 if width == 4 else width))
    total = weights + gradients + state + copy + activations + logits
    parts = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": state,
        f"{dtype} copy": copy,
        "activations": activations,
        "logits": logits,
    }
    return _sum_up(total, parts)


def saved_values_per_token(layer: LayerFacts, hidden_size: int) -> int:
    """Numbers autograd keeps for one token of one layer: inputs of norms, matmuls, attention and activation."""
    query, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    norms = 2 * 2 * hidden_size
    attention = (query + 2 * kv) * 2 + query
    feed_forward = 3 * layer.intermediate_size
    return norms + attention + feed_forward


def serve_bytes(
    facts: ModelFacts,
    *,
    weights_bytes: float = 0,
    kv_bytes: float = 0,
    max_tokens: int = 0,
    max_rows: int = 0,
    context_tokens: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
) -> Estimate:
    """What serving adds at its peak: weights (0 when they were there before), the page pool, one step's work.

    `max_tokens` is the most tokens of one step, `max_rows` the rows whose logits are computed in it,
    `context_tokens` the cached positions that one attention call gathers.
    """
    width = BYTES[dtype]
    widest = max((2 * layer.intermediate_size + hidden_row(layer, facts) for layer in facts.layers), default=0)
    step = max_tokens * width * (widest + 2 * facts.hidden_size)
    gathered = context_tokens * width * max((layer.kv_values_per_token for layer in facts.layers), default=0)
    logits = max_rows * facts.vocab_size * (width + 2 * 4)
    total = weights_bytes + kv_bytes + max(step, gathered, logits)
    parts = {
        "weights": weights_bytes,
        "pages": kv_bytes,
        "largest of step, gather, logits": max(step, gathered, logits),
    }
    return _sum_up(total, parts)


def hidden_row(layer: LayerFacts, facts: ModelFacts) -> int:
    """Numbers of one token's query, key, value and layer input together."""
    return (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim + facts.hidden_size


def _sum_up(total: float, parts: dict[str, float]) -> Estimate:
    formula = " + ".join(f"{name} {human_bytes(value)}" for name, value in parts.items() if value)
    return Estimate(value=float(total), unit="B", formula=formula, tolerance=0.2)
