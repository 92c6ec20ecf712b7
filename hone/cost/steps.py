"""Seconds of a forward pass and a training step: matmuls, attention, element-wise traffic, operation starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from hone.base.figure import Estimate
from hone.cost.facts import ModelFacts
from hone.cost.memory import BYTES
from hone.cost.roofline import attention_seconds, matmul_seconds, seconds
from hone.cost.update import UpdateCost, adamw, update_seconds
from hone.measure.calibration import Layout
from hone.measure.machine import Machine

FORWARD_OPS = 60
"""Time of one layer's forward pass without matmuls, in operation starts: two norms (7 each), rotations (6 each), gate,
attention, sums, and the Python between them. Measured on one token; a decoder's views count as parts of a start."""

BACKWARD_OPS = 300
"""The same for a layer's backward pass through autograd."""

LOOKED_AT_OPS = 300
"""Time that a layer takes more, without what it computes, when torch asks of each operation whether to save its result: a
guess, about one start for each of the operations of both passes."""

FP8_GAIN = 1.78
"""Rate of an fp8 product over that of a bfloat16 one: 1,220 over 686 TFLOP/s, 8192 x 8192 x 8192 with scales of rows, on one H200."""

FP8_OPS = 4
"""Starts of an fp8 product: itself, and on average three for the casts of its factors."""

AROUND_OPS = 60
"""Embedding, last norm, loss and Python around the layers."""

Product = tuple[tuple[int, int, int], Layout]

COMPARED = 10
"""Time of the loss, the divergence from a reference and the equality of the most likely tokens, in times of the loss: the
divergence has three exponentials and eight passes over new memory, the equality two searches (two Intel Xeon cores)."""


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
    products: list[Product] = [((tokens, *matmul), "forward") for layer in facts.layers for matmul in layer.matmuls]
    if facts.vocab_size:
        products.append(((rows, facts.vocab_size, facts.hidden_size), "forward"))
    flops = sum(layer.mixing.mixing_flops(seq_len) * tokens for layer in facts.layers)
    parts = {
        f"{len(products)} matmuls": product_seconds(machine, products, dtype),
        "attention": attention_seconds(machine, flops, dtype),
        "element-wise": traffic_seconds(machine, facts, tokens, dtype, backward=False),
    }
    starts = len(products) + FORWARD_OPS * facts.num_layers + AROUND_OPS
    return sum_up(machine, parts, starts, dtype)


def train_step_seconds(
    facts: ModelFacts,
    machine: Machine,
    *,
    batch_tokens: int,
    seq_len: int,
    dtype: str = "float32",
    micro_batches: int = 1,
    recomputed: Collection[int] = (),
    replayed: Collection[int] = (),
    update: UpdateCost | None = None,
    fp8: Collection[Layout] = (),
) -> Estimate:
    """One optimizer step: `micro_batches` forward and backward passes of `batch_tokens` each, then the update.

    Each layer runs forward once more for every time that it is in `recomputed`; of those in `replayed` all but matmuls and
    attention does, while torch looks at every operation. `update` is the optimizer's (default: AdamW's).
    `fp8`: the products of layers' linears that are of fp8 codes.
    """
    again = {"recomputed": recomputed, "replayed": replayed, "fp8": fp8}
    once = pass_seconds(facts, machine, batch_tokens=batch_tokens, seq_len=seq_len, dtype=dtype, **again)
    last = update_seconds(update or adamw(facts), facts, machine, dtype)
    value = micro_batches * once.value + last.value
    formula = f"{micro_batches} x ({once.formula}) + {last.formula}"
    return Estimate(value=value, unit="s", formula=formula, bound=once.bound)


def pass_seconds(
    facts: ModelFacts,
    machine: Machine,
    *,
    batch_tokens: int,
    seq_len: int,
    dtype: str = "float32",
    recomputed: Collection[int] = (),
    replayed: Collection[int] = (),
    fp8: Collection[Layout] = (),
) -> Estimate:
    """Forward and backward pass over `batch_tokens` tokens; without a vocabulary there is no head and no loss.

    `fp8`: the products of layers' linears that are of fp8 codes, which are cast before.
    """
    vocab, hidden = facts.vocab_size, facts.hidden_size
    products: list[Product] = []
    attention, times = 0.0, Counter(recomputed)
    for index, layer in enumerate(facts.layers):
        again = times[index]
        for out_features, in_features in layer.matmuls:
            products += _three(batch_tokens, out_features, in_features, forwards=1 + again)
        flops = layer.mixing.mixing_flops(seq_len) * batch_tokens
        attention += attention_seconds(machine, flops, dtype, train=True)
        attention += again * attention_seconds(machine, flops, dtype) if again else 0.0
    coded = [one for one in products if one[1] in fp8 and not any(size % 16 for size in one[0])]
    apart = set(coded)
    products = [one for one in products if one not in apart]
    products += _three(batch_tokens, vocab, hidden, forwards=1) if vocab else []
    twice = replace(facts, layers=tuple(facts.layers[index] for index in (*recomputed, *replayed)))
    parts = {
        f"{len(products)} matmuls": product_seconds(machine, products, dtype),
        **(fp8_seconds(machine, coded, dtype) if coded else {}),
        "attention": attention,
        "element-wise": traffic_seconds(machine, facts, batch_tokens, dtype, backward=False, kept=True)
        + traffic_seconds(machine, twice, batch_tokens, dtype, backward=False, kept=True)
        + traffic_seconds(machine, facts, batch_tokens, dtype, backward=True, kept=True),
        "loss": loss_seconds(machine, batch_tokens, vocab, train=True)
        # The head's gradient is summed, scaled, and added to the embedding's.
        + (seconds(machine, num_bytes=10 * 4 * vocab * hidden, op_bytes=8 * vocab * hidden).value if vocab else 0.0),
    }
    starts = (
        len(products)
        + FP8_OPS * len(coded)
        + FORWARD_OPS * len(recomputed)
        + (FORWARD_OPS + BACKWARD_OPS) * facts.num_layers
    )
    starts += 4 * AROUND_OPS + LOOKED_AT_OPS * len(replayed)
    return sum_up(machine, parts, starts, dtype)


def loss_seconds(machine: Machine, tokens: int, vocab_size: int, *, train: bool) -> float:
    """Cross entropy over given logits; with `train` also their gradient, which overwrites them.

    One exponential and 4 float32 values moved per logit; the gradient needs another exponential and 8 more. That is the
    work in plain torch, a bound for the GPU's kernel, which moves 3 values of the logits' dtype. Logits come in chunks: of
    4 MiB, which stay in a CPU's cache, on a GPU larger than its cache.
    """
    count = float(tokens) * vocab_size
    if not count:
        return 0.0
    chunk = (512 if machine.device.startswith("cuda") else 4) << 20
    moved = seconds(machine, num_bytes=4 * count * (12 if train else 4), op_bytes=min(8 * count, 2 * chunk)).value
    calibration = machine.calibration
    return moved + (count * (2 if train else 1) / calibration.exp_per_s if calibration is not None else 0.0)


def _three(rows: int, out_features: int, in_features: int, *, forwards: int) -> list[Product]:
    """A linear layer's forward product(s) and the two of its backward pass."""
    return [
        *[((rows, out_features, in_features), "forward")] * forwards,
        ((rows, in_features, out_features), "input_gradient"),
        ((out_features, in_features, rows), "weight_gradient"),
    ]


def product_seconds(machine: Machine, products: Iterable[Product], dtype: str) -> float:
    """Seconds of all matmuls, each the larger of its arithmetic and its traffic; equal ones are looked up once."""
    known: dict[Product, float] = {}
    total = 0.0
    for product in products:
        if product not in known:
            (m, n, k), layout = product
            num_bytes = BYTES[dtype] * (m * n + m * k + n * k)
            known[product] = matmul_seconds(machine, (m, n, k), layout, num_bytes, dtype)
        total += known[product]
    return total


def fp8_seconds(machine: Machine, products: Sequence[Product], dtype: str) -> dict[str, float]:
    """Seconds of products of fp8 codes, and of the casts of their factors from `dtype`.

    At the rates calibrated for float8, else at FP8_GAIN times those of `dtype`. A CPU multiplies decoded float32 numbers.
    Casts read twice, for the scales and for the codes: x and the gradient write two codes, which serve two products; the
    weight is read for its scales once.
    """
    calibration, on_gpu = machine.calibration, machine.device.startswith("cuda")
    if not on_gpu:
        took, said = product_seconds(machine, products, "float32"), "of float32"
    elif calibration is not None and "float8" in calibration.dtypes:
        took, said = product_seconds(machine, products, "float8"), "calibrated"
    else:
        took = product_seconds(machine, products, dtype) / FP8_GAIN
        said = f"assumed {FP8_GAIN:g} times as fast as {dtype}"
    width, cast = BYTES[dtype], 0.0
    for (m, n, k), layout in products:
        if layout == "forward":  # x [m, k] both ways, the weight [n, k]
            cast += (2 * width + 2) * m * k + (2 * width + 1) * n * k
        elif layout == "input_gradient":  # the gradient [m, k] both ways, the weight [n, k] transposed
            cast += (2 * width + 2) * m * k + (width + 1) * n * k
    moved = seconds(machine, num_bytes=cast, op_bytes=cast / max(len(products), 1), dtype=dtype).value
    return {f"{len(products)} fp8 products ({said})": took, "casts": moved}


def traffic_seconds(
    machine: Machine, facts: ModelFacts, tokens: int, dtype: str, *, backward: bool, kept: bool = False
) -> float:
    """Seconds of norms, rotations, gate and residual sums, from the numbers that they read and write per token.

    `kept`: each operation writes new memory, as in a training, which keeps what the backward pass reads. Otherwise
    the layers reuse the memory of the ones before, which a cache may hold.
    """
    widest = 3 * max([facts.hidden_size, *(layer.intermediate_size for layer in facts.layers)])
    num_bytes = BYTES[dtype] * tokens * moved_values(facts, backward=backward)
    op_bytes = num_bytes if kept else BYTES[dtype] * tokens * widest
    moved = seconds(machine, num_bytes=num_bytes, op_bytes=op_bytes, dtype=dtype).value
    calibration = machine.calibration
    if calibration is None or machine.device.startswith("cuda"):  # a GPU's exponentials overlap its traffic
        return moved
    gates = tokens * sum(layer.intermediate_size for layer in facts.layers)
    return (
        moved + gates * (2 if backward else 1) / calibration.exp_per_s
    )  # the gate's sigmoid; again for the backward pass


def moved_values(facts: ModelFacts, *, backward: bool) -> float:
    """Numbers per token that norms, rotations, gate and residual sums read and write in the torch calls of hone.ops.

    Forward: 5 passes per norm, 6 per rotation, 6 for the gate, 3 per sum. Backward: 10 per norm, 8 per rotation, 12 for the
    gate, 3 per sum, and 3 to concatenate the gradients of queries, keys and values.
    """
    hidden, total = facts.hidden_size, 0.0
    for layer in facts.layers:
        turned, joined, inner = layer.widths.turned, layer.widths.projected, layer.intermediate_size
        if backward:
            total += 26 * hidden + 8 * turned + 12 * inner + 3 * joined
        else:
            total += 16 * hidden + 6 * turned + 6 * inner
    return total


def sum_up(machine: Machine, parts: dict[str, float], starts: float, dtype: str) -> Estimate:
    """The parts and the starts of all operations: in sequence on a CPU, overlapped on a GPU.

    Without starts something else launches the work (a CUDA graph).
    """
    started = seconds(machine, num_ops=starts, dtype=dtype)
    work = sum(parts.values())
    formula = " + ".join(f"{name} {value:.3g} s" for name, value in parts.items())
    if not starts:
        value = work
    elif machine.device.startswith("cuda"):
        value, formula = max(work, started.value), f"max({formula}, {starts:,.0f} starts {started.value:.3g} s)"
    else:
        value, formula = work + started.value, f"{formula} + {starts:,.0f} starts {started.value:.3g} s"
    calibration = machine.calibration
    bound = calibration is None or dtype not in calibration.dtypes
    formula += " (a bound: not calibrated)" if bound else f" ({calibration.device}, calibrated)"
    return Estimate(value=value, unit="s", formula=formula, bound=bound)
