"""Requests of the engine whose whole outputs one coroutine waits for."""

from __future__ import annotations

import asyncio

from hone.serve.http.processes.link import EngineLink
from hone.serve.http.processes.replicas import Replicas
from hone.serve.http.processes.wire import RefusedRequest
from hone.serve.http.protocol import ApiError
from hone.serve.request import Output, Request


async def ask(engine: EngineLink | Replicas, requests: list[Request]) -> list[Output]:
    """The whole output of each request, in order. Raises ApiError; cancelled, it ends what is still running."""
    results: dict[str, Output] = {}
    arrived = asyncio.Event()
    failed: list[ApiError] = []
    running = {request.id for request in requests}

    def deliver(item: Output | RefusedRequest) -> None:
        if isinstance(item, RefusedRequest):
            failed.append(ApiError(item.status, item.message, retry_s=1 if item.status == 503 else None))
        elif item.finish == "error":
            failed.append(ApiError(500, item.error or "the engine failed on this request", code="engine_error"))
        elif item.request_id in results:
            results[item.request_id].extend(item)
        else:
            results[item.request_id] = item
        if isinstance(item, RefusedRequest) or item.finish is not None:
            running.discard(item.request_id)
        arrived.set()

    engine.submit(requests, deliver)
    try:
        while running and not failed:
            arrived.clear()
            await arrived.wait()
    finally:
        engine.abort(list(running))
    if failed:
        raise failed[0]
    return [results[request.id] for request in requests]
