"""Quantizes a checkpoint three ways and compares size and quality: rounding, GPTQ in 4 bits, and 8 bits.

    python examples/quantize_and_compare.py MODEL TEXT --out=work/example

MODEL is a Hugging Face folder (or hf:OWNER/NAME), TEXT a folder of text: a part calibrates, another part scores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import hone

VARIANTS = {
    "int8": {"kind": "rtn", "bits": 8, "group_size": 0},
    "rtn4": {"kind": "rtn", "bits": 4, "group_size": 32},
    "gptq4": {"kind": "gptq", "bits": 4, "group_size": 32},
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model")
    options.add_argument("text")
    options.add_argument("--out", type=Path, default=Path("work/example"))
    options.add_argument("--num-sequences", type=int, default=128, help="of the calibration")
    options.add_argument("--seq-len", type=int, default=256, help="tokens of each of them")
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    run = hone.Run(device=given.device)

    whole = hone.Artifact.read(given.model).folder
    data = hone.make(
        "data",
        given.out / "data-calibration",
        run=run,
        source=given.text,
        tokenizer={"path": str(whole)},  # the model's own: perplexities are of its tokens
        validation_fraction=0.2,
    )
    models = {"whole": whole}
    for name, step in VARIANTS.items():
        made = hone.make(
            "compress",
            given.out / f"compress-{name}",
            run=run,
            inputs={"model": whole, "data": data.folder},
            steps=[step],
            num_sequences=given.num_sequences,
            seq_len=given.seq_len,
        )
        models[name] = made.folder
    print(f"{'model':8} {'MB':>8} {'perplexity':>11} {'same next token':>16}")
    for name, folder in models.items():
        inputs = {"model": folder, "data": data.folder, "reference": whole}
        figures = hone.make("eval", given.out / f"eval-{name}", run=run, inputs=inputs).figures
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 1e6
        print(f"{name:8} {size:8.2f} {figures['perplexity'].value:11.3f} {figures['top1_agreement'].value:16.1%}")


if __name__ == "__main__":
    main()
