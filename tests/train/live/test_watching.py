"""What is seen of a running training: times of its ranks, the view in a terminal, profiles, both conventions of MFU."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import FitError, SpecError
from hone.base.ranks import Mesh, Waits
from hone.base.run import Bar, Run
from hone.cli import main
from hone.cost.dims import ModelDims
from hone.feed.load import PackedTokens
from hone.model.decoder import build
from hone.train.curves.wandb import WandbCurves
from hone.train.live import screen
from hone.train.live.profiling import Profiler, from_options
from hone.train.live.rank_times import STEPS, RankTimes, Stragglers, Took
from hone.train.live.screen import Screen, curve
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from hone.train.watch import Watch
from tests.ranked import together
from tests.train.conftest import SHAPE

SPEC = {"model": SHAPE.model_dump(), "batch_size": 4, "seq_len": 32, "steps": 5, "validation": {"sequences": 4}}
TRACED = {"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 1}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_own_work_is_what_is_left_of_a_step_without_waits():
    clock = Clock()
    mesh = Mesh(1, 1, 2, waits=Waits(clock))
    times = RankTimes(mesh, torch.device("cpu"), clock)
    assert times.own == (0.0, 0.0)
    with mesh.waits.around(False):  # of an evaluation before
        clock.now += 50
    times.begins()
    clock.now += 1  # reads
    times.arrives()
    clock.now += 2  # meets
    times.passes()
    clock.now += 3  # forward
    with mesh.waits.around(False):
        clock.now += 4  # another rank's weights
    clock.now += 5  # backward
    times.computed()
    clock.now += 6  # meets
    times.met()
    with mesh.waits.around(False):
        clock.now += 7  # updates before the numbers are read
    times.ends()
    assert times.own == pytest.approx((1 + 3 + 5, 2 + 4 + 6))
    times.gathered(7, torch.tensor([[3.0, 18.0], times.own], dtype=torch.float64))
    assert times.last.row() == {"step": 7, "busy_s": [3.0, 9.0], "wait_s": [18.0, 12.0]}
    times.gathered(8, torch.zeros(2, 2))  # ranks that have just resumed have none
    assert times.last.step == 7
    alone = RankTimes(Mesh(), torch.device("cpu"), clock)
    for mark in (alone.begins, alone.arrives, alone.passes, alone.computed, alone.met, alone.ends):
        mark()
    alone.gathered(1, torch.ones(1, 2))
    assert alone.last is None and alone.own == (0.0, 0.0)


def test_an_update_is_no_wait(data_folder):
    clock = Clock()
    data = PackedTokens(data_folder)
    trainer = Trainer(build(SHAPE.config(data.vocab_size), seed=1), steps=2, schedule=Cosine(warmup=1))
    trainer.times = RankTimes(Mesh(0, 0, 2), trainer.device, clock)
    apply = trainer.update.apply

    def slow(*numbers: Any) -> None:
        apply(*numbers)
        clock.now += 100

    trainer.update.apply = slow
    trainer.step(data.batch(0, 2, 32, 0))
    assert trainer.times.own == (0.0, 0.0) and clock.now == 200


def steps_of(seen: Stragglers, busy: list[float], number: int, first: int = 1) -> list[str]:
    told = [seen.notice(Took(step, busy, [0.0] * len(busy))) for step in range(first, first + number)]
    return [one for one in told if one]


def test_the_rank_that_others_wait_for_is_named_once():
    seen = Stragglers(["a", "a", "b", "b"])
    assert steps_of(seen, [1, 1, 1, 1.19], STEPS) == []
    assert steps_of(seen, [1, 1, 9, 1], 3) == [], "a pause is no straggler"
    (told,) = steps_of(seen, [1, 1.1, 1, 1.5], 2 * STEPS, first=30)
    assert told.startswith(
        "the other ranks wait for rank 3 (on b): its own work takes 1.5 times that of the median rank"
    )
    assert steps_of(seen, [1, 1, 1, 1], STEPS) == ["rank 3 is as fast as the others again"]
    assert len(steps_of(Stragglers(["a", "b"]), [1, 1.3], STEPS)) == 1, "of two ranks the faster one is the usual one"
    assert steps_of(Stragglers(["a"] * 4, stages=2), [1, 1, 3, 3], STEPS) == [], "stages have other layers"


def test_the_curve_shows_the_highest_and_the_lowest_value():
    assert curve([4, 1], 1, 1) == [chr(0x2800 + 0x01 + 0x08 + 0x10 + 0x20 + 0x80)]
    falling = curve(range(1000, 0, -1), 30, 6)
    assert len(falling) == 6 and {len(line) for line in falling} == {30}
    blank = chr(0x2800)
    assert falling[0].rstrip(blank) and falling[0].endswith(blank * 20) and falling[-1].startswith(blank * 20)
    assert "".join(curve([2.0, 2.0], 5, 2)).strip(blank)


def shown(view: Screen, width: int) -> str:
    out = Console(width=width, file=io.StringIO(), force_terminal=False)
    out.print(view.view())
    return out.file.getvalue()


def filled(number: int, ranks: int = 4) -> Screen:
    terminal = Console(width=100, height=40, force_terminal=True, file=io.StringIO())
    view = Screen("train: step", 1000, ranks=ranks, on_gpus=True, console=terminal)
    for step in range(1, number + 1):
        view.advance()
        view.saw({"step": step, "loss": 9 - step / 500, "lr": 3e-4, "grad_norm": 0.5, "tokens": step * 1000})
        view.saw({"step": step, "tokens_per_s": 8000.0, "mfu": 0.4, "mfu_full_attention": 0.5, "memory_bytes": 2**30})
    return view


def test_the_view_in_a_terminal():
    view = filled(500)
    view.saw({"step": 400, "val_loss": 8.125, "val_bits_per_byte": 2.0})
    view.saw({"step": 499, "busy_s": [0.4, 0.4, 0.4, 0.6], "wait_s": [0.2, 0.2, 0.2, 0.0]})
    view.saw({"step": 501, "loss": None, "lr": 1e-4, "grad_norm": None, "tokens": 501000})  # it overflowed
    said = shown(view, 100)
    view.close()
    for part in ("500 of 1,000  50%", "left", "val 8.1250  (step 400)", "lr 1.00e-04", "8,000 tokens/s  2,000 a GPU",
                 "MFU 40.0% (causal attention halved)  50.0% (counted in full)", "memory 1.0 GiB", "501,000 tokens"):  # fmt: skip
        assert part in said, part
    assert "J/token" not in said and "grad norm" not in said, "what is not known is not shown"
    bars = [line for line in said.splitlines() if line.endswith(" s") and " + " in line]
    assert len(bars) == 4 and bars[0].count("█") / bars[3].count("█") == pytest.approx(0.4 / 0.6, abs=0.03)
    assert bars[0].count("░") == pytest.approx(bars[0].count("█") / 2, abs=1) and "0.6 s + 0 s" in bars[3]


def test_a_long_training_keeps_a_curve_of_bounded_length(monkeypatch):
    monkeypatch.setattr(screen, "POINTS", 16)
    view = filled(500, ranks=20)
    view.saw({"step": 499, "busy_s": [0.1 + rank for rank in range(20)], "wait_s": [0.0] * 20})
    said = shown(view, 100)
    view.close()
    assert len(view._losses) < 16 and view._each == 32
    assert view._losses[0] == pytest.approx(sum(9 - step / 500 for step in range(1, 33)) / 32)
    assert "and 12 ranks that take less" in said and "   12 " in said and "   11 " not in said
    assert all(len(line) <= 100 for line in said.splitlines())


def test_a_small_terminal_has_the_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    with Run().progress(
        "x", 3, screen=lambda *options: Screen.where_it_fits(*options, ranks=1, on_gpus=False)
    ) as progress:
        assert type(progress) is Bar
    with Run(quiet=True).progress("x", 3, screen=lambda *_: pytest.fail("quiet")) as progress:
        progress.saw({"step": 1})


def test_mfu_in_both_conventions_and_joules(tmp_path):
    """Attention is 4 x heads x head_dim x positions a token, of which a causal sequence has half on average."""
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
    dims = ModelDims.uniform(num_layers=2, intermediate_size=96, vocab_size=300, max_seq_len=64, **sizes)
    seq, weights = 64, 2 * dims.matmul_params
    full = weights + 2 * 4 * 64 * seq
    assert dims.flops_per_token(2 * seq - 1) == full
    spent = iter([1.0, 3.0, None, 4.0])
    (tmp_path / "log").mkdir()
    halved = dims.flops_per_token(seq)
    watch = Watch(
        tmp_path, tmp_path / "log", device="cpu", step_positions=128, forward_flops_per_token=halved,
        full_flops_per_token=full, peak_flops_per_s=1e12, joules=lambda: next(spent),
    )  # fmt: skip
    for step in (1, 2, 3):
        watch.stepped({"step": step, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 100 * step})
    watch.close()
    rows = read_jsonl(tmp_path / "log" / "timing.jsonl")
    for row in rows:
        assert row["mfu"] * row["time_s"] == pytest.approx(3 * halved * 128 / 1e12)
        assert row["mfu_full_attention"] / row["mfu"] == pytest.approx(full / halved)
    assert [row.get("joules_per_token") for row in rows] == [0.02, None, None]


def test_curves_go_on_after_a_rewind(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent: list[int] = []
    run = SimpleNamespace(step=0, log=lambda scalars, step: sent.append(step), finish=lambda exit_code: None)
    (tmp_path / "log").mkdir()
    watch = Watch(tmp_path, tmp_path / "log", device="cpu", num_ranks=16, curves=(WandbCurves(run),))

    def steps(first: int, last: int, loss: float) -> None:
        for step in range(first, last + 1):
            row = {"step": step, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "tokens": 100 * step}
            watch.stepped(row, Took(step, [1.0] * 16, [0.0] * 16))

    steps(1, 30, loss=1.0)
    watch.rewound({"step": 11, "rewound": {"from": 31, "to": 10, "why": "a spike"}}, 1000)
    steps(11, 33, loss=2.0)
    watch.close()
    rows = read_jsonl(tmp_path / "log" / "timing.jsonl")
    assert [row["step"] for row in rows if "busy_s" in row] == list(range(1, 34))
    assert sent == list(range(1, 34)), "what was sent stays"
    events = EventAccumulator(str(tmp_path / "log")).Reload().Scalars("train/loss")
    assert [(one.step, one.value) for one in events] == [(step, 1.0 + (step > 10)) for step in range(1, 34)]


def make(out: str, data: str, profiling: dict | None) -> str:
    torch.set_num_threads(1)
    spec = Train.read({**SPEC, "optimizer": {"kind": "adamw"}})
    return Train.make(spec, out, {"data": Artifact.read(data)}, Run(quiet=True, profiling=profiling)).content


def test_two_ranks_log_their_times_and_trace_their_steps(data_folder, tmp_path):
    """Nothing of what is trained changes."""
    out = tmp_path / "train-base"
    plain = together(2, make, str(tmp_path / "train-plain"), str(data_folder), None)
    ended = together(2, make, str(out), str(data_folder), TRACED)
    assert [one.returncode for one in ended] == [0, 0], ended
    assert [one.result for one in ended] == [one.result for one in plain]
    rows = [row for row in read_jsonl(out / "log" / "timing.jsonl") if "busy_s" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]  # those of a step travel with the next
    assert all(len(row[name]) == 2 and min(row[name]) > 0 for row in rows for name in ("busy_s", "wait_s"))
    traces = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_trace.json"))
    folder = Path("train-base.profiling") / "profile_traces"
    assert traces == [folder / f"iteration_{at}" / f"rank{rank}_trace.json" for at in (2, 4) for rank in (0, 1)]
    events = json.loads((tmp_path / traces[0]).read_text())["traceEvents"]
    assert any("aten::" in event.get("name", "") for event in events)


def test_a_snapshot_of_the_step_that_ran_out_of_memory(tmp_path, monkeypatch, capsys):
    recorded = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **given: recorded.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": ["a"]})
    trainer = Trainer.__new__(Trainer)
    trainer.done = 4
    run = Run(device="cuda", quiet=True, profiling={"enable_memory_snapshot": True, "profile_freq": 2})
    with pytest.raises(FitError), Profiler(run, tmp_path / "train-base", trainer) as profiler:
        then: list[float | None] = []
        profiler.after(lambda _, loss: then.append(loss))(trainer, 1.5)
        raise FitError("cuda is out of memory", fix="less")
    assert recorded == [{"max_entries": 100_000}, {"enabled": None}] and then == [1.5]
    for name in ("iteration_4", "iteration_5_exit"):
        path = tmp_path / "train-base.profiling" / "memory_snapshot" / name / "rank0_memory_snapshot.pickle"
        assert pickle.loads(path.read_bytes()) == {"segments": ["a"]}
    assert f"what filled the memory of rank 0: {path}" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_snapshot_on_a_gpu(data_folder, tmp_path):
    profiling = {"enable_memory_snapshot": True, "enable_profiling": True, "profile_freq": 4, "profiler_warmup": 1}
    run = Run(device="cuda", quiet=True, profiling=profiling)
    Train.read(SPEC).make(tmp_path / "train-base", {"data": Artifact.read(data_folder)}, run)
    (path,) = tmp_path.rglob("*.pickle")
    assert path.parent.name == "iteration_4" and pickle.loads(path.read_bytes())["segments"]
    (trace,) = tmp_path.rglob("*_trace.json")
    assert any(event.get("cat") == "kernel" for event in json.loads(trace.read_text())["traceEvents"])


def test_what_profiling_refuses(data_folder, tmp_path, capsys):
    assert from_options({"steps": "3"}) is None
    with pytest.raises(SpecError, match="profile_freq 3 is less than profiler_warmup 3 \\+ profiler_active 1"):
        from_options({"profiling.enable_profiling": "true", "profiling.profile_freq": "3"})
    with pytest.raises(SpecError, match=r"--profiling\.profile_freq without anything to write"):
        from_options({"profiling.profile_freq": "20"})
    with pytest.raises(SpecError, match="did you mean 'profile_freq'"):
        from_options({"profiling.profile_frequ": "20"})
    words = ["train", str(data_folder), f"--out={tmp_path / 'train-x'}", "--steps=1", "--seq_len=32", "--batch_size=2"]
    assert main([*words, "--profiling.enable_memory_snapshot"]) == 2
    said = capsys.readouterr().err
    assert "records a GPU's memory, and this runs on cpu" in said and "add --device=cuda" in said
