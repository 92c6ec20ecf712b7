"""The tensors of TransMLA: turned keys, and latents of the other keys and the values.

Shapes: D hidden channels, H query heads, G key/value heads of d channels, m frequencies that count as one (fold), F = d / (2 m) of
these, C = m G keys at each, r of which keep rotary positions, N = G d - 2 F r channels of the other keys, R the latent's width.
A pair of channels (i, i + d / 2) turns at frequency i = f m + a.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hone.base.durable import write_atomic
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.compress.calibration import not_finite
from hone.compress.capture import Flow
from hone.compress.conversions.tensors import names_of, piece_of
from hone.compress.structured.importance import each_layer
from hone.model.config import ModelConfig
from hone.model.weights.model import ModelSource
from hone.model.weights.source import WeightSource
from hone.model.weights.tensors import DeclaredTensor

_FIELDS = ("turns", "basis", "numbers")


class Latents(NamedTuple):
    """What was measured of one layer, float64."""

    turns: Tensor
    """[F, C, C]: rows are directions of the keys of a frequency, those of most energy first."""
    basis: Tensor
    """[N + G d, R], orthonormal columns: the principal components of the other keys, times `balance`, and the values."""
    balance: float
    """Makes the other keys as large as the values."""
    size: float
    """Root mean square of a latent's numbers."""
    kept: float
    """The share of the energy of the balanced keys and values that latents have."""
    rotated: float
    """The share of the energy of keys that the rotated ones have."""


@torch.no_grad()
def measure(source: ModelSource, config: ModelConfig, flow: Flow, run: Run, fold: int) -> dict[int, Latents]:
    """By layer of `config`, the converted model, its `Latents`, from one pass over the calibration tokens."""
    found: dict[int, Latents] = {}
    for index, layer in each_layer(source, flow, run):
        if config.layers[index].mixer == source.config.layers[index].mixer:
            flow.through(layer)
            continue
        size = source.config.hidden_size
        moments, inputs = torch.zeros(size, size, dtype=torch.float64, device=flow.device), []
        hook = layer.get_submodule("mixer.qkv").register_forward_pre_hook(
            lambda _, args, inputs=inputs: inputs.append(args[0])
        )

        def add(states: Tensor, _: Tensor, counts: Tensor | None, moments=moments, inputs=inputs) -> None:
            x = inputs.pop().flatten(0, -2).float()
            x = x if counts is None else x[counts]
            moments += (x.T @ x).double()

        try:
            flow.through(layer, add)
        finally:
            hook.remove()
        moments = flow.mesh.sum(moments).cpu() / flow.calibration.num_tokens
        if not bool(torch.isfinite(moments).all()):
            raise not_finite("hidden states", flow.dtype)
        found[index] = _of_layer(source, config, index, moments, fold)
    return found


def _of_layer(source: ModelSource, config: ModelConfig, index: int, moments: Tensor, fold: int) -> Latents:
    """`moments` float64 [D, D]: the mean of x xT over the inputs x of the layer's queries, keys and values."""
    given, mla = source.config.layers[index].mixer, config.layers[index].mixer
    keys, values = (piece_of(source, source.config, index, "mixer.qkv", name).double() for name in "kv")
    by_frequency = _split(keys, given.num_kv_heads, fold)
    energies = torch.einsum("fcpx,xy,fkpy->fck", by_frequency, moments, by_frequency)
    turns = torch.linalg.eigh(energies).eigenvectors.flip(-1).mT.contiguous()
    rotated, others = _turned(by_frequency, turns, mla.rope_dim)
    of_keys, of_values, of_rotated = (
        float(torch.einsum("rx,xy,ry->", one, moments, one)) for one in (others, values, rotated)
    )
    balance = (of_values / of_keys) ** 0.5 if of_keys > 0 and of_values > 0 else 1.0
    both = torch.cat((balance * others, values))
    energy, vectors = torch.linalg.eigh(both @ moments @ both.T)
    rank, total = mla.latent_dim, float(energy.clamp(min=0).sum())
    best = float(energy[-rank:].clamp(min=0).sum())
    return Latents(
        turns,
        vectors[:, -rank:].flip(-1).contiguous(),
        balance,
        max(best / rank, 1e-30) ** 0.5,
        best / total if total else 1.0,
        of_rotated / max(of_rotated + of_keys, 1e-30),
    )


def _split(rows: Tensor, heads: int, fold: int) -> Tensor:
    """[heads d, X] to [F, m heads, 2, X]: the pairs of channels of each frequency."""
    return rows.unflatten(0, (heads, 2, -1, fold)).permute(2, 3, 0, 1, 4).flatten(1, 2)


def _turned(pairs: Tensor, turns: Tensor, rope_dim: int) -> tuple[Tensor, Tensor]:
    """([2 F r, X], [N, X]) of keys [F, C, 2, X]: the rotated ones, as neighbouring channels, and the others."""
    turned = torch.einsum("fck,fkpx->fcpx", turns, pairs)
    first = rope_dim // (2 * len(turns))
    return turned[:, :first].flatten(0, 2), turned[:, first:].flatten(0, 2)


@dataclass(frozen=True)
class Made:
    """The recipes of the converted model's tensors; `known` by layer."""

    known: dict[int, Latents]
    fold: int

    def recipe(self, index: int, made: DeclaredTensor, source: ModelConfig, config: ModelConfig) -> LatentTensor | None:
        """How a tensor of layer `index` is made; None: it is copied."""
        part = made.path.removeprefix("mixer.").removesuffix(".weight")
        if index not in self.known or part not in ("q", "kv_down", "kv_up", "latent_norm"):
            return None
        first = names_of(source, index, "mixer.qkv")[0]
        return LatentTensor(first, part, index, self.known[index], self.fold, source, config, made.shape)


@dataclass(frozen=True, eq=False)
class LatentTensor:
    """One tensor of the latent attention of layer `index`: `part` is its path in the mixer."""

    name: str
    part: str
    index: int
    known: Latents
    fold: int
    source: ModelConfig
    config: ModelConfig
    made: tuple[int, ...]

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return self.made

    def make(self, source: WeightSource) -> Tensor:
        dtype = source.tensor(self.name).dtype
        if self.part == "latent_norm":
            return torch.full(self.made, self.known.size - self.config.norm_offset, dtype=dtype)
        return getattr(self, f"_{self.part}")(source).to(dtype).contiguous()

    def _rows(self, source: WeightSource, piece: str) -> Tensor:
        return piece_of(source, self.source, self.index, "mixer.qkv", piece).double()

    @property
    def _mixers(self) -> tuple[Any, Any]:
        return self.source.layers[self.index].mixer, self.config.layers[self.index].mixer

    @property
    def _of_group(self) -> Tensor:
        """[G, F, C, m]: the columns of `turns` of each key head."""
        heads = self._mixers[0].num_kv_heads
        return self.known.turns.unflatten(2, (self.fold, heads)).permute(3, 0, 1, 2)

    def _q(self, source: WeightSource) -> Tensor:
        """[H (d + 2 F r), D]: each head's query, for keys out of the latent, and turned as its keys are, for the rotated ones."""
        given, mla = self._mixers
        frequencies, first = len(self.known.turns), mla.rope_dim // (2 * len(self.known.turns))
        own = given.scale or given.head_dim**-0.5
        rows = self._rows(source, "q").unflatten(0, (given.num_kv_heads, -1, given.head_dim)) * (own / mla.scale)
        pairs = rows.unflatten(2, (2, frequencies, self.fold))  # [G, H / G, 2, F, m, D]
        rotated = torch.einsum("gfca,ghpfax->ghfcpx", self._of_group[:, :, :first], pairs).flatten(2, 4)
        plain = rows * given.rope.attention_factor**2  # which rotated ones have from their angles
        return torch.cat((plain, rotated), 2).flatten(0, 2)

    def _kv_down(self, source: WeightSource) -> Tensor:
        """[R + 2 F r, D]: the latent, then the rotated key."""
        given, mla = self._mixers
        pairs = _split(self._rows(source, "k"), given.num_kv_heads, self.fold)
        rotated, others = _turned(pairs, self.known.turns, mla.rope_dim)
        both = torch.cat((self.known.balance * others, self._rows(source, "v")))
        return torch.cat((self.known.basis.T @ both, rotated))

    def _kv_up(self, source: WeightSource) -> Tensor:
        """[H 2 d, R]: every head's key, turned back, and its value."""
        given, mla = self._mixers
        heads, frequencies = given.num_kv_heads, len(self.known.turns)
        first = mla.rope_dim // (2 * frequencies)
        count = len(self.known.basis) - heads * given.head_dim
        keys = (self.known.basis[:count] / self.known.balance).unflatten(0, (frequencies, -1, 2)) if count else None
        values = self.known.basis[count:].unflatten(0, (heads, given.head_dim))
        if keys is None:
            back = torch.zeros_like(values)
        else:
            back = torch.einsum("gfca,fcpr->gpfar", self._of_group[:, :, first:], keys).flatten(1, 3)
        each = torch.cat((back, values), 1)
        return each.repeat_interleave(given.num_heads // heads, 0).flatten(0, 1)


def write(known: dict[int, Latents], path: Path) -> None:
    """Keeps what was measured, durable: arrays beside `path`, which is written last."""
    arrays: dict[str, np.ndarray] = {}
    for index, one in known.items():
        numbers = np.array([one.balance, one.size, one.kept, one.rotated])
        for name, value in zip(_FIELDS, (one.turns.numpy(), one.basis.numpy(), numbers), strict=True):
            arrays[f"{index}.{name}"] = value
    file = io.BytesIO()
    np.savez(file, **arrays)
    write_atomic(path.with_suffix(".npz"), file.getvalue())
    write_atomic(path, b"{}")


def read(path: Path, mesh: Mesh) -> dict[int, Latents] | None:
    """What `write` kept, on every rank; None: nothing was."""

    def stored() -> dict[int, Latents] | None:
        if not path.exists():
            return None
        with np.load(path.with_suffix(".npz")) as arrays:
            layers = sorted({int(name.partition(".")[0]) for name in arrays})
            found = {}
            for index in layers:
                turns, basis, numbers = (arrays[f"{index}.{name}"] for name in _FIELDS)
                found[index] = Latents(torch.from_numpy(turns), torch.from_numpy(basis), *map(float, numbers))
        return found

    return mesh.from_leader(stored)
