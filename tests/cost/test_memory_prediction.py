"""Peak memory of real stages, each in a process of its own, against what was predicted before they began."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import byte_tokenizer

pytestmark = pytest.mark.slow

VOCAB = 4096
MAKE = """
import json, sys
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.base.stage import STAGES
import importlib
kind, out, parents, spec = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
module, _, name = STAGES[kind].partition(":")
stage = getattr(importlib.import_module(module), name).read(spec)
stage.make(out, {role: Artifact.read(folder) for role, folder in parents.items()}, Run(quiet=True))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Random tokens in documents of 50 to 1,500: what they say does not matter for memory."""
    folder = tmp_path_factory.mktemp("memory") / "data-random"
    (folder / "tokens").mkdir(parents=True)
    byte_tokenizer().save_pretrained(folder)
    random, splits = np.random.default_rng(0), {}
    for split, count in (("train", 200_000), ("val", 10_000)):
        starts = np.unique(np.append(np.cumsum(random.integers(50, 1500, count // 50)).clip(max=count), (0, count)))
        tokens = random.integers(1, 256, count).astype("<u2")
        tokens[starts[1:] - 1] = 0
        tokens.tofile(folder / "tokens" / f"{split}.bin")
        np.save(folder / "tokens" / f"{split}.starts.npy", starts.astype(np.int64))
        splits[split] = {"tokens": count, "documents": len(starts) - 1, "bytes": 3 * count}
    meta = {"dtype": "uint16", "vocab_size": VOCAB, "eos_token_id": 0, "splits": splits}
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="module")
def model(data) -> Path:
    """A model of 2.6 million parameters, hardly trained."""
    return make("train", data.parent / "train-base", {"data": data}, {"steps": 2, "batch_size": 2})


def make(kind: str, out: Path, parents: dict[str, Path], spec: dict) -> Path:
    """Runs one stage in a fresh process."""
    words = [kind, str(out), json.dumps({role: str(folder) for role, folder in parents.items()}), json.dumps(spec)]
    done = subprocess.run([sys.executable, "-c", MAKE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def errors(folder: Path) -> tuple[float, str]:
    """Relative error of the predicted peak, and a line that says what was what."""
    figures = {row["name"]: row for row in json.loads((folder / "hone.json").read_text())["figures"]}
    peak, growth = figures["peak_memory_bytes"], figures["memory_growth_bytes"]["value"]
    predicted = peak["estimate"]["value"]
    start = peak["value"] - growth
    said = (
        f"peak {peak['value']:,.0f} predicted {predicted:,.0f}; growth {growth:,.0f} predicted {predicted - start:,.0f}"
    )
    return predicted / peak["value"] - 1, f"{said}: {peak['estimate']['formula']}"


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"batch_size": 32, "gradient_accumulation_steps": 4},
        {"batch_size": 32, "activation_checkpointing": {"kind": "every_nth", "n": 1}},
        {"batch_size": 16, "precision": "bf16"},
    ],
    ids=["default", "accumulate", "every", "bf16"],
)
def test_training(data, tmp_path, spec):
    error, said = errors(make("train", tmp_path / "train-x", {"data": data}, {"steps": 2, **spec}))
    print(f"{error:+.1%} {said}")
    assert abs(error) < 0.2, said


@pytest.mark.parametrize("spec", [{}, {"concurrency": 4}], ids=["default", "few"])
def test_serving(data, model, tmp_path, spec):
    spec = {"num_requests": 24, **spec}
    error, said = errors(make("serve", tmp_path / "serve-x", {"data": data, "model": model}, spec))
    print(f"{error:+.1%} {said}")
    assert abs(error) < 0.2, said


@pytest.mark.parametrize("roles", [["model"], ["model", "reference"]], ids=["alone", "compared"])
def test_evaluation(data, model, tmp_path, roles):
    parents = {"data": data, **dict.fromkeys(roles, model)}
    error, said = errors(make("eval", tmp_path / "eval-x", parents, {}))
    print(f"{error:+.1%} {said}")
    assert abs(error) < 0.2, said
