"""A small data artifact written by hand, and small models."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.model.shape import Shape
from tests.conftest import byte_tokenizer

SHAPE = Shape(
    hidden_size=48, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=96, max_seq_len=128, norm_eps=1e-5
)
"""Small enough that a training step takes milliseconds."""
STEADY = {"eps": 1e-5}
"""AdamW's options where weights are compared to 2e-6. It divides a gradient by its size plus eps: with the default of 1e-8 the
rounding of sums in another order, about 1e-9 here and other on every kind of CPU, moves the smallest gradients' weights by more."""


def write_data(folder: Path, num_documents: int = 120, seed: int = 0) -> Path:
    """A data artifact (contents only) of sentences over a few words, in which the next word can be guessed."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "tokens").mkdir(parents=True)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "the",
        "lazy",
        "dog",
        "and",
        "the",
        "cat",
        "sat",
        "on",
        "the",
        "mat",
    ]
    draw = np.random.default_rng(seed)
    splits = {}
    for split, count in (("train", num_documents), ("val", 20)):
        texts = []
        for _ in range(count):
            at = int(draw.integers(len(words)))
            texts.append(" ".join(words[(at + step) % len(words)] for step in range(int(draw.integers(5, 60)))))
        documents = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
        tokens = np.concatenate([np.asarray(document, "<u2") for document in documents])
        tokens.tofile(folder / "tokens" / f"{split}.bin")
        starts = np.cumsum([0, *map(len, documents)])
        np.save(folder / "tokens" / f"{split}.starts.npy", starts.astype(np.int64))
        splits[split] = {"tokens": len(tokens), "documents": count, "bytes": sum(len(text) for text in texts)}
    meta = {
        "dtype": "uint16",
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "splits": splits,
    }
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return folder


_CHILD = """
import json, sys, time
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.train.loop import Trainer
from hone.train.stage import Train
spec, data, out, last, parents = sys.argv[1:]
step = Trainer.step
def until_killed(self, batch):
    while self.done == int(last):
        time.sleep(1)
    return step(self, batch)
Trainer.step = until_killed
print(Train.read(json.loads(spec)).make(out, {"data": Artifact.read(data), **{role: Artifact.read(one) for role, one in json.loads(parents).items()}}, Run(quiet=True)).content)
"""


def content_after_kills(
    spec: dict[str, Any],
    data: Path,
    out: Path,
    targets: Iterable[int],
    pause: Callable[[], float] = lambda: 0.0,
    parents: Mapping[str, Path] | None = None,
) -> str:
    """The content of `out` as a training of `spec` makes it that is killed `pause()` seconds after steps.jsonl has each of
    `targets` rows, and is then left to finish. It stands still a few steps later, so that each kill comes before its end even
    where this process gets no processor for a while. `parents` are inputs beside the data, by role."""
    more = json.dumps({role: str(folder) for role, folder in (parents or {}).items()})
    command = [sys.executable, "-c", _CHILD, json.dumps(spec), str(data), str(out)]
    path = out.with_name(f"{out.name}.partial") / "steps.jsonl"
    for target in targets:
        last = min(target + 8, spec["steps"] - 1)
        assert last >= target, "steps.jsonl has at least a row for each step that is done"
        child = subprocess.Popen([*command, str(last), more], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 300
            while not path.exists() or path.read_text().count("\n") < target:
                assert child.poll() is None and time.monotonic() < deadline, f"it did not get to {target} rows"
                time.sleep(0.001)
            time.sleep(pause())
        finally:
            child.kill()
            child.wait()
        assert child.returncode == -signal.SIGKILL
    finished = subprocess.run([*command, "-1", more], capture_output=True, text=True, check=True, timeout=300)
    return finished.stdout.strip()


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("made") / "data-small")
