"""The calibration pass: hidden states layer by layer, and statistics of the inputs of a layer's linears.

Shapes: B sequences, S tokens, D hidden width, T tokens of a batch without padding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from hone.compress.calibration import Calibration
from hone.compress.statistics import RANGES, STATISTICS, Gathered
from hone.model.context import Causal, Context, Packed
from hone.model.decoder import Decoder, DecoderLayer


class Flow:
    """Hidden states of the calibration sequences: `states` [B, S, D], the inputs of the next layer."""

    def __init__(self, calibration: Calibration, batch_size: int, device: str, dtype: torch.dtype) -> None:
        self.calibration = calibration
        self.batch_size = batch_size
        self.device = device
        self.dtype = dtype
        self.states = torch.empty(0)

    @torch.no_grad()  # a graph would keep the embedding in memory through all layers
    def embed(self, ends: Decoder) -> None:
        """Computes the inputs of the first layer."""
        tokens = torch.from_numpy(self.calibration.tokens)
        width = ends.embedding.shape[1]
        self.states = torch.empty(
            *tokens.shape, width, dtype=self.dtype, device=self.device
        )  # parts would be there twice
        for start in range(0, len(tokens), 64):
            part = tokens[start : start + 64].to(self.device)
            self.states[start : start + 64] = ends.embed(part)

    @torch.no_grad()
    def statistics(
        self, layer: DecoderLayer, readers: dict[str, list[str]], wanted: Collection[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Statistics `wanted` of the inputs of `layer`'s linears, in one pass and once for each distinct input.

        `readers` maps an input to the linears that read it ('mixer_norm' to ['mixer.qkv']). Returns for every linear its
        statistics by name; linears that read one input share them.
        """
        gathered = {source: _Gather(wanted, self.calibration.num_tokens) for source in readers}
        hooks = [
            layer.get_submodule(names[0]).register_forward_pre_hook(gathered[source])
            for source, names in readers.items()
        ]
        try:
            for piece, context, counts in self._batches():
                for gather in gathered.values():
                    gather.counts = counts
                layer(self.states[piece], context)
        finally:
            for hook in hooks:
                hook.remove()
        values = {source: gather.values() for source, gather in gathered.items()}
        return {name: values[source] for source, names in readers.items() for name in names}

    @torch.no_grad()
    def through(self, layer: DecoderLayer) -> None:
        """Replaces the states by the outputs of `layer`."""
        for piece, context, _ in self._batches():
            self.states[piece] = layer(self.states[piece], context)

    def _batches(self) -> Iterator[tuple[slice, Context, Tensor | None]]:
        """(sequences, their context, flat mask of tokens without padding or None for all)."""
        tokens, ids = self.calibration.tokens, self.calibration.document_ids
        for start in range(0, len(tokens), self.batch_size):
            piece = slice(start, min(start + self.batch_size, len(tokens)))
            if ids is None or (ids[piece] == 0).all():  # one document per sequence needs no mask
                yield piece, Causal(torch.from_numpy(tokens[piece]).to(self.device)), None
                continue
            owners = torch.from_numpy(ids[piece]).to(self.device)
            valid = (owners >= 0).flatten()
            yield piece, Packed(owners), None if bool(valid.all()) else valid


class _Gather:
    """A pre-forward hook of a linear that accumulates statistics of its inputs (`counts` bool [T]: no padding; None: all)."""

    def __init__(self, wanted: Collection[str], num_tokens: int) -> None:
        self.wanted = sorted(wanted)
        self.num_tokens = num_tokens
        self.statistics: dict[str, Gathered] = {}
        self.counts: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        x = x if self.counts is None else x[self.counts]
        for name in self.wanted:
            if name not in self.statistics:
                self.statistics[name] = (STATISTICS | RANGES)[name](x.shape[1], self.num_tokens, x.device)
            self.statistics[name].add(x)

    def values(self) -> dict[str, Tensor]:
        """Every statistic over all batches."""
        return {name: statistic.value() for name, statistic in self.statistics.items()}
