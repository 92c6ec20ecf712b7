"""`hone serve --config`: the flags' fields in a file, flags first, mistakes with line and column; `hone show` prints it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hone.base.errors import SpecError
from hone.cli import main
from hone.recipe import Recipe
from hone.serve.http import ServeConfig, ServerSpec


@pytest.fixture
def served(monkeypatch) -> list:
    """What `serve` is called with."""
    calls: list = []
    monkeypatch.setattr("hone.serve.http.serve", lambda *words, **more: calls.append((*words, more["run"])))
    return calls


def written(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


TEXT = """\
# comments are allowed
model: FOLDER
device: cpu
port: 8123
served_model_name: mine
api_server_count: 2
engine.max_num_seqs: 4
engine:
  max_model_len: 256
  kv_policy: {kind: snapkv, budget: 512}
"""


def test_the_file_has_the_fields_of_the_flags(tmp_path: Path, served: list):
    config = written(tmp_path, TEXT)
    assert main(["serve", f"--config={config}"]) == 0
    assert main(["serve", "OTHER", "--config", config, "--engine.kv_policy=full", "--engine.max_num_seqs=2"]) == 0
    assert main(["serve", f"--config={config}", "--port=9", "--engine.kv_policy.budget=64", "--model=THERE"]) == 0
    (folder, spec, run), (other, fewer, _), (there, changed, _) = served
    assert (folder, other, there, run.device) == ("FOLDER", "OTHER", "THERE", "cpu") and isinstance(spec, ServerSpec)
    assert (fewer.engine.kv_policy.kind, fewer.engine.max_num_seqs, fewer.port) == ("full", 2, 8123)
    assert (spec.port, spec.served_model_name, spec.processes.api_server_count) == (8123, ("mine",), 2)
    assert (spec.engine.max_num_seqs, spec.engine.max_model_len, spec.engine.kv_policy.budget) == (4, 256, 512)
    assert (changed.port, changed.engine.kv_policy.budget, changed.engine.max_model_len) == (9, 64, 256)


def test_show_prints_every_field_and_reads_it_again(tmp_path: Path, capsys):
    config = written(tmp_path, TEXT)
    assert main(["show", config]) == 0
    printed = capsys.readouterr().out
    again = written(tmp_path, printed)
    assert {"port", "drain_s", "engine", "model"} <= yaml.safe_load(printed).keys()
    assert ServeConfig.from_overrides({}, Path(again)).to_yaml() == printed


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("model: x\nprot: 3\n", "line 2, column 1", "did you mean 'port'"),
        ("port: 99999\n", "line 1, column 1", "less than or equal to 65535"),
        ("engine:\n  max_rows: 3\n", "line 2, column 3", "max_num_seqs"),
        ("engine.dtyp: auto\n", "line 1, column 1", "did you mean 'dtype'"),
        ("engine:\n  kv_policy: {kind: h2o, budgte: 3}\n", "line 2, column 26", "did you mean 'budget'"),
        ("engine: {eviction: lruu}\n", "line 1, column 10", "did you mean 'lru'"),
        ("engine:\n  max_num_seqs: 8\n  max_num_batched_tokens: 4\n", "line 1, column 1", "less than max_num_seqs"),
        ("port: 1\nport: 2\n", "lines 1 and 2", "twice"),
        ("port: [\n", "line 2, column 1", "not a YAML file"),
        ("- port\n", "", "no mapping of fields"),
    ],
)
def test_mistakes_in_the_file_have_their_place(tmp_path: Path, served: list, capsys, text: str, place: str, words: str):
    config = written(tmp_path, text)
    assert main(["serve", "FOLDER", f"--config={config}"]) == 2
    told = capsys.readouterr().err
    assert place in told and words in told and config in told and "fix:" in told and not served


def test_mistakes_of_flags_are_not_the_files(tmp_path: Path, served: list, capsys):
    config = written(tmp_path, "port: 3\n")
    assert main(["serve", "FOLDER", f"--config={config}", "--port=99999"]) == 2
    assert "line" not in capsys.readouterr().err.partition("fix:")[0]
    assert main(["serve", f"--config={config}"]) == 2 and "needs MODEL_FOLDER" in capsys.readouterr().err
    assert main(["serve", "x", "--model=y"]) == 2 and "two models" in capsys.readouterr().err
    assert main(["serve", "--config=/nowhere.yaml"]) == 2 and "no file /nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine.max_waiting=3"], "max_queue"),
        (["--engine.max_delay_s=3"], "batching=dynamic"),
        (["--engine.eviction=lfu", "--engine.enable_prefix_caching=false"], "enable_prefix_caching"),
        (["--engine.num_pages=9", "--engine.gpu_memory_utilization=0.4"], "give one of them"),
        (["--engine.num_pages=9", "--engine.kv_cache_memory_bytes=4000000"], "give one of them"),
        (["--engine.distributed_timeout_seconds=3"], "one process"),
        (["--processes.balance_abs_threshold=3"], "one replica"),
        (["--device=cuda", "--engine.num_threads=2"], "num_threads"),
    ],
)
def test_an_option_without_effect_is_an_error(served: list, capsys, options: list[str], words: str):
    assert main(["serve", "FOLDER", *options]) == 2 and not served
    assert words in capsys.readouterr().err


def test_such_options_work_where_they_have_an_effect(served: list):
    for options in (
        ["--engine.max_delay_s=3", "--engine.batching=dynamic"],
        ["--engine.eviction=lfu"],
        ["--engine.tensor_parallel_size=2", "--engine.distributed_timeout_seconds=3"],
        ["--data_parallel_size=2", "--processes.balance_abs_threshold=3", "--processes.balance_rel_threshold=2"],
        ["--engine.num_threads=2"],
    ):
        assert main(["serve", "FOLDER", *options]) == 0
    assert len(served) == 5


def test_help_offers_the_device_and_nothing_without_effect(capsys):
    assert main(["serve", "--help"]) == 0
    told = capsys.readouterr().out
    assert "max_waiting" not in told and "--device=" in told and "--config=" in told


def test_a_parser_of_calls_that_nothing_asks_is_a_mistake(tmp_path: Path, capsys):
    assert main(["serve", str(tmp_path), "--tool_call_parser=hermes"]) == 2
    assert "enable_auto_tool_choice" in capsys.readouterr().err


def test_a_mistake_in_a_recipe_has_its_place(tmp_path: Path):
    """Of a stage's field or a technique's; of every one that may be meant where several stages have such a field."""
    path, stage = (
        tmp_path / "recipe.yaml",
        "- {stage: compress, name: NAME, from: {model: .}, steps: [{kind: rtn, FIELD}]}\n",
    )
    first = stage.replace("NAME", "a")
    column = first.index("FIELD") + 1
    for field, words in (("bitz: 3", "no field 'bitz'"), ("bits: 99", "bits = 99")):
        path.write_text("line: x\nstages:\n" + first.replace("FIELD", field))
        with pytest.raises(SpecError, match=f"recipe.yaml, line 3, column {column}: .*{words}"):
            Recipe.load(path)
    both = first.replace("FIELD", "bits: 4") + stage.replace("NAME", "b").replace("FIELD", "bits: 99")
    path.write_text("line: x\nstages:\n" + both)
    with pytest.raises(SpecError, match=f"line 3, column {column} or line 4, column {column}: "):
        Recipe.load(path)
