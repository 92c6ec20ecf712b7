"""The model card that a compressed folder gets."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from hone.compress.written.card import base_name


def parts(folder: Path) -> tuple[dict, str]:
    """(metadata, text) of a card."""
    _, front, text = (folder / "README.md").read_text(encoding="utf8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_card_says_what_was_done_and_what_it_cost(family_folder, compress, calibration_text, tmp_path) -> None:
    given = tmp_path / "models--acme--small" / "snapshots" / "0a1b"
    shutil.copytree(family_folder("llama"), given)
    (given / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\nprivate: no\n---\n# Small\n")
    (given / "LICENSE").write_text("Apache")
    made = compress(given, {"kind": "gptq", "group_size": 32}, num_sequences=8)
    front, text = parts(made.folder)
    assert front["base_model"] == "acme/small" and front["license"] == "apache-2.0" and front["language"] == ["en"]
    assert "private" not in front and {"gptq", "compressed-tensors"} <= set(front["tags"])
    assert 'hone compress hf:acme/small --steps=\'[{"kind": "gptq", "group_size": 32}]\'' in text
    assert f"--calibration_text={calibration_text.name}" in text and str(tmp_path) not in text
    for name in ("model_bytes", "kl_to_dense", "bits_per_weight"):
        assert f"| {made.figures[name].value:.4g} |" in text
    assert "That of the given model: LICENSE" in text
    assert (made.folder / "README.base.md").read_text().endswith("# Small\n")


def test_two_runs_write_the_same_card_and_a_folder_has_no_path(family_folder, compress) -> None:
    given = family_folder("llama")
    one, two = (compress(given, {"kind": "rtn", "group_size": 32}, name=name).folder for name in ("one", "two"))
    front, text = parts(one)
    assert "base_model" not in front and given.name in text and str(given.parent) not in text
    assert text == parts(two)[1]


def test_the_name_of_a_model(tmp_path) -> None:
    assert base_name(tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc") == "Qwen/Qwen3-0.6B"
    assert base_name(tmp_path / "mine") == "mine"
