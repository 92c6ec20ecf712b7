"""The command line: what it prints, and that a user's mistake is one clear line with a fix, exit code 2, no traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import yaml

from hone.base.figure import human_bytes
from hone.base.spec import dump_yaml
from hone.cli import main
from hone.cli.options import parse
from hone.recipe import Recipe
from tests.conftest import ROOT, mini_recipe


def hone(*arguments: str, cwd=ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "hone.cli", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=600
    )


def mistake(done: subprocess.CompletedProcess, *words: str) -> None:
    """Asserts the manners of a mistake: exit code 2, `error:` then `fix:`, the words in it, no traceback."""
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "fix:"))]
    assert [line.partition(":")[0] for line in lines] == ["error", "fix"], text
    assert "Traceback" not in text
    for word in words:
        assert word in done.stderr, text


@pytest.fixture
def model(mini_line, tmp_path):
    """A private copy of the small line's model, to be broken."""
    return shutil.copytree(mini_line / "work" / "tiny" / "train-base", tmp_path / "model")


def test_options_are_read_in_every_form():
    words, options = parse(["run", "r.yaml", "--a.b=1", "--c", "2", "--redo", "--quiet", "--api-key", "x"])
    assert words == ["run", "r.yaml"]
    assert options == {"a.b": "1", "c": "2", "redo": "true", "quiet": "true", "api_key": "x"}


def test_help_loads_nothing_heavy():
    """What keeps `hone --help` under half a second, checked by cause: a timing would be the machine's."""
    code = (
        "import sys; from hone.cli import main; main(['--help'])\n"
        "heavy = {'torch', 'pydantic', 'numpy', 'rich', 'yaml', 'pyarrow', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_printed_commands_are_called_as_this_one_was(tmp_path, monkeypatch):
    """Where the shell does not find `hone`, the next command names the program's path."""
    from hone.cli.line import invoked

    program = tmp_path / "env" / "bin" / "hone"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert invoked() == "env/bin/hone"
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin")
    assert invoked() == "hone"
    monkeypatch.setattr(sys, "argv", ["/somewhere/hone/__main__.py"])
    assert invoked().endswith(" -m hone")


def test_help_lists_every_verb():
    done = hone("--help")
    assert done.returncode == 0
    from hone.base.stage import STAGES

    for verb in [*(set(STAGES) - {"serve"}), "serve", "run", "report", "show", "schema", "techniques"]:
        assert f"  {verb}" in done.stdout


@pytest.mark.parametrize(
    "verb",
    [
        "plan",
        "run",
        "data",
        "train",
        "compress",
        "eval",
        "bench",
        "serve",
        "generate",
        "chat",
        "completion",
        "report",
        "show",
        "redecide",
        "schema",
        "calibrate",
        "techniques",
    ],
)
def test_every_verb_explains_itself(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: hone {verb}")


def test_show_prints_a_recipe_that_is_the_same_recipe(tmp_path, capsys):
    assert main(["show", str(ROOT / "recipes" / "tiny.yaml")]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    before = [(node.folder, node.read()) for node in Recipe.load(ROOT / "recipes" / "tiny.yaml").nodes()]
    assert [(node.folder, node.read()) for node in Recipe.load(printed).nodes()] == before


def test_schema_is_json_schema(capsys):
    assert main(["schema", "compress"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "gptq" in json.dumps(schema["properties"]["steps"])


def test_generate_continues_a_text(mini_line, capsys):
    assert (
        main(
            [
                "generate",
                str(mini_line / "work" / "tiny" / "compress-int8"),
                "import ",
                "--max_tokens=5",
                "--ignore_eos=true",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("import ")


# The ten typical mistakes.


def test_missing_folder(mini_line):
    mistake(
        hone("compress", mini_line / "work" / "tiny" / "train-bas", "--steps=rtn", "--out=/tmp/x"),
        "train-bas",
        "did you mean",
    )


def test_wrong_field(mini_line):
    mistake(
        hone("train", mini_line / "work" / "tiny" / "data-text", "--stesp=3", "--out=/tmp/x"),
        "stesp",
        "did you mean 'steps'",
    )


def test_unknown_technique(model, tmp_path):
    mistake(hone("compress", model, "--steps=[gptqq]", f"--out={tmp_path / 'x'}"), "gptqq", "did you mean 'gptq'")


def test_too_long_prompt(model):
    mistake(hone("generate", model, "word " * 5000), "tokens", "maximum context length")


def test_no_space(mini_line, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "file"))

    monkeypatch.setattr("hone.base.durable.os.fsync", full)
    assert (
        main(
            [
                "eval",
                str(mini_line / "work/tiny/train-base"),
                f"--from.data={mini_line / 'work/tiny/data-text'}",
                f"--out={tmp_path / 'e'}",
            ]
        )
        == 2
    )
    text = capsys.readouterr().err
    assert "error: no space left" in text and "fix: free some space" in text


def test_corrupt_safetensors(model, tmp_path):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    mistake(hone("compress", model, "--steps=rtn", f"--out={tmp_path / 'x'}"), "model.safetensors")
    mistake(hone("generate", model, "a"), "model.safetensors")


def test_wrong_dtype(model):
    mistake(hone("serve", model, "--engine.dtype=float17"), "float17", "float16")


def test_drifted_artifact(mini_line, mini_source, tmp_path):
    work = shutil.copytree(mini_line / "work", tmp_path / "work")
    recipe = tmp_path / "drifted.yaml"
    recipe.write_text(dump_yaml({**yaml.safe_load(mini_recipe(mini_source).to_yaml())}))
    mistake(
        hone("run", recipe, f"--work={work}", "--train-base.steps=13"),
        "steps was 12, is 13",
        "--redo=train-base",
        "--work=",
    )


def test_port_in_use(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        mistake(hone("serve", model, f"--port={port}"), str(port), "in use")


def test_no_tokenizer(model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    mistake(hone("generate", model, "a"), "tokenizer")


# And some more.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nur"], ["unknown command 'nur'"]),
        (["run"], ["RECIPE"]),
        (["run", "nothing.yaml"], ["no file nothing.yaml"]),
        (["run", "pyproject.toml"], ["pyproject.toml", "YAML"]),
        (["run", "recipes/tiny.yaml", "--data.sorce=x"], ["sorce", "did you mean 'source'"]),
        (["run", "recipes/tiny.yaml", "--from.data=x"], ["no stage 'from'"]),
        (["run", "recipes/tiny.yaml", "--redo=nothing", "--work=/tmp/none"], ["--redo=nothing", "train-base"]),
        (["data", "/nowhere/at/all", "--out=/tmp/x"], ["/nowhere/at/all"]),
        (["data", "null", "--out=/tmp/x"], ["source null", "no such file"]),
        (["data", "a.txt", "", "--out=/tmp/x"], ["takes one SOURCE"]),
        (["report", "/nowhere"], ["/nowhere"]),
        (["show", "/nowhere"], ["/nowhere"]),
        (["schema", "tarin"], ["did you mean 'train'"]),
        (["techniques", "quantiser"], ["did you mean 'quantizer'"]),
        (["eval", "tests"], ["--out"]),
        (["train", "tests", "--out=/tmp/x", "--device=cuda:77"], ["cuda:77"]),
        (["compress", "tests", "--steps=rtn", "--out=/proc/x"], []),
    ],
)
def test_other_mistakes(arguments, words):
    mistake(hone(*arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["report", "work/tiny", "--x"], "hone report has no option --x", "--price_per_hour, --grid"),
        (["report", "work/tiny", "--out=x"], "hone report has no option --out", "--price_per_hour, --grid"),
        (["run", "recipes/tiny.yaml", "--out=x"], "--out names no field of a stage", "--STAGE.FIELD=VALUE"),
        (["plan", "recipes/tiny.yaml", "--quiet"], "--quiet names no field of a stage", "--STAGE.FIELD=VALUE"),
        (["show", "recipes/tiny.yaml", "--deep=1"], "hone show has no option --deep", "its options: none"),
        (["techniques", "--slot=mixer"], "hone techniques has no option --slot", "its options: none"),
        (["techniques", "mixer", "optimizer"], "takes one SLOT or NAME, got mixer optimizer", ""),
        (["schema", "--stage=train"], "hone schema has no option --stage", ""),
        (["calibrate", "--devcie=cpu"], "hone calibrate has no option --devcie", "did you mean '--device'?"),
        (["push", "a", "b", "--out=c"], "hone push has no option --out", "--redo, --quiet"),
        (["compress", "tests", "--step=rtn", "--out=/tmp/x"], "Compress has no field 'step'", "did you mean 'steps'?"),
        (["train", "tests", "--from.dta=x", "--out=/tmp/x"], "no input 'dta'", "did you mean 'data'?"),
        (["train", "tests", "--work=x", "--out=/tmp/x"], "hone train has no option --work", "--out"),
        (["train", "tests", "--workers=2", "--out=/tmp/x"], "hone train has no option --workers", "--device"),
        (["train", "--compile", "work/data", "--out=/tmp/x"], "no folder work/data", "check the path"),
        (["train", "tests", "--out"], "--out needs a value", "--out=VALUE"),
        (["train", "tests", "--out=/tmp/x", "--steps"], "--steps needs a value", "--steps=VALUE"),
        (["train", "tests", "--steps=1", "--steps=2", "--out=/tmp/x"], "--steps is given twice: 1 and 2", "keep one"),
        (["--out=x"], "no option --out without a command", "hone --help"),
        (["run", "recipes/tiny.yaml", "--redo=train-bse"], "--redo=train-bse", "did you mean 'train-base'?"),
    ],
)
def test_no_option_is_dropped(arguments, what, fix, monkeypatch, capsys):
    monkeypatch.setattr("hone.cli.line.calibrated", lambda run, *_: run)
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert what in said and fix in said and said.startswith("error: ")


def test_a_boolean_field_stands_alone():
    assert parse(["train", "--compile", "work/data"]) == (["train", "work/data"], {"compile": "true"})
    assert parse(["run", "--train-base.compile", "r.yaml"]) == (["run", "r.yaml"], {"train-base.compile": "true"})
    assert parse(["train", "--steps", "3", "d"]) == (["train", "d"], {"steps": "3"})
    assert parse(["generate", "m", "--", "--not-an-option"]) == (["generate", "m", "--not-an-option"], {})


def test_python_m_hone_is_the_command():
    done = subprocess.run([sys.executable, "-m", "hone", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("hone ")


def test_a_refused_command_leaves_nothing(model, tmp_path, capsys):
    out = tmp_path / "out" / "eval-a"
    arguments = ["eval", str(model), f"--from.data={model}", f"--out={out}"]
    assert main(arguments) == 2
    assert "is a model, not a data set" in capsys.readouterr().err
    assert not out.parent.exists()


def test_data_refuses_a_source_given_twice(capsys):
    assert main(["data", "texts", "--source=books", "--out=nowhere"]) == 2
    said = capsys.readouterr().err
    assert "texts and --source=books" in said and "fix: " in said


def test_show_counts_the_files_of_a_hugging_face_folder(model, capsys):
    (model / "hone.json").unlink()
    files = [path.stat().st_size for path in model.rglob("*") if path.is_file()]
    assert main(["show", str(model)]) == 0
    said = capsys.readouterr().out
    assert (
        f"{human_bytes(sum(files))} in {len(files)} files" in said and "Hugging Face folder without hone.json" in said
    )


def test_data_takes_several_sources(monkeypatch):
    asked = []
    monkeypatch.setattr("hone.cli.stages.calibrated", lambda run, *_: run)
    monkeypatch.setattr("hone.data.stage.Data.make", lambda spec, *_: asked.append(spec.source) or sys.exit(7))
    for words in (["a b.txt", "émile, *.md"], ["one"]):
        with pytest.raises(SystemExit):
            main(["data", *words, "--out=/tmp/x", "--quiet"])
    assert asked == [("a b.txt", "émile, *.md"), "one"]


def test_calibrate_measures_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hone.measure.calibrate.BUDGET_S", 0.01)
    monkeypatch.setattr("hone.measure.calibrate.disturbance", lambda *_: "")  # whatever else this machine does now
    assert main(["calibrate"]) == 0
    assert "GFLOP/s" in capsys.readouterr().out and list(tmp_path.rglob("calibration-*.json"))


def test_env_says_what_a_bug_report_needs(monkeypatch, capsys):
    import torch

    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setattr("hone.cli.look._PACKAGES", ("torch", "no-such-package"))
    assert main(["env"]) == 0
    said = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert said.keys() == {"hone", "python", "cpu", "gpus", "packages", "limits"}
    assert said["packages"] == f"torch {torch.__version__}, no-such-package missing"
    assert "ATEN_CPU_CAPABILITY=avx2" in said["limits"] and "cores" in said["cpu"]


@pytest.mark.slow
def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("x")
    mistake(hone("run", "recipes/tiny.yaml", f"--work={tmp_path / 'file'}", "--quiet"), "cannot use", "Not a directory")
    mistake(hone("show", ""), "needs RECIPE_OR_FOLDER")


def test_the_command_of_an_artifact_can_be_pasted(model, tmp_path):
    """Options with brackets, spaces and quotes reach the same options through a shell."""
    arguments = [
        "compress",
        str(model),
        "--steps=[{kind: rtn, bits: 8, group_size: 0}]",
        f"--out={tmp_path / 'it is mine'}",
    ]
    assert main(arguments) == 0
    command = json.loads((tmp_path / "it is mine" / "hone.json").read_text())["provenance"]["command"]
    said = subprocess.run(
        ["bash", "-c", f'hone() {{ printf "%s\\0" "$@"; }}; {command}'], capture_output=True, text=True
    )
    assert parse(said.stdout.split("\0")[:-1]) == parse(arguments)
