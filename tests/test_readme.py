"""The README's commands and its Python are run as they stand, in a folder where the demo (made small) has run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.cli import main
from hone.model.facts import CheckpointFacts
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
COMMANDS = [line.split("#")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]


@pytest.fixture
def home(mini_line, tmp_path, monkeypatch):
    """A copy, because the commands write beside what they read."""
    monkeypatch.chdir(shutil.copytree(mini_line, tmp_path / "home"))


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command in COMMANDS if command.startswith("make ")]
    assert targets == ["demo", "test-all"]
    for target in targets:
        assert f"\n{target}:" in makefile


@pytest.mark.slow
def test_commands_run_in_their_order(home, capsys):
    commands = [shlex.split(command)[1:] for command in COMMANDS if command.startswith("hone ")]
    assert len(commands) >= 4
    for arguments in commands:
        assert main(arguments) == 0, arguments
    assert "gptq" in capsys.readouterr().out


@pytest.mark.slow
def test_commands_that_the_demo_prints_work_on_what_it_made(home, mini_source, capsys):
    assert main(["run", "work/tiny/recipe.yaml", "--quiet"]) == 0
    printed = capsys.readouterr().out.partition("try next:\n")[2].splitlines()
    serve, compress, again = (
        shlex.split(line.partition("-m hone ")[2] or line.partition("hone ")[2]) for line in printed
    )
    assert serve[0] == "serve" and CheckpointFacts.of(Path(serve[1])).config.num_layers == 4
    assert main([*compress, "--quiet"]) == 0
    assert Artifact.read("work/mine/compress-int4").techniques[-1]["kind"] == "gptq"
    own = [word.replace("YOUR_TEXT_FOLDER", str(mini_source)) for word in again]
    assert own != again and main(["plan", *own[1:]]) == 0


@pytest.mark.slow
def test_python_runs(home, capsys):
    (code,) = [block for kind, block in BLOCKS if kind == "python"]
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "times smaller" in capsys.readouterr().out
    assert names["decoder"].config.vocab_size >= names["tokenizer"].vocab_size


def test_every_linked_file_is_there():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_where_is_x_names_every_room():
    for folder in (ROOT / "hone").iterdir():
        if (folder / "__init__.py").exists():
            assert f"hone/{folder.name}/" in README
