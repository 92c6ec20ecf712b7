"""What each of several ranks does in the tests of the readable collectives."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hone.base.errors import HoneError
from hone.base.ranks import Mesh
from hone.parallel.axis import Axis
from hone.parallel.collectives import halving, hierarchical, pairs, ring, tree
from hone.parallel.degrees import Degrees

SIZES = (1, 7, 64, 1001)


def drawn(rank: int, size: int, rows: int = 0) -> Tensor:
    """Whole numbers as float32: their sums are exact in every order."""
    draw = torch.Generator().manual_seed(100 * size + rank)
    return torch.randint(-1000, 1000, (rows, size) if rows else (size,), generator=draw).float()


def axis_of(mesh: Mesh) -> Axis:
    ranks = list(range(mesh.world_size))
    return Axis(ranks, mesh.rank, mesh.group([ranks], "cpu"), mesh.broken)


def wrong() -> list[str]:
    """The names of the collectives whose result is not that of torch's own over gloo."""
    torch.set_num_threads(1)
    mesh, found = Mesh.from_environment(), []
    with mesh.together(), mesh.transfers():
        axis, n = axis_of(mesh), mesh.world_size
        for size in SIZES:
            x = drawn(mesh.rank, size)
            total = x.clone()
            dist.all_reduce(total, group=axis.group)
            sums = {"ring": ring.all_reduce, "halving": halving.all_reduce}
            sums |= {"doubling": halving.doubling, "tree": tree.all_reduce}
            found += [name for name, way in sums.items() if not torch.equal(way(axis, x.clone()), total)]
            mine = total.tensor_split(n)[mesh.rank]
            if not torch.equal(ring.reduce_scatter(axis, x.clone()).tensor_split(n)[mesh.rank], mine):
                found.append("reduce_scatter")
            part = torch.zeros(size)
            part.tensor_split(n)[mesh.rank].copy_(mine)
            if not torch.equal(ring.all_gather(axis, part), total):
                found.append("all_gather")
            found += _rooted(axis, x, total, size)
        if n == 4:
            degrees = Degrees(dp_replicate=2, dp_shard=2)
            rows, columns = degrees.lines(["dp_shard"]), degrees.lines(["dp_replicate"])
            lines = [next(one for one in some if mesh.rank in one) for some in (rows, columns)]
            inside, between = (
                Axis(line, mesh.rank, mesh.group(some, "cpu"), mesh.broken)
                for line, some in zip(lines, (rows, columns), strict=True)
            )
            if not torch.equal(hierarchical.all_reduce(inside, between, x.clone()), total):
                found.append("hierarchical")
    return found


def _rooted(axis: Axis, x: Tensor, total: Tensor, size: int) -> list[str]:
    found, n, me = [], axis.size, axis.index
    for root in range(n):
        theirs, rows = x.clone(), [torch.empty_like(x) for _ in range(n)]
        dist.broadcast(theirs, root, group=axis.group)
        if not torch.equal(tree.broadcast(axis, x.clone(), root), theirs):
            found.append(f"broadcast from {root}")
        ours = tree.reduce(axis, x.clone(), root)
        if me == root and not torch.equal(ours, total):
            found.append(f"reduce to {root}")
        dist.gather(x, rows if me == root else None, root, group=axis.group)
        gathered = tree.gather(axis, x, root)
        if (gathered is not None) != (me == root) or (
            gathered is not None and not torch.equal(gathered, torch.stack(rows))
        ):
            found.append(f"gather to {root}")
        part, given = torch.empty(size), drawn(root, size, n)
        if not torch.equal(tree.scatter(axis, given if me == root else None, part, root), given[me]):
            found.append(f"scatter from {root}")
    given = drawn(me, size, n)
    swapped = torch.stack([drawn(rank, size, n)[me] for rank in range(n)])
    return found if torch.equal(pairs.all_to_all(axis, given), swapped) else [*found, "all_to_all"]


def ended(how: str) -> str:
    """What rank 0 raises in the middle of a ring when rank 1 is killed, or raises an error of its own."""
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    try:
        with mesh.together(), mesh.transfers():
            axis = axis_of(mesh)
            ring.all_reduce(axis, torch.ones(64))
            axis.patience = timedelta(seconds=1)  # from here on nothing comes; before, a rank may be slow
            if mesh.rank == 1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ZeroDivisionError("a bug")
            ring.all_reduce(axis, torch.ones(64))
    except (HoneError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"


def measured(sizes: list[int]) -> list[dict]:
    """The table that the ranks measure together."""
    from hone.parallel.collectives.measure import measure

    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    with mesh.together():
        return [one.model_dump() for one in measure(mesh, "cpu", sizes=sizes, budget_s=0.01)]
