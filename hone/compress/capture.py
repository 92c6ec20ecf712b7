"""What calibration shows of a layer: the mean of x x^T in front of every linear, and what the layer makes of its inputs.

Shapes: B sequences, S tokens, D hidden width, K input features of a linear, T tokens that count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hone.base.errors import ArtifactError
from hone.compress.calibration import Calibration
from hone.model.context import Causal, Context, Packed
from hone.model.decoder import Decoder, DecoderLayer


class Flow:
    """The calibration sequences' hidden states on their way through the layers: `states` [B, S, D], one layer at a time."""

    def __init__(self, calibration: Calibration, batch_size: int, device: str, dtype: torch.dtype) -> None:
        self.calibration = calibration
        self.batch_size = batch_size
        self.device = device
        self.dtype = dtype
        self.states = torch.empty(0)

    @torch.no_grad()  # a graph would keep the embedding in memory through all layers
    def embed(self, ends: Decoder) -> None:
        """States in front of the first layer."""
        tokens = torch.from_numpy(self.calibration.tokens)
        self.states = torch.cat([ends.embed(part.to(self.device)).to(self.dtype) for part in tokens.split(64)])

    def snapshot(self) -> Tensor:
        """A copy of the states on the CPU, to be written while the next layer changes them."""
        return self.states.to("cpu", copy=True)

    def restore(self, path: Path) -> None:
        """Reads a snapshot that was written as "states", into memory of their own: a mapped file may be aligned differently, and
        matrix products may then differ in the last bit."""
        try:
            with safe_open(path, framework="pt") as file:
                self.states = file.get_tensor("states").clone().to(self.device)
        except (SafetensorError, OSError) as error:
            raise ArtifactError(
                f"{path} is corrupt: {error}", fix="delete the unfinished folder and start again"
            ) from None

    def hessians(self, layer: DecoderLayer, names: list[str]) -> dict[str, Tensor]:
        """float32 [K, K] for each linear `names` of `layer`: the mean of x x^T over the tokens that count.

        Products of bfloat16 inputs are summed in float32, so only the order of summation differs from float32 inputs.
        """
        gathered = {name: _Gather() for name in names}
        hooks = [layer.get_submodule(name).register_forward_pre_hook(gathered[name]) for name in names]
        try:
            for piece, context, counts in self._batches():
                for gather in gathered.values():
                    gather.counts = counts
                layer(self.states[piece], context)
        finally:
            for hook in hooks:
                hook.remove()
        return {name: gather.total / self.calibration.num_tokens for name, gather in gathered.items()}

    def through(self, layer: DecoderLayer) -> None:
        """Replaces the states by what `layer` makes of them."""
        for piece, context, _ in self._batches():
            self.states[piece] = layer(self.states[piece], context)

    def _batches(self) -> Iterator[tuple[slice, Context, Tensor | None]]:
        """(rows, their context, flat mask of tokens that count or None for all)."""
        tokens, ids = self.calibration.tokens, self.calibration.document_ids
        for start in range(0, len(tokens), self.batch_size):
            piece = slice(start, min(start + self.batch_size, len(tokens)))
            if ids is None or (ids[piece] == 0).all():  # one document a row needs no mask
                yield piece, Causal(torch.from_numpy(tokens[piece]).to(self.device)), None
                continue
            owners = torch.from_numpy(ids[piece]).to(self.device)
            valid = (owners >= 0).flatten()
            yield piece, Packed(owners), None if bool(valid.all()) else valid


class _Gather:
    """A hook in front of a linear that adds up x x^T of the tokens that count (`counts` bool [T], None for all)."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.counts: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        x = x if self.counts is None else x[self.counts]
        if self.total is None:
            self.total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
        if x.is_cuda and x.dtype != torch.float32:
            self.total += torch.mm(x.T, x, out_dtype=torch.float32)
        else:
            x = x.float()
            self.total.addmm_(x.T, x)
