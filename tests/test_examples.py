"""The scripts in examples/ run as their users start them, on models and texts of seconds."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """A function that runs `python examples/NAME` in an empty folder, and returns what it prints.

    In this process, which has imported and compiled what the examples need.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def start(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return start


def test_every_example_is_tested_and_says_how_it_is_started():
    source = Path(__file__).read_text(encoding="utf8")
    scripts = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(scripts) >= 4
    for name in scripts:
        assert re.search(rf'run\(\s*"{name}"', source), f"no test runs {name}"
        assert f"python examples/{name}" in (EXAMPLES / name).read_text(encoding="utf8")


@pytest.mark.slow
def test_train_from_text(run, mini_source, tmp_path):
    said = run("train_from_text.py", mini_source, "--steps=8")
    made = Artifact.read(tmp_path / "work" / "example" / "train-base")
    assert made.figures["num_steps"].value == 8
    assert f"val_loss       {made.figures['val_loss'].value:.4g} nats/token" in said and "perplexity" in said


@pytest.mark.slow
def test_quantize_and_compare(run, tiny_llama, mini_source, tmp_path):
    said = run("quantize_and_compare.py", tiny_llama, mini_source, "--num-sequences=8", "--seq-len=64")
    rows = {name: [float(one.rstrip("%")) for one in rest.split()] for name, rest in _rows(said)}
    assert list(rows) == ["whole", "int8", "rtn4", "gptq4"]
    assert rows["whole"][0] > rows["int8"][0] > rows["rtn4"][0]
    assert rows["whole"][2] == 100 and rows["int8"][2] > rows["rtn4"][2]


def _rows(said: str) -> list[tuple[str, str]]:
    return re.findall(r"^(whole|int8|rtn4|gptq4) +(.*)$", said, re.M)


@pytest.mark.slow
def test_serve_and_query(run, tiny_llama, tmp_path):
    said = run("serve_and_query.py", tiny_llama, "--prompt=the quick", "--max-tokens=8")
    found = re.search(r"^completion: (.*)\nstream: (.*)\none of three: (Oslo|Rome|Lima)\n", said, re.M | re.S)
    assert found and found[1] == found[2] != ""


@pytest.mark.slow
def test_own_quantizer(run, tiny_llama, mini_source, tmp_path):
    text = sorted(mini_source.iterdir())[0]
    said = run("own_quantizer.py", tiny_llama, "--out=made", f"--calibration-text={text}")
    made = Artifact.read(tmp_path / "made")
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    assert f"relative_output_error  {made.figures['relative_output_error'].value:.4g}" in said
    assert [one["kind"] for one in made.techniques] == ["own_quantizer:Stochastic"]
