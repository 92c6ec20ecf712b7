"""The base of activation checkpointing techniques: segments of layers, and the sizes from which they may be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from hone.base.errors import SpecError
from hone.base.figure import human_bytes
from hone.base.table import Technique
from hone.cost.activations.segments import UNIT, LayerBytes, Segment, live_layers, recomputed_layers, replayed_layers

Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class Sizes:
    """What segments cost in a training, for techniques that choose them by it."""

    layers: tuple[LayerBytes, ...]
    """Bytes of every layer's activations."""
    forward_s: tuple[float, ...]
    """Seconds of every layer's forward pass."""
    replay_s: tuple[float, ...]
    """The same without matmuls and attention."""
    growth: Callable[[Segments], float]
    """Bytes that the training adds at its peak."""
    seconds: Callable[[Segments], float]
    """Seconds of a step."""
    free_bytes: float
    """Memory of the device."""
    elsewhere: bool = True
    """Whether the host's memory is another than the device's."""
    finer: Callable[[Segments], Iterable[tuple[int, float]]] = lambda _: ()
    """Higher `gradient_accumulation_steps` that the batch allows, with the bytes of `growth` of each."""

    def ways(self, least: Segments, budget: float) -> str:
        """How a training that needs more than `budget` bytes with `least`, the smallest segments, may fit, as an error's fix."""
        fix = f"set memory_bytes to at least {self.growth(least):.4g}"
        for count, needed in self.finer(least):
            if needed <= budget:
                return f"{fix}, or gradient_accumulation_steps to {count}, with which {human_bytes(needed)} are enough"
        return fix

    @classmethod
    def alike(cls, num_layers: int, free_layers: float) -> Sizes:
        """Equal layers whose activations take 1 each, in a memory of `free_layers`."""

        def seconds(segments: Segments) -> float:
            return 3 * num_layers + len(recomputed_layers(segments)) + 0.1 * len(replayed_layers(segments))

        ones = (UNIT,) * num_layers
        return cls(ones, (1.0,) * num_layers, (0.1,) * num_layers, live_layers, seconds, free_layers)


class ActivationCheckpointing(Technique):
    """A policy of activation checkpointing, which divides the layers into segments."""

    by_rule: ClassVar[bool] = False
    """Whether its segments depend on the number of layers alone, and keep their input or all."""

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """Divides `num_layers` layers into consecutive segments that cover all.

        Raises SpecError where the choice needs `sizes` and has none, or where nothing fits.
        """
        raise NotImplementedError

    def notes(self, num_layers: int, sizes: Sizes) -> tuple[str, ...]:
        """Lines for the plan: what was chosen by itself, and why."""
        return ()

    def check(self, *, compile: bool, stages: int) -> None:
        """Raises ValueError where it does not work with `compile`, or with so many pipeline `stages`."""
        if stages > 1 and not self.by_rule:
            raise ValueError(
                f"activation_checkpointing {self.kind} does not work with pipeline stages: take full, every_nth or sqrt"
            )

    def needed(self, sizes: Sizes | None) -> Sizes:
        """`sizes`. Raises SpecError without them."""
        if sizes is None:
            raise SpecError(
                f"activation_checkpointing {self.kind} chooses by the sizes of the training, which are not known here",
                fix="give Trainer the segments themselves: policy.segments(num_layers, sizes), as the train stage does",
            )
        return sizes


def said(segments: Segments, sizes: Sizes) -> str:
    """What `segments` do and cost, in words."""
    kept = sum(one.stop - one.start for one in segments if not one.recompute and not one.to_host)
    more = [f"{kept} of {len(sizes.layers)} layers kept"]
    for count, what in (
        (len(recomputed_layers(segments)), "recomputed"),
        (len(replayed_layers(segments)), "recomputed but for matmuls and attention"),
        (sum(one.to_host for one in segments), "on the host"),
    ):
        if count:
            more.append(f"{count} {what}")
    return f"{', '.join(more)}: {human_bytes(sizes.growth(segments))}, {sizes.seconds(segments):.3g} s a step"
