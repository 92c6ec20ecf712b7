"""The trained weights of a data-parallel training: each rank holds parts of them, of their gradients and masters."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hone.model.decoder import Decoder, parts_of
from hone.parallel.grid import Copies, Grid
from hone.train.data_parallel.bucket import Bucket
from hone.train.data_parallel.flat import Flat
from hone.train.data_parallel.frozen import Frozen
from hone.train.data_parallel.moves import Moves
from hone.train.data_parallel.sums import Sum
from hone.train.data_parallel.travel import Travel
from hone.train.weights import Weights, filled, scaled

_AT_ONCE = 2
"""Buckets whose sums may be under way while the backward pass goes on: more need memory, and one may not hide its message."""


class DividedWeights(Weights):
    """`Weights` of a rank in `grid`: a bucket of flat tensors for every layer, one for the embedding, and one for last norm and head.

    `sharded` as in `DataParallel.sharded`, `moves` as in `DataParallel.moves`. Weights in `whole` are held by one rank of each
    group, never in parts. Those in `copied` are held by all tensor-parallel ranks, over which their gradient is summed too;
    those `alone` by this one only.
    `masters` and gradients are this rank's: flat pieces [stop - start] of a weight, or the whole weight in its shape.
    """

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        *,
        grid: Grid,
        sharded: Collection[str],
        whole: Collection[str],
        copied: Collection[str] = (),
        alone: Collection[str] = (),
        zeros: Mapping[str, Tensor] | None = None,
        summing: Sum | None = None,
        moves: Moves | None = None,
    ) -> None:
        self.parameters = {}
        self.split = dtype != torch.float32
        self.grid = grid
        self.zeros = {}
        self.masters: dict[str, Tensor] = {}
        self.pieces: dict[str, tuple[int, int]] = {}
        """The elements of each weight, start to stop, that `masters` holds."""
        self._frees = "weights" in sharded and grid.copies.shard.size > 1
        self._adapts = bool(model.config.adapters)
        self._on_gpu = torch.device(grid.device).type == "cuda"
        make = partial(self._make, dtype=dtype, shares_gradients="gradients" in sharded, whole=whole, copied=copied)
        self._rounds = moves is not None and moves.weight_bits > 0
        moves = moves or Moves(grid.copies.shard.size)
        self._travels = {one: Travel(grid, moves, one) for one in (grid.copies.shard, grid.expert_copies.shard)}
        make = partial(make, alone=alone, summing=summing or Sum())
        ends: dict[str, nn.Parameter] = {}
        self._layers: list[list[Bucket]] = []
        self._frozen: list[list[Frozen]] = []
        """What adapters leave as it is, of each layer: one, or none where it stays whole."""
        for path in parts_of(model.config):
            given = self._take(model, path, zeros or {})
            if path.startswith("layers."):
                self._layers.append(make(given, frees=self._frees))
                self._frozen.append(self._freeze(model.get_submodule(path)))
            else:
                ends |= given
        model.maker = None
        # The head's gradient comes first: its sum need not wait for the embedding's, which comes last.
        tail = {name: part for name, part in ends.items() if "lm_head.weight" in ends and name != "embed_tokens.weight"}
        self._first = make({name: part for name, part in ends.items() if name not in tail}, frees=False)
        self._tail = make(tail, frees=False)
        self._buckets = [*self._first, *(bucket for layer in self._layers for bucket in layer), *self._tail]
        self._home = {name: bucket for bucket in self._buckets for name in bucket.parameters}
        for name, mask in (zeros or {}).items():
            if name in self.pieces:
                start, stop = self.pieces[name]
                self.zeros[name] = mask.view(-1)[start:stop].view(self.masters[name].shape)
        # Weakly: no garbage collector sees a circle of a weight's hook and what holds the weight.
        self_of = weakref.ref(self)
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(_arrived, self_of, name))
        model.norm.register_forward_pre_hook(lambda *_: self._ready(self._tail))
        for index, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(partial(self._before, index))
            if self._frees:
                layer.register_forward_hook(partial(self._after, index))
        self._last = self._backward = False
        self._norms: list[Tensor] = []
        """Of each bucket the squared norm of this rank's share of the step's gradient."""
        self._unstepped: set[str] = set()
        """Weights whose step of the update under way is not made yet."""
        self._unpublished = deque(self._buckets)
        self._waiting: deque[Bucket] = deque()
        self._flying: deque[Bucket] = deque()

    def _take(self, model: Decoder, path: str, zeros: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """The trained parameters of the part of `model` at `path`, which is made now where it is on the meta device."""
        part = model.get_submodule(path)
        if model.maker is not None and any(one.is_meta for one in part.parameters()):
            model.maker.make(part, path)
        found = {f"{path}.{name}": one for name, one in part.named_parameters() if one.requires_grad}
        for name, parameter in found.items():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}: build the model in float32"
            if name in zeros:
                parameter.data.masked_fill_(zeros[name], 0)
                parameter.register_hook(partial(filled, zeros[name]))
        self.parameters |= found
        return found

    def _freeze(self, layer: nn.Module) -> list[Frozen]:
        """Divides what adapters leave as it is in a layer: frozen weights, and buffers, as codes of quantized ones are."""
        if not (self._frees and self._adapts):
            return []
        found: dict[str, Tensor] = {name: one for name, one in layer.named_parameters() if not one.requires_grad}
        found |= dict(layer.named_buffers())
        # One whose numbers lie in another order stays whole, as its kernel reads it.
        found = {name: one for name, one in found.items() if one.numel() and one.is_contiguous()}
        copies = self.grid.copies
        made = [Frozen(found, copies, self._travels[copies.shard])] if found else []
        for one in made:
            one.free()
        return made

    def _make(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        whole: Collection[str],
        copied: Collection[str],
        alone: Collection[str],
        dtype: torch.dtype,
        frees: bool,
        **options: Any,
    ) -> list[Bucket]:
        """The buckets of one layer: weights that may be cut and weights that may not, of one rank and of all tensor-parallel ones."""
        groups: dict[tuple[bool, bool, bool, Copies], dict[str, nn.Parameter]] = {}
        for name, part in parameters.items():
            # Apart, a weight of one tensor-parallel rank does not move the others to other slices than its neighbours have.
            key = (name in whole, name in copied, name in alone, self.grid.copies_of(name, name in copied))
            groups.setdefault(key, {})[name] = part
        made = []
        # One order on all ranks, whichever weights each has.
        for key in sorted(groups, key=lambda one: (*one[:3], one[3].replicate.size, one[3].shard.size)):
            (uncut, *_, copies), chosen = key, groups[key]
            shapes = {name: tuple(part.shape) for name, part in chosen.items()}
            flat = Flat(shapes, copies.shard.size, whole=uncut)
            options |= {"frees": frees and copies.shard.size > 1, "travel": self._travels[copies.shard]}
            bucket = Bucket(chosen, flat, copies, dtype, **options)
            bucket.free()
            made.append(bucket)
            self._name(bucket)
        return made

    def _name(self, bucket: Bucket) -> None:
        """The masters of a bucket's weights: views of its own."""
        for piece in bucket.ranges:
            master = bucket.master[piece.at : piece.at + piece.stop - piece.start]
            entire = len(master) == bucket.parameters[piece.name].numel()
            self.masters[piece.name] = master.view(bucket.flat.shapes[piece.name]) if entire else master
            self.pieces[piece.name] = (piece.start, piece.stop)

    @torch.no_grad()
    def renew(self) -> None:
        """Weights, and masters that are views of them, get other memory with the same values: older versions of a pipeline stay."""
        for bucket in self._buckets:
            bucket.renew()
            self._name(bucket)

    @staticmethod
    def _ready(buckets: Sequence[Bucket | Frozen]) -> None:
        for bucket in buckets:
            bucket.ready()

    # Passes

    @torch.compiler.disable  # it would be compiled for every layer's number
    def _before(self, index: int, *_: Any) -> None:
        """Before layer `index` computes: its weights are there, and the next one's on their way."""
        self._bring(index, index - 1 if self._backward else index + 1)

    @torch.compiler.disable
    def _after(self, index: int, _: nn.Module, __: Any, output: Tensor) -> None:
        """After layer `index` has computed: frees its weights until the backward pass comes back to it."""
        grad = torch.is_grad_enabled() and output.requires_grad
        if grad:
            output.register_hook(lambda _: self._came_back(index))
        if self._backward:  # a layer that is recomputed is about to need them again
            return
        with torch.no_grad():
            for bucket in self._held(index):
                bucket.leave() if grad else bucket.free()

    def _held(self, index: int) -> list[Bucket | Frozen]:
        """The weights of layer `index`, trained and frozen."""
        return [*self._layers[index], *self._frozen[index]]

    def _came_back(self, index: int) -> None:
        """When the backward pass comes to layer `index`: the one after it has computed all, and its frozen weights are needed no more."""
        for one in self._frozen[index + 1] if index + 1 < len(self._frozen) else ():
            one.free()
        self._bring(index, index - 1)

    @torch.no_grad()
    def _bring(self, index: int, following: int) -> None:
        for bucket in self._held(index):
            bucket.gather()
        if self._frees and 0 <= following < len(self._layers):
            for bucket in self._held(following):
                bucket.gather()
        self._ready(self._held(index))

    def before_backward(self, last: bool) -> None:
        """Before a backward pass; `last`: it is the last one of the step."""
        self._last, self._backward = last, True
        for bucket in self._buckets:
            bucket.begin(last)
        # All ranks start the sums in this order: the last layer's gradient comes first.
        self._waiting = deque(reversed(self._buckets))

    @torch.no_grad()
    def _arrived(self, name: str, parameter: Tensor) -> None:
        """Takes a weight's gradient; starts the sums of the buckets that are complete, in order."""
        bucket = self._home[name]
        if parameter.grad is None:  # a pipeline computes it later
            return
        bucket.add(name, parameter.grad)
        parameter.grad = None
        if not bucket.missing:
            bucket.free()
        while self._waiting and not self._waiting[0].missing:
            self._launch(self._waiting.popleft())

    def _launch(self, bucket: Bucket) -> None:
        bucket.launch(self._last)
        self._flying.append(bucket)
        while len(self._flying) > _AT_ONCE or (self._flying and self._flying[0].copies.shard.size == 1):
            self._flying.popleft().settle(self._last)

    @torch.no_grad()
    def after_backward(self) -> None:
        """After a backward pass; after the step's last one, the gradients are those of all ranks."""
        while self._waiting:  # those in which a weight took no part
            self._launch(self._waiting.popleft())
        for layer in self._frozen:  # the first one that has adapters, and one that was brought beside it
            for one in layer:
                one.free()
        self._backward, norms = False, []
        for bucket in reversed(
            self._buckets
        ):  # in the order of the sums: beside those under way, the others' norms are computed
            if bucket in self._flying:
                self._flying.remove(bucket)
                bucket.settle(self._last)
            bucket.free()
            if self._last:
                bucket.finish()
                norms.append(bucket.squared_norm())
        self._norms = norms[::-1]

    # Gradients

    def grad(self, name: str) -> Tensor:
        """This rank's piece of the summed gradient of `name` in the shape of its master, float32; where this rank alone has the weight and a
        step is one pass, in the dtype of the pass."""
        bucket = self._home[name]
        if bucket.kept is not None:
            return bucket.kept[name].view(self.masters[name].shape)
        assert bucket.part is not None, f"{name} got no gradient"
        at = next(piece.at for piece in bucket.ranges if piece.name == name)
        return bucket.part[at : at + self.masters[name].numel()].view(self.masters[name].shape)

    def holds(self, name: str) -> bool:
        """As `Weights.holds`: the first of the ranks that have the same part."""
        return self._home[name].copies.replicate.index == 0

    def squared_norm(self) -> Tensor:
        """Squared norm of this rank's share of the gradients, float64 scalar: the sum over all ranks is the whole."""
        return torch.stack(self._norms).sum()

    def take_grads(self, names: Sequence[str], factor: float | Tensor | None) -> list[Tensor]:
        """The pieces of the gradients of `names` times `factor`, float32, or with None as they are; valid until `published`."""
        grads = [self.grad(name) for name in names]
        return scaled(grads if factor is None else [one.float() for one in grads], factor)

    def rounded(self, name: str) -> Tensor | None:
        """As `Weights.rounded`, of this rank's piece."""
        return None if name in self.zeros else self._home[name].rounded(name)

    def drop_grads(self, names: Sequence[str] | None = None) -> None:
        """Clears the gradients of all weights."""
        assert names is None, "gradients are dropped together"
        for bucket in self._buckets:
            bucket.drop()

    def copied_grads(self) -> list[Any]:
        """Copies of this rank's gradients, for `put_grads`."""
        return [bucket.copied() for bucket in self._buckets]

    def put_grads(self, grads: Sequence[Any]) -> None:
        """Sets the gradients to what `copied_grads` copied."""
        for bucket, part in zip(self._buckets, grads, strict=True):
            bucket.put(part)

    # Weights

    @torch.no_grad()
    def publish(self, names: Sequence[str]) -> None:
        """Zeros where weights stay zero; `published` brings the masters to the other ranks."""
        for name in names:
            if name in self.zeros:
                self.masters[name].masked_fill_(self.zeros[name], 0)

    def begin(self, buckets: Sequence[Sequence[str]], factor: float | Tensor) -> None:
        """As `Weights.begin`."""
        self._unstepped = {name for names in buckets for name in names}

    @torch.no_grad()
    def stepped(self, names: Sequence[str]) -> None:
        """As `Weights.stepped`: starts to bring whole buckets to the other ranks, beside the steps of the others."""
        self._unstepped.difference_update(names)
        while self._unpublished and self._unstepped.isdisjoint(one.name for one in self._unpublished[0].ranges):
            self._publish(self._unpublished.popleft())  # in one order on all ranks, whichever weights each has

    @staticmethod
    def _publish(bucket: Bucket) -> None:
        bucket.drop()
        bucket.publish()

    @torch.no_grad()
    def published(self) -> None:
        """After an update: brings every rank's masters to the others, in the weights' dtype; clears the gradients."""
        for bucket in self._unpublished:
            self._publish(bucket)
        self._unpublished = deque(self._buckets)
        # On a GPU a layer waits for its own when it computes; a CPU ends the transfer while the ranks are surely there.
        self._ready(self._first if self._on_gpu else self._buckets)

    def ready(self) -> None:
        """As `Weights.ready`: on a GPU those of other ranks may still be on their way."""
        self._ready(self._buckets)

    @contextmanager
    def whole(self, path: str, *, wide: bool) -> Iterator[None]:
        """As `Weights.whole`: gathered of all ranks; masters, too, where passes compute with rounded ones."""
        _, _, index = path.partition("layers.")
        ends = [
            one for one in (*self._first, *self._tail) if any(name.startswith(f"{path}.") for name in one.parameters)
        ]
        buckets = self._layers[int(index)] if index else ends
        wide = self._rounds or (wide and self.split)
        with torch.no_grad():
            for bucket in buckets:
                bucket.widen() if wide else bucket.gather()
            frozen = self._frozen[int(index)] if index else []
            for one in frozen:
                one.gather()
            self._ready([*buckets, *frozen])
        try:
            yield
        finally:
            for bucket in buckets:
                bucket.narrow()
                bucket.free()
            for one in frozen:
                one.free()


def _arrived(weights: weakref.ref[DividedWeights], name: str, parameter: Tensor) -> None:
    """The hook of weight `name`."""
    found = weights()
    if found is not None:
        found._arrived(name, parameter)
