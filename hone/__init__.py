"""hone makes language models cheap to build and cheap to run, and shows what every optimization cost and saved."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hone.measure.amx import avoid_undescribed_tiles

if TYPE_CHECKING:
    from hone.base.artifact import Artifact
    from hone.base.errors import HoneError
    from hone.base.run import Run
    from hone.base.store import pull, push
    from hone.exports.api import export
    from hone.model.hf import load, save
    from hone.model.tokenizer import load_tokenizer
    from hone.recipe import Recipe, make
    from hone.serve.engine import Engine
    from hone.serve.request import SamplingParams
    from hone.serve.spec import EngineSpec

# Names and their modules. Everything loads on first use, so that `import hone` and the CLI start fast.
_HOMES = {
    "Artifact": "hone.base.artifact",
    "Engine": "hone.serve.engine",
    "EngineSpec": "hone.serve.spec",
    "HoneError": "hone.base.errors",
    "Recipe": "hone.recipe",
    "Run": "hone.base.run",
    "SamplingParams": "hone.serve.request",
    "export": "hone.exports.api",
    "load": "hone.model.hf",
    "load_tokenizer": "hone.model.tokenizer",
    "make": "hone.recipe",
    "pull": "hone.base.store",
    "push": "hone.base.store",
    "save": "hone.model.hf",
}

__all__ = [
    "Artifact",
    "Engine",
    "EngineSpec",
    "HoneError",
    "Recipe",
    "Run",
    "SamplingParams",
    "export",
    "load",
    "load_tokenizer",
    "make",
    "pull",
    "push",
    "save",
]
__version__ = "0.1.0"

avoid_undescribed_tiles()  # before anything multiplies: oneDNN reads its limit once


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hone' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from hone.base.errors import without_extra

        raise (without_extra(error) or error) from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
