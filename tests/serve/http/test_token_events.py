"""Streams of ordinary tokens: the same bytes as the long way, one write for all steps that had arrived, all counted."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from hone.serve.http.chat import ChatForm, ParsedChatReply
from hone.serve.http.edge.guard import ChunkWriter
from hone.serve.http.front import ReplyJob
from hone.serve.http.metrics import ServerMetrics
from hone.serve.http.processes.link import EngineLink
from hone.serve.http.processes.messages import framed
from hone.serve.http.processes.tallies import adopt, state_of, summed
from hone.serve.http.processes.wire import pack
from hone.serve.http.protocol import ChatBody, CompletionBody, parse_body
from hone.serve.http.replies import ChatReply, CompletionReply, PromptTokens, Reply, TokenLabels
from hone.serve.request import Output, Request, SamplingParams

LABELS = TokenLabels(None, as_ids=False)
TEXTS = [" a", 'quote " and \\ and \n', "é漢😀", "", "\u2028", "\x1f", "\ud800", "end"]


def reply_of(chat: bool, **fields: Any) -> Reply:
    more: dict[str, Any] = {"reply_id": "r-1", "created": 7, "model": 'm"ä', "prompts": [PromptTokens([1, 2])], "n": 1}
    if chat:
        asked = {"messages": [{"role": "user", "content": "x"}], **fields}
        return ChatReply(parse_body(json.dumps(asked).encode(), ChatBody), LABELS, **more)
    body = parse_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)
    return CompletionReply(body, LABELS, frozenset(), **more)


class Client:
    """The connection of one stream."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.flow = SimpleNamespace(write_paused=False)
        self.transport = SimpleNamespace(is_closing=lambda: False, write=self.writes.append)

    def text(self) -> bytes:
        parts = []
        for chunk in self.writes:
            size, _, rest = chunk.partition(b"\r\n")
            assert len(rest) == int(size, 16) + 2 and rest.endswith(b"\r\n")
            parts.append(rest[:-2])
        return b"".join(parts)


class Rig:
    """A job whose outputs come from a real handle over a socket; the test plays the engine."""

    def __init__(self, reply: Reply) -> None:
        self.client = Client()
        self.handle = EngineLink()
        self.metrics = ServerMetrics("m", dict)
        front = SimpleNamespace(metrics=self.metrics, engine=self.handle)
        requests = [Request("r", [1], SamplingParams(max_tokens=99))]
        self.job = ReplyJob(front, reply, requests)
        self.handle._frames = SimpleNamespace(send=lambda message: None)
        self.handle.submit(requests, self.job.deliver, self.job.streams)
        self.job.writer = ChunkWriter(self.client)
        self._step = 0

    def step(self, *outputs: Output, flush: bool = True) -> None:
        self._step += 1
        self.handle._received(("step", self._step, 0.01, *pack(list(outputs))))
        if flush:
            self.handle._flush()


def outputs_of(texts: list[str]) -> list[Output]:
    return [Output("r", [40 + n], text, num_output_tokens=n + 1) for n, text in enumerate(texts)]


CASES = [
    (chat, fields)
    for chat in (False, True)
    for fields in (
        {},
        {"return_token_ids": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
]


@pytest.mark.parametrize(("chat", "fields"), CASES)
def test_the_bytes_are_those_of_the_long_way(chat: bool, fields: dict[str, Any]):
    rig, long_way = Rig(reply_of(chat, **fields)), reply_of(chat, **fields)
    expected = b""
    for output in outputs_of(TEXTS):
        (choice,) = long_way.choices
        choice.take(output)
        expected += long_way.events(choice, output)
        rig.step(output)
    assert rig.client.text() == expected
    assert rig.job.reply.choices[0].tokens == list(range(40, 40 + len(TEXTS)))
    assert "".join(rig.job.reply.choices[0].text) == "".join(TEXTS)
    quick = rig.job.streams[0]._flow is not None
    assert quick == ("continuous_usage_stats" not in str(fields))


def test_replies_whose_events_depend_on_earlier_ones_have_no_fixed_bytes():
    more: dict[str, Any] = {"reply_id": "r", "created": 7, "model": "m", "prompts": [PromptTokens([1])], "n": 1}
    body = parse_body(b'{"messages": [{"role": "user", "content": "x"}]}', ChatBody)
    parsed = ParsedChatReply(body, LABELS, ChatForm(), **more)
    assert parsed.around(parsed.choices[0]) is None
    for chat, fields in ((False, {"logprobs": 1}), (True, {"logprobs": True})):
        reply = reply_of(chat, **fields)
        assert reply.around(reply.choices[0]) is None


def test_steps_that_arrive_together_are_one_write():
    rig = Rig(reply_of(False))
    first, *rest = outputs_of([" a"] * 6)
    rig.step(first)
    assert len(rig.client.writes) == 1
    for output in rest:
        rig.step(output, flush=False)
    assert len(rig.client.writes) == 1
    rig.handle._flush()
    assert len(rig.client.writes) == 2 and rig.client.text().count(b"data: ") == 6


def test_an_output_on_the_long_way_is_sent_after_what_is_kept():
    rig = Rig(reply_of(False))
    first, second, third, fourth = outputs_of([" a", " b", " c", " d"])
    rig.step(first)
    rig.step(second, flush=False)
    rig.step(Output("r", [1, 2], " two", num_output_tokens=4), third, fourth)  # a guess was right: two tokens
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in rig.client.text().split(b"\n\n") if line]
    assert texts == [" a", " b", " two", " c", " d"]


def test_a_client_that_is_behind_gets_what_waits_in_order():
    rig = Rig(reply_of(False))
    first, second, third, last = outputs_of([" a", " b", " c", " d"])
    rig.step(first)
    rig.client.flow.write_paused = True
    rig.step(second)
    rig.client.flow.write_paused = False
    rig.step(third)  # the second waits in the job: this one must not overtake it
    assert [item.text for item in rig.job.waits] == [" b", " c"]
    last.finish = "length"
    rig.step(last)
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        sent.append(data)

    asyncio.run(rig.job.events(send, rig.job.writer))
    assert [json.loads(line[6:])["choices"][0]["text"] for line in b"".join(sent).split(b"\n\n")[:3]] == [
        " b",
        " c",
        " d",
    ]


def test_every_token_is_counted_once():
    rig = Rig(reply_of(False))
    for output in outputs_of([" a"] * 2500):
        rig.step(output)
    text = rig.metrics.text().decode()
    for name, value in (
        ("generation_tokens_total", 2500),
        ("inter_token_latency_seconds_count", 2499),
        ("time_to_first_token_seconds_count", 1),
    ):
        assert f'hone:{name}{{model_name="m"}} {value}.0' in text
    assert len(rig.metrics.gaps) == 0


def test_tallies_of_processes_are_summed():
    one, two = ServerMetrics("m", dict), ServerMetrics("m", dict)
    one.replied("/health", 200)
    two.replied("/health", 200)
    two.replied("/v1/models", 404)
    one.latency_s.observe(0.3)
    two.latency_s.observe(1000.0)
    three = ServerMetrics("m", dict)
    three.latency_s.observe(0.5, 2)
    all_of_them = ServerMetrics("m", dict, counted=lambda: [state_of(each.settle()) for each in (one, two, three)])
    text = all_of_them.text().decode()
    assert 'hone:http_replies_total{endpoint="/health",model_name="m",status="200"} 2.0' in text
    assert 'hone:http_replies_total{endpoint="/v1/models",model_name="m",status="404"} 1.0' in text
    for bound, count in (("0.25", 0), ("0.5", 3), ("320.0", 3), ("+Inf", 4)):
        assert f'hone:e2e_request_latency_seconds_bucket{{le="{bound}",model_name="m"}} {count}.0' in text
    assert 'hone:e2e_request_latency_seconds_sum{model_name="m"} 1001.3' in text
    successor = ServerMetrics("m", dict)
    adopt(successor.tallies, summed([state_of(one.tallies), state_of(two.tallies)]))
    successor.replied("/health", 200)
    assert 'status="200"} 3.0' in successor.text().decode()


def test_messages_are_taken_from_any_pieces():
    async def main() -> None:
        from hone.serve.http.processes.wire import FrameProtocol

        ours, theirs = socket.socketpair()
        taken: list[Any] = []
        flushes: list[int] = []
        lost = asyncio.Event()
        loop = asyncio.get_running_loop()
        _, frames = await loop.create_connection(
            lambda: FrameProtocol(taken.append, lambda: flushes.append(len(taken)), lost.set), sock=ours
        )
        data = framed("one") + framed(["two"] * 3) + framed("three")
        theirs.setblocking(False)
        for cut in (data[:3], data[3:40], data[40:]):
            await loop.sock_sendall(theirs, cut)
            await asyncio.sleep(0.02)
        assert taken == ["one", ["two"] * 3, "three"]
        assert flushes == sorted(set(flushes)) and flushes[-1] == 3
        theirs.close()
        await asyncio.wait_for(lost.wait(), 5)
        frames.send("nobody reads this")

    asyncio.run(main())
