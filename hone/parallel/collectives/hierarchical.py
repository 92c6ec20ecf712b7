"""All-reduce in two levels: fast links inside a machine carry whole messages, slow ones between machines a slice of them.

The ring of each level as in `ring`; the division as in Mikami et al. 2018, arXiv:1811.05233 (2D-torus all-reduce). With m ranks
inside (seconds a message and a byte `alpha`, `beta`), k machines (`alpha'`, `beta'`) and a message of B bytes:

    2 (m - 1) alpha + 2 (m - 1) / m B beta  +  2 (k - 1) alpha' + 2 (k - 1) / k B / m beta'
"""

from __future__ import annotations

from torch import Tensor

from hone.parallel.axis import Axis
from hone.parallel.collectives import ring


def all_reduce(inside: Axis, between: Axis, x: Tensor) -> Tensor:
    """x [N] becomes the sum of every rank's x, the same bits on all.

    `inside` are the ranks of this machine in order, `between` those with this rank's place on every machine.
    """
    ring.reduce_scatter(inside, x)
    ring.all_reduce(between, x.tensor_split(inside.size)[inside.index])
    return ring.all_gather(inside, x)
