"""/v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs, in vLLM's words."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi.requests import Request as HttpRequest
from fastapi.responses import PlainTextResponse, Response

from hone.serve.http.front import Front
from hone.serve.http.processes.link import EngineLink
from hone.serve.http.protocol import ApiError, Body, Text


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (False,)}
    lora_name: Text | None = None
    lora_path: Text | None = None
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})
    lora_name: Text | None = None


class AdapterEndpoints:
    """The two endpoints of one front."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def load(self, request: HttpRequest) -> Response:
        """Reads an adapter's folder on the server's disk; from the reply on `model` may be its name."""
        body, headers = await self._front.read(request, LoadAdapterBody)
        engine, models = self._engine(), self._front.models
        if not body.lora_name or not body.lora_path:
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
        name, path = body.lora_name, body.lora_path
        if name in models.names:
            raise _invalid(
                f"'{name}' is the model's own name: requests for it get the base. Give the adapter another lora_name."
            )
        if name in models.adapters and not body.load_inplace:
            raise _invalid(
                f"The lora adapter '{name}' has already been loaded. If you want to load it again, set load_inplace."
            )
        await _done(engine, "load", (name, path, body.load_inplace))
        models.adapters[name] = path
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.", headers=headers)

    async def unload(self, request: HttpRequest) -> Response:
        """New requests for it get 404 at once; the reply comes when those that run have ended, and its memory is free."""
        body, headers = await self._front.read(request, UnloadAdapterBody)
        engine, models, name = self._engine(), self._front.models, body.lora_name
        if not name:
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
        if models.adapters.pop(name, None) is None:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", param="lora_name", code="NotFoundError")
        await _done(engine, "unload", (name,))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.", headers=headers)

    def _engine(self) -> EngineLink:
        """The engine. Raises ApiError where adapters neither come nor go."""
        if not self._front.settings.allow_runtime_lora_updating:
            raise ApiError(
                404, "adapters come and go only with --allow_runtime_lora_updating=true", code="lora_updating_off"
            )
        engine = self._front.engine
        if self._front.board is not None or not isinstance(engine, EngineLink):
            raise ApiError(
                400, "several fronts or replicas serve the adapters of --lora_modules only", code="unsupported"
            )
        return engine


async def _done(engine: EngineLink, kind: str, what: tuple[Any, ...]) -> None:
    """Waits until the engine has done it. Raises ApiError with what it says otherwise."""
    status, said = await engine.call(kind, what)
    if status != 200:
        code = {400: "InvalidUserInput", 404: "NotFoundError"}.get(status)
        raise ApiError(status, said, param="lora_path" if kind == "load" else "lora_name", code=code)


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="InvalidUserInput")
