"""Cost of pipeline parallelism: what of a model each rank holds, the seconds of a step, the activations in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hone.base.figure import Estimate, human_bytes
from hone.cost.activations.segments import Segment
from hone.cost.cache import BYTES
from hone.cost.dims import ModelDims
from hone.cost.pipeline.check import alive_versions
from hone.cost.pipeline.simulate import Costs, Played, peaks, simulate
from hone.cost.pipeline.table import Table, receiver
from hone.cost.ranks import MESSAGE_S, link_bytes_per_s
from hone.cost.roofline import seconds
from hone.cost.steps import forward_seconds, pass_seconds, product_seconds
from hone.cost.train.timed import Timed
from hone.cost.train.update import UpdateCost, update_seconds
from hone.measure.machine import Machine


@dataclass(frozen=True)
class Pipelined:
    """A training whose ranks run `table`: stage s has `layers[s]`.

    `parts[r]` are the dims of rank r's part, with a vocabulary only where the head is; `updates[r]` is its update.
    """

    table: Table
    layers: tuple[range, ...]
    parts: tuple[ModelDims, ...]
    updates: tuple[UpdateCost, ...]
    dims: ModelDims
    """Those of all layers."""
    update: Callable[[ModelDims], UpdateCost] = field(compare=False, repr=False)
    """What an optimizer's step of a part costs."""
    begins: tuple[int, ...] = ()
    """The layers at which a stage may begin that is cut anew; (): the layers stay divided as they are."""
    cut_by: str = "operations"
    """What divides the layers, in words."""
    shared: int = 1
    """Tensor-parallel ranks that share the tokens between layers: each sends its own to the next stage."""
    copies: bool = False
    """Whether an update is made before it is known to be right."""
    _simulated: dict[Costs, Played] = field(default_factory=dict, compare=False, repr=False)
    """The last simulation alone: a plan's estimates, its notes and the drawing ask for the same one in turn."""

    @classmethod
    def of(
        cls, table: Table, layers: Sequence[range], dims: ModelDims, update: Callable[[ModelDims], UpdateCost]
    ) -> Pipelined:
        """The division of a model of `dims`; `update` says what an optimizer's step of a part costs."""
        held = [table.held(rank) for rank in range(len(table.ranks))]
        parts = tuple(dims_of_layers(dims, [layers[stage] for stage in own]) for own in held)
        return cls(table, tuple(layers), parts, tuple(update(one) for one in parts), dims, update)

    def cut(self, layers: Sequence[range], cut_by: str) -> Pipelined:
        """The same pipeline with other `layers` for each stage."""
        found = Pipelined.of(self.table, layers, self.dims, self.update)
        return replace(found, begins=self.begins, cut_by=cut_by, copies=self.copies, shared=self.shared)

    @property
    def largest(self) -> int:
        """The rank with the most weights."""
        return max(range(len(self.parts)), key=lambda rank: self.parts[rank].num_params)

    def played(
        self,
        machine: Machine,
        *,
        tokens: int,
        recomputed: Sequence[int],
        options: Mapping[str, Any],
        inside: float = 0.0,
    ) -> Played:
        """The passes of a step in simulated time, with `inside` seconds of transfers inside the layers of a pass.

        `options` are those of `pass_seconds`.
        """
        dtype, sizes = options["dtype"], {"tokens": tokens, "recomputed": recomputed, "options": options}
        each = [self.passes_s(layers, machine, **sizes, inside=inside) for layers in self.layers]
        forward, inputs, weights = map(tuple, zip(*each, strict=True))
        step, sent = self._update_s(machine, dtype) if self.table.steps else 0.0, self.sent_s(machine, tokens, dtype)
        costs = Costs(forward, inputs, weights, sent, step)
        if costs not in self._simulated:
            found = simulate(self.table, costs)
            self._simulated.clear()
            self._simulated[costs] = found
        return self._simulated[costs]

    def passes_s(
        self,
        layers: range,
        machine: Machine,
        *,
        tokens: int,
        recomputed: Sequence[int],
        options: Mapping[str, Any],
        inside: float = 0.0,
    ) -> tuple[float, float, float]:
        """Seconds of F, I and W of a stage of `layers`, as `played` takes them."""
        again = [index - layers.start for index in recomputed if index in layers]
        share = inside * len(layers) / max(self.dims.num_layers, 1)
        stage = dims_of_layers(self.dims, [layers])
        return passes_of(stage, machine, {**options, "batch_tokens": tokens, "recomputed": again}, share)

    def versions(self, rank: int) -> int:
        """The most versions of its weights that `rank` holds at once: 1 in a synchronous schedule."""
        return alive_versions(self.table)[rank] if self.table.steps else 1

    def with_versions(self, growth: Estimate, rank: int, dtype: str, shards: int) -> Estimate:
        """`growth`, the bytes that `rank` needs, with those of the older versions of its weights, or of copies of its part of
        weights, gradients and states, one of `shards`."""
        older = self.versions(rank) - 1
        if self.copies:
            kept = (8 * self.parts[rank].num_params + self.updates[rank].state_bytes) / shards
            formula = f"{growth.formula} + copies for an update that is taken back {human_bytes(kept)}"
            return growth.model_copy(update={"value": growth.value + kept, "formula": formula})
        if not older:
            return growth
        kept = older * BYTES[dtype] * self.parts[rank].num_params
        formula = f"{growth.formula} + {older} older versions of weights {human_bytes(kept)}"
        return growth.model_copy(update={"value": growth.value + kept, "formula": formula})

    def moved_s(self, machine: Machine, tokens: int, dtype: str) -> float:
        """Seconds in which the rank with most of them receives activations and gradients of a step."""
        received = [0] * len(self.parts)
        for rank, ops in enumerate(self.table.ranks):
            for op in ops:
                to = receiver(self.table, op)
                if to is not None and (other := self.table.place(to.stage, to.microbatch)) != rank:
                    received[other] += 1
        return max(received) * self.sent_s(machine, tokens, dtype)

    def sent_s(self, machine: Machine, tokens: int, dtype: str) -> float:
        """Seconds of one activation between two stages."""
        kind = "cuda" if machine.device.startswith("cuda") else "cpu"
        message = BYTES[dtype] * tokens * self.parts[0].hidden_size / self.shared
        return MESSAGE_S[kind] + message / link_bytes_per_s(machine.device, machine.num_ranks, machine.processor)

    def step(self, played: Played, machine: Machine, dtype: str) -> Estimate:
        """Seconds of a step: until the last pass ends, and the largest update."""
        last = 0.0 if self.table.steps else self._update_s(machine, dtype)
        calibration = machine.calibration
        said = f"{self.table.name}: {self.table.microbatches} micro-batches over {len(self.parts)} ranks "
        return Estimate(
            value=played.seconds + last,
            unit="s",
            formula=f"{said}{played.seconds:.3g} s simulated, of which {played.bubble:.1%} bubble (link rates are not "
            f"calibrated) + " + (f"update {last:.3g} s" if last else f"no update after its {self.table.steps}"),
            bound=calibration is None or dtype not in calibration.dtypes,
        )

    def _update_s(self, machine: Machine, dtype: str) -> float:
        """Seconds of the largest update."""
        each = zip(self.updates, self.parts, strict=True)
        return max(update_seconds(one, part, machine, dtype).value for one, part in each)

    def losses(self, rank: int) -> int:
        """The most micro-batches whose loss `rank` has computed and not yet passed back: each keeps a gradient of the head, which
        the loss computes with it."""
        last, held, most = len(self.layers) - 1, 0, 0
        for op in self.table.ranks[rank]:
            if op.stage == last and op.kind in "FBI":
                held += 1 if op.kind == "F" else -1
                most = max(most, held)
        return most

    def live(self, rank: int, segments: Sequence[Segment], *, first: bool) -> tuple[Segment, ...]:
        """What `rank` holds at its peak, as segments: one for each layer of each micro-batch in memory. `first`: until its first
        backward pass has ended; else from then on, beside gradients of weights."""
        kept, dropped, longest = [0.0] * len(self.layers), [0.0] * len(self.layers), 0
        for stage, layers in enumerate(self.layers):
            for one in segments:
                inside = min(one.stop, layers.stop) - max(one.start, layers.start)
                if inside > 0 and one.recompute:
                    dropped[stage], longest = dropped[stage] + 1, max(longest, inside)
                elif inside > 0:
                    kept[stage] += inside
        many, inputs = (round(peaks(self.table, rank, sizes)[0 if first else 1]) for sizes in (kept, dropped))
        found = [Segment(0, 1, False)] * many + [Segment(0, 1, True)] * max(inputs - 1, 0)
        return (*found, *([Segment(0, longest, True)] if inputs else []))


def passes_of(
    stage: ModelDims, machine: Machine, sizes: Mapping[str, Any], inside: float
) -> tuple[float, float, float]:
    """Seconds of F, I and W of `stage`, of which `inside` are transfers: half of them in F, half in I.

    The loss computes its gradients in the forward pass, so head and loss are in F as a whole. W has the products of the layers'
    weight gradients alone; what is recomputed is in I. In fp8 F and W take the share that they have of both passes in their dtype.
    """
    tokens, seq_len, dtype = sizes["batch_tokens"], sizes["seq_len"], sizes["dtype"]
    layers = replace(stage, vocab_size=0)
    both, whole = pass_seconds(layers, machine, **sizes).value, pass_seconds(stage, machine, **sizes).value
    first = forward_seconds(layers, machine, tokens=tokens, seq_len=seq_len, dtype=dtype).value
    shapes = [shape for one in layers.layers for shape in one.matmuls]
    weights = product_seconds(machine, [((*shape, tokens), "weight_gradient") for shape in shapes], dtype)
    if sizes["fp8"]:
        coded = both / pass_seconds(layers, machine, **{**sizes, "fp8": ()}).value
        first, weights = first * coded, weights * coded
    first = min(first, both / 2)
    weights = min(weights, both - first)
    return first + whole - both + inside / 2, both - first - weights + inside / 2, weights


def layer_seconds(dims: ModelDims, machine: Machine, *, tokens: int, seq_len: int, dtype: str) -> Timed | None:
    """Seconds of a micro-batch of `tokens` in each layer and at both ends; None where `machine` is not calibrated in `dtype`."""
    calibration = machine.calibration
    if calibration is None or dtype not in calibration.dtypes:
        return None

    def of(layers: Sequence[int], vocab: int) -> float:
        part = replace(dims, layers=tuple(dims.layers[index] for index in layers), vocab_size=vocab)
        return pass_seconds(part, machine, batch_tokens=tokens, seq_len=seq_len, dtype=dtype).value

    around, table = of([], 0), dims.vocab_size * dims.hidden_size
    # The gradient of an embedding is as large as its table: it is written, read, and added up in float32.
    moved = (2 * BYTES[dtype] + 8) * table + 2 * BYTES[dtype] * tokens * dims.hidden_size
    layers = tuple(of([index], 0) - around for index in range(dims.num_layers))
    return Timed(layers, seconds(machine, num_bytes=moved).value, of([], dims.vocab_size) - around)


def dims_of_layers(dims: ModelDims, ranges: Sequence[range]) -> ModelDims:
    """The dimensions of the layers in `ranges`, with embedding and head where these are the first and the last layers."""
    picked = tuple(dims.layers[index] for one in ranges for index in one)
    first, last = any(one.start == 0 for one in ranges), any(one.stop == dims.num_layers for one in ranges)
    table = dims.vocab_size * dims.hidden_size
    ends = table if dims.tie_embeddings and (first or last) else table * (first + last)
    inner = dims.num_params - table * (1 if dims.tie_embeddings else 2)
    weights = sum(one.matmul_params for one in dims.layers)
    share = sum(one.matmul_params for one in picked) / max(weights, 1)
    num_params = round(inner * share) + ends
    return replace(
        dims,
        num_params=num_params,
        active_params=num_params,
        vocab_size=dims.vocab_size if last else 0,
        layers=picked,
    )
