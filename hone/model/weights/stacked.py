"""Experts that a checkpoint stores as one tensor of all of a layer: read as a module for each, and written so again.

gpt-oss stores `gate_up_proj` [E, K, 2N] with gates and ups in alternating columns and `gate_up_proj_bias` [E, 2N]; in MXFP4
`gate_up_proj_blocks` uint8 [E, 2N, K / 32, 16], two codes a byte, the even column in the low nibble, and `gate_up_proj_scales` uint8
[E, 2N, K / 32], exponents + 127. The rest of hone knows one expert's modules, 'experts.3.gate_proj': its `weight` [N, K] and `bias`,
or `weight_packed` uint8 [N, K / 2] and `weight_scale` uint8 [N, K / 32] as compressed-tensors has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.weights.source import View, WeightSource

_SUFFIXES = {"weight": "", "bias": "_bias", "weight_packed": "_blocks", "weight_scale": "_scales"}
"""The tensors of one expert's module, and what the name of all experts' ends with."""
_GROUP_BYTES = 16
"""Bytes of a block of MXFP4: 32 codes."""

Stacked = Mapping[str, tuple[str, ...]]
"""`Family.stacked`: the tensor of all experts, and the modules of one whose rows alternate in it."""


class _Place(NamedTuple):
    """Where a module's tensor is: in `stored`, of `expert`, every `count`-th row from `first` on."""

    stored: str
    expert: int
    first: int
    count: int
    suffix: str


class ApartExperts(View):
    """The weights of `source` with a module for every expert in place of one tensor of all."""

    def __init__(self, source: WeightSource, stacked: Stacked) -> None:
        super().__init__(source)
        ends = {f"{name}{end}": (name, suffix) for name in stacked for suffix, end in _SUFFIXES.items()}
        self._places: dict[str, _Place] = {}
        self._others: list[str] = []
        for name in source.names():
            owner, _, leaf = name.rpartition(".")
            if leaf not in ends or not owner.endswith(".experts"):
                self._others.append(name)
                continue
            whole, suffix = ends[leaf]
            shape, pieces = source.shape(name), stacked[whole]
            _check(source.file(name), name, shape, suffix, len(pieces))
            for expert in range(shape[0]):
                for first, piece in enumerate(pieces):
                    place = _Place(name, expert, first, len(pieces), suffix)
                    self._places[f"{owner}.{expert}.{piece}.{suffix}"] = place

    def names(self) -> list[str]:
        return [*self._others, *self._places]

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            return self.source.shape(name)
        whole = self.source.shape(place.stored)[1:]
        if place.suffix == "weight":
            return whole[1] // place.count, whole[0]
        rows = whole[0] // place.count
        return (rows, whole[1] * whole[2]) if place.suffix == "weight_packed" else (rows, *whole[1:])

    def tensor(self, name: str) -> Tensor:
        place = self._places.get(name)
        if place is None:
            return self.source.tensor(name)
        stored = self.source.tensor(place.stored)[place.expert]
        rows = (stored.T if place.suffix == "weight" else stored)[place.first :: place.count].contiguous()
        return rows.flatten(1) if place.suffix == "weight_packed" else rows

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """`index` of the tensor called `name`."""
        return self.tensor(name)[index] if name in self._places else self.source.part(name, index)  # type: ignore[attr-defined]

    def stored(self, name: str) -> str:
        """The tensor of the source in which the one called `name` is."""
        place = self._places.get(name)
        return name if place is None else place.stored

    def file(self, name: str) -> Path:
        return self.source.file(self.stored(name))


def _check(file: Path, name: str, shape: tuple[int, ...], suffix: str, count: int) -> None:
    """Raises ArtifactError unless rows of `count` modules alternate in a tensor of this `shape`."""
    axes = {"weight": 3, "bias": 2, "weight_packed": 4, "weight_scale": 3}[suffix]
    rows = -1 if suffix == "weight" else 1
    if len(shape) != axes or shape[rows] % count or (axes == 4 and shape[-1] != _GROUP_BYTES):
        raise ArtifactError(
            f"{file}: {name} has shape {list(shape)}, which is none of all experts of a layer",
            fix="pair the weights with the config.json they were saved with",
        )


def stack_experts(
    tensors: Iterable[tuple[str, Tensor]], stacked: Stacked, device: str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """`tensors` with one tensor of all experts in place of their modules', each as soon as the tensors of its layer are there.

    The modules of one layer must come before those of the next: the experts of one layer are held at a time. Raises
    ArtifactError for experts that are stored otherwise, some of which cannot be one tensor.
    """
    pieces = {piece: (name, first, len(each)) for name, each in stacked.items() for first, piece in enumerate(each)}
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)\.([^.]+)")
    held: dict[str, dict[tuple[int, int], tuple[str, Tensor]]] = {}
    layer = ""
    for name, tensor in tensors:
        found = pattern.fullmatch(name)
        if found is not None and found[3] in pieces:
            if found[4] not in _SUFFIXES:
                raise ArtifactError(
                    f"{name} has no place in {found[1]}.{pieces[found[3]][0]}, the tensor of all experts",
                    fix="save it with hone.save, which has a format of its own for such experts",
                )
            if found[1] != layer:
                yield from _joined(held, device)
                held, layer = {}, found[1]
            whole, first, _ = pieces[found[3]]
            room = held.setdefault(f"{found[1]}.{whole}{_SUFFIXES[found[4]]}", {})
            room[int(found[2]), first] = found[4], tensor
        else:
            yield name, tensor
    yield from _joined(held, device)


class _Held:
    """Tensors in memory as a source."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def file(self, name: str) -> Path:
        return Path(name)


def unstack_experts(tensors: Mapping[str, Tensor], stacked: Stacked) -> dict[str, Tensor]:
    """The inverse of `stack_experts` for tensors in memory."""
    apart = ApartExperts(_Held(tensors), stacked)  # type: ignore[arg-type]
    return {name: apart.tensor(name) for name in apart.names()}


def _joined(
    held: Mapping[str, Mapping[tuple[int, int], tuple[str, Tensor]]], device: str
) -> Iterator[tuple[str, Tensor]]:
    for name, modules in held.items():
        suffix, some = next(iter(modules.values()))
        count = 1 + max(first for _, first in modules)
        experts = 1 + max(expert for expert, _ in modules)
        assert len(modules) == experts * count, f"{name}: {len(modules)} modules of {experts} experts"
        out = torch.empty(experts, some.shape[0] * count, *some.shape[1:], dtype=some.dtype, device=device)
        for (expert, first), (_, tensor) in modules.items():
            out[expert, first::count] = tensor.to(device)
        if suffix == "weight":
            out = out.transpose(1, 2)
        yield name, out.unflatten(-1, (-1, _GROUP_BYTES)) if suffix == "weight_packed" else out
