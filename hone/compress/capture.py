"""The calibration pass: hidden states layer by layer, and statistics of the inputs of a layer's linears.

Shapes: B sequences, S tokens, D hidden width, T tokens of a batch without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hone.base.ranks import Mesh
from hone.compress.calibration import Calibration
from hone.compress.statistics import LEAST_TOKENS, PAIRED, RANGES, STATISTICS, pooled
from hone.model.context import Causal, Context, Packed
from hone.model.decoder import Decoder, DecoderLayer

Seen = Callable[[Tensor, Tensor, Tensor | None], None]
"""Reads a batch of a layer: its inputs and outputs [B, S, D], and the flat mask [B * S] of tokens without padding (None: all)."""


class Flow:
    """Hidden states of the calibration sequences: `states` [B, S, D], the inputs of the next layer.

    With `paired`, `dense_states` [B, S, D] are the same in the model that is not compressed; None without.

    Each rank of `mesh` has a share of the batches, `own`; a rank may have none. A batch is what it is with one rank, so that
    its results are, too: only sums over batches are added in another order.
    """

    def __init__(
        self,
        calibration: Calibration,
        batch_size: int,
        device: str,
        dtype: torch.dtype,
        *,
        paired: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        self.calibration = calibration
        self.mesh = mesh or Mesh()
        rows = share(len(calibration.tokens), batch_size, self.mesh)
        self.own = calibration.part(rows)
        self.before = calibration.part(slice(rows.start)).num_tokens
        """Tokens of the ranks before this one."""
        self.batch_size = batch_size
        self.device = device
        self.dtype = dtype
        self.paired = paired
        self.states = torch.empty(0)
        self.dense_states: Tensor | None = None

    @torch.no_grad()  # a graph would keep the embedding in memory through all layers
    def embed(self, ends: Decoder) -> None:
        """Computes the inputs of the first layer, by the embedding of `ends`."""
        self.states = self._embedded(ends)

    @torch.no_grad()
    def embed_dense(self, ends: Decoder) -> None:
        """With `paired`, computes `dense_states` of the first layer, by the embedding that is not compressed."""
        if self.paired:
            self.dense_states = self._embedded(ends)

    def _embedded(self, ends: Decoder) -> Tensor:
        tokens = torch.from_numpy(self.own.tokens)
        width = ends.embedding.shape[1]
        states = torch.empty(*tokens.shape, width, dtype=self.dtype, device=self.device)  # parts would be there twice
        for start in range(0, len(tokens), 64):
            part = tokens[start : start + 64].to(self.device)
            states[start : start + 64] = ends.embed(part)
        return states

    @torch.no_grad()
    def statistics(
        self, layer: DecoderLayer, readers: Mapping[Any, list[str]], wanted: Collection[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Statistics `wanted` of the inputs of `layer`'s linears, in one pass and once for each distinct input.

        `layer` has its original weights; with `paired`, `dense_states` become its outputs. `readers` maps an input to the
        linears that read it ('mixer_norm' to ['mixer.qkv']). Returns for every linear its statistics by name, over the
        batches of all ranks; linears that read one input share them. Those of an expert are of the tokens that its router sends to it.
        """
        experts = [source for source in readers if getattr(source, "expert", None) is not None]
        gathered = {
            source: self._gather(layer, names[0], {*wanted, "tokens"} if source in experts else wanted)
            for source, names in readers.items()
        }
        hooks = [
            layer.get_submodule(names[0]).register_forward_pre_hook(gathered[source])
            for source, names in readers.items()
        ]
        routing = {readers[source][0].partition(".")[0] for source in experts}
        without = {block: WithoutPadding(layer.get_submodule(block)) for block in routing}
        inside = {source for source, names in readers.items() if names[0].partition(".")[0] in routing}
        try:
            for piece, context, counts in self.batches():
                for source, gather in gathered.items():
                    gather.counts = None if source in inside else counts
                for block in without.values():
                    block.counts = counts
                self._dense(layer, piece, context, gathered.values())
                layer(self.states[piece], context)
        finally:
            for hook in (*hooks, *without.values()):
                hook.remove()
        values = {source: gather.values(self.mesh) for source, gather in gathered.items()}
        holder = {source: readers[source][0].rpartition(".")[0] for source in experts}
        seldom = [source for source in experts if int(values[source]["tokens"]) < LEAST_TOKENS]
        pools = {
            path: pooled([values[one] for one in experts if holder[one] == path])
            for path in {holder[source] for source in seldom}
        }
        for source in seldom:  # a range of so few tokens would clip what another text sends there
            values[source] |= pools[holder[source]]
        return {name: values[source] for source, names in readers.items() for name in names}

    def _gather(self, layer: DecoderLayer, path: str, wanted: Collection[str]) -> _Gather:
        """The hook for the inputs of the linear at `path`."""
        columns, count = layer.get_submodule(path).weight.shape[1], self.calibration.num_tokens
        kinds, device = STATISTICS | RANGES, torch.device(self.device)
        return _Gather({name: kinds[name](columns, count, device, self.before) for name in sorted(wanted)})

    def _dense(self, layer: DecoderLayer, piece: slice, context: Context, gathered: Collection[_Gather]) -> None:
        """With `paired`, one batch of `dense_states` through `layer`: its inputs for `gathered`, its outputs in place."""
        if self.dense_states is None:
            return
        for gather in gathered:
            gather.first = True
        self.dense_states[piece] = layer(self.dense_states[piece], context)
        for gather in gathered:
            gather.first = False

    @torch.no_grad()
    def through(self, layer: DecoderLayer, seen: Seen | None = None) -> None:
        """Replaces the states by the outputs of `layer`; calls `seen` with each batch's inputs, outputs and mask."""
        self._through(layer, self.states, seen)

    @torch.no_grad()
    def dense_through(self, layer: DecoderLayer) -> None:
        """With `paired`, replaces `dense_states` by the outputs of `layer`, which has its original weights."""
        if self.dense_states is not None:
            self._through(layer, self.dense_states)

    def _through(self, layer: DecoderLayer, states: Tensor, seen: Seen | None = None) -> None:
        for piece, context, counts in self.batches():
            outputs = layer(states[piece], context)
            if seen is not None:
                seen(states[piece], outputs, counts)
            states[piece] = outputs

    def batches(self) -> Iterator[tuple[slice, Context, Tensor | None]]:
        """(sequences, their context, flat mask of tokens without padding or None for all)."""
        ids = self.own.document_ids
        for start in range(0, len(self.own.tokens), self.batch_size):
            piece = slice(start, min(start + self.batch_size, len(self.own.tokens)))
            tokens, valid = torch.from_numpy(self.own.tokens[piece]).to(self.device), None
            context: Context = Causal(tokens)
            if ids is not None and not (ids[piece] == 0).all():  # one document per sequence needs no mask
                owners = torch.from_numpy(ids[piece]).to(self.device)
                context, valid = Packed(owners), (owners >= 0).flatten()
            context.tokens, context.measures = tokens, True
            yield piece, context, None if valid is None or bool(valid.all()) else valid


def share(count: int, batch_size: int, mesh: Mesh) -> slice:
    """The rows of this rank of `count`: whole batches, in the order of the ranks, equally many or one more on the first ranks."""
    batches = -(-count // batch_size)
    each, more = divmod(batches, mesh.world_size)
    begin = each * mesh.rank + min(mesh.rank, more)
    end = begin + each + (mesh.rank < more)
    return slice(begin * batch_size, min(end * batch_size, count))


class WithoutPadding:
    """Hooks of a block with experts by which it computes tokens alone: rows that experts see do not say which tokens they are.

    The block must work on each token by itself, as feed-forwards do; its outputs for padding are zero.
    """

    def __init__(self, block: nn.Module) -> None:
        self.counts: Tensor | None = None
        self.shape = torch.Size()
        self.tokens: Tensor | None = None
        self.hooks = block.register_forward_pre_hook(self._take), block.register_forward_hook(self._put)

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _take(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.counts is None:
            return None
        x, context = args
        self.shape, self.tokens = x.shape, context.tokens
        if context.tokens is not None:
            context.tokens = context.tokens.flatten()[self.counts]
        return x.flatten(0, -2)[self.counts][None], context

    def _put(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
        if self.counts is None:
            return None
        args[1].tokens = self.tokens
        whole = out.new_zeros(len(self.counts), out.shape[-1])
        whole[self.counts] = out[0]
        return whole.view(*self.shape[:-1], -1)


class _Gather:
    """A pre-forward hook of a linear that accumulates statistics of its inputs (`counts` bool [T]: no padding; None: all).

    While `first`, inputs are those of the model that is not compressed, and are kept for the pass that follows.
    """

    def __init__(self, statistics: dict[str, Any]) -> None:
        self.statistics = statistics
        self.counts: Tensor | None = None
        self.first = False
        self.dense: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        x = x if self.counts is None else x[self.counts]
        if self.first:
            self.dense = x
            return
        for name, statistic in self.statistics.items():
            statistic.add(*((x, self.dense) if name in PAIRED else (x,)))
        self.dense = None

    def values(self, mesh: Mesh) -> dict[str, Tensor]:
        """Every statistic over all batches of all ranks."""
        for statistic in self.statistics.values():
            statistic.merge(mesh)
        return {name: statistic.value() for name, statistic in self.statistics.items()}
