"""A bucket: some weights of a layer in one flat tensor, the part of them that this rank holds, and their gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hone.ops import widen
from hone.parallel.grid import Copies
from hone.train.data_parallel.flat import Flat
from hone.train.data_parallel.sums import Handle, Sum
from hone.train.data_parallel.travel import Reducing, ReducingApart, Travel


class Bucket:
    """`parameters` become views of one flat tensor in `dtype`; `master` is this rank's slice of it in float32.

    `shares_gradients`: the gradient of every backward pass is summed over the group at once, and only this rank's slice is
    kept. Otherwise the whole float32 gradient of a step is, and summed after its last pass. A gradient of one pass travels in `dtype`,
    in which the pass computed it, and is summed in float32; where this rank alone has the weights, it stays as it is. `frees`: the weights are in
    memory between `gather` and `free` only. `travel` is their way inside the group, `summing` adds up what the groups have.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        flat: Flat,
        copies: Copies,
        dtype: torch.dtype,
        *,
        shares_gradients: bool,
        frees: bool,
        travel: Travel,
        summing: Sum,
    ) -> None:
        self._summing, self._travel = summing, travel
        self.parameters, self.flat, self.copies = dict(parameters), flat, copies
        self.shares_gradients, self.frees = shares_gradients, frees
        self.ranges = flat.ranges(copies.shard.index)
        device = next(iter(parameters.values())).device
        self.weights = torch.zeros(flat.size, dtype=dtype, device=device)
        apart = frees or dtype != torch.float32
        self.master = (
            torch.zeros(flat.slice_size, device=device) if apart else flat.slice_of(self.weights, copies.shard.index)
        )
        for piece in self.ranges if apart else ():
            values = self.parameters[piece.name].detach().view(-1)[piece.start : piece.stop]
            self.master[piece.at : piece.at + len(values)].copy_(values)
        for name, parameter in self.parameters.items():
            view = flat.view(self.weights, name)
            view.copy_(parameter.detach())
            parameter.data = view
        self._own = self.master
        """What the other ranks gather from this one."""
        if frees and (dtype != torch.float32 or travel.moves.weight_bits):
            self._own = travel.own(self.master, dtype)
        elif dtype != torch.float32:
            self._own = flat.slice_of(self.weights, copies.shard.index)
        self._elsewhere: dict[str, Tensor] | None = None
        """The masters of the pieces, where they are not in `master`."""
        self._second: Tensor | None = None
        """This rank's part of the copy that neighbours hold together until the weights change."""
        self.there = True
        """Whether the whole weights are in memory, or on their way."""
        self._gathering: Handle | None = None
        self._narrow: dict[str, Tensor] = {}
        """The parameters' own values while they are views of the masters."""
        self.missing: set[str] = set()
        """Weights whose gradient the backward pass under way has not computed yet."""
        self._gradient: Tensor | None = None
        self._passes = 0
        """Backward passes of the step up to now."""
        self._travels = torch.float32
        """The dtype of the gradient of the pass under way, until it is summed; the same on all ranks."""
        self._summed: set[str] = set()
        """Weights that have a value in `_gradient`."""
        self._apart: dict[str, Tensor] = {}
        """The gradients of one pass as it left them, where they travel in its dtype."""
        self._rounded: set[str] = set()
        """Weights whose new piece was written where other ranks gather it."""
        self._flying: Reducing | ReducingApart | None = None
        self._adding: Handle | None = None
        self.part: Tensor | None = None
        """This rank's slice of the gradient, float32 [slice_size], summed over all ranks after `finish`."""
        self._keeps = False
        """Whether the pass under way leaves the step's gradient, which nobody else adds to."""
        self.kept: dict[str, Tensor] | None = None
        """Instead of `part` the whole gradients as that pass left them."""

    # The gradient

    def begin(self, last: bool) -> None:
        """Before a backward pass; `last`: it is the last one of the step."""
        self.missing = set(self.parameters)
        self._passes += 1
        one = self.shares_gradients or (last and self._passes == 1)
        apart = one and self.copies.shard.size > 1 and not self._travel.moves.gradient_bits
        alone = self.copies.shard.size == self.copies.replicate.size == 1 and self._elsewhere is None
        self._keeps = alone and last and self._passes == 1
        self._travels = self.weights.dtype if apart or self._keeps else torch.float32

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds the gradient of one weight in one backward pass; the bucket keeps it."""
        self.missing.discard(name)
        if self._travels != torch.float32:
            assert name not in self._apart, f"{name} has two gradients in one pass"
            self._apart[name] = gradient.to(self._travels).contiguous()
            return
        if self._gradient is None:
            self._gradient = torch.empty(self.flat.size, device=gradient.device)
        widen(self.flat.view(self._gradient, name), gradient.contiguous(), add=name in self._summed)
        self._summed.add(name)

    def launch(self, last: bool) -> None:
        """Starts the sum over the group, after the last pass or with `shares_gradients` after each."""
        if not (last or self.shares_gradients):
            return
        if self._travels != torch.float32:
            for name in self.parameters.keys() - self._apart.keys():  # other ranks may have one
                self._apart[name] = torch.zeros(self.flat.shapes[name], dtype=self._travels, device=self.weights.device)
            if self._keeps:
                self.kept, self._apart, self._passes = self._apart, {}, 0
                return
            self._flying = self._travel.reduce_apart(self.flat, self._apart)
            self._apart = {}
            return
        if self._gradient is None:
            self._gradient = torch.empty(self.flat.size, device=self.weights.device)
        self._flying = self._travel.reduce(self._filled(self._gradient))

    def _filled(self, gradient: Tensor) -> Tensor:
        """`gradient` with zeros where no weight has written: a GPU fills them alone, not the whole before."""
        end = 0
        for name, start in sorted(self.flat.offsets.items(), key=lambda one: one[1]):
            if name in self._summed:
                gradient[end:start].zero_()
                end = start + self.parameters[name].numel()
        gradient[end:].zero_()
        return gradient

    def settle(self, last: bool) -> None:
        """Takes the result of `launch`; after the last pass starts the sum over the groups."""
        if self._flying is None:
            return
        part, self._flying = self._flying.part(), None
        self.part = part if self.part is None else self.part.add_(part)
        self._gradient = None
        self._summed.clear()
        if last:
            self._passes = 0
            name = next(iter(self.parameters))
            self._adding = self._summing.start(self.copies.replicate, self.flat, self.part, name)

    def finish(self) -> None:
        """Waits for the sum over the groups."""
        if self._adding is not None:
            self._adding.wait()
            self._adding = None

    def copied(self) -> Tensor | dict[str, Tensor] | None:
        """A copy of the gradient, as `part` or `kept` has it."""
        if self.kept is not None:
            return {name: one.clone() for name, one in self.kept.items()}
        return None if self.part is None else self.part.clone()

    def put(self, gradient: Tensor | dict[str, Tensor] | None) -> None:
        """Sets the gradient to what `copied` gave."""
        self.kept = gradient if isinstance(gradient, dict) else None
        self.part = None if isinstance(gradient, dict) else gradient

    def drop(self) -> None:
        """Forgets the gradient."""
        self._gradient = self.part = self.kept = self._flying = self._adding = None
        self._apart, self._passes = {}, 0
        self._summed.clear()

    def squared_norm(self) -> Tensor:
        """Squared norm of this rank's share of the gradient, float64: the shares of all ranks are the whole gradient."""
        if self.kept is not None:
            norms = torch._foreach_norm([self.kept[one.name] for one in self.ranges], 2, torch.float32)
            return torch.stack(norms).double().square().sum()
        assert self.part is not None, f"{next(iter(self.parameters))} got no gradient"
        others = self.copies.replicate  # they have the same slice: each takes a part of it
        if others.size == 1:  # weight by weight, as one process does
            mine = [self.part[one.at : one.at + one.stop - one.start] for one in self.ranges] or [self.part]
            return torch.stack(torch._foreach_norm(mine)).double().square().sum()
        mine = self.part.tensor_split(others.size)[others.index]
        return torch.linalg.vector_norm(mine).double().square()

    # The weights

    def moved(self, masters: Mapping[str, Tensor]) -> None:
        """The masters are those in `masters`, on the host, from now on; what other ranks gather stays on the device."""
        self._elsewhere, self.master = (
            {piece.name: masters[piece.name] for piece in self.ranges},
            self.master[:0].clone(),
        )

    def _masters(self) -> Tensor:
        """The masters of the rank's slice, on the device."""
        if self._elsewhere is None:
            return self.master
        found = torch.zeros(self.flat.slice_size, device=self.weights.device)
        for piece in self.ranges:
            found[piece.at : piece.at + piece.stop - piece.start].copy_(self._elsewhere[piece.name].view(-1))
        return found

    def rounded(self, name: str) -> Tensor | None:
        """The piece of weight `name` in what other ranks gather, where that is not the master; it must be written before `publish`."""
        aliased = self._elsewhere is None and self._own.data_ptr() == self.master.data_ptr()
        if self._own.dtype != self.weights.dtype or aliased:
            return None
        piece = next(piece for piece in self.ranges if piece.name == name)
        self._rounded.add(name)
        size = piece.stop - piece.start
        shape = self.flat.shapes[name] if size == self.parameters[name].numel() else (size,)
        return self._own[piece.at : piece.at + size].view(shape)

    def publish(self) -> None:
        """Rounds the master to what other ranks gather, and starts gathering it unless the weights are freed."""
        self.ready()
        self._second, written = None, self._rounded >= {piece.name for piece in self.ranges}
        written = written or (self._elsewhere is None and self._own.data_ptr() == self.master.data_ptr())
        self._rounded.clear()
        if self.frees:
            self._own = self._own if written else self._travel.own(self._masters(), self.weights.dtype)
            return
        if not written:
            self._own.copy_(self._masters())
        self._gathering = self.copies.shard.all_gather(self.weights, self._own)

    def gather(self) -> None:
        """Starts to bring the whole weights into memory."""
        if self.there:
            return
        self.weights.untyped_storage().resize_(self.flat.size * self.weights.element_size())
        if self._second is not None:
            self._gathering = self._travel.inner.all_gather(self.weights, self._second)
        else:
            self._gathering = self._travel.gather(self.weights, self._own)
        self.there = True

    def leave(self) -> None:
        """After the forward pass: frees the whole weights, unless they stay for the backward pass; neighbours keep a copy together."""
        if self._travel.moves.within == 1:
            return
        inner = self._travel.inner
        if inner is not None and self._second is None:
            self._second = self.weights.chunk(inner.size)[inner.index].clone()
        self.free()

    def widen(self) -> None:
        """The parameters become views of all ranks' masters, until `narrow`."""
        whole = torch.empty(self.flat.size, device=self.weights.device)
        transfer = self.copies.shard.all_gather(whole, self._masters())
        if transfer is not None:
            transfer.wait()
        self._narrow = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = self.flat.view(whole, name)

    def narrow(self) -> None:
        """Ends `widen`."""
        for name, values in self._narrow.items():
            self.parameters[name].data = values
        self._narrow = {}

    def renew(self) -> None:
        """The weights get memory of their own: what passes under way have read stays as it is."""
        assert not self.frees, "weights that are freed have no copies"
        self.ready()
        index, before = self.copies.shard.index, self.weights
        self.weights = before.clone()
        for name, parameter in self.parameters.items():
            parameter.data = self.flat.view(self.weights, name)
        within = self.flat.slice_of(before, index).data_ptr()
        if self.master.data_ptr() == within:
            self.master = self.flat.slice_of(self.weights, index)
        if self._own.data_ptr() == within:
            self._own = self.flat.slice_of(self.weights, index)

    def ready(self) -> None:
        """Waits for the whole weights."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def free(self) -> None:
        """Frees the whole weights."""
        if self.frees and self.there:
            self.ready()
            self.weights.untyped_storage().resize_(0)
            self.there = False
