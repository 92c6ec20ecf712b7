"""The engine's loop and its handle, in one process and across two."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import threading

import psutil
import pytest

from hone.base.errors import MachineError, SpecError
from hone.serve.http.processes.messages import framed
from hone.serve.http.processes.wire import Channel, RefusedRequest, pack, unpack
from hone.serve.http.worker import EngineInfo, EngineProcess, Loop
from hone.serve.request import Output, Request, SamplingParams, TokenLogprob
from tests.serve import fake_engine as fake


class Recorder:
    """A channel that keeps what was sent and ends the loop after `limit` steps."""

    def __init__(self, limit: int) -> None:
        self.sent: list[tuple] = []
        self._limit = limit

    def send(self, message: tuple) -> None:
        self.sent.append(message)
        if message[0] == "step" and message[1] == self._limit:
            raise BrokenPipeError

    def kinds(self) -> list[str]:
        return [message[0] for message in self.sent]


def run_loop(engine: object, messages: list[tuple], steps: int) -> Recorder:
    channel, inbox = Recorder(steps), queue.SimpleQueue()
    for message in messages:
        inbox.put(message)
    with pytest.raises(BrokenPipeError):
        Loop(engine, channel, inbox).run()
    return channel


def request(name: str, *prompt: int, max_tokens: int = 3) -> Request:
    return Request(name, list(prompt), SamplingParams(max_tokens=max_tokens))


def test_the_loop_reports_every_step():
    channel = run_loop(fake.FakeEngine(), [("add", [request("a", 40), request("b", 50)])], 3)
    steps = [message for message in channel.sent if message[0] == "step"]
    assert [message[1] for message in steps] == [1, 2, 3]
    assert all(message[2] > 0 for message in steps)
    assert [output.tokens for _, _, _, *rows in steps for output in unpack(*rows)] == [
        [41],
        [51],
        [42],
        [52],
        [43],
        [53],
    ]


def test_the_loop_takes_messages_between_steps_in_order():
    engine = fake.FakeEngine()
    run_loop(engine, [("add", [request("a", 40), request("b", 50)]), ("abort", ["a", "never heard of"])], 1)
    assert engine.stats() == {"running": 1, "aborted": 1}


def test_a_refused_request_is_answered():
    channel = run_loop(
        fake.FakeEngine(),
        [
            (
                "add",
                [
                    request("a", fake.ADD_REFUSES),
                    request("b", fake.ADD_RAISES),
                    request("c", 40),
                    request("d", fake.ADD_IS_BUSY),
                ],
            )
        ],
        1,
    )
    refused = [message[1] for message in channel.sent if message[0] == "refused"]
    assert [(one.request_id, one.status) for one in refused] == [("a", 400), ("b", 500), ("d", 503)]


def test_a_broken_step_fails_what_was_in_it_only():
    channel = run_loop(fake.FakeEngine(), [("add", [request("a", fake.ALWAYS_RAISES), request("b", 40)])], 1)
    (rows,) = [message[3:] for message in channel.sent if message[0] == "step"]
    assert {output.request_id: output.finish for output in unpack(*rows)} == {"a": "error", "b": "error"}
    assert "step is broken" in unpack(*rows)[0].error


def test_packing_keeps_every_field():
    output = Output("a", [1], "x", [TokenLogprob(1, -1.0, [(1, -1.0)])], [None], "stop", "y", "z", 1, 2, 3)
    assert unpack(*pack([output])) == [output]


def test_ordinary_tokens_are_packed_in_columns_and_keep_their_order():
    first = Output("a", [1], "x", num_output_tokens=1)  # says how many tokens were cached: not ordinary
    plain = Output("b", [2], "y", num_output_tokens=5)
    scored = Output("c", [3], "z", [TokenLogprob(3, -1.0)], num_output_tokens=2)
    behind = Output("c", [4], "w", num_output_tokens=3)
    columns, others = pack([first, plain, scored, behind])
    assert columns == (["b"], [2], ["y"])
    assert unpack(columns, others) == [Output("b", [2], "y"), first, scored, behind]


@pytest.mark.parametrize("sent", [0, 5, 8, 30, 900])
def test_a_message_that_was_cut_off_is_the_end(sent):
    """A front that is killed while it sends has ended, and what it asked for is aborted."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(framed("whole") + framed("a" * 1000)[:sent])
        theirs.close()
        channel = Channel(ours)
        assert channel.receive() == "whole"
        with pytest.raises(EOFError):
            channel.receive()


def across(test) -> None:
    """Runs coroutine `test(process)` against a fake engine in a process of its own."""

    async def main() -> None:
        process = await EngineProcess.start(fake.build, {})
        try:
            await asyncio.wait_for(test(process), 120)
        finally:
            await process.stop()

    asyncio.run(main())


class Inbox:
    def __init__(self) -> None:
        self.items: list[Output | RefusedRequest] = []

    async def until(self, done) -> None:
        while not done(self.items):
            await asyncio.sleep(0.005)


def test_across_processes():
    async def talk(process: EngineProcess) -> None:
        assert process.info == EngineInfo(max_model_len=100_000, vocab_size=256, max_num_seqs=4)
        inbox = Inbox()
        process.submit([request("a", 40), request("b", *range(100), max_tokens=2)], inbox.items.append)
        process.submit([request("c", fake.ADD_REFUSES)], inbox.items.append)
        assert process.outstanding == 3
        await inbox.until(lambda items: process.outstanding == 0)
        tokens = {"a": [], "b": []}
        for item in inbox.items:
            if isinstance(item, Output):
                tokens[item.request_id] += item.tokens
        assert tokens == {"a": [41, 42, 43], "b": [100, 101]}
        assert [item.status for item in inbox.items if isinstance(item, RefusedRequest)] == [400]
        await inbox.until(lambda items: process.stats == {"running": 0, "aborted": 0})
        assert process.steps >= 3 and process.trouble(0.001) is None  # idle is healthy however long it lasts

    across(talk)


def test_nothing_is_delivered_after_an_abort():
    async def talk(process: EngineProcess) -> None:
        inbox = Inbox()
        process.submit([request("a", 40, max_tokens=90_000)], inbox.items.append)
        await inbox.until(lambda items: len(items) > 3)
        process.abort(["a"])
        count = len(inbox.items)
        await inbox.until(lambda items: process.stats["aborted"] == 1)
        assert len(inbox.items) == count and process.outstanding == 0

    across(talk)


def test_a_large_prompt_and_a_busy_engine_do_not_block_the_caller():
    async def talk(process: EngineProcess) -> None:
        inbox = Inbox()
        process.submit([request("stuck", fake.STUCK, max_tokens=4)], inbox.items.append)
        await inbox.until(lambda items: len(items) == 2)
        engine = psutil.Process(process._process.pid)
        engine.suspend()  # it reads nothing any more
        waking = threading.Timer(60, engine.resume)
        waking.start()
        for number in range(20):
            process.submit([request(f"r{number}", *([40] * 50_000), max_tokens=1)], inbox.items.append)
        assert engine.status() == psutil.STATUS_STOPPED, "the caller waited for the engine"
        while process.trouble(0.0001) is None:  # until 20 median steps have passed
            await asyncio.sleep(0.01)
        process.fail_all("enough")  # before the engine goes on: a step could end some of them
        assert process.outstanding == 0
        assert sum(item.error == "enough" for item in inbox.items) == 21
        assert engine.status() == psutil.STATUS_STOPPED, "the caller waited for the engine"
        waking.cancel()
        engine.resume()

    across(talk)


def test_a_dead_engine_ends_every_request_once():
    async def talk(process: EngineProcess) -> None:
        inbox, deaths = Inbox(), []
        process.on_death = lambda: deaths.append(1)
        process.submit(
            [request("a", 40, max_tokens=90_000), request("b", fake.KILLED, max_tokens=9)], inbox.items.append
        )
        await inbox.until(lambda items: deaths)
        errors = [item for item in inbox.items if item.finish == "error"]
        assert {item.request_id for item in errors} == {"a", "b"}
        assert "killed by SIGKILL" in process.death and process.trouble(99) == process.death
        late = Inbox()
        process.submit([request("c", 40)], late.items.append)
        assert late.items[0].finish == "error"
        assert deaths == [1]

    across(talk)


def refuse_to_build() -> None:
    raise SpecError("this cannot be", fix="do something else")


def die_while_building() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "kind", "text"),
    [
        (refuse_to_build, SpecError, "this cannot be"),
        (fake.build_broken, MachineError, "no engine today"),
        (die_while_building, MachineError, "killed by SIGKILL"),
    ],
)
def test_an_engine_that_cannot_be_built_raises_here(build, kind, text):
    with pytest.raises(kind, match=text):
        asyncio.run(EngineProcess.start(build, {}))
