"""Seconds of a sweep that chooses masks, and of the operations that its estimate counts: `python -m benchmarks.mask_seconds`.

One core, half a minute. Processor seconds of one thread, each the least of rounds until four rounds made none smaller: that of a
moment without other work. A row for each pattern goes to benchmarks/ledger/masks.jsonl, with the sweep's operation starts and
the bytes of their operands, by which tests/cost/test_compress.py sees that the sweep is still the one that was measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import ledger
from hone.compress import PRUNERS
from hone.compress.matrix import Matrix

ROWS, COLUMNS = 1536, 512
PATTERNS = ("none", "2:4", "4:8")


class Counted(TorchDispatchMode):
    """Operations that are started inside, and the bytes of their operands and results, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops, self.num_bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.num_ops += 1
            leaves = tree_leaves((args, kwargs, found))
            self.num_bytes += sum(one.nbytes for one in leaves if isinstance(one, torch.Tensor))
        return found


def sweep(pattern: str) -> Callable[[], None]:
    """A call that prunes a random matrix of ROWS x COLUMNS by SparseGPT."""
    generator = torch.Generator().manual_seed(0)
    weights, x = torch.randn(ROWS, COLUMNS, generator=generator), torch.randn(2048, COLUMNS, generator=generator)
    step, given = PRUNERS.read({"kind": "sparsegpt", "pattern": pattern}), {"hessian": x.T @ x / 2048}
    return lambda: step.apply(Matrix("w", weights, torch.float32, dict(given)))


def counted(pattern: str) -> Counted:
    """What a sweep starts and moves."""
    with Counted() as found:
        sweep(pattern)()
    return found


def measured(pattern: str) -> list[float]:
    """Seconds of a byte of a large copy, of an operation's start, of a product's operation, and of the sweep."""
    large, small, square = torch.randn(4096, 4096), torch.ones(8), torch.randn(1024, 1024)
    into, pruned = torch.empty_like(large), sweep(pattern)
    works: tuple[tuple[Callable[[], object], float], ...] = (
        (lambda: into.copy_(large), 2.0 * large.nbytes),
        (lambda: [small.add_(small) for _ in range(1000)], 1000.0),
        (lambda: square @ square, 2e9),
        (pruned, 1.0),
    )
    least, settled = [math.inf] * 4, 0
    for _ in range(80):
        found = [_seconds(work) / count for work, count in works]
        settled = settled + 1 if all(one > 0.97 * best for one, best in zip(found, least, strict=True)) else 0
        least = [min(pair) for pair in zip(least, found, strict=True)]
        if settled == 4:
            break
    return least


def _seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for pattern in PATTERNS:
        byte_s, op_s, flop_s, seconds = measured(pattern)
        found = counted(pattern)
        counts = {"num_ops": found.num_ops, "operand_bytes": found.num_bytes}
        rates = {"byte_s": byte_s, "op_s": op_s, "flop_s": flop_s}
        figure = f"sparsegpt {ROWS} x {COLUMNS}, pattern {pattern}"
        rows.append({"figure": figure, "value": seconds, "unit": "s", "n": 1, **rates, **counts})
    ledger.append("masks", rows)
    print(ledger.table(rows))


if __name__ == "__main__":
    main()
