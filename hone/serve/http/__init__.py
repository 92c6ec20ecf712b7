"""The server: OpenAI-compatible HTTP in one process, the engine in another. `serve` runs it, `ServerSpec` sets it up."""

from hone.serve.http.server import serve
from hone.serve.http.spec import ServeConfig, ServerSpec

__all__ = ["ServeConfig", "ServerSpec", "serve"]
