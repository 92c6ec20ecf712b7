"""The engine's job: which steps work on which linears, with what bits, on which ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.compress.statistics import RANGES, STATISTICS
from hone.compress.step import Assigned, CacheStep, Step, storing
from hone.compress.targets import EMBEDDING, HEAD, Linear, has_head
from hone.cost.work import share_out
from hone.model.weights.model import ModelSource
from hone.model.weights.stacked import Stacked


@dataclass(frozen=True)
class Job:
    """The engine's job: `steps` on every linear in `targets[layer]`, computing in `dtype`."""

    checkpoint: ModelSource
    steps: tuple[Step, ...]
    targets: tuple[tuple[Linear, ...], ...]
    device: str
    dtype: torch.dtype
    rest_dtype: torch.dtype | None = None
    """Dtype of the stored matrices outside the layers (embedding, head); None keeps theirs."""
    bits: Mapping[str, int] = field(default_factory=dict)
    """Bits of each matrix by `matrix_name`, where an allocation chose them."""
    cache: CacheStep | None = None
    """The step that calibrates the caches of layers."""
    model: dict[str, float] = field(default_factory=dict)
    """What the first step's `prepare` found."""
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    """Squared gradients of the loss by each matrix's inputs, by `matrix_name`, where an observer reads them."""
    mesh: Mesh = field(default_factory=Mesh)
    embedding: Linear | None = None
    """The embedding, where it is compressed."""
    requantized: bool = False
    """Whether the given model was quantized, whose weights have zeros of a grid that nothing pruned."""
    stacked: Stacked = field(default_factory=dict)
    """The tensors of all experts of a layer that the folder has in place of those of each; empty: it has these."""

    def weights(self) -> Iterator[Tensor]:
        """The given weights [N, K] of the linears in `targets`, by layer, a checkpoint module at a time."""
        for linears in self.targets:
            opened = self.checkpoint.reopened()  # so that its memory maps are freed with it
            for linear in linears:
                for name, _ in linear.modules:
                    yield opened.tensor(f"{name}.weight").to(self.device)

    @property
    def statistics(self) -> frozenset[str]:
        """Statistics of the calibration inputs to gather: those of the steps' needs and of the output error."""
        return frozenset({"hessian"}).union(*(step.needs & STATISTICS.keys() for step in self.steps))

    @property
    def storage(self) -> Assigned:
        """The step that stores each matrix."""
        return Assigned(storing(self.steps), self.bits)

    @property
    def ranges(self) -> frozenset[str]:
        """Statistics of the inputs of the layer as transforms leave it."""
        return RANGES.keys() & frozenset().union(*(step.input_statistics for step in self.steps))

    @property
    def transforms(self) -> tuple[Step, ...]:
        """The steps that change a whole layer, before those that change a matrix."""
        return tuple(step for step in self.steps if step.phase == "layer")

    def matrix_steps(self, index: int, linear: Linear) -> tuple[Step, ...]:
        """The steps of one matrix, that which stores it with the bits that it was allocated."""
        own = self.storage.of(index, linear)
        steps = (step for step in self.steps if step.phase == "matrix")
        return tuple(own if own is not None and step.stores else step for step in steps)

    def mine(self, index: int) -> frozenset[str]:
        """The linears of layer `index` that this rank solves."""
        works = []
        for linear in self.targets[index]:
            works.append([step.work(linear.rows, linear.columns) for step in self.matrix_steps(index, linear)])
        ranks = share_out(works, self.mesh.world_size, self.device)
        return frozenset(
            linear.path for linear, rank in zip(self.targets[index], ranks, strict=True) if rank == self.mesh.rank
        )

    @property
    def num_shards(self) -> int:
        """One for embedding, final norm and head, one for each layer, one for a head that is compressed."""
        return len(self.targets) + 1

    def ends(self) -> list[str]:
        """Names of the tensors outside the decoder layers, without a head or an embedding that is compressed."""
        without = self.inside(self.checkpoint.config.num_layers) if has_head(self.targets) else []
        without += [] if self.embedding is None else [f"{EMBEDDING}.weight"]
        return [one for one in self.checkpoint.names() if not one.startswith("model.layers.") and one not in without]

    def inside(self, index: int) -> list[str]:
        """Names of the tensors of layer `index`, or of the head."""
        if index == self.checkpoint.config.num_layers:
            return [f"{HEAD}.weight"]
        return [name for name in self.checkpoint.names() if name.startswith(f"model.layers.{index}.")]
