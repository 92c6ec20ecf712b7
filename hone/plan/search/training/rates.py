"""What one layer, one end and one exchange of a training cost, by hone's scalar estimates, for the arrays of a search to multiply.

Everything here is linear in the number of layers, so that it is asked for a few layers and not for a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from hone.cost.activations.segments import layer_bytes
from hone.cost.cache import BYTES
from hone.cost.dims import ModelDims
from hone.cost.ranks import MESSAGE_S, Transfers, link_bytes_per_s
from hone.cost.steps import code_bytes, coded_params, held_cast_seconds, pass_seconds, product_seconds
from hone.cost.train.replicas import Divided
from hone.cost.train.tensor import Messages, Tensor
from hone.cost.train.update import adamw, update_seconds
from hone.plan.search.product import Lookup
from hone.plan.search.shapes import layers_alone
from hone.plan.search.training.space import Trainings

FEW, MORE = 2, 4
"""Layers that a pass is asked for: the difference is that of layers alone."""


class Rates:
    """Scalar costs of the trainings of one model on one machine, looked up by places of their axes."""

    def __init__(self, of: Trainings) -> None:
        self.of = of
        self.part = cache(self._part)
        self.divided = cache(self._divided)
        self.times = cache(self._times)

    @cached_property
    def layer(self) -> Lookup:
        """By (tensor, context, experts, micro_batch, precision, held): seconds of a layer's passes, of computing it again, of
        computing it again but for products, of both ends with the loss, of a layer's weight gradients, of its codes once a step."""
        return Lookup(self._layer, 6)

    def _layer(self, *places: int) -> Sequence[float]:
        tensor, context, experts, micro, precision, held = places
        part, machine = self.part(tensor, experts), self.of.fleet.machine
        options = self.options(tensor, context, micro, precision, bool(held))
        few, more = of_layers(part, FEW), of_layers(part, MORE)
        first, second = (pass_seconds(one, machine, **options).value for one in (few, more))
        each = (second - first) / (MORE - FEW)
        every = range(MORE)
        again = (pass_seconds(more, machine, **options, recomputed=every).value - second) / MORE
        replay = (pass_seconds(more, machine, **options, replayed=every).value - second) / MORE
        tokens = options["batch_tokens"]
        shapes = [((*shape, tokens), "weight_gradient") for shape in part.layers[0].matmuls]
        weights = product_seconds(machine, shapes, options["dtype"])  # type: ignore[arg-type]
        alone = layers_alone(part, 1)
        codes = (
            held_cast_seconds(alone, machine, options["dtype"], options["recipe"]) if held and options["fp8"] else 0.0
        )
        return each, again, replay, first - FEW * each, min(weights, each), codes

    def options(self, tensor: int, context: int, micro: int, precision: int, held: bool) -> dict[str, Any]:
        """What `pass_seconds` takes for a pass."""
        from hone.cost.chunks import loss_chunk
        from hone.train.fp8.fits import fp8_products
        from hone.train.precision import FP8_RECIPES

        axes, goal, device = self.of.product.axes, self.of.goal, self.of.fleet.machine.device
        kind, ranks, shares = axes["precision"][precision], axes["tensor"][tensor], axes["context"][context]
        tokens = self.tokens(context, micro)
        rows = -(-self.of.candidate.dims.vocab_size // ranks)
        return {
            "batch_tokens": tokens,
            "seq_len": goal.seq_len,
            "dtype": self.dtype(precision),
            "fp8": fp8_products(kind),
            "recipe": FP8_RECIPES.get(kind, ""),
            "held": held and bool(fp8_products(kind)),
            "loss_chunk": loss_chunk(tokens, rows, device, divided=ranks > 1),
            "piece_len": goal.seq_len // shares,
            "sequence_ranks": ranks,
        }

    @cached_property
    def inside(self) -> Lookup:
        """By (tensor, context, experts, micro_batch, precision): seconds of one sum of a pass's tokens over tensor-parallel ranks; of
        a layer's keys and values that travel forward and backward; forward alone; of a layer's rows of experts one way; of a pass's
        activations to the next stage."""
        return Lookup(self._inside, 5)

    def _inside(self, *places: int) -> Sequence[float]:
        tensor, context, experts, micro, precision = places
        axes, machine, dtype = self.of.product.axes, self.of.fleet.machine, self.dtype(precision)
        ranks, tokens = axes["tensor"][tensor], self.tokens(context, micro)
        part, times = self.part(tensor, experts), self.times()
        hidden = part.hidden_size
        sums = 0.0
        if ranks > 1:
            one = Tensor(ranks, True, layers_alone(part, 1))
            sent = Messages(hidden, tokens, dtype, machine.device)
            sums = one.step_s(sent, times) / 6  # four of a layer, one of each end
        both = forward = 0.0
        if axes["context"][context] > 1:
            ring, sizes = self.ring(tensor, context, experts, micro, precision)
            both = ring.step_s(sizes, 1, 0, machine.device, machine.processor)
            forward = ring.step_s(sizes, 1, 1, machine.device, machine.processor) - both
        rows = 0.0
        if axes["experts"][experts] > 1:
            values = BYTES[dtype] * tokens * part.layers[-1].routed_values / 2
            rows = times.seconds("all_to_all", axes["experts"][experts], values)
        kind = "cuda" if self.of.fleet.on_gpu else "cpu"
        to_next = MESSAGE_S[kind] + BYTES[dtype] * tokens * hidden / ranks / link_bytes_per_s(
            machine.device, self.of.fleet.count, machine.processor
        )
        return sums, both, forward, rows, to_next

    def ring(self, tensor: int, context: int, experts: int, micro: int, precision: int) -> tuple[Any, Any]:
        """The technique that shares sequences, and the sizes of one layer's pass."""
        from hone.cost.train.context import RingSharing, Sizes

        shares = self.of.product.axes["context"][context]
        width, goal = BYTES[self.dtype(precision)], self.of.goal
        alone = layers_alone(self.part(tensor, experts), 1)
        return RingSharing("ring"), Sizes.of(alone, self.tokens(context, micro), goal.seq_len, shares, width)

    @cached_property
    def exchange(self) -> Lookup:
        """By (tensor, stages, context, experts, sharding, precision, several, layers): seconds in which gradients and weights travel in a step of one
        pass (or with `several` two), more for each further pass, and those of them that nothing hides."""
        return Lookup(self._exchange, 3)

    def _exchange(self, *places: int) -> Sequence[float]:
        tensor, stages, context, experts, sharding, precision, several, layers = places
        divided, dtype = self.divided(tensor, stages, context, experts, sharding), self.dtype(precision)
        if divided.num_ranks == 1:
            return 0.0, 0.0, 0.0
        device, times = self.of.fleet.machine.device, self.times(self.of.product.axes["tensor"][tensor])
        whole = self.held_by_a_rank(tensor, stages, experts, layers)
        passes = 2 if several else 1

        def linear(ask: Any) -> float:
            """`ask` of the part with all its layers, from two with one and two layers."""
            one, two = (ask(of_layers(whole, count)) for count in (1, 2))
            return one + (two - one) * (whole.num_layers - 1)

        base = linear(lambda dims: divided.step_s(dims, dtype, passes, device, times))
        more = linear(lambda dims: divided.step_s(dims, dtype, passes + 1, device, times)) - base if several else 0.0
        hidden = divided.exposed_s(of_layers(whole, 2), dtype, device, times)
        return base, more, hidden

    @cached_property
    def update(self) -> Lookup:
        """By (tensor, stages, context, experts, sharding, precision, several, layers): seconds of an update, and more for each further pass whose gradients
        are added up."""
        return Lookup(self._update, 2)

    def _update(self, *places: int) -> Sequence[float]:
        tensor, stages, context, experts, sharding, precision, several, layers = places
        divided, dtype, machine = (
            self.divided(tensor, stages, context, experts, sharding),
            self.dtype(precision),
            self.of.fleet.machine,
        )
        dims = self.held_by_a_rank(tensor, stages, experts, layers)
        cost = replace(adamw(dims, fused=self.of.fleet.on_gpu), share=1 / divided.of("optimizer"))
        axes = self.of.product.axes
        shared = divided.num_ranks > 1 or axes["tensor"][tensor] > 1 or axes["stages"][stages] > 1
        passes = 2 if several else 1
        widened = passes if shared or several else 0
        at_once = divided.of("gradients") > 1 or (divided.of("optimizer") > 1 and passes == 1)
        senders = divided.num_shards if at_once and BYTES[dtype] == 2 else 1

        def seconds(extra: int) -> float:
            asked = replace(cost, widened=widened + extra if widened else 0, senders=senders)
            return update_seconds(asked, dims, machine, dtype).value

        return seconds(0), seconds(1) - seconds(0) if several else 0.0

    @cached_property
    def states(self) -> Lookup:
        """By (tensor, stages, context, experts, sharding, precision, several, layers, last): bytes of weights and optimizer state, of all gradients at an
        update, of those kept between passes, and of weights of the head on the rank."""
        return Lookup(self._states, 4)

    def _states(self, *places: int) -> Sequence[float]:
        tensor, stages, context, experts, sharding, precision, several, layers, last = places
        divided, dtype = self.divided(tensor, stages, context, experts, sharding), self.dtype(precision)
        width = BYTES[dtype]
        dims = self.held_by_a_rank(tensor, stages, experts, layers, last=bool(last))
        params, passes = dims.num_params, 2 if several else 1
        wide = self.of.product.axes["tensor"][tensor] > 1
        if divided.num_ranks > 1:
            weights, gradients = divided.weights_bytes(dims, width), divided.gradient_bytes(dims, passes)
            summed = divided.summed_bytes(dims) if several else 0.0
        else:
            weights = 4.0 * params + (width * params if width < 4 else 0)
            gradients = float((4 if wide or several else width) * params)
            summed = gradients if several else 0.0
        state = adamw(dims).state_bytes / (divided.of("optimizer") if divided.num_ranks > 1 else 1)
        return weights + state, gradients, summed, float(dims.vocab_size * dims.hidden_size)

    @cached_property
    def activations(self) -> Lookup:
        """By (tensor, context, experts, micro_batch, precision): bytes of a layer that are saved, of its input, of its products, made by its
        backward pass; of those saved that other tensor-parallel ranks have; held for attention over ranks; of codes of weights."""
        return Lookup(self._activations, 7)

    def _activations(self, *places: int) -> Sequence[float]:
        tensor, context, experts, micro, precision = places
        from hone.train.fp8.fits import fp8_products
        from hone.train.precision import FP8_RECIPES

        axes, machine, dtype = self.of.product.axes, self.of.fleet.machine, self.dtype(precision)
        kind, width, tokens = axes["precision"][precision], BYTES[dtype], self.tokens(context, micro)
        part = self.part(tensor, experts)
        mask = self.of.goal.seq_len if axes["context"][context] == 1 and not (self.of.fleet.on_gpu and width < 4) else 0
        products = fp8_products(kind)
        codes = code_bytes(FP8_RECIPES[kind]) if "weight_gradient" in products else 0.0
        one = layer_bytes(part.layers[0], part.hidden_size, tokens, width, mask, fp8=codes)
        shared = Tensor(axes["tensor"][tensor], True, part)
        less = shared.saved_bytes(part.hidden_size, tokens, 1, dtype)
        around = 0.0
        if axes["context"][context] > 1:
            ring, sizes = self.ring(tensor, context, experts, micro, precision)
            around = ring.kept_bytes(sizes, machine.device)
        held = 2.0 * coded_params(layers_alone(part, 1), FP8_RECIPES[kind]) if products else 0.0
        return one.saved, one.entry, one.products, one.making, less, around, held

    def _part(self, tensor: int, experts: int) -> ModelDims:
        """What of the model one rank of tensor or expert parallelism computes."""
        axes, candidate = self.of.product.axes, self.of.candidate
        ranks, divides = axes["tensor"][tensor], axes["experts"][experts]
        part: ModelDims = candidate.part(ranks)
        if divides > 1:
            from hone.cost.train.experts import part_of
            from hone.train.routing.layouts import expert_params

            return part_of(part, expert_params(candidate.config.local(ranks)), divides)
        return part

    def held_by_a_rank(self, tensor: int, stages: int, experts: int, layers: int, *, last: bool = True) -> ModelDims:
        """The weights of the rank of a pipeline that has most: `layers` layers and one end, or all."""
        part = self.part(tensor, experts)
        if self.of.product.axes["stages"][stages] == 1:
            return part
        table = part.vocab_size * part.hidden_size
        inner = layers_alone(part, layers)
        return replace(
            inner,
            num_params=inner.num_params + table,
            active_params=inner.active_params + table,
            vocab_size=part.vocab_size if last else 0,
        )

    def _divided(self, tensor: int, stages: int, context: int, experts: int, sharding: int) -> Divided:
        """The ranks that share the batch, and what each holds."""
        laid = self.of.parallelism(tensor, stages, context, experts, sharding)
        return laid.with_experts(laid.divided(self.of.fleet.count), self.of.candidate.config)

    def tokens(self, context: int, micro: int) -> int:
        """Tokens of one pass of one rank."""
        axes = self.of.product.axes
        return self.of.goal.seq_len * axes["micro_batch"][micro] // axes["context"][context]

    def dtype(self, precision: int) -> str:
        """The dtype of weights and activations, as torch names it."""
        from hone.train.precision import TORCH_NAMES

        return TORCH_NAMES[self.of.product.axes["precision"][precision]]

    def _times(self, stride: int = 1) -> Transfers:
        """Seconds of collectives between ranks `stride` apart."""
        machine = self.of.fleet.machine
        return Transfers(machine.device, machine.calibration.collectives if machine.calibration else (), stride)


def of_layers(dims: ModelDims, count: int) -> ModelDims:
    """`dims` with `count` layers, embedding and head as they are."""
    ends = dims.vocab_size * dims.hidden_size * (1 if dims.tie_embeddings else 2)
    share = count / max(dims.num_layers, 1)
    return replace(
        dims,
        num_params=round((dims.num_params - ends) * share) + ends,
        active_params=round((dims.active_params - ends) * share) + ends,
        layers=tuple(dims.layers[index % dims.num_layers] for index in range(count)),
    )
