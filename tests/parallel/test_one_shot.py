"""The all-reduce over peer memory: it compiles to wide accesses everywhere, and adds right where there are several GPUs."""

from __future__ import annotations

import pytest
import torch

from hone.parallel.group import Group, Pipe
from hone.parallel.one_shot import OneShot
from hone.parallel.place import Place
from tests.parallel import on_ranks

triton = pytest.importorskip("triton")


@pytest.mark.parametrize(("size", "kind"), [(2, "fp16"), (8, "bf16")])
def test_the_kernel_compiles_for_hopper(size: int, kind: str) -> None:
    from hone.parallel.one_shot_triton import UNIT, one_shot_kernel
    from tests.ops.compiled import compile_triton

    types = {"x": f"*{kind}", "out": f"*{kind}", "addresses": "*i64", "calls": "*i32"}
    numbers = dict.fromkeys(("units", "half", "rank"), "i32") | {"patience": "i64"}
    found = compile_triton(one_shot_kernel, types | numbers, {"SIZE": size, "UNITS": 128, "UNIT": UNIT}, num_warps=8)
    assert found.clean
    assert found.count("LDG.E.128") == 1 + size and found.count("STG.E.128") == 2
    order = [text for text in found.instructions if text.startswith(("MEMBAR", "ATOMG.E.EXCH", "ATOMG.E.ADD", "BPT"))]
    assert order[0].startswith("MEMBAR.ALL.SYS") and "STRONG.SYS" in order[1] and "STRONG.SYS" in order[2]


def test_only_small_whole_messages_are_taken() -> None:
    one = object.__new__(OneShot)
    one.max_bytes = 1024
    assert one.takes(torch.zeros(512, dtype=torch.bfloat16))
    assert not one.takes(torch.zeros(528, dtype=torch.bfloat16)) and not one.takes(torch.zeros(24))
    assert not one.takes(torch.zeros(32, 32)[:, :16]) and not one.takes(torch.zeros(16, dtype=torch.int64))
    assert not one.takes(torch.zeros(0))


def test_one_rank_changes_nothing() -> None:
    group, x = Group(Place()), torch.arange(6.0).view(2, 3)
    assert group.all_reduce(x) is x and group.all_gather(x) is x


def test_places_of_a_grid() -> None:
    places = [Place.of(rank, 2, 2) for rank in range(4)]
    assert [one.rank for one in places] == [0, 1, 2, 3] and [one.stage for one in places] == [0, 0, 1, 1]
    assert [(one.first, one.last) for one in places] == [(True, False)] * 2 + [(False, True)] * 2
    assert list(places[3].peers) == [2, 3] and str(places[3]) == "rank 3 of 4 (stage 1 of 2)"


def test_ranks_add_and_join_in_their_order() -> None:
    for found in on_ranks.collectives(4):
        assert found == on_ranks.expected(4)


def test_a_pipe_keeps_the_order() -> None:
    assert on_ranks.piped(20)[1] == [float(step) for step in range(20)]
    assert Pipe(Place())._KEPT < 20


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_add_as_nccl_does() -> None:
    """Every size and dtype, many calls in a row, eager and replayed as a graph: equal bits on all ranks."""
    size = max(count for count in (2, 4, 8) if count <= torch.cuda.device_count())
    found = on_ranks.on_gpus(size)
    assert found == ["right"] * size
