"""All-to-all by pairwise exchange: in step s every rank sends to the one s behind it and receives from the one s before it.

Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", section 3.4. With n ranks, B bytes
on each rank, `alpha` seconds a message and `beta` seconds a byte: (n - 1) alpha + (n - 1) / n B beta.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.parallel.axis import Axis


def all_to_all(axis: Axis, x: Tensor) -> Tensor:
    """Row i of x [n, ...] goes to rank i; row i of the result is what rank i sent here."""
    found, me, n = torch.empty_like(x), axis.index, axis.size
    found[me] = x[me]
    for step in range(1, n):
        to, source = (me + step) % n, (me - step) % n
        axis.exchange(to, x[to], source, found[source])
    return found
