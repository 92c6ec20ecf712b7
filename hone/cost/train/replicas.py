"""Cost of data parallelism: what of a training's state each rank holds, and the seconds of its transfers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from hone.cost.cache import BYTES
from hone.cost.dims import ModelDims
from hone.cost.ranks import Transfers, messages_and_bytes

GATHERED_LAYERS = 2
"""Layers whose weights are whole at once where they are gathered for each pass: one computes, the next is on its way."""

FLYING_LAYERS = 3
"""Layers with a whole float32 gradient at once where only parts are kept: one is computed, two are being summed."""

BLOCK = 256
"""Numbers that share a scale where they travel in few bits."""


class Message(NamedTuple):
    """A collective of a tensor of `num_bytes` on `ranks`, of which neighbours are `apart` ranks apart, so many `times` a step."""

    op: str
    ranks: int
    num_bytes: float
    times: float
    apart: int = 1

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step, where sums and gathers go around a ring: 2 (n - 1) / n of a tensor to sum it, half of
        that to sum it in parts, to gather it, or to exchange it."""
        return self.times * messages_and_bytes(self.op, "ring", self.ranks, self.num_bytes)[1]


@dataclass(frozen=True)
class Divided:
    """A training on `num_ranks` ranks, in groups of `num_shards` that each hold all state together.

    `sharded` names what a rank of a group holds a part of: 'optimizer' (with float32 masters), 'gradients', 'weights'.
    Sums are in float32; what is summed are float32 gradients, or those of one backward pass in its dtype. Rajbhandari et al. 2019, arXiv:1910.02054, section 5 and 7.
    """

    num_ranks: int = 1
    num_shards: int = 1
    sharded: Collection[str] = field(default_factory=frozenset)
    sent: float = 1.0
    """Bytes that travel between groups for a byte of a float32 gradient."""
    low_rank: int = 0
    """Columns of the factors that travel in place of a layer's matrices; 0: none."""
    kept_bytes: float = 0.0
    """Further bytes a weight that each rank keeps."""
    every: int = 0
    """Steps between two exchanges of all weights, in place of sums of gradients; 0: none."""
    within: int = 0
    """Neighbours that hold a second copy of divided weights together, for the backward pass; 1: each has them whole; 0: there is
    none (as with `num_shards`)."""
    weight_bits: int = 0
    """Bits of a layer's weight that travels, with a scale for each block; 0: those of its dtype."""
    gradient_bits: int = 0
    """The same of a gradient inside a group; 0: float32."""
    served: bool = False
    """Whether each rank sends its gradient to the ranks that serve a part of the weights, and gets the weights from them."""
    peers: int = 0
    """Neighbours that get a rank's weights in each step; 0: none."""
    answered: bool = False
    """Whether a neighbour sends weights back when it has got them."""
    expert_ranks: int = 1
    """Ranks that each hold a part of the experts, and are copies for all other weights; the dimensions are those of such a rank's part."""
    experts: float = 0.0
    """Weights of that part of the experts, of a layer on average."""
    held: float = 1.0
    """The share of all weights that the part is."""

    def of(self, name: str) -> float:
        """The number of parts into which `name` is divided, as it is held by ranks that divide the experts."""
        return max(self.num_shards * self.held, 1.0) if name in self.sharded else 1

    @property
    def _expert_shards(self) -> int:
        """Ranks that share the state of an expert."""
        return max(self.num_shards // self.expert_ranks, 1)

    def weights_bytes(self, dims: ModelDims, width: int) -> float:
        """Bytes of the weights of `width` bytes each and of their float32 masters on one rank."""
        stay = (
            dims.num_layers * self.experts if self._expert_shards == 1 else 0.0
        )  # experts that no other rank has a part of
        layers, ends = _layers(dims) - stay, dims.num_params - _layers(dims) + stay
        whole = width * dims.num_params
        if self.of("weights") > 1:
            gathered = GATHERED_LAYERS * layers / max(dims.num_layers, 1)
            # What a rank keeps of the layers in their own dtype, for the others to gather, unless it is the master.
            kept = width * layers / self.num_shards if width < 4 else 0.0
            if self.weight_bits:
                kept = _coded(self.weight_bits) * layers / self.num_shards
            again = width * layers / self.within if 0 < self.within < self.num_shards else 0.0
            gathered = width * min(gathered, layers)
            whole = width * ends + (again if self.within == 1 else gathered + again) + kept
        apart = width < 4 or self.of("weights") > 1
        whole += self.kept_bytes * dims.num_params
        if self.served:
            # The rank's own float32 masters, what it sends and receives, what the others send to it; in fp32, its weights are the
            # masters, and those of the part it serves are further ones.
            others = (self.num_ranks - 1) / self.num_ranks
            whole += 4 * dims.num_params * (1 + others + (1 if apart else 1 / self.num_ranks))
        return whole + (4 * dims.num_params / self.of("optimizer") if apart else 0.0)

    def frozen_bytes(self, dims: ModelDims, width: int, num_bytes: float) -> float:
        """Bytes on one rank of a model's frozen weights, `num_bytes` in all, of which embedding and head are dense in `width` bytes each."""
        if self.of("weights") == 1:
            return num_bytes
        layers = frozen_layer_bytes(dims, width, num_bytes) * dims.num_layers
        near = min(self.within or self.num_shards, self.num_shards)
        whole = layers if near == 1 else layers * min(GATHERED_LAYERS / max(dims.num_layers, 1), 1.0)
        again = layers / near if 1 < near < self.num_shards else 0.0
        return num_bytes - layers + layers / self.num_shards + whole + again

    def frozen_messages(self, dims: ModelDims, width: int, num_bytes: float, micro_batches: int) -> list[Message]:
        """The gathers of a step of the layers' weights of `frozen_bytes`, each for forward and backward pass; they never change."""
        if self.of("weights") == 1:
            return []
        near = min(self.within or self.num_shards, self.num_shards)
        times = micro_batches * (1 if near == 1 else 2)
        ranks = near if near > 1 else self.num_shards
        return [Message("all_gather", ranks, frozen_layer_bytes(dims, width, num_bytes), times)] * dims.num_layers

    def gradient_bytes(self, dims: ModelDims, passes: int) -> float:
        """Bytes of float32 gradients on one rank, at the end of the last of `passes` backward passes, when it has most of them.

        Ranks that share only the optimizer's state add up the gradients of several passes; those of one leave layer by layer.
        """
        apart = self.num_shards > 1 and not self.served
        part = 4 * dims.num_params / max(self.num_shards * self.held, 1.0) if apart else 0.0
        if self.of("gradients") == 1 and not (apart and passes == 1):
            return 4 * dims.num_params + part
        flying = (FLYING_LAYERS - 1) * _layers(dims) / max(dims.num_layers, 1)
        return part + 4 * (max(_ends(dims)) + min(flying, _layers(dims)))

    def summed_bytes(self, dims: ModelDims) -> float:
        """Bytes of float32 gradients that one rank keeps from one backward pass of a step to the next."""
        return 4 * dims.num_params / self.of("gradients")

    def step_s(
        self, dims: ModelDims, dtype: str, micro_batches: int, device: str, times: Transfers | None = None
    ) -> float:
        """Seconds in which a step's gradients and weights travel between ranks; `times` of a message are assumed without a table.

        A bucket of each layer, one of the embedding, and one of head and last norm: its gradient is summed in parts inside the
        group, then between groups; its weights are gathered. With `every` all weights travel to all ranks every so many steps.
        """
        times = times or Transfers(device)
        if self.every:
            return self._meeting_s(dims, times) + self._mixed_s(dims, times)
        if self.served:
            times = _between_hosts(times)
        messages = self.messages(dims, BYTES[dtype], micro_batches)
        return sum(one.times * times.seconds(one.op, one.ranks, one.num_bytes, one.apart) for one in messages)

    def exposed_s(self, dims: ModelDims, dtype: str, device: str, times: Transfers) -> float:
        """Of `step_s`, the seconds that no work of a step is left to pass beside, where sums and gathers pass beside passes.

        The gradient of the embedding comes last; new weights travel while those after them are updated. Where weights are gathered
        for each pass, the next step begins with the first layer's. What ranks exchange every so many steps passes beside nothing, as
        what a worker sends to its servers and gets from them; neighbours' weights come beside the passes.
        """
        if self.served:
            return self.step_s(dims, dtype, 1, device, times)
        if self.every:
            return self._meeting_s(dims, times)
        found = self._by_bucket(dims, BYTES[dtype], 1)
        embedding = found[-len(_ends(dims))] if dims.vocab_size else []
        waits = [one for one in embedding if one.op != "all_gather"]
        if self.of("weights") > 1:
            waits += [one._replace(times=1.0) for one in found[0] if one.op == "all_gather"][:1]
        return sum(one.times * times.seconds(one.op, one.ranks, one.num_bytes, one.apart) for one in waits)

    def sent_bytes(self, dims: ModelDims, width: int, micro_batches: int) -> float:
        """Bytes that a rank sends in a step, with weights of `width` bytes each: on average, where weights travel every so many steps."""
        if self.every:
            groups = self.num_ranks // self.num_shards
            met = Message("all_gather", groups, groups * 4 * dims.num_params, 1 / self.every)
            return met.sent_bytes + self.peers * 4 * dims.num_params
        return sum(one.sent_bytes for one in self.messages(dims, width, micro_batches))

    def _meeting_s(self, dims: ModelDims, times: Transfers) -> float:
        """Seconds a step of the exchanges of all weights, every so many steps."""
        groups = self.num_ranks // self.num_shards
        return times.seconds("all_gather", groups, groups * 4 * dims.num_params) / self.every

    def _mixed_s(self, dims: ModelDims, times: Transfers) -> float:
        """Seconds in which a rank gets the weights of its neighbours, and they its own before where they answer."""
        near, turns = 1 + self.peers, 1 + self.answered
        return turns * _between_hosts(times).seconds("all_gather", near, near * 4 * dims.num_params)

    def messages(self, dims: ModelDims, width: int, micro_batches: int) -> list[Message]:
        """The collectives of a step's gradients and of its weights, of `width` bytes each, without those of `every`."""
        if self.served:  # of float32 gradients, then of float32 weights
            return [Message("all_to_all", self.num_ranks, 4 * dims.num_params, 2)]
        return [one for bucket in self._by_bucket(dims, width, micro_batches) for one in bucket]

    def _by_bucket(self, dims: ModelDims, width: int, micro_batches: int) -> list[list[Message]]:
        """The collectives of each bucket: of every layer, with those of its experts where ranks divide them, of the embedding, of the head."""
        passes = micro_batches if self.of("gradients") > 1 else 1
        count, every = max(dims.num_layers, 1), []
        layer = [(_layers(dims) / count - self.experts, True, self.num_shards, self.num_ranks)]
        if self.experts:
            layer.append((self.experts, True, self._expert_shards, self.num_ranks // self.expert_ranks))
        buckets = [layer] * dims.num_layers
        buckets += [[(params, False, self.num_shards, self.num_ranks)] for params in _ends(dims)]
        for index, parts in enumerate(buckets):
            found = []
            for part in parts:
                found += self._of_bucket(dims, index, *part, width, micro_batches, passes)
            every.append(found)
        return every

    def _of_bucket(
        self,
        dims: ModelDims,
        index: int,
        params: float,
        in_layer: bool,
        shards: int,
        num_ranks: int,
        width: int,
        micro_batches: int,
        passes: int,
    ) -> list[Message]:
        """The collectives of `params` weights that `num_ranks` ranks hold, in groups of `shards`."""
        groups, found = num_ranks // shards, []
        near = self.within if 1 < self.within < shards else shards
        frees = self.of("weights") > 1 and shards > 1
        if self.gradient_bits:
            size = _coded(self.gradient_bits) * params
            found.append(Message("all_to_all", near, size, passes))
            found.append(Message("all_to_all", shards // near, size / near, passes, near))
        elif width < 4 and passes == micro_batches:  # each of one backward pass: it travels in its own dtype
            found.append(Message("all_to_all", shards, width * params, passes))
        else:
            found.append(Message("reduce_scatter", shards, 4 * params, passes))
        if self.low_rank:
            matrices = dims.layers[index].matmuls if in_layer else [(dims.vocab_size, dims.hidden_size)]
            numbers = [self.low_rank * sum(shape) for shape in matrices]
            # Two messages: P, then Q.
            found.append(Message("all_reduce", groups, 4 * sum(numbers) / 2, 2, shards))
        else:
            found.append(Message("all_reduce", groups, self.sent * 4 * params / shards, 1, shards))
        if not (frees and in_layer):
            found.append(Message("all_gather", shards, width * params, 1))
            return found
        size = (_coded(self.weight_bits) if self.weight_bits else width) * params
        if near < shards:  # once of all, then of the neighbours' copy
            found.append(Message("all_gather", shards, size, 1))
            found.append(Message("all_gather", near, width * params, 2 * micro_batches - 1))
        else:
            found.append(Message("all_gather", shards, size, micro_batches * (1 if self.within == 1 else 2)))
        return found


def frozen_layer_bytes(dims: ModelDims, width: int, num_bytes: float) -> float:
    """Bytes of a layer's frozen weights, on average, where all of `dims` have `num_bytes` and the ends are dense in `width` bytes each."""
    return max(num_bytes - width * (dims.num_params - _layers(dims)), 0.0) / max(dims.num_layers, 1)


def _coded(bits: int) -> float:
    """Bytes of a number in `bits` with a float32 scale for each block of 256."""
    return bits / 8 + 4 / BLOCK


def _layers(dims: ModelDims) -> int:
    """Weights in the layers; the rest is embedding, head and last norm."""
    return dims.num_params - dims.vocab_size * dims.hidden_size * (1 if dims.tie_embeddings else 2)


def _ends(dims: ModelDims) -> list[float]:
    """Weights of the embedding and, unless it is tied, of the head; the last norm is nothing beside them."""
    return [float(dims.vocab_size * dims.hidden_size)] * (1 if dims.tie_embeddings else 2)


def _between_hosts(times: Transfers) -> Transfers:
    """`times` over hone's own connections, from one host's memory to another's, whatever device computes; nothing of them is calibrated."""
    found = Transfers("cpu")
    found.assumed = times.assumed
    return found
