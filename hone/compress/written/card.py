"""The model card of a compressed folder: README.md with what it was made from, how, and what that cost, as the Hub reads it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hone.base.durable import write_atomic

if TYPE_CHECKING:
    from hone.base.figure import Figure
    from hone.compress.spec import CompressSpec

_CACHED = re.compile(r"models--([\w.-]+)--([\w.-]+)/snapshots/")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FIGURES = {
    "model_bytes": "bytes of the weights",
    "compression_ratio": "times smaller",
    "bits_per_weight": "bits a weight, whole folder",
    "sparsity": "zeros in the compressed matrices",
    "kl_to_dense": "divergence of its predictions from the given model's, nats a token",
    "top1_agreement": "positions with the same most likely token",
    "perplexity_ratio": "perplexity over the given model's",
    "relative_output_error": "relative error of the matrices' outputs",
    "relative_weight_error": "relative error of the weights",
}
"""What a card says of its figures; times and memory are of the machine that made it."""
_INHERITED = ("license", "license_name", "license_link", "language")


def write(
    folder: Path, given: Path, spec: CompressSpec, figures: Mapping[str, Figure], quantization: Mapping[str, Any] | None
) -> None:
    """Writes README.md into `folder`, which `spec` made of the model in `given`. The same bytes for the same work."""
    name, about = base_name(given), _front_matter(given)
    kinds = [step.kind for step in spec.steps]
    method = (quantization or {}).get("quant_method")
    tags = list(dict.fromkeys(["hone", "compressed", *kinds, *([method] if method else [])]))
    front: dict[str, Any] = {key: about[key] for key in _INHERITED if key in about}
    front |= {"base_model": name} if _HUB_NAME.fullmatch(name) else {}
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    table = [
        f"| {said} | {figures[key].value:.4g} |"
        for key, said in _FIGURES.items()
        if key in figures and figures[key].value is not None
    ]
    licence = [path.name for path in sorted(folder.iterdir()) if re.match(r"(?i)licen[cs]e", path.name)]
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(),
        "---",
        f"# {name}, compressed: {' + '.join(kinds)}",
        "",
        f"Made by hone from `{name}`:",
        "",
        "```console",
        f"$ {command(name, spec)}",
        "```",
        "",
        "| figure | value |",
        "|---|---|",
        *table,
        "",
        "Divergence, agreement and perplexity are of text outside the calibration, if there is any. `hone.json` has every figure with its",
        "conditions, `layers.jsonl` the errors of every matrix.",
        "",
        "## Use",
        "",
        "```python",
        "import hone",
        'hone.load("FOLDER")  # or transformers.AutoModelForCausalLM.from_pretrained, or `vllm serve`',
        "```",
        "",
        "## Licence",
        "",
        f"That of the given model{': ' + ', '.join(licence) if licence else ''}; its own card is README.base.md, if it had one.",
        "",
    ]
    write_atomic(folder / "README.md", "\n".join(lines).encode())


def base_name(given: Path) -> str:
    """OWNER/NAME of a model from the Hub, else the folder's name: never a path of this machine."""
    cached = _CACHED.search(given.resolve().as_posix() + "/")
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    return given.resolve().name


def command(name: str, spec: CompressSpec) -> str:
    """The command line of `spec`, with what differs from the defaults; a calibration text by its name."""
    options = spec.model_dump(mode="json", exclude_defaults=True)
    options.pop("stage", None)
    if options.get("calibration_text"):
        options["calibration_text"] = Path(options["calibration_text"]).name
    options["steps"] = [
        step.model_dump(mode="json", exclude_defaults=True) | {"kind": step.kind} for step in spec.steps
    ]
    said = [
        f"--{key}={shlex.quote(value if isinstance(value, str) else json.dumps(value))}"
        for key, value in options.items()
    ]
    return " ".join(["hone compress", name if _HUB_NAME.fullmatch(name) is None else f"hf:{name}", *said])


def _front_matter(given: Path) -> dict[str, Any]:
    """The metadata of the given model's card; empty without one that can be read."""
    try:
        text = (given / "README.md").read_text(encoding="utf8")
        found = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}
