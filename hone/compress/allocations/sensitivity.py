"""How much rounding a matrix costs: relative output errors for candidate bits, and what a layer adds to the hidden states.

Shapes: N rows, K columns of a matrix, H [K, K] mean of x x^T of its inputs, D hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.compress.capture import Flow
from hone.compress.engine.job import Job
from hone.compress.layer import original
from hone.compress.targets import matrix_name, readers_of
from hone.model.weights.exchanged import build_layer


class Sensitivity(NamedTuple):
    """Of one matrix: ||(Q(W) - W) X||^2 / ||W X||^2 by bits, and its block's share of the hidden states after the block."""

    name: str
    errors: dict[int, float]
    share: float


@torch.no_grad()
def measure(
    job: Job, flow: Flow, quantizers: Mapping[int, Any], run: Run, rows: Mapping[str, Tensor] | None = None
) -> Iterator[Sensitivity]:
    """Streams the uncompressed layers, and yields every target with its errors. `quantizers` by their bits.

    With `rows`, weights [N] of each matrix's outputs by name, the errors are sums of squares weighted by them.
    """
    flow.embed(job.checkpoint.build_ends(job.device, job.dtype))
    count = job.checkpoint.config.num_layers
    with run.progress("sensitivity", count, "layers") as bar:
        for index in range(count):
            checkpoint = job.checkpoint.reopened()  # so that its memory maps are freed with it
            layer = build_layer(checkpoint, index, job.device, job.dtype, job.mesh)
            with _Energies(layer) as added:
                statistics = flow.statistics(layer, readers_of(job.targets[index]), {"hessian"})
            flow.through(layer)
            shares = added.shares(job.mesh)
            mine, found = job.mine(index), []
            for linear in job.targets[index]:
                if linear.path not in mine:
                    continue
                stored = [checkpoint.tensor(f"{name}.weight") for name, _ in linear.modules]
                weight = original(layer.get_submodule(linear.path).weight.detach(), stored)
                own = None if rows is None else rows[matrix_name(index, linear.path)]
                errors = output_errors(weight, statistics[linear.path]["hessian"], quantizers, own)
                share = shares[linear.path.partition(".")[0]]
                found.append(Sensitivity(matrix_name(index, linear.path), errors, share))
            for part in job.mesh.gather(found):
                yield from part
            bar.advance()


def output_errors(
    weight: Tensor, hessian: Tensor, quantizers: Mapping[int, Any], rows: Tensor | None = None
) -> dict[int, float]:
    """tr(D H D^T) / tr(W H W^T) for the change D [N, K] that each quantizer's rounding to nearest makes.

    With `rows` [N], sum_i rows_i (D H D^T)_ii.
    """
    whole = _energy(weight, hessian, None).clamp(min=1e-30) if rows is None else 1.0
    return {
        bits: float(_energy(one.nearest(weight) - weight, hessian, rows) / whole) for bits, one in quantizers.items()
    }


def _energy(weight: Tensor, hessian: Tensor, rows: Tensor | None) -> Tensor:
    squares = (weight @ hessian.to(weight)) * weight
    return (squares.sum() if rows is None else (squares.sum(1) * rows).sum()).clamp(min=0)


class _Energies:
    """The share of each block, 'mixer' and 'feed_forward', in the hidden states to which a layer adds its output.

    `shares` gives sums of squares of what the block adds, divided by those of the states with it. They are taken right
    after the block: the first layers may enlarge the states a hundredfold, and what an earlier block wrote still decided
    what they add.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.sums = {"mixer": [0.0, 0.0], "feed_forward": [0.0, 0.0]}
        self.states = torch.empty(0)
        self.hooks: list[Any] = []

    def __enter__(self) -> _Energies:
        self.hooks.append(self.layer.register_forward_pre_hook(lambda _, args: setattr(self, "states", args[0])))
        for name in self.sums:
            # A norm after the block, where a family has one, is what is added.
            last = getattr(self.layer, f"{name}_post_norm", None) or getattr(self.layer, name)
            self.hooks.append(last.register_forward_hook(lambda _, __, out, name=name: self._add(name, out)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def shares(self, mesh: Mesh) -> dict[str, float]:
        """Over the batches of all ranks."""
        both = {name: [math.fsum(column) for column in zip(*mesh.gather(one))] for name, one in self.sums.items()}
        return {name: added / max(whole, 1e-30) for name, (added, whole) in both.items()}

    def _add(self, name: str, out: Tensor) -> None:
        added = out.float() * self.layer.multiplier
        self.states = self.states + added
        sums = self.sums[name]
        sums[0] += float(added.square().sum())
        sums[1] += float(self.states.square().sum())
