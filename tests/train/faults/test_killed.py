"""A rank killed at any collective of a training: the others end with one error, and it resumes on as many ranks or others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hone.base.durable import read_jsonl
from hone.model.hf import load
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY
from tests.train.data_parallel.test_data_parallel import on_ranks
from tests.train.faults.fault_ranks import killed
from tests.train.ranks import made

SPEC: dict[str, Any] = {
    "model": SHAPE.model_dump(),
    "batch_size": 8,
    "gradient_accumulation_steps": 2,
    "seq_len": 32,
    "steps": 4,
    "validation": {"sequences": 4},
    "checkpoint": {"interval": 1},
    "optimizer": {"lr": 1e-3, **STEADY},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"data_parallel": "ddp"}),
    "zero3": (2, {"data_parallel": "zero3"}),
    "hsdp": (4, {"data_parallel": {"kind": "zero3", "data_parallel_replicate_degree": 2}}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "ring": (2, {"context_parallel_degree": 2}),
    "ulysses": (2, {"context_parallel_degree": 2, "context_parallel": "ulysses"}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "tp-dp": (4, {"tensor_parallel_degree": 2, "data_parallel": "zero1"}),
}
CASES = [
    ("zero3", "reduce_scatter", 2, True, "ddp"),
    ("pp", "send", 2, False, "pp"),
    ("ddp", "checkpoint", 2, False, "zero3"),
]
"""(layout, op, which call of it, while it is under way, layout that resumes)."""
MORE = [
    ("ddp", "all_reduce", 1, True, "hsdp"),
    ("ddp", "meeting", 2, False, "ddp"),
    ("zero3", "all_gather", 5, False, "zero3"),
    ("zero3", "all_gather", 1, True, "tp"),
    ("zero3", "reduce_scatter", 1, False, "zero3"),
    ("hsdp", "all_reduce", 1, False, "ddp"),
    ("hsdp", "reduce_scatter", 3, True, "hsdp"),
    ("pp", "receive", 2, True, "ddp"),
    ("ring", "rotate", 2, False, "ring"),
    ("ring", "rotate", 3, True, "ddp"),
    ("ulysses", "all_to_all", 2, False, "ulysses"),
    ("ulysses", "all_to_all", 1, True, "tp-dp"),
    ("tp", "all_gather", 3, False, "tp"),
    ("tp", "reduce_scatter", 2, True, "ring"),
    ("tp-dp", "all_gather", 2, False, "zero3"),
    ("tp-dp", "checkpoint", 1, False, "tp-dp"),
    ("zero3", "checkpoint", 3, True, "zero3"),
]


def spec(layout: str) -> dict[str, Any]:
    return {**SPEC, "parallelism": LAYOUTS[layout][1]}


@pytest.fixture(scope="module")
def whole(data_folder, tmp_path_factory):
    """A function that gives the finished folder of a layout whose ranks all lived."""
    folder, found = tmp_path_factory.mktemp("whole"), {}

    def of(layout: str) -> Path:
        if layout not in found:
            found[layout] = on_ranks(LAYOUTS[layout][0], made, spec(layout), str(data_folder), str(folder / layout))[0]
        return folder / layout

    of.contents = found
    return of


def id_of(case: tuple[Any, ...]) -> str:
    layout, op, count, during, then = case
    return f"{layout}-{op}-{count}-{'during' if during else 'before'}-then-{then}"


@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)],
    ids=[id_of(one) for one in CASES + MORE],
)
def test_the_others_end_with_one_error_and_the_training_goes_on(case, whole, data_folder, tmp_path):
    layout, op, count, during, then = case
    out = tmp_path / "x"
    ended = together(LAYOUTS[layout][0], killed, spec(layout), str(data_folder), str(out), op, count, during)
    assert ended[1].returncode == -signal.SIGKILL, f"it made no call {count} of {op}"
    for rank, one in enumerate(ended):
        if rank != 1:
            assert one.returncode == 0 and "Traceback" not in one.stderr, one.stderr[-2000:]
            what, fix = one.result.split("\n")
            assert "lost" in what and fix.startswith("fix: ") and "the stage resumes" in fix, one.result
    again = on_ranks(LAYOUTS[then][0], made, spec(then), str(data_folder), str(out))
    assert len(set(again)) == 1
    reference = whole(layout)
    if then == layout:
        assert again[0] == whole.contents[layout]
    ours, theirs = load(out).state_dict(), load(reference).state_dict()
    for name, one in theirs.items():
        assert (ours[name] - one).abs().max() <= 4e-6, name
    rows = [
        [row.get("loss", row.get("val_loss")) for row in read_jsonl(one / "steps.jsonl")] for one in (out, reference)
    ]
    assert rows[0] == pytest.approx(rows[1], abs=4e-6)


@pytest.mark.slow(seconds=30)
@pytest.mark.timeout(800)
def test_torchrun_starts_all_again_and_they_resume(data_folder, tmp_path):
    """`--max-restarts=1`, with one rank killed once: to the bit the training in which it lived."""
    num_ranks = 2  # of more, torchrun starts as many; each imports for seconds, twice
    [content, *_] = on_ranks(num_ranks, made, spec("zero3"), str(data_folder), str(tmp_path / "whole"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["--max-restarts=1", "-m", "tests.train.faults.elastic", json.dumps(spec("zero3")), str(data_folder)]
    command += [str(tmp_path / "x"), str(tmp_path / "mark")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (tmp_path / "mark").exists() and f"content {content}" in ended.stdout
