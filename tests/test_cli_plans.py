"""What the command line does before it works: the rates of the machine, plans, and what they print."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hone.base.figure import human_bytes
from hone.base.plan import MEMORY, PEAK
from hone.base.run import Run
from hone.cli import main
from hone.cli.idle import need_effect
from hone.compress.stage import Compress
from hone.eval.stage import Eval
from hone.measure.calibration import keep_calibration, read_calibration
from hone.measure.machine import describe, identity
from hone.model.facts import CheckpointFacts
from hone.serve.request import SamplingParams


@pytest.fixture(autouse=True)
def described_anew() -> Iterator[None]:
    """The machine is described once a process; here its stored rates change."""
    yield
    describe.cache_clear()


def test_a_mistake_is_said_before_the_machine_is_measured(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    describe.cache_clear()
    monkeypatch.setattr("hone.measure.calibrate.calibrate_all", lambda *_, **__: pytest.fail("measured"))
    left = tmp_path / ".hone-calibrate-x"
    left.mkdir()
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--plan"]):
        assert main(["compress", str(tiny_llama), "--steps=[gptq]", "--out=x", *more]) == 2
        assert "gptq needs hessian" in "".join(capsys.readouterr())
    recipe = tmp_path / "r.yaml"
    stage = {"stage": "compress", "name": "a", "from": {"model": str(tiny_llama)}, "steps": ["gptq"]}
    recipe.write_text(json.dumps({"line": "x", "stages": [stage]}))
    assert main(["plan", str(recipe)]) == 2
    assert "gptq needs hessian" in capsys.readouterr().out
    assert not left.exists(), "a killed process's folder"


def test_rates_of_a_busy_machine_are_said_where_they_are_used(tiny_llama, tmp_path, monkeypatch, capsys):
    who = identity(describe())
    stored = read_calibration(who)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_calibration(who, stored.model_copy(update={"busy": {"float32": "other work took 1.9 of its 2 processors"}}))
    describe.cache_clear()
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 20)
    assert main(["eval", str(tiny_llama), str(text), "--plan"]) == 0
    said = capsys.readouterr().err
    assert "note: predicted times may be too long" in said and "1.9 of its 2" in said and "hone calibrate" in said


def test_eval_takes_a_text_or_a_data_folder_as_its_second_argument(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "null").write_text("the quick brown fox " * 20)
    out = tmp_path / "eval-a"
    assert main(["eval", str(tiny_llama), "null", f"--out={out}", "--quiet"]) == 0
    said, notes = capsys.readouterr()
    assert "bits_per_byte" in said and 'made with text="./null"' in said and "stride" not in said.split("made with")[1]
    assert not notes, "quiet"
    assert main(["show", str(out)]) == 0
    assert "stride: 0" in capsys.readouterr().out, "the whole spec, when it is asked for"
    (tmp_path / "made" / "tokens").mkdir(parents=True)
    (tmp_path / "made" / "tokens" / "meta.json").write_text("{}")
    assert main(["eval", str(tiny_llama), "made", "--out=b"]) == 2
    assert "meta.json is corrupt" in capsys.readouterr().err, "a data set's folder is data"
    assert main(["eval", str(tiny_llama), "null", "--text=null", "--out=b"]) == 2
    assert "two texts are given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what", "way"),
    [
        (["eval", "MODEL", "--out=x"], "something to score the model on", "hone eval MODEL FILE.txt --out=FOLDER"),
        (["bench", "MODEL", "--out=x"], "needs the input 'data'", "--from.data=FOLDER"),
        (["compress", "MODEL", "--steps=[gptq]", "--out=x"], "gptq needs hessian", "calibration_text=FILE"),
    ],
)
def test_a_missing_input_is_asked_for_in_the_words_of_the_command_line(arguments, what, way, tiny_llama, capsys):
    assert main([str(tiny_llama) if word == "MODEL" else word for word in arguments]) == 2
    said = capsys.readouterr().err
    assert what in said and way in said and "from: " not in said


def test_a_plan_prints_names_whole(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    text, name = tmp_path / "text.txt", "eval-with-a-name-that-is-longer-than-a-narrow-terminal"
    text.write_text("the quick brown fox " * 20)
    assert main(["eval", str(tiny_llama), str(text), f"--out={name}", "--plan"]) == 0
    assert any(line.startswith(f"{name} ") and "to make" in line for line in capsys.readouterr().out.splitlines())


def test_an_unknown_technique_is_answered_with_the_nearest(capsys):
    assert main(["techniques", "quantiser"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'quantizer'?" in said and len(said) < 900


def test_quiet_keeps_what_warns(capsys):
    run = Run(quiet=True)
    run.say("a step is done")
    run.warn("half of the rows are left out")
    assert capsys.readouterr().err == "note: half of the rows are left out\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["compress", "MODEL", "--steps=[{kind: rtn, group_size: 0}]", "--num_sequences=4", "--plan"],
            "nothing is calibrated",
        ),
        (["train", "MODEL", "--from.model=MODEL", "--model.num_layers=3", "--out=x"], "that of --from.model"),
        (["train", "MODEL", "--checkpoint.interval=0", "--checkpoint.keep_latest_k=3", "--out=x"], "no checkpoints"),
        (
            ["data", "MODEL", "--tokenizer.path=MODEL", "--tokenizer.vocab_size=300", "--out=x"],
            "no tokenizer is trained",
        ),
        (["generate", "MODEL", "the", "--logprobs=3"], "the text alone is printed"),
        (["generate", "MODEL", "the", "--top_p=0.9"], "with temperature 0"),
    ],
)
def test_an_option_without_effect_is_a_mistake(arguments, why, tiny_llama, capsys):
    assert main([word.replace("MODEL", str(tiny_llama)) for word in arguments]) == 2
    said = capsys.readouterr().err
    assert "has no effect" in said and why in said and "fix: leave it out, or " in said


def test_an_option_with_an_effect_is_none(tiny_llama):
    spec = Compress.read({"steps": ["rtn"], "calibration_text": "x"})
    need_effect("compress", spec, {}, {"num_sequences": "4"})
    need_effect("compress", spec.override({"calibration_text": "null"}), {"data": "x"}, {"num_sequences": "4"})
    need_effect("generate", SamplingParams(temperature=1.0), {}, {"top_p": "0.9", "max_tokens": "4"})


def test_a_plan_prints_the_memory_of_the_whole_process(tiny_llama, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 200)
    stage = Eval.read({"text": str(text)})
    plan = stage.full_plan({"model": CheckpointFacts.of(tiny_llama)}, describe())
    before = plan.estimates[PEAK].value - plan.estimates[MEMORY].value
    assert before == describe().process_bytes > 2**28
    assert main(["eval", str(tiny_llama), str(text), "--plan"]) == 0
    assert human_bytes(plan.estimates[PEAK].value) in capsys.readouterr().out
    gpu = describe().model_copy(update={"device": "cuda"})
    assert gpu.process_bytes == 0 == gpu.resident_bytes
