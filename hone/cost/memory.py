"""Bytes that training and serving add to a process or a GPU, in closed form, from the tensors of hone's modules."""

from __future__ import annotations

from collections.abc import Sequence

from hone.base.figure import Estimate, human_bytes
from hone.cost.activations.segments import Segment, gradient_values, keep_all, layer_bytes, live_bytes
from hone.cost.cache import BYTES as BYTES
from hone.cost.dims import ModelDims
from hone.cost.train.replicas import Divided
from hone.cost.train.update import UpdateCost, adamw

GAPS = 2.5
"""Gaps in glibc's heap on a CPU, in sets of one layer's temporaries: freed tensors leave gaps that the next ones, of other
sizes, do not fill. Measured with hone's trainer, with and without activation checkpointing, at 1 to 96
sequences, in float32 and bfloat16: 1.3 to 4.5 sets. (None with MALLOC_MMAP_THRESHOLD_=65536, which gives every tensor its own
pages and takes a third more time.) CUDA's figures count live bytes, so there it is 0."""

TOUCHED = 32 << 20
"""Bytes of program code and small objects that a CPU run brings into memory beside its tensors: measured
14 MiB in a bare loop, about 35 MiB in a stage (TensorBoard, safetensors, a second thread)."""

FORWARD_GAPS = 0.5
FORWARD_TOUCHED = 8 << 20
"""The same two without a backward pass, which leaves few gaps; measured while serving and scoring."""

COMPILER_BYTES = 140 << 20
"""Bytes of numba, LLVM and what they keep once a CPU's decode step is compiled: 115 to 157 MiB were measured."""

BUCKET = 1 << 26
"""Gradients that half-precision training widens to float32 at a time."""


def train_bytes(
    dims: ModelDims,
    *,
    batch_tokens: int,
    seq_len: int,
    dtype: str = "float32",
    update: UpdateCost | None = None,
    passes: int = 1,
    wide: bool = False,
    packed: bool = True,
    segments: Sequence[Segment] | None = None,
    loss_chunk: int | None = None,
    kernels: bool = False,
    model_loaded: bool = False,
    device: str = "cpu",
    divided: Divided | None = None,
    fp8: float = 0.0,
    trained: ModelDims | None = None,
    lean: bool = False,
    frozen_bytes: float | None = None,
) -> Estimate:
    """Growth of memory at the peak of training.

    Throughout: weights, optimizer state and, in half precision, float32 master weights. In addition the largest of three
    moments: `loss` (all activations and the head's logits), `backward` (all activations and the last layer's gradients) and
    `update` (all gradients and one layer's activations, or one bucket widened).

    `update` is the optimizer's (default: AdamW's). `batch_tokens` is one micro-batch (B x S) of sequences of `seq_len`, of which
    a step has `passes`; the gradients of several are summed in float32, and `wide` says that those of one are too. `packed`: sequences of several documents have an
    attention mask. `segments` (default: all layers are kept) are the layers' activation checkpointing. `loss_chunk` is the
    number of tokens whose logits exist at once (default: all). `kernels`: attention and loss run in the GPU kernels of hone.ops, which store no masks, overwrite
    logits with their gradient and sum the head's gradient in its own dtype (float32 beyond 8 chunks). `model_loaded`: the
    float32 weights are in memory before. `divided`: the ranks of a data-parallel training, of which this is one.
    `fp8`: linears keep fp8 codes of their inputs, of so many bytes a number. `trained`: the weights that are trained (None: all);
    the others have no masters, no gradients and no state. `lean`: these adapt linears by LoRA, whose products keep their inputs alone.
    `frozen_bytes`: of the other weights where they stay codes, of which one matrix at a time is dequantized.
    """
    width = BYTES[dtype]
    half = width < 4
    own = trained or dims
    params, vocab, hidden = own.num_params, dims.vocab_size, dims.hidden_size
    weights = 4 * params + (width * params if half else 0) - (4 * params if model_loaded else 0)
    update = update or adamw(own)
    gradients = (4 if wide or passes > 1 else width) * params
    head = vocab * hidden if trained is None else 0
    taken = head * width + (4 * head if wide else 0)  # the head's gradient, and its float32 copy
    state = update.state_bytes
    if divided is not None and divided.num_ranks > 1:
        weights, gradients = divided.weights_bytes(own, width), divided.gradient_bytes(own, passes)
        state, taken = state / divided.of("optimizer"), head * (width + 4)
    summed = gradients if passes > 1 else 0
    if summed and divided is not None and divided.num_ranks > 1:
        summed = divided.summed_bytes(own)
    frozen = width * (dims.num_params - params) if frozen_bytes is None else frozen_bytes
    weights += frozen if divided is None or not frozen else divided.frozen_bytes(dims, width, frozen)

    # Each layer's attention saves its own float mask of the batch.
    mask = seq_len if packed and not (kernels and half) else 0
    sizes = [layer_bytes(one, hidden, batch_tokens, width, mask, fp8=fp8, lean=lean) for one in dims.layers]
    live = live_bytes(
        keep_all(dims.num_layers) if segments is None else segments, sizes, elsewhere=device.startswith("cuda")
    )
    per_layer = max((one.saved for one in sizes), default=0)
    making = batch_tokens * width * max((gradient_values(one, hidden) for one in dims.layers), default=0)

    chunk = min(loss_chunk or batch_tokens, batch_tokens) * vocab
    # The head's gradient is summed in float32; scaling it makes a second one, rounding it a third in half precision.
    in_loss = head * 4 + chunk * (2 * 4 + (width if half else 0)) + 3 * batch_tokens * hidden * width
    scaled = head * (8 + (width if half else 0)) + 3 * batch_tokens * hidden * width
    if kernels:
        summed_wide = half and chunk * 8 < batch_tokens * vocab
        in_loss = head * (width + (4 if summed_wide else 0)) + chunk * width + 3 * batch_tokens * hidden * width
        scaled = head * width + 3 * batch_tokens * hidden * width
    widened = 2 * min(max(BUCKET, head), params) if half else 0
    moments = {
        "loss": live.turn + max(in_loss, scaled) + summed,
        "backward": live.backward + taken + summed + (0 if frozen_bytes is None else width * _largest_matrix(dims)),
        "update": gradients + max(per_layer + making, widened + update.work_bytes),
    }
    moment = max(moments, key=lambda name: moments[name])
    fixed = {"weights": weights, "optimizer": state}
    activations = {"loss": live.turn, "backward": live.backward, "update": 0.0}[moment]
    moving = {f"{moment}: activations": activations}
    moving[f"{moment}: gradients and work"] = moments[moment] - sum(moving.values())
    return _sum_up(fixed, moving, GAPS * making, TOUCHED, device)


def _largest_matrix(dims: ModelDims) -> int:
    """Weights of the largest matrix in the layers."""
    return max((rows * columns for layer in dims.layers for rows, columns in layer.matmuls), default=0)


def serve_bytes(
    dims: ModelDims,
    *,
    weights_bytes: float = 0,
    kv_bytes: float = 0,
    max_tokens: int = 0,
    max_num_seqs: int = 0,
    context_tokens: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    compiled: bool = False,
    widened_bytes: float = 0.0,
) -> Estimate:
    """Growth of memory at the peak of serving: weights (0 if loaded before), the page pool, one step's activations.

    `max_tokens` is the most tokens of one step, `max_num_seqs` the sequences whose logits are computed in it,
    `context_tokens` the cached positions, over all sequences, that a step's attention gathers. `compiled`: decode steps on a
    CPU are compiled, which brings the compiler into memory. `widened_bytes`: codes of experts that a step widens at a time.
    """
    width = BYTES[dtype]
    step = forward_bytes(dims, tokens=max_tokens, dtype=dtype, context_tokens=context_tokens)
    # Logits, their float32 copy, and the sampler's copy (sorted or as probabilities).
    logits = max_num_seqs * dims.vocab_size * (width + 3 * 4)
    fixed = {"weights": weights_bytes, "pages": kv_bytes}
    code = FORWARD_TOUCHED + (COMPILER_BYTES if compiled else 0)
    moving = {"a step's activations": step, "widened experts": widened_bytes, "logits": logits}
    return _sum_up(fixed, moving, FORWARD_GAPS * step, code, device)


def score_bytes(
    models: Sequence[ModelDims],
    *,
    weights_bytes: float,
    max_tokens: int,
    max_rows: int,
    dtype: str = "float32",
    device: str = "cpu",
) -> Estimate:
    """Growth of memory at the peak of scoring `max_tokens` at a time by one model, or by one and a reference (`models`).

    The larger of two moments: a forward pass, or the logits of `max_rows` tokens and their loss or divergence, beside the last
    hidden states of all tokens. On a CPU both, and the logits twice: freed heap memory does not fit the next allocations
    (measured from 1,024 to 16,384 tokens at a time).
    """
    width = BYTES[dtype]
    waiting = [width * max_tokens * one.hidden_size for one in models]
    step = max(forward_bytes(one, tokens=max_tokens, dtype=dtype) for one in models)
    # In float32: both models' logits, the reference's log-probabilities and the differences from them. One model alone: its
    # logits and their exponentials, or the next logits while these still exist.
    numbers = 4 * 4 if len(models) > 1 else 4 * 2 + (width if width < 4 else 0)
    logits = max_rows * models[0].vocab_size * numbers
    forward, scoring = step + sum(waiting[:-1]), sum(waiting) + logits
    parts = {"a step's activations": step, "logits and their divergence": 2.0 * logits}
    if device.startswith("cuda"):
        parts = {"a step's activations": forward} if forward > scoring else {"logits and their divergence": scoring}
    return _sum_up({"weights": weights_bytes}, parts, FORWARD_GAPS * step, FORWARD_TOUCHED, device)


def forward_bytes(dims: ModelDims, *, tokens: int, dtype: str = "float32", context_tokens: int = 0) -> float:
    """Peak bytes of a forward pass without gradients beside weights and logits.

    In the attention: the residual, its norm, queries, keys and values as projected and rotated, keys and values gathered
    from `context_tokens` cached positions, the result. In the feed-forward: residual, norm, both halves, their product.
    """
    width, hidden, most = BYTES[dtype], dims.hidden_size, 0.0
    for layer in dims.layers:
        widths = layer.widths
        made = widths.projected + widths.turned + widths.mixed
        attention = tokens * (2 * hidden + made) + context_tokens * layer.kv_values_per_token
        feed_forward = tokens * (2 * hidden + 3 * layer.intermediate_size + layer.routed_values)
        most = max(most, attention, feed_forward)
    return width * most


def _sum_up(fixed: dict[str, float], moving: dict[str, float], gaps: float, code: int, device: str) -> Estimate:
    """Sum of all parts; on a CPU plus the heap's gaps and the loaded program code."""
    parts = {**fixed, **moving}
    if not device.startswith("cuda"):
        parts |= {"gaps in the heap": gaps, "code": code}
    formula = " + ".join(f"{name} {human_bytes(value)}" for name, value in parts.items() if value)
    return Estimate(value=float(sum(parts.values())), unit="B", formula=formula, tolerance=0.2)
