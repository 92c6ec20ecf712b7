"""A training under a budget of joules ends at it, and one that pauses makes the same bytes; clock and meter are made up."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import HoneError, MachineError, SpecError
from hone.base.run import Interrupted
from hone.cli.dispatch import main
from hone.measure import window
from hone.train import loop
from hone.train.budget import control
from hone.train.budget.control import Paused
from hone.train.budget.spec import Energy
from hone.train.loop import Trainer
from hone.train.schedules.wsd import WarmupStableDecay
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE
from tests.train.ranks import made
from tests.train.test_stage import QUIET, SPEC

WSD = {"kind": "wsd", "warmup": 4, "decay": 0.25}
LAYER = SHAPE.model_copy(update={"num_layers": 1}).model_dump()  # what is counted here are steps
LONG = {
    **SPEC,
    "model": LAYER,
    "steps": 120,
    "validation": {"sequences": 8},
    "checkpoint": {"interval": 10},
    "schedule": WSD,
}


class World:
    """Joules and the time of day: a step takes `step_j` and `step_s` of it, a pause `idle_w`."""

    def __init__(self) -> None:
        self.joules: float | None = 0.0
        self.when = datetime(2026, 11, 27, 20, 0, tzinfo=UTC)
        self.step_j, self.step_s, self.noise, self.idle_w = 100.0, 600.0, 0.0, 50.0
        self.later_j: float | None = None
        self.slept: list[float] = []
        self._draw = random.Random(0)

    def step(self, done: int) -> None:
        each = self.step_j if self.later_j is None or done < 40 else self.later_j
        if self.joules is not None:
            self.joules += each * self._draw.uniform(1 - self.noise, 1 + self.noise)
        self.when += timedelta(seconds=self.step_s)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.when += timedelta(seconds=seconds)
        if self.joules is not None:
            self.joules += self.idle_w * seconds


@pytest.fixture
def world(monkeypatch) -> World:
    found = World()

    class Meter:
        note = "NVML: made up"

        def __init__(self, device: str) -> None:
            self._first = found.joules

        def start(self) -> None: ...
        def stop(self) -> None: ...
        def joules(self) -> float | None:
            return None if found.joules is None else found.joules - self._first

    step = Trainer.step

    def counted(self, batch):
        made = step(self, batch)
        found.step(self.done)
        return made

    evaluate = loop.held_out_loss

    def evaluated(*arguments, **options):
        if found.joules is not None:
            found.joules += found.step_j / 3 * options["num_sequences"] / SPEC["batch_size"]
        return evaluate(*arguments, **options)

    monkeypatch.setattr(loop, "held_out_loss", evaluated)
    monkeypatch.setattr(window, "Meter", Meter)
    monkeypatch.setattr(Trainer, "step", counted)
    for name, value in (("now", lambda: found.when), ("sleep", found.sleep), ("_LEAST_S", 0.0), ("_LOOK_S", 900.0)):
        monkeypatch.setattr(control, name, value)
    monkeypatch.setattr(control, "monotonic", lambda: found.when.timestamp())
    return found


def make(out: Path, data_folder: Path, energy: dict | None = None, **changes) -> Artifact:
    changes["early_stopping"] = {"energy": energy or {}}
    return Train.read({**LONG, **changes}).make(out, {"data": Artifact.read(data_folder)}, QUIET)


def steps_of(made: Artifact) -> list[dict]:
    return [row for row in read_jsonl(made.folder / "steps.jsonl") if "loss" in row]


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_it_ends_within_two_percent_of_its_joules(noise, world, data_folder, tmp_path):
    world.noise = noise
    made = make(tmp_path / "train-a", data_folder, energy={"budget_j": 10_000.0})
    spent = made.figures["budget_spent_j"]
    assert spent.value == pytest.approx(10_000.0, rel=0.02) and spent.how == "measured"
    assert made.figures["num_steps"].value == len(steps_of(made)) == pytest.approx(99, abs=8)
    assert "sufficed for no more" in made.figures["num_steps"].note and made.figures["planned_steps"].value == 120
    assert (
        json.loads((made.folder / "hone.json").read_text())["spec"]["early_stopping"]["energy"]["budget_j"] == 10_000.0
    )


def test_wsd_is_shortened_before_its_decay(world, data_folder, tmp_path):
    """Until the decay the steps are those of the whole training, bit for bit; then it decays as a training of so many steps would."""
    made = steps_of(make(tmp_path / "train-a", data_folder, energy={"budget_j": 6000.0}))
    whole = steps_of(make(tmp_path / "train-b", data_folder))
    total = len(made)
    before = WarmupStableDecay(warmup=4, decay=0.25).kept_after(total)
    assert [row["loss"] for row in made[: before - 1]] == [row["loss"] for row in whole[: before - 1]]
    assert made[before - 1]["lr"] == made[before - 2]["lr"] == max(row["lr"] for row in made)
    assert made[-1]["lr"] == pytest.approx(0.1 * max(row["lr"] for row in made))
    falling = [row["lr"] for row in made[before:]]
    assert falling == sorted(falling, reverse=True) and len(falling) == pytest.approx(0.25 * total, abs=2)


def test_a_step_that_becomes_dearer_is_noticed(world, data_folder, tmp_path):
    world.later_j = 180.0
    made = make(tmp_path / "train-a", data_folder, energy={"budget_j": 9000.0})
    assert made.figures["budget_spent_j"].value == pytest.approx(9000.0, rel=0.02)
    assert len(steps_of(made)) == pytest.approx(40 + (9000 - 4000) / 180, abs=2)


def test_a_cosine_is_shortened_too(world, data_folder, tmp_path):
    made = make(tmp_path / "train-a", data_folder, schedule="cosine", energy={"budget_j": 6000.0})
    assert made.figures["budget_spent_j"].value == pytest.approx(6000.0, rel=0.02)
    assert steps_of(made)[-1]["lr"] == pytest.approx(0.1 * 3e-3, rel=0.05)


def test_a_budget_that_suffices_changes_nothing(world, data_folder, tmp_path):
    made = make(tmp_path / "train-a", data_folder, energy={"budget_j": 1e6})
    assert len(steps_of(made)) == 120 and "sufficed" not in made.figures["num_steps"].note
    whole = make(tmp_path / "train-b", data_folder)
    assert steps_of(made) == steps_of(whole) and made.fingerprint != whole.fingerprint


def test_the_line_is_hard(world, data_folder, tmp_path):
    """A budget of less than the first projection needs: it ends at once, whole."""
    made = make(tmp_path / "train-a", data_folder, energy={"budget_j": 250.0})
    assert len(steps_of(made)) == 3 and (made.folder / "model.safetensors").exists()


def test_one_that_was_ended_keeps_its_length_and_its_account(world, data_folder, tmp_path, monkeypatch):
    """It was shortened at step 45 and lost the steps 51 to 53, whose joules are spent: it ends three steps earlier."""
    whole = steps_of(make(tmp_path / "train-a", data_folder, energy={"budget_j": 6000.0}))
    step = Trainer.step

    def dying(self, batch):
        if self.done == 53:
            raise KeyboardInterrupt
        return step(self, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "step", dying)
        make(tmp_path / "train-b", data_folder, energy={"budget_j": 6000.0})
    state = json.loads((tmp_path / "train-b.partial" / "state" / "energy.json").read_text())
    assert state["spent_j"] == pytest.approx(5300.0) and list(state["changes"].values()) == [len(whole)]
    made = make(tmp_path / "train-b", data_folder, energy={"budget_j": 6000.0})
    again = steps_of(made)
    assert again[:54] == whole[:54] and len(again) == len(whole) - 3
    assert made.figures["budget_spent_j"].value == pytest.approx(6000.0, rel=0.02)


def test_without_a_sensor_it_says_so_and_may_model(world, data_folder, tmp_path, monkeypatch):
    world.joules = None
    with pytest.raises(MachineError, match=r"needs a reading of joules: NVML: made up[\s\S]*energy.power_w"):
        make(tmp_path / "train-a", data_folder, energy={"budget_j": 6000.0})
    begun = world.when.timestamp()
    monkeypatch.setattr(control.Draft, "elapsed_s", property(lambda self: world.when.timestamp() - begun))
    made = make(tmp_path / "train-b", data_folder, energy={"budget_j": 600_000.0, "power_w": 20.0})
    spent = made.figures["budget_spent_j"]
    assert spent.how == "modelled" and spent.value == pytest.approx(600_000.0, rel=0.02)  # 600 s a step
    assert "seconds times 20 W, early_stopping.energy.power_w" in spent.note and len(steps_of(made)) == pytest.approx(
        50, abs=1
    )
    world.joules = 0.0
    with pytest.raises(SpecError, match=r"early_stopping\.energy\.power_w stands in for a sensor"):
        make(tmp_path / "train-c", data_folder, energy={"budget_j": 6000.0, "power_w": 20.0})


def test_a_trace_from_elsewhere_stands_in_for_a_sensor(tmp_path):
    path = tmp_path / "power.csv"
    rows = "".join(f"{second}.0,cuda:0,{power},,,,,,\n" for second, power in enumerate((400, 500, 500, 400)))
    path.write_text("timestamp_s,device,power_w,energy_mj,sm_mhz,mem_mhz,temp_c,util,throttle\n" + rows)
    watts, source = Energy.read({"budget_j": 1e6, "trace": str(path)}).watts()
    assert watts == pytest.approx((450 + 500 + 450) / 3) and "recorded elsewhere" in source
    with pytest.raises(SpecError, match="one of the two"):
        Energy.read({"budget_j": 1e6, "trace": str(path), "power_w": 3})


def hours_file(folder: Path, text: str = "allowed: [20:00-22:00, 02:00-03:00]") -> str:
    path = folder / "hours.yaml"
    path.write_text(text)
    return str(path)


def test_paused_and_resumed_it_is_the_same_to_the_bit(world, data_folder, tmp_path):
    """12 steps from 20:00 to 22:00, then four hours of sleep, six steps until 03:00, seventeen hours of sleep, and so on."""
    whole = make(tmp_path / "train-a", data_folder, steps=40)
    world.when = datetime(2026, 11, 27, 20, 0, tzinfo=UTC)
    made = make(tmp_path / "train-b", data_folder, steps=40, energy={"schedule": hours_file(tmp_path)})
    assert made.content == whole.content and made.fingerprint == whole.fingerprint
    assert made.figures["pauses"].value == 4 and made.figures["paused_s"].value == (4 + 17 + 4 + 17) * 3600
    assert set(world.slept) == {900.0}
    per_token = made.figures["joules_per_token"].value
    assert per_token == pytest.approx(whole.figures["joules_per_token"].value)  # without the joules of sleep


def test_it_waits_before_its_first_step_and_does_not_charge_pauses(world, data_folder, tmp_path):
    energy = {"budget_j": 8000.0, "schedule": hours_file(tmp_path, "allowed: 23:00-01:00")}
    made = make(tmp_path / "train-a", data_folder, energy=energy)
    assert sum(world.slept[:12]) == 3 * 3600  # from 20:00
    assert made.figures["budget_spent_j"].value == pytest.approx(8000.0, rel=0.02)
    assert made.figures["paused_j"].value == pytest.approx(50.0 * made.figures["paused_s"].value)


def test_with_exit_it_ends_and_the_same_command_goes_on(world, data_folder, tmp_path):
    whole = make(tmp_path / "train-a", data_folder, steps=20)
    world.when = datetime(2026, 11, 27, 20, 0, tzinfo=UTC)
    energy = {"schedule": hours_file(tmp_path), "pause": "exit"}
    with pytest.raises(Paused, match=r"paused after step 12 of 20, which is saved: .* in 4 h 0 min") as caught:
        make(tmp_path / "train-b", data_folder, steps=20, energy=energy)
    assert caught.value.code == 75 and isinstance(caught.value, Interrupted) and not world.slept
    with pytest.raises(Paused, match="after step 12 of 20"):  # cron was early
        make(tmp_path / "train-b", data_folder, steps=20, energy=energy)
    world.when = datetime(2026, 11, 28, 2, 0, tzinfo=UTC)
    with pytest.raises(Paused, match="after step 18 of 20"):
        make(tmp_path / "train-b", data_folder, steps=20, energy=energy)
    world.when = datetime(2026, 11, 28, 20, 0, tzinfo=UTC)
    made = make(tmp_path / "train-b", data_folder, steps=20, energy=energy)
    assert made.content == whole.content and made.figures["pauses"].value == 3


def test_a_schedule_without_later_hours_is_an_error(world, data_folder, tmp_path):
    path = tmp_path / "windows.csv"
    path.write_text("start,end\n2026-11-27T19:00,2026-11-27T21:00\n")
    with pytest.raises(HoneError, match="no hours after now; step 6 of 120 is saved"):
        make(tmp_path / "train-a", data_folder, energy={"schedule": str(path)})


def test_the_command_line_and_its_exit_code(world, data_folder, tmp_path, capfd):
    words = ["train", str(data_folder), f"--out={tmp_path / 'train-x'}", "--steps=20", "--seq_len=32", "--batch_size=4"]
    sizes = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96}
    words += [f"--model.{name}={value}" for name, value in sizes.items()]
    words += [
        f"--early_stopping.energy.{one}" for one in (f"schedule={hours_file(tmp_path)}", "pause=exit", "budget_j=5000")
    ]
    assert main(words) == 75
    said = capfd.readouterr().err
    assert "paused after step 12 of 20" in said and "the same command resumes where it stopped" in said
    assert main([*words, "--plan"]) == 0
    assert "ends within 5,000 J" in capfd.readouterr().out


def test_fields_that_do_not_fit_together():
    with pytest.raises(SpecError, match="threshold is of a schedule"):
        Energy.read({"threshold": 3})
    with pytest.raises(SpecError, match=r"give early_stopping\.energy\.budget_j"):
        Energy.read({"power_w": 3})
    assert (
        Train.read({**SPEC, "early_stopping": {"energy": {"pause": "exit"}}}).identity() == Train.read(SPEC).identity()
    )


def test_two_ranks_choose_alike(data_folder, tmp_path):
    """They look every `interval` steps: both end at the first look of a budget that is spent, and neither begins outside its hours."""
    energy = {"budget_j": 1.0, "power_w": 1e9, "interval": 3}
    spec = {**LONG, "steps": 12, "checkpoint": {"interval": 6}, "early_stopping": {"energy": energy}}
    ended = [one.result for one in together(2, made, spec, str(data_folder), str(tmp_path / "train-a"))]
    assert ended[0] == ended[1] == Artifact.read(tmp_path / "train-a").content
    assert Artifact.read(tmp_path / "train-a").figures["num_steps"].value == 3
    path = tmp_path / "windows.csv"
    path.write_text("start,end\n2020-01-01,2020-01-02\n")
    spec = {**LONG, "early_stopping": {"energy": {"schedule": str(path), "interval": 3}}}
    ended = [one.result for one in together(2, made, spec, str(data_folder), str(tmp_path / "train-b"))]
    assert ended[0] == ended[1] and "has no hours after now; step 0 of 120" in ended[0]
