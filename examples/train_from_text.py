"""Trains a small model from a folder of text: curated, tokenized, trained, evaluated.

    python examples/train_from_text.py FOLDER --out=work/example

A second run resumes or reuses what the first one made.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import hone


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("text", help="folder with text, HTML, PDF, code, JSONL, Parquet ...")
    options.add_argument("--out", type=Path, default=Path("work/example"))
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    run = hone.Run(device=given.device)

    data = hone.make(
        "data",
        given.out / "data-text",
        run=run,
        source=given.text,
        tokenizer={"vocab_size": 1024},
        validation_fraction=0.1,
    )
    model = hone.make(
        "train",
        given.out / "train-base",
        run=run,
        inputs={"data": data.folder},
        model={"hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 352},
        steps=given.steps,
        batch_size=8,
        seq_len=128,
        optimizer={"kind": "adamw", "lr": 1e-3},
    )
    score = hone.make("eval", given.out / "eval-base", run=run, inputs={"model": model.folder, "data": data.folder})
    print(f"{data.figures['kept_documents'].value:.0f} documents kept")
    for name in ("val_loss", "tokens_per_s"):
        print(f"{name:14} {model.figures[name].value:.4g} {model.figures[name].unit}")
    print(f"perplexity     {score.figures['perplexity'].value:.4g}")
    print(f"the model is in {model.folder}; `hone generate {model.folder} 'Once'` writes with it")


if __name__ == "__main__":
    main()
