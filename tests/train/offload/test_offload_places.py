"""Where a training's state is: scratch files, shares of ranks, what a plan chooses and says, kills, full disks."""

from __future__ import annotations

import errno
import gc
import os
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import FitError, HoneError, MachineError, SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.cost.serve.offload import link_rate
from hone.cost.train.offload import Load, places, times
from hone.cost.train.training import Training
from hone.feed.load import PackedTokens
from hone.measure.machine import Gpu, describe
from hone.model.shape import Shape
from hone.train import OFFLOADS, OPTIMIZERS
from hone.train.activation_checkpointing import KeepAll
from hone.train.checkpoint import Checkpoints
from hone.train.offload import choose, files, rates
from hone.train.offload.choose import chosen
from hone.train.offload.files import ScratchFile, Span, aligned
from hone.train.offload.rates import Rates
from hone.train.offload.techniques import Auto, Host, Nvme, Resident
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE, content_after_kills
from tests.train.data_parallel.test_data_parallel import assert_same_weights, on_ranks, weights_of
from tests.train.offload.test_offload import make, trained
from tests.train.ranks import trained as trained_on_ranks

QUIET = Run(quiet=True)
SPEC: dict[str, Any] = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "seq_len": 32,
    "steps": 8,
    "precision": "bf16",
    "validation": {"interval": 5, "sequences": 8},
    "checkpoint": {"interval": 2},
    "optimizer": {"lr": 3e-3},
}
KINDS: dict[str, Any] = {
    "host": {"kind": "host", "parameters": True},
    "nvme": {"kind": "nvme"},
    "nvme-parameters": {"kind": "nvme", "parameters": True},
    "nvme-all": {"kind": "nvme", "parameters_on_disk": True},
    "auto": {"kind": "auto", "device_bytes": 1},
}


def spec(offload: Any, **more: Any) -> dict[str, Any]:
    return {**SPEC, "parallelism": {"offload": offload}, **more}


# Scratch files


@pytest.mark.parametrize("direct", [True, False])
def test_a_scratch_file(direct, tmp_path, monkeypatch):
    """What is written past the page cache is in the mapped tensors, and the other way round; without O_DIRECT a note says why."""
    if not direct:
        monkeypatch.setattr(files, "_direct", lambda path: None)
    monkeypatch.setattr(files, "PIECE", 8192)
    file = ScratchFile(tmp_path, 100_000)
    assert not list(tmp_path.iterdir()) and (file.direct or "O_DIRECT" in file.note)
    memory = aligned(file.num_bytes)
    file.wait(file.read(memory, 0))
    assert not memory.any()
    memory.copy_(torch.randint(0, 256, (len(memory),), dtype=torch.uint8))
    file.wait(file.write(memory, 0))
    mapped = file.tensor(Span(8192, (50, 7), torch.float32))
    assert torch.equal(mapped.view(-1).view(torch.uint8), memory[8192 : 8192 + 1400])
    mapped.fill_(2.0)
    file.flush()
    file.wait(file.read(memory, 0))
    assert (memory[8192 : 8192 + 1400].view(torch.float32) == 2).all()
    assert file.read_bytes == 2 * file.num_bytes and file.written_bytes == file.num_bytes
    descriptors = len(os.listdir("/proc/self/fd"))
    file.close()
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(FitError, match=r"takes 1024.0 TiB in .* are free"):
        ScratchFile(tmp_path, 1 << 50)
    with pytest.raises(MachineError, match="cannot be kept in /proc/none"):
        ScratchFile(Path("/proc/none"), 1 << 20)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FitError, match=r"takes 1.0 MiB") as caught:
        ScratchFile(tmp_path, 1 << 20)
    assert "parallelism.offload.folder" in caught.value.fix
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_is_one_error(data_folder, tmp_path, monkeypatch):
    data = PackedTokens(data_folder)
    trainer = make(data, {"kind": "nvme", "folder": str(tmp_path)})
    trained(trainer, data, range(1))

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(MachineError, match=r"training state cannot be kept in .*: Input/output error"):
        trained(trainer, data, range(1, 2))


def test_two_trainings_in_one_folder(data_folder, tmp_path):
    """Their files have no names: neither sees the other's, and the folder is empty all along."""
    data, place = PackedTokens(data_folder), {"kind": "nvme", "folder": str(tmp_path)}
    alone = trained(make(data, "none"), data)
    one, other = make(data, place), make(data, place, precision="bf16")
    found = []
    for step in range(3):
        found += trained(one, data, range(step, step + 1))
        trained(other, data, range(step, step + 1))
        assert not list(tmp_path.iterdir())
    assert found == alone


def test_memory_is_bounded(data_folder, tmp_path):
    """What is in memory of masters and state is three windows, whatever their number."""
    trainer = make(PackedTokens(data_folder), {"kind": "nvme", "folder": str(tmp_path)})
    trained(trainer, PackedTokens(data_folder), range(2))
    states = trainer.update.weights.files
    largest = max(one.numel() for one in trainer.update.weights.masters.values())
    assert len(states._buffers) == 3 and sum(map(len, states._buffers)) <= 3 * (12 * largest + 3 * 4096)


@pytest.mark.parametrize("kinds", [("none", "nvme"), ("nvme", "none"), ("nvme", "nvme"), ("nvme", "host")])
def test_checkpoints_are_read_by_all(kinds, data_folder, tmp_path):
    data, (before, after) = PackedTokens(data_folder), kinds
    whole = trained(make(data, "none", precision="bf16"), data, range(4))
    first, kept = make(data, before, precision="bf16"), Checkpoints(tmp_path)
    first.save(kept)  # no state yet
    trained(first, data, range(2))
    first.save(kept)
    second = make(data, after, precision="bf16")
    trained(second, data, range(1))  # what it holds is overwritten
    second.restore(*kept.newest())
    assert trained(second, data, range(2, 4)) == whole[2:]
    second.restore(*kept.of(0))
    assert trained(second, data, range(4)) == whole


# A stage


@pytest.fixture(scope="module")
def resident(data_folder, tmp_path_factory) -> Artifact:
    return Train.read(SPEC).make(tmp_path_factory.mktemp("line") / "none", {"data": Artifact.read(data_folder)}, QUIET)


@pytest.mark.parametrize("name", KINDS)
def test_a_stage_makes_the_same_model(name, resident, data_folder, tmp_path, capsys):
    """The content of the folder is that of the training on the device; seconds and bytes stand beside their estimates."""
    made = Train.read(spec(KINDS[name])).make(tmp_path / name, {"data": Artifact.read(data_folder)}, Run())
    assert made.content == resident.content
    said = " ".join(capsys.readouterr().err.split())
    assert "s a step" in said
    if name == "auto":  # so small a model needs more memory with buffers on the host than without
        assert "auto takes offload none" in said and "offload_update_s" not in made.figures
        return
    assert "optimizer state and masters" in said
    figures = made.figures
    assert figures["offload_update_s"].value > 0 and figures["offload_update_s"].estimate.value > 0
    assert figures["offload_moved_bytes"].error == pytest.approx(0, abs=0.1)
    assert ("offload_disk_bytes" in figures) == name.startswith("nvme")
    if name.startswith("nvme"):  # read and written once: the file's pages, which small weights fill badly
        states, found = (
            make(PackedTokens(data_folder), "nvme", precision="bf16").update.weights.files,
            figures["offload_disk_bytes"],
        )
        assert found.value == 2 * states.file.num_bytes
        assert found.estimate.value == pytest.approx(2 * sum(one.num_bytes for one in states._spans.values()), rel=0.01)
    assert not (tmp_path / f"{name}.partial").exists()


def test_a_file_system_without_o_direct_is_said_once(resident, data_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files, "_direct", lambda path: None)
    made = Train.read(spec(KINDS["nvme-all"])).make(tmp_path / "x", {"data": Artifact.read(data_folder)}, Run())
    assert made.content == resident.content
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("refuses O_DIRECT") == 1 and "page cache" in made.figures["offload_disk_bytes"].note


@pytest.mark.parametrize("name", ["host", "nvme", "nvme-all"])
def test_a_training_that_is_over_gives_all_back(name, data_folder):
    trainer = make(PackedTokens(data_folder), KINDS[name], accumulation=2)
    trained(trainer, PackedTokens(data_folder), range(1))
    held = weakref.ref(trainer.update.weights)
    file = getattr(trainer.update.weights.files, "file", None)
    closed = None if file is None else file.close
    del trainer, file
    gc.collect()
    assert held() is None and (closed is None or not closed.alive)


def killed_in_a_write(data: str, out: str, calls: int) -> None:
    """Trains until the scratch file is written for the `calls`-th time, half of which is done when the process ends."""
    write, seen = os.pwritev, 0

    def dying(descriptor: int, views: list[memoryview], offset: int) -> int:
        nonlocal seen
        seen += 1
        if seen == calls:
            write(descriptor, [views[0][:4096]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, views, offset)

    os.pwritev = dying
    Train.read(spec(KINDS["nvme"])).make(out, {"data": Artifact.read(data)}, QUIET)


def test_a_kill_in_the_middle_of_a_write_changes_nothing(resident, data_folder, tmp_path):
    """The checkpoints are what lasts: what was in the scratch file of a killed training is gone with it."""
    out = tmp_path / "killed"
    num_files = len(make(PackedTokens(data_folder), "nvme").update.weights.files._spans)
    for calls in (int(3.5 * num_files), 2 * num_files + 1):
        [ended] = together(1, killed_in_a_write, str(data_folder), str(out), calls)
        assert ended.returncode == -signal.SIGKILL
        assert not list(out.with_name("killed.partial").rglob("*offload*/*"))
    made = Train.read(spec(KINDS["nvme"])).make(out, {"data": Artifact.read(data_folder)}, QUIET)
    assert made.content == resident.content


@pytest.mark.slow
def test_kills_at_any_time_change_nothing(resident, data_folder, tmp_path):
    pauses = iter([0.004, 0.0, 0.01])
    place = spec(KINDS["nvme-all"])
    content = content_after_kills(place, data_folder, tmp_path / "killed", (3, 5), lambda: next(pauses))
    assert content == resident.content


def test_a_full_disk_is_said_before_the_run(data_folder, tmp_path, monkeypatch):
    class Status:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(choose.os, "statvfs", lambda _: Status)
    with pytest.raises(HoneError, match=r"offload nvme: needs .* in .*, 40.0 KiB are free"):
        Train.read(spec("nvme")).make(tmp_path / "x", {"data": Artifact.read(data_folder)}, QUIET)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"parallelism": {"offload": {"kind": "host", "delayed_update": True}}, "early_stopping": {"max_time_s": 9}},
            "delayed_update",
        ),
        ({"parallelism": {"offload": {"kind": "host", "parameters": True}}, "precision": "fp8"}, "not in fp8"),
        ({"parallelism": {"offload": "nvme"}, "checkpoint": {"async_mode": "async"}}, "async_mode"),
        ({"parallelism": {"offload": "host", "tensor_parallel_degree": 2}}, "context parallelism only"),
    ],
)
def test_what_does_not_go_together(changes, said):
    with pytest.raises(SpecError, match=said):
        Train.read(changes)


# Several ranks


def test_each_rank_has_its_share_elsewhere(data_folder, tmp_path):
    """zero1, zero2 and zero3 with their share of masters and state in host memory or a file: the training of one process."""
    settings: list[dict[str, Any]] = []
    for kind, offload, more in (
        ("zero1", "host", {"precision": "bf16"}),
        ("zero1", "nvme", {"optimizer": "muon"}),
        ("zero2", "nvme", {"gradient_accumulation_steps": 2}),
        ("zero3", "host", {"optimizer": "adamw_8bit", "widen": True}),
        ("zero3", {"kind": "nvme", "folder": str(tmp_path / "scratch")}, {"precision": "bf16", "masked": True}),
    ):
        plain = {"model": {"num_layers": 2}, "data_parallel": kind, **more}
        settings += [plain, {**plain, "parallelism": {"offload": offload}}]
    ended = on_ranks(2, trained_on_ranks, str(data_folder), str(tmp_path), settings)
    for losses in ended:
        for place in range(0, len(settings), 2):
            assert losses[place] == losses[place + 1], settings[place]
    for place in range(0, len(settings), 2):
        ours, theirs = weights_of(tmp_path, place + 1, 2), weights_of(tmp_path, place, 2)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_weights(one, other, settings[place].get("optimizer", "adamw"))
    assert not list((tmp_path / "scratch").iterdir())


def test_ranks_read_checkpoints_of_other_places(data_folder, tmp_path):
    """Written by two ranks with files, read by two with memory and by one that has all on the device."""
    plain = {"model": {"num_layers": 2}, "data_parallel": "zero1", "steps": 3}
    write = {**plain, "parallelism": {"offload": "nvme"}, "until": 2, "write": str(tmp_path / "kept")}
    read = {**plain, "parallelism": {"offload": "host"}, "read": str(tmp_path / "kept")}
    whole, _, after = on_ranks(2, trained_on_ranks, str(data_folder), str(tmp_path), [plain, write, read])[0]
    assert after == whole[2:]
    [[alone]] = on_ranks(
        1, trained_on_ranks, str(data_folder), str(tmp_path), [{**read, "parallelism": {}, "data_parallel": "ddp"}]
    )
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(whole[2:]), rtol=2e-6, atol=2e-6)


def test_what_several_ranks_cannot():
    Resident(kind="none").ready(4, 1)
    assert Host(kind="host").ready(2, 2) == Host(kind="host")
    with pytest.raises(SpecError, match="2 copies of the whole state"):
        Host(kind="host").ready(2, 1)
    with pytest.raises(SpecError, match=r"offload.parameters works on one rank, here are 2"):
        Nvme(kind="nvme", parameters=True).ready(2, 2)
    with pytest.raises(SpecError, match="chosen by a training's plan"):
        Auto(kind="auto").ready(1, 1)


# What it costs

CONFIG = Shape(
    hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate_size=14336, max_seq_len=512
).config(128256)
DIMS = CONFIG.dims()
RATES = Rates(link=50e9, update=100e9, read=2e9, write=4e9, said="given")
GPU = describe("cpu").model_copy(
    update={
        "device": "cuda:0",
        "num_threads": 16,
        "calibration": None,
        "gpus": (Gpu(name="X", memory_bytes=80 << 30, capability="9.0", num_multiprocessors=0),),
    }
)


def load(**more: Any) -> Load:
    return Load(DIMS, OPTIMIZERS.read("adamw").cost(DIMS, "bfloat16", "cuda:0"), "bfloat16", **more)


def test_bytes_of_every_place():
    """In bf16 masters and moments, 12 bytes a weight, leave the GPU; with gradients 2 more, with parameters nearly 2 more."""
    params, host = DIMS.num_params, Host(kind="host")
    assert places(Resident(kind="none"), load(), "cuda:0").device == 0
    assert places(host, load(), "cuda:0").device == 12 * params
    assert places(host, load(shards=4, ranks=4), "cuda:0").device == 3 * params
    left = places(Nvme(kind="nvme", gradients=True), load(), "cuda:0")
    assert left.device == 14 * params and left.disk == 12 * params
    assert places(host, load(), "cuda:0").host - left.host == pytest.approx(0, abs=12 * params)
    both = places(Host(kind="host", parameters=True), load(), "cuda:0").device
    assert both == 14 * params + 2 * load().layer_weights * (1 - 2 / 32)
    narrow = replace(load(), dtype="float32")
    assert places(host, narrow, "cuda:0").device == 8 * params
    assert places(host, narrow, "cpu").device < -4 * params
    assert "on disk" in left.said[0] and "gradients" in left.said[1]


def test_seconds_of_every_place():
    """An update takes as long as its slowest part; what travels beside passes costs what it takes longer than they do."""
    params, layers = DIMS.num_params, load().layer_weights
    found = times(Host(kind="host"), load(), GPU, 1.0, RATES)
    assert found.update == pytest.approx(params * (28 + 18) / 100e9) and found.waits == 0
    few = times(Host(kind="host"), load(), GPU.model_copy(update={"num_threads": 2}), 1.0, RATES)
    assert few.update == pytest.approx(params * (28 + 4) / 100e9)
    assert times(Nvme(kind="nvme"), load(), GPU, 1.0, RATES).update == pytest.approx(12 * params / 2e9)
    assert times(Nvme(kind="nvme"), load(), GPU, 1.0, RATES).disk_bytes == 24 * params
    slow = replace(RATES, link=1e6)
    assert times(Host(kind="host"), load(), GPU, 1.0, slow).update == pytest.approx(2 * params / 1e6)
    waits = times(Host(kind="host", parameters=True), load(), GPU, 3.0, slow).waits
    assert waits == pytest.approx(2 * layers / 1e6 - 1 + 2 * params / 1e6 - 2)
    assert times(Host(kind="host", parameters=True), load(), GPU, 3.0, RATES).waits == 0
    assert times(Resident(kind="none"), load(), GPU, 1.0, RATES) is None
    assert link_rate(GPU)[1]


def work(offload: Any, **more: Any) -> Training:
    sizes = {"batch_size": 8, "seq_len": 512, "dtype": "bfloat16", "packed": False, "steps": 4}
    return Training(
        model=DIMS,
        segments=KeepAll(kind="none").segments(32),
        update=OPTIMIZERS.read("adamw").cost(DIMS, "bfloat16", "cuda:0"),
        offload=OFFLOADS.read(offload),
        **{**sizes, **more},
    )


def test_auto_takes_what_fits(monkeypatch):
    """The less room the device has, the more leaves, what is used most seldom first; the disk comes after the host's memory."""

    class Status:
        f_bavail, f_frsize = 1 << 30, 4096

    monkeypatch.setattr(choose.os, "statvfs", lambda _: Status)
    params, took = DIMS.num_params, []
    much = 40 * params
    here = GPU.model_copy(update={"gpus": (GPU.gpus[0].model_copy(update={"num_multiprocessors": 132}),)})
    monkeypatch.setattr(rates, "_disk", lambda folder: (2e9, 2e9))
    most = choose.growth_bytes(work("none"), "cuda:0").value
    for room, host in (
        (1, much),
        (12 * params, much),
        (12 * params, 10 * params),
        (15 * params, much),
        (most, much),
    ):
        auto = {"kind": "auto", "device_bytes": int(most - room) + 1000 if room > 1 else int(most), "host_bytes": host}
        one, said = chosen(work(auto), here, "bf16")
        took.append(
            (
                one.offload.kind,
                one.offload.leaves and one.offload.gradients,
                one.offload.leaves and one.offload.parameters,
            )
        )
        assert said[-1].startswith(f"auto takes offload {one.offload.kind}") and len(said) == 8
    assert took[0] == ("none", False, False)
    assert took[1] == ("host", False, False)
    assert took[2] == ("nvme", False, False)
    assert took[3][0] == "host" and took[3][2]
    assert took[4][0] in ("host", "nvme") and took[4][2], "none fits: the one that needs least"


def test_the_plan_says_where_everything_is(data_folder):
    facts = {"data": facts_of(Artifact.read(data_folder))}
    plan = Train.read(spec({"kind": "nvme", "gradients": True})).plan(facts, describe("cpu"))
    [line] = [one for one in plan.notes if one.startswith("offload")]
    assert "on disk, gradients" in line and "predicted" in line and "s a step" in line
    assert {"offload_update_s", "offload_moved_bytes", "offload_disk_bytes"} <= set(plan.estimates)
    assert not {"offload_update_s"} & set(Train.read(SPEC).plan(facts, describe("cpu")).estimates)


def test_a_disk_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rates, "_PROBE_BYTES", 1 << 20)
    calls, probe = [], rates.probe
    monkeypatch.setattr(rates, "probe", lambda folder: calls.append(folder) or probe(folder, 1 << 20))
    one = rates.rates_of(describe("cpu"), str(tmp_path / "not" / "there"))
    other = rates.rates_of(describe("cpu"), str(tmp_path))
    assert one == other and len(calls) == 1 and "the disk is measured" in one.said and one.read > 1e6
    assert "disk" not in rates.rates_of(describe("cpu")).said
