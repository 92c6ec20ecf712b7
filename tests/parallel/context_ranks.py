"""What each of several ranks does in the tests of attention over ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from hone.base.errors import HoneError
from hone.base.ranks import Mesh
from hone.model.context import Causal, Packed
from hone.parallel.axis import Axis
from hone.parallel.context.all_gather import all_gather
from hone.parallel.context.layout import Layout
from hone.parallel.context.ring import ring
from hone.parallel.context.ulysses import ulysses

WAYS = {"ring": ring, "all_gather": all_gather, "ulysses": ulysses}
LENGTH = 48
SETTINGS: list[dict[str, Any]] = [
    {},
    {"kv_heads": 2},
    {"kv_heads": 1, "v_dim": 12},
    {"documents": True},
    {"window": 7},
    {"documents": True, "window": 9, "kv_heads": 2},
    {"softcap": 2.0, "documents": True},
    {"sinks": True, "kv_heads": 2, "window": 9},
    {"contiguous": True, "documents": True, "kv_heads": 2},
    {"dtype": "bfloat16"},
]


def documents(batch: int, length: int) -> torch.Tensor:
    """Documents of uneven lengths: one longer than a rank's part, some of one token."""
    ends = [[1, 2, 9, 40], [25, 26, 47]]
    places = torch.arange(length)
    return torch.stack([(places[:, None] >= torch.tensor(ends[row % 2])).sum(1) for row in range(batch)])


def axis_of(mesh: Mesh) -> Axis:
    ranks = list(range(mesh.world_size))
    return Axis(ranks, mesh.rank, mesh.group([ranks], "cpu"), mesh.broken)


def errors() -> list[dict[str, float]]:
    """For every setting and technique the largest error of out, dq, dk and dv against one process in float64."""
    torch.set_num_threads(1)
    mesh, found = Mesh.from_environment(), []
    with mesh.together(), mesh.transfers():
        axis = axis_of(mesh)
        for setting in SETTINGS:
            found.append({name: error(way, axis, name != "ulysses", **setting) for name, way in WAYS.items()})
    return found


def error(
    way: Any,
    axis: Axis,
    zigzag: bool,
    *,
    kv_heads: int = 4,
    v_dim: int = 16,
    documents: bool = False,
    contiguous: bool = False,
    dtype: str = "float32",
    **options: Any,
) -> float:
    drawn, ids = torch.Generator().manual_seed(0), DOCUMENTS if documents else None
    sizes = {"q": (4, 16), "k": (kv_heads, 16), "v": (kv_heads, v_dim), "d": (4, v_dim)}
    whole = [torch.randn(2, LENGTH, *size, generator=drawn).to(getattr(torch, dtype)) for size in sizes.values()]
    context = Causal(torch.zeros(2, LENGTH)) if ids is None else Packed(ids)
    sinks = [torch.tensor([-1.0, 0.5, 2.0, 0.0], requires_grad=True)] if options.pop("sinks", False) else []
    options = {"window": None, **options, "scale": 0.25}
    leaves = [part.double().requires_grad_() for part in whole[:3]] + [one.double() for one in sinks]
    given = [{"sinks": one} for one in (leaves[3], sinks[0])] if sinks else [{}, {}]
    out = context.attend(0, *leaves[:3], **options, **given[0])
    wanted = [out, *torch.autograd.grad(out, leaves, whole[3].double())]
    layout = Layout(LENGTH, axis.size, axis.index, zigzag=zigzag and not contiguous, document_ids=ids)
    assert torch.equal(layout.positions.expand(2, -1), layout.mine(context.positions))
    mine = [layout.mine(part).requires_grad_() for part in whole[:3]]
    out = way(*mine, layout, axis, **options, **given[1])
    got = [out, *torch.autograd.grad(out, mine + sinks, layout.mine(whole[3]))]
    assert all(one.dtype == getattr(torch, dtype) for one in got[:4])
    pairs = [(one, layout.mine(other)) for one, other in zip(got[:4], wanted[:4], strict=True)]
    for one, other in zip(got[4:], wanted[4:], strict=True):
        torch.distributed.all_reduce(one)
        pairs.append((one, other))
    return max(((one - other).abs() / other.abs().clamp(min=1)).max().item() for one, other in pairs)


DOCUMENTS = documents(2, LENGTH)


class Counting(Axis):
    """An axis that counts the bytes which this rank receives."""

    received = 0

    def rotate(self, x: torch.Tensor, part: torch.Tensor) -> Any:
        self.received += x.nbytes
        return super().rotate(x, part)

    def all_to_all(self, x: torch.Tensor, parts: torch.Tensor) -> Any:
        self.received += x.nbytes * (self.size - 1) // self.size
        return super().all_to_all(x, parts)

    def all_gather(self, x: torch.Tensor, part: torch.Tensor) -> Any:
        self.received += part.nbytes * (self.size - 1)
        return super().all_gather(x, part)

    def reduce_scatter(self, part: torch.Tensor, x: torch.Tensor) -> Any:
        self.received += part.nbytes * (self.size - 1)
        return super().reduce_scatter(part, x)


def moved_bytes() -> dict[str, tuple[int, int]]:
    """Bytes that a rank receives in each technique's forward and backward pass over a layer of the tests' model, in float32."""
    torch.set_num_threads(1)
    mesh, found = Mesh.from_environment(), {}
    with mesh.together(), mesh.transfers():
        plain = axis_of(mesh)
        for name, way in WAYS.items():
            axis = Counting(plain.ranks, mesh.rank, plain.group, plain.broken)
            layout = Layout(LENGTH, axis.size, axis.index, zigzag=name != "ulysses")
            q, k, v = (torch.zeros(2, LENGTH // axis.size, heads, 12, requires_grad=True) for heads in (4, 2, 2))
            out = way(q, k, v, layout, axis, scale=0.25)
            forward = axis.received
            out.sum().backward()
            found[name] = forward, axis.received - forward
    return found


def ended(at: str) -> str:
    """What the ranks raise when rank 1 is killed in the forward or the backward pass of a ring, or has an error."""
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    try:
        with mesh.together(), mesh.transfers():
            axis = axis_of(mesh)
            layout = Layout(LENGTH, axis.size, axis.index)
            x = torch.randn(2, LENGTH // axis.size, 4, 16, requires_grad=True)
            out = ring(x, x, x, layout, axis, scale=0.25)
            if mesh.rank == 1 and at == "forward":
                os.kill(os.getpid(), signal.SIGKILL)
            out = ring(out, out, out, layout, axis, scale=0.25)
            if mesh.rank == 1 and at == "error":
                raise ZeroDivisionError("a bug")
            if mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            out.sum().backward()
    except (HoneError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
