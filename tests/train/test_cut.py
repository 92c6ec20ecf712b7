"""Pipeline stages cut by the simulated step: exact where all cuts are tried, never worse, within memory, and the run's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.cost.dims import ModelDims
from hone.cost.train import cut as cuts
from hone.cost.train.cut import cut
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.pipeline import layer_seconds
from hone.cost.train.search import search
from hone.cost.train.training import Training
from hone.cost.train.update import masked
from hone.measure.machine import Machine
from hone.train import PIPELINE_SCHEDULES
from hone.train.activation_checkpointing import Segment
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from tests.cost.h200 import h200, row
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import SPEC, on_ranks
from tests.train.ranks import cut_at

Seconds = Callable[[tuple[int, ...]], float]


def table_of(seed: int) -> Seconds:
    """Seconds of a cut without any order among them, some of them equal."""
    known: dict[tuple[int, ...], float] = {}
    draw = np.random.default_rng(seed)
    return lambda one: known.setdefault(one, float(draw.integers(1, 30)))


def asked(seconds: Seconds, seen: list[tuple[int, ...]]) -> Any:
    def ask(rows: Any) -> Any:
        seen.extend(map(tuple, rows.tolist()))
        return np.array([seconds(tuple(one)) for one in rows.tolist()])

    return ask


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(3, 9), stages=st.integers(2, 5), seed=st.integers(0, 999), most=st.integers(1, 60), data=st.data()
)
def test_all_cuts_where_they_are_few_and_else_a_climb(
    count: int, stages: int, seed: int, most: int, data: st.DataObject
):
    begins = sorted(data.draw(st.sets(st.integers(1, count - 1), min_size=min(stages, count) - 1)))
    stages = min(stages, len(begins) + 1)
    every = [(0, *inner, count) for inner in combinations(begins, stages - 1)]
    first, seconds, seen = data.draw(st.sampled_from(every)), table_of(seed), []
    found, took = search(first, begins, asked(seconds, seen), most)
    assert len(seen) == len(set(seen)) <= max(most, 1) and {*map(tuple, found.tolist())} == set(seen) <= set(every)
    assert [seconds(tuple(one)) for one in found.tolist()] == took.tolist() == sorted(took.tolist())
    least = min(map(seconds, every))
    if len(every) <= most:
        assert took[0] == least
    assert took[0] <= seconds(first)
    if took[0] == seconds(first):
        assert tuple(found[0]) == first, "no other cut is taken that is only as good"


def test_a_climb_moves_a_layer_over_stages_between():
    """Stages of 6, 3, 3 and 3 layers: no move between neighbours makes the longest one shorter, one to the last stage does."""

    def seconds(one: tuple[int, ...]) -> float:
        sizes = [end - begin for begin, end in pairwise(one)]
        return max(sizes[0], 1.5 * sizes[1], 1.5 * sizes[2], sizes[3])

    first = (0, 6, 9, 12, 15)
    found, took = search(first, range(1, 15), asked(seconds, []), 300)  # of 364 cuts
    assert took[0] == 5 and tuple(found[0]) == (0, 5, 8, 11, 15)


def work_of(schedule: str, machine: Machine, layers: int, micro_batches: int, **others: Any) -> Training:
    """A Llama of the 8B shape with `layers` layers, in bf16."""
    sizes = {"num_layers": layers, "hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8}
    shape = SHAPE.model_copy(update={**sizes, "head_dim": 128, "max_seq_len": 8192, "tie_embeddings": False})
    config, dtype = shape.config(128256), "bfloat16"
    parallelism = Parallelism(
        pipeline_parallel_degree=machine.num_ranks, pipeline_parallel_schedule=PIPELINE_SCHEDULES.read(schedule)
    )

    def timed(dims: ModelDims) -> Any:
        return layer_seconds(dims, machine, tokens=8192, seq_len=8192, dtype=dtype)

    shared = parallelism.shared(config, lambda part: AdamW().cost(part, dtype, "cuda"), micro_batches, 8192, timed)
    kept = {"segments": (Segment(0, layers, False),), **others}
    return Training(
        config.dims(), 1, micro_batches, 8192, dtype, update=shared.update, packed=False, pipeline=shared.pipeline,
        gradient_accumulation_steps=micro_batches, **kept,
    )  # fmt: skip


def lengths(work: Training) -> list[int]:
    assert work.pipeline is not None
    return [len(one) for one in work.pipeline.layers]


@pytest.mark.parametrize(("schedule", "layers"), [("zb_v", 8), ("gpipe", 8), ("1f1b", 7), ("dualpipe", 6)])
def test_it_is_the_best_of_all_cuts(schedule, layers):
    """Half of the layers are recomputed, so that they are of two kinds. The oracle simulates each cut by itself."""
    machine = h200().model_copy(update={"num_ranks": 2})
    recomputed = tuple(Segment(one, one + 1, one % 2 == 0) for one in range(layers))
    work = work_of(schedule, machine, layers, 4, segments=recomputed)
    assert work.pipeline is not None
    every = {}
    for inner in combinations(range(1, layers), len(work.pipeline.layers) - 1):
        one = work.pipeline.cut([range(*pair) for pair in pairwise((0, *inner, layers))], "an oracle")
        every[inner] = step_seconds(replace(work, pipeline=one, update=one.updates[one.largest]), machine).value
    found = cut(work, machine)
    assert step_seconds(found, machine).value == pytest.approx(min(every.values()), rel=1e-9)
    assert step_seconds(found, machine).value <= step_seconds(work, machine).value


def test_a_heavy_head_and_many_layers():
    """zb_v of 12 layers on two GPUs, whose last stage has the head: the first and the last stage are on one rank."""
    machine = h200().model_copy(update={"num_ranks": 2})
    work = work_of("zb_v", machine, 12, 6)
    found = cut(work, machine)
    assert step_seconds(found, machine).value < 0.93 * step_seconds(work, machine).value
    assert found.pipeline is not None and found.pipeline.cut_by == "the simulated seconds of a step"
    assert cut(found, machine) is found, "its own cut is the best"
    held = cut(work, machine, zeros=True)
    assert held.pipeline == found.pipeline and held.update == masked(found.update, work.model)
    eight = h200().model_copy(update={"num_ranks": 4})
    many = work_of("interleaved", eight, 32, 8)  # more cuts than are tried
    climbed = cut(many, eight)
    assert step_seconds(climbed, eight).value < 0.95 * step_seconds(many, eight).value


def test_no_cut_that_memory_does_not_hold_and_none_where_it_changes_the_result(monkeypatch):
    machine = h200().model_copy(update={"num_ranks": 2})
    work = work_of("zb_v", machine, 12, 6)
    needed = growth_bytes(work, "cuda").value
    assert growth_bytes(cut(work, machine), "cuda").value > needed
    small = [gpu.model_copy(update={"memory_bytes": int(needed) + 1}) for gpu in machine.gpus]
    tight = cut(work, machine.model_copy(update={"gpus": small}))
    assert growth_bytes(tight, "cuda").value <= needed
    assert step_seconds(tight, machine).value <= step_seconds(work, machine).value
    asynchronous = work_of("pipedream", machine, 12, 6)
    assert cut(asynchronous, machine) is asynchronous
    monkeypatch.setattr(cuts, "MOST_PASSES", 0)
    assert cut(work, machine) is work


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "zb_h1", "interleaved", "dualpipe_v", "gpipe"])
def test_memory_of_a_rank_is_what_the_ledger_measured(schedule):
    """All forwards of `gpipe` are over before there are gradients of weights; the others have them at their peak."""
    found = row("train", f"llama3-8b, 8 layers on 2 cuda pipeline ranks, bf16, 6 micro-batches of 1 x 8192: {schedule}")
    work = work_of(schedule, h200().model_copy(update={"num_ranks": 2}), 8, 6)
    assert work.pipeline is not None
    told = re.search(r"; layers ([\d ]+)", found["note"])  # rows that do not say it are of layers divided by operations
    sizes = map(int, told[1].split()) if told else (5, 3) if len(work.pipeline.layers) == 2 else (2, 2, 3, 1)
    layers = [range(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
    work = replace(work, pipeline=work.pipeline.cut(layers, "the ledger"))
    assert growth_bytes(work, "cuda").value == pytest.approx(found["peak_bytes"], rel=0.03)


def test_all_ranks_run_the_cut_that_the_first_one_planned(data_folder, tmp_path):
    spec = {**SPEC, "steps": 1, "batch_size": 4, "gradient_accumulation_steps": 2}
    spec["parallelism"] = {"pipeline_parallel_degree": 2}
    assert on_ranks(2, cut_at, spec, str(data_folder), str(tmp_path / "made"), 3) == [[3, 1], [3, 1]]
