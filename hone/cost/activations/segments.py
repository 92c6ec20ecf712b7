"""Bytes of activations that segments of layers keep: at the turn from forward to backward, and at the peak of the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from hone.cost.dims import LayerDims


class Segment(NamedTuple):
    """Layers `start` to `stop` (exclusive); with `recompute`, only what `saves` says is kept after the forward pass."""

    start: int
    stop: int
    recompute: bool
    inner: tuple[Segment, ...] = ()
    """How the layers are kept when they are computed again; empty: all of them whole."""
    saves: Literal["input", "products"] = "input"
    """What a recomputed segment keeps: its input, or also the results of matmuls and of attention."""
    to_host: bool = False
    """What it keeps is copied to the host's memory until the backward pass."""


class LayerBytes(NamedTuple):
    """Bytes of one layer's activations."""

    saved: float
    """All that its backward pass reads, its input included."""
    entry: float = 0.0
    """Its input."""
    products: float = 0.0
    """Its input and the results of its matmuls (but the last one, which nothing reads again) and of its attention."""
    making: float = 0.0
    """What the backward pass adds at its widest."""


UNIT = LayerBytes(saved=1.0, products=0.5)
"""A layer where all are alike and only their number counts."""


class Live(NamedTuple):
    """Bytes of activations at two moments."""

    turn: float
    """When the forward pass is over."""
    backward: float
    """At the peak of the backward pass, with its gradients of activations."""


def layer_bytes(
    layer: LayerDims, hidden_size: int, tokens: int, width: int, mask: int, *, fp8: float = 0.0, lean: bool = False
) -> LayerBytes:
    """Bytes of a layer over `tokens` tokens of `width` bytes a number; `mask` is what attention's mask has a token.

    `fp8`: linears keep their inputs as codes of so many bytes a number with their scales (0: not), instead of the normed residuals and
    the gate's product; attention still keeps its result, too. The backward pass then makes two codes of the gradient of gate and up.
    `lean`: its linears are frozen under LoRA (`adapted_values`); experts keep what they would without.
    """
    values = adapted_values if lean and not layer.routed_values else saved_values
    products = 2 * hidden_size + layer.widths.projected + layer.widths.mixed + 2 * layer.intermediate_size
    one = tokens * width
    instead = 2 * hidden_size + layer.intermediate_size
    codes = fp8 * tokens * (instead + layer.widths.mixed) - one * instead if fp8 else 0
    return LayerBytes(
        one * (values(layer, hidden_size) + mask) + codes,
        one * hidden_size,
        one * products,
        one * gradient_values(layer, hidden_size) + 4 * fp8 * tokens * layer.intermediate_size,
    )


def saved_values(layer: LayerDims, hidden_size: int) -> int:
    """Numbers per token that one layer saves for the backward pass.

    Two residuals and two normed ones; the mixer's widths (attention: projected queries, keys, values, saved whole because
    the values are a view of them, rotated queries and keys, the result); gate and up, and their product; experts' rows.
    """
    return 4 * hidden_size + layer.widths.total + 3 * layer.intermediate_size + layer.routed_values


def adapted_values(layer: LayerDims, hidden_size: int) -> int:
    """Numbers per token that a layer saves whose weights are frozen under LoRA: an attention and a SwiGLU, both adapted.

    As `saved_values`, but for the product of gate and up, which is computed again, and for what queries and keys were before they
    were rotated: an adapted product keeps its input, not its output.
    """
    widths = layer.widths
    return 4 * hidden_size + widths.total - widths.turned + 2 * layer.intermediate_size


def gradient_values(layer: LayerDims, hidden_size: int) -> int:
    """Numbers per token that the backward pass of a feed-forward adds at its widest.

    Gradients of the product, of gate and up, one temporary; the product itself is free by then. Two residual gradients, and those
    of half of the experts' rows.
    """
    return 3 * layer.intermediate_size + 2 * hidden_size + layer.routed_values // 2


def keep_all(num_layers: int) -> tuple[Segment, ...]:
    """One segment per layer, none recomputed."""
    return tuple(Segment(layer, layer + 1, False) for layer in range(num_layers))


def inside(segments: Sequence[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    """The parts of `segments` in the layers `start` to `stop`."""
    cut = (one._replace(start=max(one.start, start), stop=min(one.stop, stop)) for one in segments)
    return tuple(one for one in cut if one.start < one.stop)


def again(segment: Segment) -> tuple[Segment, ...]:
    """How the layers of a recomputed segment run when they are computed again."""
    return inside(segment.inner, segment.start, segment.stop) or (segment._replace(recompute=False, to_host=False),)


def live_bytes(segments: Sequence[Segment], layers: Sequence[LayerBytes], *, elsewhere: bool = True) -> Live:
    """What `segments` of `layers` keep; the host's copies take nothing where the host is `elsewhere` than the device.

    Layer i has the sizes of `layers[i % len(layers)]`: a pipeline rank's segments have the numbers of the whole model.
    """
    held = [_held(one, layers, elsewhere) for one in segments]
    turn, peak = sum(held), 0.0
    if any(one.to_host for one in segments) and elsewhere:  # the last layer's copy is still under way
        turn += max(_whole(one, layers) for one in segments if one.to_host)
    before = turn
    for one, own in zip(reversed(segments), reversed(held), strict=True):
        before -= own
        peak = max(peak, before + _peak(one, layers))
    return Live(turn, peak)


def live_layers(segments: Sequence[Segment]) -> float:
    """Number of equal layers with activations in memory at the peak, without the inputs of recomputed ones."""
    return max(live_bytes(segments, (UNIT,)))


def copied_bytes(segments: Sequence[Segment], layers: Sequence[LayerBytes]) -> float:
    """Bytes that `segments` copy to the host, and back."""
    return sum(_whole(one, layers) for one in segments if one.to_host)


def recomputed_layers(segments: Sequence[Segment]) -> list[int]:
    """The layers that run forward once more, each as often as it does."""
    found = []
    for one in segments:
        if one.recompute and one.saves == "input":
            found += [*range(one.start, one.stop), *recomputed_layers(again(one))]
    return found


def replayed_layers(segments: Sequence[Segment]) -> list[int]:
    """The layers of which all but matmuls and attention runs forward once more, each as often as it does."""
    found = []
    for one in segments:
        if one.recompute and one.saves == "products":
            found += range(one.start, one.stop)
        elif one.recompute:
            found += replayed_layers(again(one))
    return found


def _whole(one: Segment, layers: Sequence[LayerBytes]) -> float:
    """What a segment keeps, wherever it is."""
    first = layers[one.start % len(layers)]
    if not one.recompute:
        return sum(layers[index % len(layers)].saved for index in range(one.start, one.stop))
    if one.saves == "products":
        return sum(layers[index % len(layers)].products for index in range(one.start, one.stop))
    return first.entry


def _held(one: Segment, layers: Sequence[LayerBytes], elsewhere: bool) -> float:
    return 0.0 if one.to_host and elsewhere else _whole(one, layers)


def _peak(one: Segment, layers: Sequence[LayerBytes]) -> float:
    """Most bytes of a segment in its own backward pass."""
    if one.recompute and one.saves == "input":
        live = live_bytes(again(one), layers)
        return layers[one.start % len(layers)].entry * bool(one.inner) + max(live)
    total, peak = 0.0, 0.0
    for index in range(one.start, one.stop):
        layer = layers[index % len(layers)]
        total += layer.saved
        peak = max(peak, total + layer.making)
    return peak
