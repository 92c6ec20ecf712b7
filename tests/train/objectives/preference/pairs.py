"""A small data folder of pairs written by hand: the chosen answer counts up from the prompt, the rejected one repeats it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.conftest import byte_tokenizer


def write_answers(folder: Path, num_pairs: int = 48, seed: int = 0) -> Path:
    """The answers of `write_pairs`, each a document of its own with its label."""
    write_pairs(folder, num_pairs, seed)
    meta = json.loads((folder / "tokens" / "meta.json").read_text())
    for split, row in meta["splits"].items():
        starts = np.load(folder / "tokens" / f"{split}.starts.npy")
        marks = np.fromfile(folder / "tokens" / f"{split}.trained.bin", np.uint8)
        inside = np.flatnonzero(np.diff(marks >> 1) == 1) + 1
        np.save(folder / "tokens" / f"{split}.starts.npy", np.sort(np.concatenate([starts, inside])))
        row["documents"] *= 2
    meta["targets"] = "labels"
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return folder


def write_pairs(folder: Path, num_pairs: int = 48, seed: int = 0) -> Path:
    """A data artifact (contents only) of pairs of 8 + 10 tokens or fewer, 8 of them held out."""
    tokenizer, draw = byte_tokenizer(), np.random.default_rng(seed)
    tokenizer.save_pretrained(folder)
    (folder / "tokens").mkdir(parents=True)
    splits = {}
    for split, count in (("train", num_pairs), ("val", 8)):
        ids, marks, sizes = [], [], []
        for _ in range(count):
            at, length = int(draw.integers(60, 80)), int(draw.integers(3, 6))
            prompt = [at, at, 50]
            chosen, rejected = [*prompt, *(at + 1 + step for step in range(length))], [*prompt, *[at] * (length - 1)]
            ids += [*chosen, *rejected]
            marks += [0] * 3 + [1] * length + [2] * 3 + [3] * (length - 1)
            sizes.append(len(chosen) + len(rejected))
        np.array(ids, "<u2").tofile(folder / "tokens" / f"{split}.bin")
        np.array(marks, np.uint8).tofile(folder / "tokens" / f"{split}.trained.bin")
        np.save(folder / "tokens" / f"{split}.starts.npy", np.cumsum([0, *sizes]).astype(np.int64))
        trained = int((np.array(marks) & 1).sum())
        splits[split] = {"tokens": len(ids), "documents": count, "bytes": len(ids)}
        splits[split] |= {"trained_tokens": trained, "trained_bytes": trained}
    meta = {"dtype": "uint16", "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "splits": splits}
    meta |= {"packing": {"kind": "best_fit", "lengths": []}, "targets": "pairs"}
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return folder
