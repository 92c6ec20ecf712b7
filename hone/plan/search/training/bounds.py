"""Seconds and bytes of many trainings at once: the estimates of hone.cost for a layer, an end and an exchange, multiplied in numpy.

What one configuration's plan simulates, a pipeline's passes, has here its closed form (Narayanan et al. 2021, arXiv:2104.04473;
Qi et al. 2023, arXiv:2401.10241 for zb_h1): equal stages, the slowest of which has a whole number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.cost.cache import BYTES
from hone.cost.memory import BUCKET, GAPS, TOUCHED
from hone.cost.ranks import slowing
from hone.plan.search.product import Columns
from hone.plan.search.training.rates import Rates

Array = NDArray[np.float64]


class Priced(NamedTuple):
    """Of each row: seconds of a step, hours of all steps, bytes of the device that needs most."""

    step_s: Array
    hours: Array
    num_bytes: Array


class Row(NamedTuple):
    """The columns of a block that formulas use, as numbers."""

    layers: Array
    """Layers of the busiest rank of a pipeline, all without one."""
    stages: Array
    passes: Array
    chunks: Array
    recomputed: Array
    """The share of layers that run forward once more."""
    replayed: Array
    """The share of layers that run forward once more but for products."""


def priced(rates: Rates, block: Columns) -> Priced:
    """Seconds, hours and bytes of all rows of `block` (`Trainings.blocks`)."""
    product = rates.of.product
    places = [block[name] for name in ("tensor", "context", "experts", "micro_batch", "precision")]
    held = (block["passes"] > 1) & ~_sharded_weights(rates, block)
    each, again, replay, ends, weights, codes = rates.layer(*places, held.astype(np.int64))
    row = _row(rates, block, ends / each)
    one = each + row.recomputed * again + row.replayed * replay
    step = _passes(rates, block, row, one, ends, weights, places) + codes * row.layers
    base, more = rates.update(*_held(block, row.layers))
    extra = np.maximum(row.passes - 2, 0)
    step = step + base + more * extra
    step = _with_transfers(rates, block, row, step, places)
    tokens, batch = product.column(block, "tokens"), product.column(block, "batch_size")
    hours = step * np.ceil(tokens / (batch * rates.of.goal.seq_len)) / 3600
    return Priced(step, hours, memory(rates, block, row, places, held))


def _held(block: Columns, layers: Array, *last: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The places by which a rank's weights are looked up."""
    names = ("tensor", "stages", "context", "experts", "sharding", "precision")
    several = (block["passes"] > 1).astype(np.int64)
    return [*(block[name] for name in names), several, layers.astype(np.int64), *last]


def _sharded_weights(rates: Rates, block: Columns) -> NDArray[np.bool_]:
    return np.array([one == "zero3" for one in rates.of.product.axes["sharding"]])[block["sharding"]]


def _row(rates: Rates, block: Columns, head: Array) -> Row:
    """Numbers of each row; `head` is the time of both ends in layers."""
    product, num_layers = rates.of.product, rates.of.candidate.dims.num_layers
    stages = product.column(block, "stages").astype(float)
    chunks = np.array([float(v) for _, v in product.axes["schedule"]])[block["schedule"]]
    # The least k for which (p - 1) k + floor(k - head) layers are all: the last rank has the head instead of some.
    layers = np.where(stages > 1, np.ceil((num_layers + np.ceil(head - 1e-9)) / stages), num_layers)
    layers = np.minimum(np.maximum(layers, np.ceil(num_layers / stages)), num_layers)
    shares = np.array([_shares(one) for one in product.axes["recomputation"]])[block["recomputation"]]
    return Row(layers, stages, block["passes"].astype(float), chunks, shares[:, 0], shares[:, 1])


def _shares(recomputation: str) -> tuple[float, float]:
    """Of all layers, those recomputed and those recomputed but for their products."""
    kind, _, n = recomputation.partition(" ")
    return {"none": (0.0, 0.0), "full": (1.0, 0.0), "selective": (0.0, 1.0)}.get(kind) or (1 / int(n or 1), 0.0)


def _passes(
    rates: Rates, block: Columns, row: Row, one: Array, ends: Array, weights: Array, places: Sequence[Any]
) -> Array:
    """Seconds of all passes of a step, with the transfers inside them."""
    sums, _, _, rows, to_next = rates.inside(*places)
    inside = (4 + 2 * row.recomputed) * (sums + rows)
    plain = row.passes * (row.layers * (one + inside) + ends + 2 * sums)
    busy = row.layers * (one + inside) + 2 * sums / row.stages
    zero_bubble = np.array([kind == "zb_h1" for kind, _ in rates.of.product.axes["schedule"]])[block["schedule"]]
    waits = (row.stages - 1) * np.where(zero_bubble, busy - 2 * row.layers * weights, busy / row.chunks)
    piped = row.passes * busy + np.maximum(waits, 0) + 2 * (row.stages - 1) * to_next
    return np.where(row.stages > 1, piped, plain)


def _with_transfers(rates: Rates, block: Columns, row: Row, step: Array, places: Sequence[Any]) -> Array:
    """`step` with what travels beside it: as `hone.cost.ranks.beside_seconds` on a GPU, after it on a CPU."""
    base, more, hidden = rates.exchange(*_held(block, row.layers))
    moved = base + more * np.maximum(row.passes - 2, 0)
    _, both, forward, _, _ = rates.inside(*places)
    shared = row.passes * row.layers * (both + row.recomputed * forward)
    waits = np.where(row.stages > 1, moved, hidden)
    moved = moved + shared
    if not rates.of.fleet.on_gpu:
        return step + moved
    waits = np.minimum(waits, moved)
    slowed = slowing(rates.of.fleet.machine) * np.minimum(moved - waits, step)
    beside = np.maximum(step + slowed, moved - waits) + waits
    return np.where(moved > 0, beside, step)


def memory(rates: Rates, block: Columns, row: Row, places: Sequence[Any], held: NDArray[np.bool_]) -> Array:
    """Bytes of the rank that needs most: the first of a pipeline, with the activations of most passes, or the last, with the loss."""
    last = _of_rank(rates, block, row, places, held, last=True)
    if not (row.stages > 1).any():
        return last
    return np.where(row.stages > 1, np.maximum(last, _of_rank(rates, block, row, places, held, last=False)), last)


def _of_rank(
    rates: Rates, block: Columns, row: Row, places: Sequence[Any], held: NDArray[np.bool_], *, last: bool
) -> Array:
    """As `hone.cost.memory.train_bytes`: states, and the largest of the moments of loss, backward passes and update."""
    saved, entry, products, making, less, around, codes = rates.activations(*places)
    marks = np.full(len(row.layers), int(last))
    state, gradients, summed, head = rates.states(*_held(block, row.layers, marks))
    width = np.array([float(BYTES[rates.dtype(place)]) for place in range(len(rates.of.product.axes["precision"]))])
    wide = width[block["precision"]]
    tokens = (
        rates.of.goal.seq_len
        * rates.of.product.column(block, "micro_batch")
        / rates.of.product.column(block, "context")
    )
    hidden = rates.of.candidate.dims.hidden_size

    in_flight = np.ones_like(row.layers)
    if not last:  # interleaved stages: arXiv:2205.05198, section 4.2.3
        in_flight = np.minimum(
            row.stages * (1 + (row.stages - 1) / (row.stages * row.chunks)) * (row.chunks > 1)
            + row.stages * (row.chunks == 1),
            row.passes,
        )
    count = in_flight * row.layers
    dropped = np.round(count * row.recomputed) + np.round(count * row.replayed)
    small = np.where(row.replayed > 0, products, entry)
    turn = (count - dropped) * saved + dropped * small
    own = np.where(row.recomputed + row.replayed == 1, small, saved)
    back = turn - own + saved + making
    # In layers, as `live_layers` counts them: what selective recomputation keeps is half of one.
    live = count - dropped + np.where(row.replayed > 0, 0.5 * (dropped + 1), row.recomputed == 1)

    rows_at_once = np.minimum(_chunk(rates, block), tokens)
    vocabulary = head / hidden
    chunk = rows_at_once * vocabulary
    half = wide < 4
    if rates.of.fleet.on_gpu:
        summed_wide = half & (chunk * 8 < tokens * vocabulary)
        in_loss = head * (wide + 4 * summed_wide) + chunk * wide + 3 * tokens * hidden * wide
    else:
        in_loss = head * 4 + chunk * (8 + wide * half) + 3 * tokens * hidden * wide
        in_loss = np.maximum(in_loss, head * (8 + wide * half) + 3 * tokens * hidden * wide)
    shared = (block["data"] * rates.of.product.column(block, "context") > 1) | (
        rates.of.product.column(block, "tensor") > 1
    )
    taken = head * wide + np.where(shared, 4 * head, 0)
    params = gradients / 4
    widened = np.where(half, 2 * np.minimum(np.maximum(BUCKET, head), params), 0)
    moments = np.maximum(turn + in_loss * (head > 0) + summed, back + taken + summed)
    moments = np.maximum(moments, gradients + np.maximum(saved + making, widened))
    total = state + moments - less * live + around + codes * row.layers * held
    return total if rates.of.fleet.on_gpu else total + GAPS * making + TOUCHED


def _chunk(rates: Rates, block: Columns) -> Array:
    """Tokens whose logits exist at once."""
    chunks = [
        [
            float(rates.options(tensor, context, micro, 0, False)["loss_chunk"] or 1e18)
            for micro in range(len(rates.of.product.axes["micro_batch"]))
        ]
        for tensor in range(len(rates.of.product.axes["tensor"]))
        for context in range(len(rates.of.product.axes["context"]))
    ]
    shares = len(rates.of.product.axes["context"])
    return np.array(chunks)[block["tensor"] * shares + block["context"], block["micro_batch"]]
