"""One request's life between the engine and its client, without either."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from hone.serve.http import front as module
from hone.serve.http.edge.guard import ChunkWriter
from hone.serve.http.front import ReplyJob, until_disconnect
from hone.serve.http.metrics import ServerMetrics
from hone.serve.http.processes.wire import RefusedRequest
from hone.serve.http.protocol import ApiError, CompletionBody, parse_body
from hone.serve.http.replies import CompletionReply, PromptTokens, TokenLabels
from hone.serve.request import Output, Request


def job_of(n: int = 1) -> tuple[ReplyJob, list[str]]:
    """A job with requests '0'.. and the list that aborted ids go to."""
    aborted: list[str] = []
    stand_in = SimpleNamespace(
        metrics=ServerMetrics("m", dict), engine=SimpleNamespace(abort=lambda ids: aborted.extend(sorted(ids)))
    )
    reply = CompletionReply(
        parse_body(b'{"prompt": "a"}', CompletionBody),
        TokenLabels(None, as_ids=False),
        frozenset(),
        reply_id="cmpl-1",
        created=1,
        model="m",
        prompts=[PromptTokens([1], "a")],
        n=n,
    )
    return ReplyJob(stand_in, reply, [Request(str(index), [1]) for index in range(n)]), aborted


def stream(job: ReplyJob) -> list:
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        sent.append(data)

    asyncio.run(job.events(send))
    lines = [line.removeprefix(b"data: ") for line in b"".join(sent).split(b"\n\n") if line]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def test_a_backlog_is_sent_event_by_event():
    job, _ = job_of()
    job.deliver(Output("0", tokens=[5], text="x"))
    job.deliver(Output("0", tokens=[6], text="y"))
    job.deliver(Output("0", tokens=[7], text="z", finish="length"))
    *chunks, done = stream(job)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["x", "y", "z"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert done == b"[DONE]"


def test_what_came_before_an_error_is_sent_before_it():
    job, aborted = job_of(2)
    job.deliver(Output("0", tokens=[5], text="x"))
    job.deliver(RefusedRequest("1", "no", 400))
    chunk, error, done = stream(job)
    assert chunk["choices"][0]["text"] == "x" and error["error"]["message"] == "no" and done == b"[DONE]"
    job.close()
    assert aborted == ["0"]


def test_a_quiet_stream_is_kept_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PING_S", 0.01)
    sent: list[bytes] = []

    async def main() -> None:
        job, _ = job_of()

        async def send(data: bytes) -> None:
            sent.append(data)
            if len(sent) == 3:
                job.deliver(Output("0", tokens=[5], text="x", finish="length"))

        await asyncio.wait_for(job.events(send), 10)

    asyncio.run(main())
    assert sent[:3] == [b": ping\n\n"] * 3 and sent[-1] == b"data: [DONE]\n\n"


def test_whole_raises_what_the_engine_says():
    job, aborted = job_of(2)
    job.deliver(Output("1", finish="error", error="broken"))
    with pytest.raises(ApiError, match="broken") as caught:
        asyncio.run(job.whole())
    assert caught.value.status == 500
    job.close()
    job.close()
    assert aborted == ["0"]


def test_a_disconnect_cancels_the_reply():
    async def never() -> None:
        await asyncio.Event().wait()

    async def gone() -> dict:
        return {"type": "http.disconnect"}

    async def stays() -> dict:
        await asyncio.Event().wait()
        return {}

    async def done() -> int:
        return 7

    async def main() -> None:
        assert await until_disconnect(never(), gone) is None
        assert await until_disconnect(done(), stays) == 7

    asyncio.run(main())


def test_an_empty_part_of_a_stream_is_no_chunk() -> None:
    """A chunk without data ends a body: what followed would be read as the beginning of the next reply."""
    sent: list[bytes] = []
    transport = SimpleNamespace(is_closing=lambda: False, write=sent.append)
    writer = ChunkWriter(SimpleNamespace(transport=transport, flow=SimpleNamespace(write_paused=False)))
    for part in (b"data: 1\n\n", b"", b"x"):
        writer.write(part)
    assert sent == [b"9\r\ndata: 1\n\n\r\n", b"1\r\nx\r\n"]
