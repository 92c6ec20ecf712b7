"""/openapi.json: the endpoints, and the fields of their bodies as the server checks them."""

from __future__ import annotations

from functools import cache
from typing import Any

from hone.serve.http.endpoints.adapters import LoadAdapterBody, UnloadAdapterBody
from hone.serve.http.endpoints.embeddings import EmbeddingsBody, ScoreBody
from hone.serve.http.endpoints.response_body import ResponsesBody
from hone.serve.http.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/score": ScoreBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
"""The POST endpoints that read a body."""
STATE = (
    "/tokenizer_info",
    "/v1/models",
    "/v1/models/{name}",
    "/openapi.json",
    "/health",
    "/ping",
    "/metrics",
    "/version",
)
"""The GET endpoints."""
_OPEN = ("/health", "/ping", "/metrics", "/version")
_REF = "#/components/schemas/{model}"


@cache
def description(version: str) -> dict[str, Any]:
    """The document. It has nothing of this server's configuration: no model, address, key or path."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for path, body in BODIES.items():
        schema = body.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        for name in body.refused:
            schema["properties"].setdefault(name, {"description": "not supported: an error unless it means off"})
        schemas[body.__name__] = schema
        content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
        paths[path] = {"post": {**_operation(path), "requestBody": {"required": True, "content": content}}}
    for path in STATE:
        paths[path] = {"get": _operation(path)}
    paths["/v1/models/{name}"]["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "hone", "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation(path: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {
        "operationId": path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_"),
        "security": [] if path in _OPEN else [{"key": []}, {}],
        "responses": {
            "200": {"description": "the result"},
            "default": {"description": "an error", "content": error},
        },
    }
