"""Serving in fewer bits beside bfloat16, hone and vLLM on the same folder: `python -m benchmarks.serve_bits --peer none`.

Makes a folder of each of `--forms` for a shape (its config.json with a quantization_config; weights are random codes, which
both engines draw themselves) and runs `benchmarks.serve --peer` on them. Batch 1 reads what the bits leave, prefill and
throughput show the products of codes. A form with `kv-` before a number format is bfloat16 with a KV cache of that format.
Rows as those of `benchmarks.serve_peer`; the model's name has the form.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.serve_peer import compare, folder_of, parser_of
from hone.model.quantized.config import to_json
from hone.model.quantized.methods.mxfp4 import SCHEME as MXFP4
from hone.model.quantized.scheme import Quantization, Scheme
from hone.ops.rounding.inputs import ACTIVATIONS

FORMS: dict[str, Scheme | None] = {
    "bf16": None,
    "int4": Scheme(4, 128),
    "int8": Scheme(8, layout="int-quantized", activations=ACTIVATIONS["int8_token"]),
    "fp8": Scheme(8, layout="float-quantized", number="e4m3", activations=ACTIVATIONS["fp8_token"]),
    "fp8-block": Scheme(
        8, layout="float-quantized", number="e4m3", block=(128, 128), activations=ACTIVATIONS["fp8_group"]
    ),
    "mxfp4": MXFP4,
}
"""W4A16 in groups of 128; W8A8 with a scale a row and a token; blocks of 128; experts alone in MXFP4."""


def write_form(shape: str, form: str, under: Path) -> Path:
    """The folder of `shape` (see `serve_peer.folder_of`) in one of FORMS, or in bfloat16 for a form of the KV cache."""
    scheme = None if form.startswith("kv-") else FORMS[form]
    with tempfile.TemporaryDirectory() as plain:
        values = json.loads((folder_of(shape, Path(plain)) / "config.json").read_text(encoding="utf8"))
    if scheme is MXFP4:
        values["quantization_config"] = {"quant_method": "mxfp4"}
    elif scheme is not None:
        values["quantization_config"] = to_json(
            Quantization(((("Linear",), scheme),), ("lm_head", "re:.*mlp\\.gate$"))  # and no router of experts
        )
    folder = under / f"{Path(shape).name}-{form}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf8")
    return folder


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="llama3-8b", help="name or folder")
    parser.add_argument("--forms", nargs="*", default=["bf16", "int4", "fp8", "kv-fp8"])
    parser.set_defaults(loads=["batch 1", "throughput", "prefill"])
    args = parser.parse_args()
    for form in args.forms:
        if form not in FORMS and not form.startswith("kv-"):
            parser.error(f"--forms {form}: one of {', '.join(FORMS)}, or kv- and a kv_cache_dtype")
    with tempfile.TemporaryDirectory(prefix="hone-bits-") as work:
        args.shapes = [str(write_form(args.shape, form, Path(work))) for form in args.forms]
        compare(args, [form.partition("-")[2] if form.startswith("kv-") else "auto" for form in args.forms])


if __name__ == "__main__":
    main()
