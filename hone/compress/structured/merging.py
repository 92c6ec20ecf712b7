"""Which experts are merged, and the tensors of the result. Shapes: T tokens, D hidden channels, E experts before and G groups after, w an expert's channels."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hone.base.durable import write_atomic
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.compress.calibration import not_finite
from hone.compress.capture import Flow
from hone.model.config import ModelConfig
from hone.model.decoder import DecoderLayer
from hone.model.growth.checkpoint import Recipe, grown
from hone.model.growth.depth import Copied
from hone.model.routers.base import Seen
from hone.model.weights.exchanged import build_layer
from hone.model.weights.model import ModelSource
from hone.model.weights.source import WeightSource
from hone.model.weights.tensors import DeclaredTensor, end_tensors, layer_tensors
from hone.ops import swiglu

_BLOCK = "feed_forward."
_RIDGE = 1e-6
"""Added to the diagonal of x^T x, relative to its mean: fewer tokens than channels leave some scores undetermined."""


class Merging(Protocol):
    """The options of `hone.compress.structured.expert_merging.ExpertMerging`."""

    similarity: str
    grouping: str
    align: bool
    router: str


class LayerGroups(NamedTuple):
    """What becomes of the experts of one layer; without groups: it has none."""

    groups: tuple[tuple[int, ...], ...] = ()
    """The members of each merged expert, the most visited one first; groups are in the order of their first expert."""
    weights: tuple[tuple[float, ...], ...] = ()
    """What each member has of the average: its share of the group's visits."""
    orders: tuple[tuple[np.ndarray, ...], ...] = ()
    """int64 [w] of each member: its channels in the order of the first member's; () without `align`."""
    rows: np.ndarray | None = None
    """float32 [G, D]: the router."""


@torch.no_grad()
def measure(checkpoint: ModelSource, flow: Flow, run: Run, how: Merging, counts: Sequence[int]) -> list[LayerGroups]:
    """The groups of every layer, `counts` many, from one pass over the calibration tokens, one layer in memory at a time."""
    flow.embed(checkpoint.build_ends(flow.device, flow.dtype))
    found = []
    with run.progress("merging", len(counts), "layers") as bar:
        for index, count in enumerate(counts):
            layer = build_layer(checkpoint.reopened(), index, flow.device, flow.dtype, flow.mesh)
            if count:
                found.append(_Experts(layer, flow).groups(how, count))
            else:
                flow.through(layer)
                found.append(LayerGroups())
            bar.advance()
    return found


class _Experts:
    """What the experts of one layer do with the calibration tokens, whose states go through the layer meanwhile."""

    def __init__(self, layer: DecoderLayer, flow: Flow) -> None:
        self.block: Any = layer.feed_forward
        self.spec, self.mesh, self.dtype = self.block.spec, flow.mesh, flow.dtype
        self.inputs: list[Tensor] = []
        kept: list[Tensor] = []
        hook = self.block.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        try:
            for piece, context, counts in flow.batches():
                flow.states[piece] = layer(flow.states[piece], context)
                x = kept.pop().flatten(0, -2)
                self.inputs.append(x if counts is None else x[counts])
        finally:
            hook.remove()
        self.router = self.block.router.weight.float()
        self.visits = self._sum(self._visits, self.spec.num_experts).cpu().numpy()
        """float64 [E]."""

    def _sum(self, of: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
        """The sum of `of` over the batches of all ranks, float64 of `shape`."""
        total = torch.zeros(shape, dtype=torch.float64, device=self.router.device)
        for x in self.inputs:
            total += of(x)
        if not bool(torch.isfinite(total).all()):
            raise not_finite("hidden states", self.dtype)
        return self.mesh.sum(total)

    def _logits(self, x: Tensor) -> Tensor:
        return x.float() @ self.router.T

    def _visits(self, x: Tensor) -> Tensor:
        bias = getattr(self.block, "router_bias", None)
        seen = Seen(self._logits(x), self.spec.num_experts, 1, bias)
        return self.spec.router.route(seen).loads.double()

    def groups(self, how: Merging, count: int) -> LayerGroups:
        """`count` groups of experts, with what each becomes."""
        distances = self._of_outputs() if how.similarity == "outputs" else self._of_scores()
        group = hierarchical if how.grouping == "hierarchical" else dominant
        members = [
            sorted(one, key=lambda expert: (-self.visits[expert], expert))
            for one in group(distances, self.visits, count)
        ]
        weights = []
        for one in members:
            total = sum(self.visits[expert] for expert in one)
            weights.append(tuple(float(self.visits[expert] / total) if total else 1 / len(one) for expert in one))
        orders = [self._orders(one) for one in members] if how.align else []
        rows = self._rows(how.router, members, weights)
        return LayerGroups(tuple(map(tuple, members)), tuple(weights), tuple(orders), rows.cpu().float().numpy())

    def _of_outputs(self) -> np.ndarray:
        """[E, E] distances of the experts' mean outputs over all tokens, also those that visit others: down is linear."""
        up, down = self.block.gate_up.weight, self.block.down.weight

        def inner(x: Tensor) -> Tensor:
            return torch.stack([swiglu(x @ one.T).double().sum(0) for one in up])

        means = self._sum(inner, up.shape[0], down.shape[-1]) / max(
            self.visits.sum() / self.spec.router.visits(self.spec.num_experts), 1
        )
        outputs = torch.einsum("edw,ew->ed", down.double(), means)
        return torch.cdist(outputs, outputs, compute_mode="donot_use_mm_for_euclid_dist").cpu().numpy()

    def _of_scores(self) -> np.ndarray:
        """[E, E]: 1 less the cosine of two experts' scores over the tokens."""
        count = self.spec.num_experts

        def products(x: Tensor) -> Tensor:
            logits = self._logits(x).double()
            return logits.T @ logits

        gram = self._sum(products, count, count).cpu().numpy()
        norms = np.sqrt(np.maximum(np.diag(gram), 1e-30))
        return 1 - gram / norms / norms[:, None]

    def _orders(self, members: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Of each member the order of its channels in which they fit the first member's best: the largest sum of products of weights."""
        from scipy.optimize import linear_sum_assignment  # takes a while to import

        up, down = self.block.gate_up.weight, self.block.down.weight
        width = down.shape[-1]

        def channels(expert: int) -> Tensor:
            gate, other = up[expert].float().split(width)
            return torch.cat((gate, other, down[expert].float().T), 1)

        first, found = channels(members[0]), [np.arange(width)]
        for expert in members[1:]:
            found.append(linear_sum_assignment((first @ channels(expert).T).cpu().numpy(), maximize=True)[1])
        return tuple(found)

    def _rows(self, how: str, members: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> Tensor:
        """The router of the groups, float32 [G, D]."""
        if how == "dominant":
            return self.router[[one[0] for one in members]]
        averages = torch.stack(
            [
                torch.tensor(share, device=self.router.device) @ self.router[list(one)]
                for one, share in zip(members, weights, strict=True)
            ]
        )
        if how == "average":
            return averages
        wide, size = [place for place, one in enumerate(members) if len(one) > 1], self.router.shape[1]

        def both(x: Tensor) -> Tensor:
            logits = self._logits(x).double()
            wanted = torch.stack([self._together(logits[:, list(members[place])]) for place in wide], 1)
            x = x.double()
            return x.T @ torch.cat((x, wanted), 1)

        sums = self._sum(both, size, size + len(wide))
        gram, products = sums[:, :size], sums[:, size:]
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        averages[wide] = torch.linalg.solve(gram, products).T.float()
        return averages

    def _together(self, logits: Tensor) -> Tensor:
        """The score [T] by which a group is chosen as often as its members [T, n]: that of the sum of their probabilities, and with
        sigmoids that of at least one."""
        if self.spec.router.kind != "sigmoid":
            return logits.logsumexp(-1)
        none = torch.nn.functional.softplus(logits).sum(-1)  # minus the logarithm of the probability of none
        return none + torch.log1p(-torch.exp(-none))


def hierarchical(distances: np.ndarray, visits: np.ndarray, count: int) -> list[list[int]]:
    """`count` groups: the two with the least mean distance become one, again and again; of equally near ones the first."""
    groups = [[expert] for expert in range(len(distances))]
    apart = distances.astype(np.float64).copy()
    np.fill_diagonal(apart, np.inf)
    while len(groups) > count:
        one, other = sorted(divmod(int(apart.argmin()), len(groups)))
        sizes = len(groups[one]), len(groups[other])
        mean = (sizes[0] * apart[one] + sizes[1] * apart[other]) / sum(sizes)
        apart[one], apart[:, one] = mean, mean
        apart[one, one] = np.inf
        apart = np.delete(np.delete(apart, other, 0), other, 1)
        groups[one] += groups.pop(other)
    return sorted(sorted(group) for group in groups)


def dominant(distances: np.ndarray, visits: np.ndarray, count: int) -> list[list[int]]:
    """`count` groups: the most visited experts, which each of the others joins where it is nearest."""
    order = sorted(range(len(visits)), key=lambda expert: (-visits[expert], expert))
    groups = {expert: [expert] for expert in sorted(order[:count])}
    leaders = list(groups)
    for expert in order[count:]:
        groups[leaders[int(distances[expert][leaders].argmin())]].append(expert)
    return sorted(sorted(group) for group in groups.values())


@dataclass(frozen=True)
class Average:
    """The sum of `weights` times the tensors `names` of several experts, their channels along `axis` in `orders` (empty: as they are)."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    orders: tuple[np.ndarray, ...]
    axis: int

    @property
    def name(self) -> str:
        return self.names[0]

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return source.shape(self.name)

    def make(self, source: WeightSource) -> Tensor:
        if len(self.names) == 1:
            return source.tensor(self.name)
        stored = [source.tensor(name) for name in self.names]
        found = torch.zeros_like(stored[0], dtype=torch.float32)
        for place, (tensor, weight) in enumerate(zip(stored, self.weights, strict=True)):
            if self.orders:
                tensor = tensor.index_select(self.axis, torch.from_numpy(self.orders[place]))
            found.add_(tensor, alpha=weight)
        return found.to(stored[0].dtype)


@dataclass(frozen=True)
class Router:
    """The router `rows` [G, D] in place of that called `name`, or of a vector [E] called so the average of each group."""

    name: str
    groups: LayerGroups
    vector: bool = False

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return (len(self.groups.groups), *source.shape(self.name)[1:])

    def make(self, source: WeightSource) -> Tensor:
        stored = source.tensor(self.name)
        if not self.vector:
            return torch.from_numpy(self.groups.rows).to(stored.dtype)
        pairs = zip(self.groups.groups, self.groups.weights, strict=True)
        return torch.stack([torch.tensor(share, dtype=stored.dtype) @ stored[list(group)] for group, share in pairs])


def merged(source: ModelSource, config: ModelConfig, layers: Sequence[LayerGroups]) -> ModelSource:
    """The model of `config`, whose experts are the groups of those of `source`; tensors are made when they are read."""
    recipes: dict[str, Recipe] = {one.name: Copied(one.name) for one in end_tensors(config)}
    for index, groups in enumerate(layers):
        given = list(layer_tensors(source.config, index))
        for made in layer_tensors(config, index):
            recipes[made.name] = _recipe(made, given, groups)
    return grown(source, config, recipes)


def _recipe(made: DeclaredTensor, given: list[DeclaredTensor], groups: LayerGroups) -> Recipe:
    """How a tensor of a layer is made of those `given`."""
    module = made.module
    alike = [one for one in given if one.path == made.path and len(one.shape) == len(made.shape)]  # weights, or biases
    if groups.groups and made.path == f"{_BLOCK}router":
        return Router(alike[0].name, groups)
    if groups.groups and made.path == f"{_BLOCK}router_bias":
        return Router(alike[0].name, groups, vector=True)
    if module is None or module.linear.experts is None:
        (source,) = [one for one in alike if one.module is None or one.module.rows == module.rows]  # type: ignore[union-attr]
        return Copied(source.name)
    expert, inside = divmod(module.rows.start, module.linear.out_features)
    starts = {one.module.rows.start: one.name for one in alike if one.module is not None}
    names = tuple(starts[member * module.linear.out_features + inside] for member in groups.groups[expert])
    orders = groups.orders[expert] if groups.orders else ()
    return Average(names, groups.weights[expert], orders, 1 if module.linear.residual else 0)


def write(layers: Sequence[LayerGroups], path: Path) -> None:
    """Keeps what was measured, durable: numbers at `path`, which is written last, arrays beside it."""
    arrays = {}
    for index, layer in enumerate(layers):
        if layer.rows is not None:
            arrays[f"{index}.rows"] = layer.rows
        for group, orders in enumerate(layer.orders):
            arrays |= {f"{index}.{group}.{member}": order for member, order in enumerate(orders)}
    file = io.BytesIO()
    np.savez(file, **arrays)
    write_atomic(path.with_suffix(".npz"), file.getvalue())
    write_atomic(path, json.dumps([[layer.groups, layer.weights, bool(layer.orders)] for layer in layers]).encode())


def read(path: Path, mesh: Mesh) -> list[LayerGroups] | None:
    """What `write` kept, on every rank; None: nothing was."""

    def stored() -> list[LayerGroups] | None:
        if not path.exists():
            return None
        found = []
        with np.load(path.with_suffix(".npz")) as arrays:
            for index, (groups, weights, aligned) in enumerate(json.loads(path.read_text(encoding="utf8"))):
                orders = tuple(
                    tuple(arrays[f"{index}.{place}.{member}"] for member in range(len(group)))
                    for place, group in enumerate(groups if aligned else ())
                )
                rows = arrays[f"{index}.rows"] if groups else None
                found.append(LayerGroups(tuple(map(tuple, groups)), tuple(map(tuple, weights)), orders, rows))
        return found

    return mesh.from_leader(stored)
