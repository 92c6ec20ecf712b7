"""The names that clients may ask for: the model's, and those of its adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hone.serve.http.protocol import ApiError, bounded


class ServedModels:
    """The model's `names`, the first of which is the parent of its adapters, and the folder of each adapter by its name."""

    def __init__(self, names: Iterable[str], adapters: Mapping[str, str]) -> None:
        self.names = tuple(names)
        self.adapters = dict(adapters)

    def check(self, model: str | None) -> None:
        """Raises ApiError 404 for a model that is not served."""
        if model is not None and model not in self.names and model not in self.adapters:
            known = [*self.names, *self.adapters]
            raise ApiError(
                404,
                f"no model '{bounded(model, 100)}'; this server has: {', '.join(known)}",
                param="model",
                code="model_not_found",
            )

    def adapter_of(self, model: str | None) -> str:
        """The adapter that a request for `model` needs; "": none."""
        return model if model in self.adapters and model not in self.names else ""  # type: ignore[return-value]

    def cards(self) -> list[dict[str, Any]]:
        """What differs among the entries of /v1/models: `id`, `root`, and of adapters `parent`."""
        own = [{"id": name, "root": self.names[0], "parent": None} for name in self.names]
        return own + [{"id": name, "root": path, "parent": self.names[0]} for name, path in self.adapters.items()]
