"""A small data folder of prompts with one right answer: `a+b=` in digits, answered by one digit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.conftest import byte_tokenizer


def write_sums(folder: Path, count: int = 64, seed: int = 0, most: int = 3) -> Path:
    """A data artifact (contents only) of `count` sums of two digits up to `most`; 16 more are held out."""
    tokenizer, draw = byte_tokenizer(), np.random.default_rng(seed)
    tokenizer.save_pretrained(folder)
    (folder / "tokens").mkdir(parents=True)
    splits = {}
    for split, number in (("train", count), ("val", 16)):
        ids, marks, sizes = [], [], []
        for _ in range(number):
            one, other = (int(draw.integers(0, most + 1)) for _ in range(2))
            prompt = tokenizer.encode(f"{one}+{other}=", add_special_tokens=False)
            answer = [*tokenizer.encode(str(one + other), add_special_tokens=False), tokenizer.eos_token_id]
            ids += [*prompt, *answer]
            marks += [0] * len(prompt) + [1] * len(answer)
            sizes.append(len(prompt) + len(answer))
        np.array(ids, "<u2").tofile(folder / "tokens" / f"{split}.bin")
        np.array(marks, np.uint8).tofile(folder / "tokens" / f"{split}.trained.bin")
        np.save(folder / "tokens" / f"{split}.starts.npy", np.cumsum([0, *sizes]).astype(np.int64))
        trained = int(np.sum(marks))
        splits[split] = {"tokens": len(ids), "documents": number, "bytes": len(ids)}
        splits[split] |= {"trained_tokens": trained, "trained_bytes": trained}
    meta = {"dtype": "uint16", "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "splits": splits}
    meta |= {"packing": {"kind": "best_fit", "lengths": []}, "targets": "trained"}
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return folder
