"""`hone completion`: what the shells themselves offer with its scripts, and that TAB starts no program."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hone.base.spec import describe_fields
from hone.cli import main
from hone.cli.completion.known import SHELLS, options_of, slots, verbs
from hone.cli.dispatch import VERBS
from hone.cli.options import parse
from hone.serve.http import ServeConfig
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of each shell's script, written by one process that must not import torch."""
    folder = tmp_path_factory.mktemp("completion")
    code = (
        "import sys\n"
        "from hone.cli.completion.scripts import script\n"
        f"for shell in {SHELLS}: open(f'{folder}/{{shell}}', 'w').write(script(shell))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    return {shell: folder / shell for shell in SHELLS}


def test_every_verb_and_its_options_are_known():
    assert {*verbs()} == {*VERBS} and all(verbs().values())
    names = [one.name for one in options_of("serve")]
    assert {name for name, *_ in describe_fields(ServeConfig)} - {*names} == {"engine.max_waiting"}
    assert len(names) == len({*names}) and {"config", "quiet", "help", "engine.kv_policy.budget"} <= {*names}
    for verb in VERBS:
        for one in options_of(verb):
            assert one.about, (verb, one.name)
            if one.flag:  # the next word is not its value
                assert parse([verb, f"--{one.name}", "word"])[0] == [verb, "word"], (verb, one.name)


def offered(script: Path, *lines: list[str]) -> list[list[str]]:
    """What bash offers for the last word of each line, without any program to start."""
    code = [f"source {script}", "compopt() { :; }"]
    for words in lines:
        quoted = " ".join(f"'{word}'" for word in words)
        code += [f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _hone", 'echo "${COMPREPLY[@]}"']
    bash = shutil.which("bash")
    assert bash is not None
    command = [bash, "--norc", "--noprofile", "-c", "\n".join(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": "/nowhere"}, timeout=600)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_bash(scripts: dict[str, Path], tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "file.txt").touch()
    (tmp_path / "one.yaml").touch()
    here = f"{tmp_path}/"
    cases = {
        ("hone", "ch"): ["chat"],
        ("hone", "--v"): ["--version"],
        ("hone", "hardware", "GB"): ["GB200", "GB300"],
        ("hone", "cost", "k"): ["kv"],
        ("hone", "serve", "--po"): ["--port=", "--pooling="],
        ("hone", "serve", "--enable_a"): ["--enable_auto_tool_choice"],
        ("hone", "serve", "--engine.kv_policy", "=", "s"): ["streaming_llm", "snapkv"],
        ("hone", "serve", "--engine.kv_policy", "="): ["full", "window", "streaming_llm", "h2o", "snapkv"],
        ("hone", "serve", "--engine.kv_policy", "s"): ["streaming_llm", "snapkv"],
        ("hone", "serve", "--engine.kv_policy=s"): ["--engine.kv_policy=streaming_llm", "--engine.kv_policy=snapkv"],
        ("hone", "serve", "--quiet", here): [f"{here}model"],
        ("hone", "chat", here): [f"{here}model"],
        ("hone", "serve", "--config", "=", f"{here}o"): [f"{here}one.yaml"],
        ("hone", "run", here): [f"{here}model", f"{here}one.yaml"],
        ("hone", "run", "--train.optimizer", "=", "adamw_"): ["adamw_8bit"],
        ("hone", "run", "--serve.engine.max_m"): ["--serve.engine.max_model_len="],
        ("hone", "plan", "--serve.engine.dtype", "=", "f"): ["float32", "float16"],
        ("hone", "compress", "model", "--steps", "=", "gpt"): ["gptq", "gptaq"],
        ("hone", "compress", "--from.m"): ["--from.model="],
        ("hone", "techniques", "hessian"): ["hessian"],
        ("hone", "completion", ""): [*SHELLS],
        ("hone", "serve", "--port", "="): [],
        ("hone", "nothing", "--x"): [],
    }
    for words, expected in zip(cases, offered(scripts["bash"], *map(list, cases)), strict=True):
        assert sorted(expected) == sorted(cases[words]), words


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_fish(scripts: dict[str, Path]):
    cases = {
        "hone ch": ["chat"],
        "hone serve --engine.dtype=f": ["--engine.dtype=float16", "--engine.dtype=float32"],
        "hone run --train.optimizer ad": ["adafactor", "adamw", "adamw_8bit"],
        "hone completion ": ["bash", "fish", "zsh"],
    }
    asked = "; ".join(f"complete -C '{line}'; echo ===" for line in cases)
    command = ["fish", "--no-config", "-c", f"source {scripts['fish']}; {asked}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    told = [part.strip().splitlines() for part in done.stdout.split("===\n")]
    found = [[line.partition("\t")[0] for line in part] for part in told]
    assert found[: len(cases)] == [*cases.values()]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh(scripts: dict[str, Path]):
    """The functions that offer words to zsh's line editor are replaced by ones that print them."""
    code = f"""
        compdef() {{ print "$@" }}
        source {scripts["zsh"]}
        _describe() {{ print -l -- ${{(P)@[-1]}} ${{valued-}} }}
        _files() {{ print "files $@" }}
        compset() {{ PREFIX=${{PREFIX#*=}} }}
        compadd() {{ shift; print -- "$@" }}
        ask() {{ words=("$@"); CURRENT=$#; PREFIX=$words[-1]; _hone; print -- --- }}
        ask hone ''; ask hone serve --po; ask hone serve --engine.dtype=f; ask hone serve --quiet x; ask hone run x
    """
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    registered, _, rest = done.stdout.partition("\n")
    named, options, values, folders, recipes, _ = rest.split("---\n")
    assert registered == "_hone hone" and len(named.splitlines()) == len(VERBS)
    assert any(line.startswith("--port=:Port to listen on") for line in options.splitlines())
    assert values.split() == ["auto", "float32", "bfloat16", "float16"]
    assert folders == "files -/\n" and recipes.startswith("files -g")


def test_another_shell_is_a_mistake(capsys):
    assert main(["completion", "bahs"]) == 2
    assert "did you mean 'bash'" in capsys.readouterr().err
    assert main(["completion", "--help"]) == 0 and "bash-completion" in capsys.readouterr().out


@pytest.mark.slow
def test_slots_are_those_of_the_tables():
    from hone.base.table import all_tables

    assert slots() == {slot: [*table] for slot, table in all_tables().items()}
