"""Sampling defaults of a model: its generation_config.json, under what each request says itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hone.base.errors import ArtifactError, SpecError
from hone.serve.request import SamplingParams

FIELDS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
"""The fields that vLLM reads, too; with `max_new_tokens`, which limits every reply."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Values of the request fields in FIELDS for requests without them, and most tokens of a reply."""

    values: dict[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None

    def fill(self, body: Any) -> None:
        """Sets the fields that the client left out."""
        for name, value in self.values.items():
            if getattr(body, name) is None:
                setattr(body, name, value)

    def __str__(self) -> str:
        """One line for the operator; empty without any."""
        parts = [f"{name} {value:g}" for name, value in self.values.items()]
        if self.max_new_tokens is not None:
            parts.append(f"at most {self.max_new_tokens} tokens a reply")
        return ", ".join(parts)


def generation_defaults(folder: Path, source: str) -> GenerationDefaults:
    """Those of `source`: `auto` (the model `folder`'s), `vllm` (none: the API's), or another folder.

    Raises SpecError for a folder without the file, ArtifactError for a file or a value that cannot be read.
    """
    if source == "vllm":
        return GenerationDefaults()
    path = (folder if source == "auto" else Path(source)) / "generation_config.json"
    if not path.exists():
        if source == "auto":
            return GenerationDefaults()
        raise SpecError(
            f"generation_config: {path} does not exist", fix="give auto, vllm, or a folder that has the file"
        )
    fix = "correct the file, or start with --generation_config=vllm, which leaves it out"
    try:
        given = json.loads(path.read_text(encoding="utf8"))
        if not isinstance(given, dict):
            raise ValueError("it is no JSON object")
        values = {name: given[name] for name in FIELDS if given.get(name) is not None}
        limit = given.get("max_new_tokens")
        if any(isinstance(one, bool | str) for one in [*values.values(), limit]):
            raise ValueError(f"{', '.join(FIELDS)} and max_new_tokens are numbers")
        values["top_k"] = max(0, values.get("top_k", 0))  # -1 means off, too
        SamplingParams.model_validate({**values, "max_tokens": 1 if limit is None else limit})
    except (OSError, ValueError, ValidationError) as error:
        why = error.errors()[0]["loc"] if isinstance(error, ValidationError) else error
        raise ArtifactError(f"{path}: {why} is wrong", fix=fix) from None
    off = {name: getattr(SamplingParams(), name) for name in values}
    return GenerationDefaults({name: value for name, value in values.items() if value != off[name]}, limit)
