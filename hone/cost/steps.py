"""Seconds of a forward pass and a training step: matmuls, attention, element-wise traffic, operation starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from hone.base.figure import Estimate
from hone.cost.dims import ModelDims
from hone.cost.memory import BYTES
from hone.cost.roofline import attention_seconds, kernel_rate, linear_seconds, matmul_seconds, seconds
from hone.cost.train.adapted import AdaptedLinear, Added, added_by_adapters, added_by_decoding
from hone.cost.train.update import UpdateCost, adamw, update_seconds
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

FP8_BLOCK_GAIN = 1.35
"""The same with blocks of 128: 13.35 over 9.88 ms, the nine products of a layer of Llama-3 8B over 8,192 tokens with cuBLAS on one H100."""

FP8_OPS = 4
"""Starts of an fp8 product: itself, and on average three for the casts of its factors."""

FP8_BLOCK_OPS = 7 / 3
"""The same with blocks of 128, whose casts are one kernel: four casts for three products."""

AROUND_OPS = 60
"""Embedding, last norm, loss and Python around the layers."""

Product = tuple[tuple[int, int, int], Layout]

COMPARED = 10
"""Time of the loss, the divergence from a reference and the equality of the most likely tokens, in times of the loss: the
divergence has three exponentials and eight passes over new memory, the equality two searches (two Intel Xeon cores)."""


def forward_seconds(
    dims: ModelDims,
    machine: Machine,
    *,
    tokens: int,
    seq_len: int,
    dtype: str = "float32",
    logit_tokens: int | None = None,
    launched: bool = True,
    codes: str = "",
    fused: bool = False,
) -> Estimate:
    """Forward pass over `tokens` (B x S) in sequences of `seq_len`, logits for `logit_tokens` of them (default: all).

    `launched`: its operations are started one by one; else something else starts them, such as a CUDA graph. `fused`: norms and gates are kernels that read inputs once.
    `codes`: the recipe ("rowwise", "blockwise") by which layers' linears multiply codes of 8 bits with codes of 8 bits; "": they do not.
    """
    rows = tokens if logit_tokens is None else logit_tokens
    products: list[Product] = [((tokens, *matmul), "forward") for layer in dims.layers for matmul in layer.matmuls]
    head: list[Product] = [((rows, dims.vocab_size, dims.hidden_size), "forward")] if dims.vocab_size else []
    flops = sum(layer.mixing.mixing_flops(seq_len) * tokens for layer in dims.layers)
    linears = _coded_seconds(machine, products, dtype, codes) if codes else product_seconds(machine, products, dtype)
    products += head
    parts = {
        f"{len(products)} matmuls": linears + product_seconds(machine, head, dtype),
        "attention": attention_seconds(machine, flops, dtype, seq_len=seq_len),
        "element-wise": traffic_seconds(machine, dims, tokens, dtype, backward=False, kept=fused),
    }
    starts = len(products) + FORWARD_OPS * dims.num_layers + AROUND_OPS if launched else 0
    return sum_up(machine, parts, starts, dtype)


def train_step_seconds(
    dims: ModelDims,
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
    recipe: str = "rowwise",
    held: bool = False,
    loss_chunk: int | None = None,
    piece_len: int | None = None,
    sequence_ranks: int = 1,
    trained: ModelDims | None = None,
    adapted: Sequence[Sequence[AdaptedLinear]] = (),
    code_width: float | None = None,
) -> Estimate:
    """One optimizer step: `micro_batches` forward and backward passes of `batch_tokens` each, then the update.

    Each layer runs forward once more for every time that it is in `recomputed`; of those in `replayed` all but matmuls and
    attention does, while torch looks at every operation. `update` is the optimizer's (default: AdamW's).
    `fp8`: the products of layers' linears that are of fp8 codes, by `recipe`; with `held` weights are cast once a step.
    `loss_chunk`: the tokens whose logits exist at once (None: all). `piece_len`: the
    length of the parts in which attention is computed (None: whole sequences). `sequence_ranks` share the tokens of norms and sums. Others: as in `pass_seconds`.
    """
    once = pass_seconds(
        dims, machine, batch_tokens=batch_tokens, seq_len=seq_len, dtype=dtype, recomputed=recomputed,
        replayed=replayed, fp8=fp8, recipe=recipe, held=held, loss_chunk=loss_chunk,
        piece_len=piece_len, sequence_ranks=sequence_ranks, trained=trained, adapted=adapted, code_width=code_width,
    )  # fmt: skip
    last = update_seconds(update or adamw(trained or dims), trained or dims, machine, dtype)
    value = micro_batches * once.value + last.value
    formula = f"{micro_batches} x ({once.formula}) + {last.formula}"
    if fp8 and held:
        cast = held_cast_seconds(dims, machine, dtype, recipe)
        value, formula = value + cast, f"{formula} + codes of weights {cast:.3g} s"
    return Estimate(value=value, unit="s", formula=formula, bound=once.bound)


def code_bytes(recipe: str) -> float:
    """Bytes of an fp8 code with its part of a scale, in blocks 4 bytes for 128 numbers; scales of rows and tensors are next to none."""
    return 1 + 4 / 128 if recipe == "blockwise" else 1.0


def coded_params(dims: ModelDims, recipe: str) -> int:
    """Weights of the layers that an fp8 training casts: of experts all with scales of rows, else (they stay as they are) those of one token."""
    if recipe.startswith("rowwise"):
        return sum(dims.layer_params)
    return sum(layer.matmul_params for layer in dims.layers)


def _reads(recipe: str) -> int:
    """How often a cast reads a factor: for its scales and for its codes, in blocks once for both."""
    return 1 if recipe == "blockwise" else 2


def held_cast_seconds(dims: ModelDims, machine: Machine, dtype: str, recipe: str) -> float:
    """Seconds in which the layers' weights are cast once, to codes for both of their products."""
    moved = (_reads(recipe) * BYTES[dtype] + 2 * code_bytes(recipe)) * coded_params(dims, recipe)
    return seconds(machine, num_bytes=moved, dtype=dtype).value


def pass_seconds(
    dims: ModelDims,
    machine: Machine,
    *,
    batch_tokens: int,
    seq_len: int,
    dtype: str = "float32",
    recomputed: Collection[int] = (),
    replayed: Collection[int] = (),
    fp8: Collection[Layout] = (),
    recipe: str = "rowwise",
    held: bool = False,
    loss_chunk: int | None = None,
    piece_len: int | None = None,
    sequence_ranks: int = 1,
    trained: ModelDims | None = None,
    adapted: Sequence[Sequence[AdaptedLinear]] = (),
    code_width: float | None = None,
) -> Estimate:
    """Forward and backward pass over `batch_tokens` tokens; without a vocabulary there is no head and no loss.

    `fp8`: the products of layers' linears that are of fp8 codes, which are cast before, as in `train_step_seconds`.
    `trained`: of each layer the last products, those of adapters; the weights of all others are frozen and get no gradient.
    `adapted`: the linears of each layer that LoRA or DoRA adapts, if all its adapters do (else products of adapters are as others).
    `code_width`: bytes of a frozen weight that stays a code (None: none does), which each product decodes.
    """
    vocab, hidden = dims.vocab_size, dims.hidden_size
    products: list[Product] = []
    linears: list[tuple[tuple[int, int, int], int]] = []
    attention, times = 0.0, Counter(recomputed)
    for index, layer in enumerate(dims.layers):
        again = times[index]
        frozen = 0 if trained is None else len(layer.matmuls) - len(trained.layers[index].matmuls)
        for place, (out_features, in_features) in enumerate(layer.matmuls):
            shape = batch_tokens, out_features, in_features
            if adapted and place >= frozen:
                continue
            if fp8 and not any(size % 16 for size in shape):
                linears.append((shape, again))
            else:
                products += _three(*shape, forwards=1 + again)[: -1 if place < frozen else None]
        flops = layer.mixing.mixing_flops(seq_len) * batch_tokens
        attention += attention_seconds(machine, flops, dtype, train=True, seq_len=piece_len or seq_len)
        attention += again * attention_seconds(machine, flops, dtype, seq_len=piece_len or seq_len) if again else 0.0
    coded, instead = fp8_seconds(machine, linears, dtype, fp8, recipe, held=held) if linears else ({}, [])
    idle = coded_params(dims, recipe) - sum(layer.matmul_params for layer in dims.layers)
    if linears and idle and not held:  # forward and backward pass cast the experts that one token does not use, too
        moved = 2 * (_reads(recipe) * BYTES[dtype] + code_bytes(recipe)) * idle
        coded["casts of other experts"] = seconds(machine, num_bytes=moved, dtype=dtype).value
    products += instead
    chunk = min(loss_chunk or batch_tokens, batch_tokens) if machine.device.startswith("cuda") else batch_tokens
    for rows in _chunks(batch_tokens, chunk) if vocab else ():
        products += _three(rows, vocab, hidden, forwards=1)[: None if trained is None else -1]
    twice = replace(dims, layers=tuple(dims.layers[index] for index in (*recomputed, *replayed)))
    beside = _beside_frozen(machine, dims, trained, adapted, code_width, times, batch_tokens, dtype)
    parts = {
        f"{len(products)} matmuls": product_seconds(machine, products, dtype),
        **coded,
        **{name: one.seconds for name, one in beside.items()},
        "attention": attention,
        "element-wise": sum(
            traffic_seconds(
                machine, of, batch_tokens, dtype, backward=backward, kept=True, sequence_ranks=sequence_ranks
            )
            for of, backward in ((dims, False), (twice, False), (dims, True))
        ),
        "loss": loss_seconds(machine, batch_tokens, vocab, train=True, dtype=dtype)
        + (_head_seconds(dims, machine, dtype) if trained is None else 0.0),
    }
    starts = (
        len(products)
        + round((FP8_BLOCK_OPS if recipe == "blockwise" else FP8_OPS) * 3 * len(linears))
        + FORWARD_OPS * len(recomputed)
        + (FORWARD_OPS + BACKWARD_OPS) * dims.num_layers
    )
    starts += 4 * AROUND_OPS + LOOKED_AT_OPS * len(replayed) + sum(one.starts for one in beside.values())
    return sum_up(machine, parts, starts, dtype)


def _beside_frozen(
    machine: Machine, dims: ModelDims, trained: ModelDims | None, adapted: Sequence[Sequence[AdaptedLinear]],
    code_width: float | None, again: Counter[int], tokens: int, dtype: str,
) -> dict[str, Added]:  # fmt: skip
    """What adapters add to frozen linears, and the weights that codes become."""
    found = {}
    if adapted:
        linears = [(one, 1 + again[index]) for index, layer in enumerate(adapted[: dims.num_layers]) for one in layer]
        found[f"{len(linears)} adapters"] = added_by_adapters(machine, linears, tokens, dtype)
    if trained is not None and code_width is not None:
        passes = [2 + again[index] for index in range(dims.num_layers)]
        found["weights of codes"] = added_by_decoding(machine, dims, trained, code_width, passes, dtype)
    return found


def _chunks(tokens: int, chunk: int) -> list[int]:
    """Sizes of the parts of `tokens`."""
    return [min(chunk, tokens - begin) for begin in range(0, tokens, chunk)]


def _head_seconds(dims: ModelDims, machine: Machine, dtype: str) -> float:
    """Seconds of passes over the gradient of the head: on a CPU it is summed, scaled, and added to the embedding's.

    On a GPU it is scaled in its own dtype, and the embedding's starts as zeros; a tied one is the sum of both.
    """
    numbers = dims.vocab_size * dims.hidden_size
    if not numbers:
        return 0.0
    if machine.device.startswith("cuda"):
        passes = 2 + 1 + (3 if dims.tie_embeddings else 0)
        return seconds(machine, num_bytes=passes * BYTES[dtype] * numbers, dtype=dtype).value
    return seconds(machine, num_bytes=10 * 4 * numbers, op_bytes=8 * numbers).value


def loss_seconds(machine: Machine, tokens: int, vocab_size: int, *, train: bool, dtype: str = "float32") -> float:
    """Cross entropy over given logits; with `train` also their gradient, which overwrites them.

    In plain torch one exponential and 4 float32 values moved per logit; the gradient needs another exponential and 8 more.
    Logits come in chunks of 4 MiB, which stay in a CPU's cache. A GPU's kernel reads a row of logits twice and overwrites it; its
    exponentials pass beside that.
    """
    count = float(tokens) * vocab_size
    if not count:
        return 0.0
    if machine.device.startswith("cuda"):
        return seconds(machine, num_bytes=BYTES[dtype] * count * (3 if train else 2), dtype=dtype).value
    moved = seconds(machine, num_bytes=4 * count * (12 if train else 4), op_bytes=min(8 * count, 8 << 20)).value
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


def fp8_seconds(
    machine: Machine,
    linears: Sequence[tuple[tuple[int, int, int], int]],
    dtype: str,
    fp8: Collection[Layout],
    recipe: str,
    *,
    held: bool,
) -> tuple[dict[str, float], list[Product]]:
    """Seconds of `linears`, ((rows, outputs, inputs), how often it runs forward once more), and of the casts of their factors.

    Beside them the products that are in none of these seconds. At the rates calibrated for linears of `recipe`, casts included; else
    the products in `fp8` at FP8_GAIN or FP8_BLOCK_GAIN times the rates of `dtype`, and the others as they are. A CPU multiplies decoded float32 numbers.
    """
    known: dict[tuple[tuple[int, int, int], bool], float | None] = {}
    for shape, _ in linears:
        for trained in (True, False):
            if (shape, trained) not in known:
                known[shape, trained] = linear_seconds(machine, shape, recipe, held=held, trained=trained)
    if machine.device.startswith("cuda") and None not in known.values():
        took = sum((known[shape, True] or 0.0) + again * (known[shape, False] or 0.0) for shape, again in linears)
        return {f"{len(linears)} fp8 linears ({recipe}, calibrated)": took}, []
    every = [one for (shape, again) in linears for one in _three(*shape, forwards=1 + again)]
    coded = [one for one in every if one[1] in fp8]
    if machine.device.startswith("cuda"):
        gain = FP8_BLOCK_GAIN if recipe == "blockwise" else FP8_GAIN
        took = product_seconds(machine, coded, dtype) / gain
        said = f"assumed {gain:g} times as fast as {dtype}"
    else:
        took, said = product_seconds(machine, coded, "float32"), "of float32"
    cast = _cast_bytes(coded, BYTES[dtype], held=held, recipe=recipe)
    moved = seconds(machine, num_bytes=cast, op_bytes=cast / max(len(coded), 1), dtype=dtype).value
    parts = {f"{len(coded)} fp8 products ({said})": took, "casts": moved}
    return parts, [one for one in every if one[1] not in fp8]


def _coded_seconds(machine: Machine, products: Sequence[Product], dtype: str, recipe: str) -> float:
    """Seconds of linears whose weights are codes of 8 bits and whose inputs are cast to such: at the rates calibrated for `recipe`, casts
    included; else at FP8_GAIN or FP8_BLOCK_GAIN times those of `dtype`, and the casts' traffic."""
    known = {
        shape: linear_seconds(machine, shape, recipe, held=True, trained=False) for shape, _ in dict.fromkeys(products)
    }
    if None not in known.values():
        return sum(known[shape] or 0.0 for shape, _ in products)
    gain = FP8_BLOCK_GAIN if recipe == "blockwise" else FP8_GAIN
    cast = sum((BYTES[dtype] + 1) * shape[0] * shape[2] for shape, _ in products)
    moved = seconds(machine, num_bytes=cast, op_bytes=cast / max(len(products), 1), dtype=dtype).value
    return product_seconds(machine, products, dtype) / gain + moved


def _cast_bytes(products: Iterable[Product], width: int, *, held: bool, recipe: str) -> float:
    """Bytes moved by the casts: x and the gradient are read twice, for the scales and for the codes, in blocks once, and write two codes, which
    serve two products; the weight is read for its scales once, and not at all where its codes are `held`."""
    cast, reads, code = 0.0, _reads(recipe), code_bytes(recipe)
    for (m, n, k), layout in products:
        if layout == "forward":  # x [m, k] both ways, the weight [n, k]
            cast += (reads * width + 2 * code) * m * k + (0 if held else (reads * width + 1) * n * k)
        elif layout == "input_gradient":  # the gradient [m, k] both ways, the weight [n, k] transposed
            cast += (reads * width + 2 * code) * m * k + (0 if held else (width + 1) * n * k)
    return cast


def traffic_seconds(
    machine: Machine,
    dims: ModelDims,
    tokens: int,
    dtype: str,
    *,
    backward: bool,
    kept: bool = False,
    sequence_ranks: int = 1,
) -> float:
    """Seconds of norms, rotations, gate and residual sums, from the numbers that they read and write per token.

    `kept`: each operation writes new memory, as in a training, which keeps what the backward pass reads. Otherwise
    the layers reuse the memory of the ones before, which a cache may hold. A training's kernels on a GPU read their inputs once.
    """
    on_gpu, calibration = machine.device.startswith("cuda"), machine.calibration
    if on_gpu and kept and calibration is not None:
        found = fused_values(dims, backward=backward)
        own = {
            "rms_norm": sequence_ranks,
            "": sequence_ranks,
        }  # with sequence parallelism a rank has a part of these tokens
        moved = {kernel: BYTES[dtype] * tokens * values / own.get(kernel, 1) for kernel, values in found.items()}
        return sum(size / (kernel_rate(machine, kernel, dtype, size) or 1.0) for kernel, size in moved.items() if size)
    widest = 3 * max([dims.hidden_size, *(layer.intermediate_size for layer in dims.layers)])
    num_bytes = BYTES[dtype] * tokens * moved_values(dims, backward=backward)
    op_bytes = num_bytes if kept else BYTES[dtype] * tokens * widest
    moved_s = seconds(machine, num_bytes=num_bytes, op_bytes=op_bytes, dtype=dtype).value
    if calibration is None or on_gpu:  # a GPU's exponentials overlap its traffic
        return moved_s
    gates = tokens * sum(layer.intermediate_size for layer in dims.layers)
    # the gate's sigmoid; again for the backward pass
    return moved_s + gates * (2 if backward else 1) / calibration.exp_per_s


def moved_values(dims: ModelDims, *, backward: bool) -> float:
    """Numbers per token that norms, rotations, gate and residual sums read and write in the torch calls of hone.ops.

    Forward: 5 passes per norm, 6 per rotation, 6 for the gate, 3 per sum. Backward: 10 per norm, 8 per rotation, 12 for the
    gate, 3 per sum, and 3 to concatenate the gradients of queries, keys and values. Experts' rows are gathered, gathered back,
    weighted and summed: 3 passes over both of them, 4 backward.
    """
    hidden, total = dims.hidden_size, 0.0
    for layer in dims.layers:
        turned, joined, inner = layer.widths.turned, layer.widths.projected, layer.intermediate_size
        if backward:
            total += 26 * hidden + 8 * turned + 12 * inner + 3 * joined + 4 * layer.routed_values
        else:
            total += 16 * hidden + 6 * turned + 6 * inner + 3 * layer.routed_values
    return total


def fused_values(dims: ModelDims, *, backward: bool) -> dict[str, float]:
    """The same in a training by the kernels of hone.ops, by kernel ('' for torch's own operations), each of which passes over its memory once.

    Forward: the first norm of a layer reads and writes, the second also adds the residual (4), and so does the layer's end (3); a
    rotation and a gate read and write. Backward: a norm reads its input and what flows to its result and writes a gradient, the
    second reads what flows to its sum, too; the gate reads its three factors and writes two gradients; sums of what flows to
    a layer's input (3), and the gradients of queries, keys and values are concatenated (2). Experts' rows are written once and read
    twice, as are their gradients, which are also multiplied with the weights.
    """
    hidden, layers = dims.hidden_size * dims.num_layers, dims.layers
    turned, inner = sum(one.widths.turned for one in layers), sum(one.intermediate_size for one in layers)
    joined, rows = sum(one.widths.projected for one in layers), sum(one.routed_values for one in layers)
    if backward:
        own = 3.0 * hidden + 2.0 * joined + 2.0 * rows
        return {"rms_norm": 7.0 * hidden, "rope": 2.0 * turned, "swiglu": 5.0 * inner, "": own}
    return {"rms_norm": 6.0 * hidden, "rope": 2.0 * turned, "swiglu": 3.0 * inner, "": 3.0 * hidden + 1.5 * rows}


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
