"""What the clients of `benchmarks.soak` do: one random act after another, each of which knows what it may be answered."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema

VOCAB = 256
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
     "required": ["a", "n"], "additionalProperties": False},
    {"anyOf": [{"const": "one"}, {"type": "null"}]},
)  # fmt: skip
MISTAKES: tuple[tuple[str, str, Any, tuple[int, ...]], ...] = (
    ("POST", "/v1/completions", {"prompt": [1, 2], "temperature": -1}, (400,)),
    ("POST", "/v1/completions", {"prompt": [5] * 600}, (400,)),
    ("POST", "/v1/completions", {"prompt": [10**9]}, (400,)),
    ("POST", "/v1/completions", {"prompt": "x" * 200_000}, (400,)),
    ("POST", "/v1/completions", {"prompt": "a", "n": 10**6}, (400,)),
    ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, (404,)),
    ("POST", "/v1/completions", {"prompt": "a", "mirostat": 2}, (400,)),
    ("POST", "/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(" * 30}}, (400,)),
    ("POST", "/v1/completions", {"prompt": "a", "structured_outputs": {"json": {"type": "nothing"}}}, (400,)),
    ("POST", "/v1/completions", b'{"prompt": "a"', (400,)),
    ("POST", "/v1/completions", b"\xff\xfe\x00", (400,)),
    ("POST", "/v1/chat/completions", {"messages": "hello"}, (400,)),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user"}], "tools": 3}, (400,)),
    ("POST", "/v1/embeddings", {"input": []}, (400,)),
    ("POST", "/tokenize", {}, (400,)),
    ("POST", "/detokenize", {"tokens": [-1]}, (400,)),
    ("GET", "/v1/completions", None, (405,)),
    ("GET", "/no/such/page", None, (404,)),
)


class Clients:
    """Users of one server, which share what they have seen.

    `disturbed(t)` says whether the server was ended on purpose since `t` (the loop's clock): then a request begun at `t` may fail.
    `adapters` are the folders of those that the server has from the start.
    """

    def __init__(
        self, url: str, seed: int, disturbed: Callable[[float], bool], adapters: dict[str, Path] | None = None
    ) -> None:
        self.url, self.disturbed, self.adapters = url, disturbed, adapters or {}
        self._loaded = 0
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.known: dict[str, str] = {}
        self._prefixes = [[self.rng.randrange(1, VOCAB) for _ in range(96)] for _ in range(4)]

    async def learn(self, http: httpx.AsyncClient) -> None:
        """Greedy replies of the server at rest, for `greedy` to compare with."""
        for place in range(6):
            prompt = self._prefixes[place % 4] + [place + 1] * (3 * place + 1)
            for model in ("tiny", *self.adapters):
                reply = await self._greedy(http, prompt, model)
                self.known[json.dumps([model, prompt])] = reply.json()["choices"][0]["text"]

    async def user(self, going: Callable[[], bool]) -> None:
        """Acts while `going()`, over connections of its own."""
        acts: list[tuple[float, Callable[[httpx.AsyncClient], Awaitable[str]]]] = [
            (40, self.generate), (15, self.greedy), (10, self.structured), (14, self.mistake), (4, self.half_a_request),
            (5, self.embed), (3, self.tokens), (3, self.beams), (3, self.responses), (3, self.chat),
        ]  # fmt: skip
        if self.adapters:
            acts.append((6, self.adapter))
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            while going():
                begun = asyncio.get_running_loop().time()
                (act,) = self.rng.choices([act for _, act in acts], [weight for weight, _ in acts])
                try:
                    self.done[await act(http)] += 1
                except Exception as error:
                    if self.disturbed(begun):
                        self.done["met the end of a server"] += 1
                        await asyncio.sleep(0.2)
                    else:
                        self.wrong.append(f"{act.__name__}: {type(error).__name__}: {str(error)[:400]}")

    # ---- acts -----------------------------------------------------------------------------------------------------------

    async def generate(self, http: httpx.AsyncClient) -> str:
        """Any parameters; reads all, leaves in the middle of a stream, or gives up waiting."""
        rng = self.rng
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 150))]
        body: dict[str, Any] = {
            "prompt": rng.choice([[], [], *self._prefixes]) + prompt,
            "max_tokens": rng.randrange(1, 120),
            "n": rng.choice([1, 1, 1, 3]),
            "ignore_eos": True,
            "stream": rng.random() < 0.6,
            "priority": rng.randrange(3),
            "model": rng.choice(["tiny", *self.adapters]),
        }
        more = {"temperature": rng.choice([0, 0.7, 2.0]), "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": rng.getrandbits(40),
                "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": rng.randrange(6), "stop": ["\x01\x02"],
                "logit_bias": {"7": -2}, "min_tokens": 1, "bad_words": ["zq"]}  # fmt: skip
        body |= {name: value for name, value in more.items() if rng.random() < 0.25}
        fate = rng.choice(["reads all", "reads all", "leaves", "gives up"])
        limit = rng.uniform(0.01, 0.6) if fate == "gives up" else 120
        try:
            if not body["stream"]:
                reply = await http.post("/v1/completions", json=body, timeout=limit)
                return "busy" if _busy(reply) else "generate: read all"
            async with http.stream("POST", "/v1/completions", json=body, timeout=limit) as stream:
                if stream.status_code != 200:
                    await stream.aread()
                    return "busy" if _busy(stream) else ""
                leave_after, count, last = rng.randrange(1, 30) if fate == "leaves" else 10**9, 0, ""
                async for line in stream.aiter_lines():
                    count, last = count + 1, line or last
                    if count > leave_after:
                        return "generate: left"
                    _expect('"error"' not in line, line)
                _expect(last == "data: [DONE]", f"the last line is {last[:200]}")
                return "generate: read all"
        except httpx.TimeoutException:
            _expect(fate == "gives up", "no answer in 120 s")
            return "generate: gave up"

    async def _greedy(self, http: httpx.AsyncClient, prompt: list[int], model: str) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        return await http.post("/v1/completions", json=body)

    async def greedy(self, http: httpx.AsyncClient) -> str:
        """A reply that must be what it was at rest, whatever runs beside, was cached or freed."""
        asked, text = self.rng.choice(list(self.known.items()))
        model, prompt = json.loads(asked)
        return await self._compared(http, prompt, model, text) or "greedy reply compared"

    async def _compared(self, http: httpx.AsyncClient, prompt: list[int], model: str, text: str) -> str:
        """'busy', or '' when the reply is `text`."""
        reply = await self._greedy(http, prompt, model)
        if _busy(reply):
            return "busy"
        found = reply.json()["choices"][0]["text"]
        _expect(found == text, f"greedy text of {model} is {found!r}, was {text!r}")
        return ""

    async def adapter(self, http: httpx.AsyncClient) -> str:
        """One of the adapters under a name of its own comes, gives the same text, and goes, at times while requests for it run."""
        asked, text = self.rng.choice([one for one in self.known.items() if json.loads(one[0])[0] in self.adapters])
        source, prompt = json.loads(asked)
        self._loaded += 1
        name = f"{source}{self._loaded}"
        begun = asyncio.get_running_loop().time()
        reply = await http.post(
            "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(self.adapters[source])}
        )
        _expect(reply.status_code == 200, f"load {name}: {reply.status_code} {reply.text[:200]}")
        found = await self._compared(http, prompt, name, text)
        running = asyncio.create_task(self._greedy(http, prompt, name))
        await asyncio.sleep(self.rng.uniform(0, 0.1))
        reply = await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        last = await running
        if self.disturbed(begun):
            return "met the end of a server"
        _expect(reply.status_code == 200, f"unload {name}: {reply.status_code} {reply.text[:200]}")
        if last.status_code == 200:
            _expect(last.json()["choices"][0]["text"] == text, f"the last text of {name} is {last.text[:200]}")
        else:
            _expect(last.status_code in (404, 503), f"{name} at its end: {last.status_code} {last.text[:200]}")
        return found or "adapter came and went"

    async def structured(self, http: httpx.AsyncClient) -> str:
        """JSON of a schema, an expression, a choice: what comes to its end is valid."""
        schema = self.rng.choice(SCHEMAS)
        if self.rng.random() < 0.3:  # one that no cache of grammars holds
            schema = {"type": "integer", "minimum": 0, "maximum": self.rng.randrange(10**9)}
        kind = self.rng.choice(["schema", "schema", "choice", "regex"])
        form = (
            {"json": schema}
            if kind == "schema"
            else {"choice": ["yes", "no"]}
            if kind == "choice"
            else {"regex": "[a-c]{2,5}"}
        )
        body = {
            "prompt": [self.rng.randrange(1, VOCAB)],
            "max_tokens": 200,
            "temperature": 2.0,
            "seed": self.rng.getrandbits(30),
        }
        reply = await http.post("/v1/completions", json=body | {"structured_outputs": form})
        if _busy(reply):
            return "busy"
        choice = reply.json()["choices"][0]
        if choice["finish_reason"] == "stop" and kind == "schema":
            jsonschema.validate(json.loads(choice["text"]), schema)
        elif choice["finish_reason"] == "stop":
            _expect(
                choice["text"] in ("yes", "no") if kind == "choice" else set(choice["text"]) <= set("abc"),
                choice["text"],
            )
        return f"structured: {choice['finish_reason']}"

    async def mistake(self, http: httpx.AsyncClient) -> str:
        method, path, body, allowed = self.rng.choice(MISTAKES)
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        reply = await http.request(method, path, content=raw, headers={"content-type": "application/json"})
        _expect(
            reply.status_code in (*allowed, 503), f"{path} {str(body)[:80]}: {reply.status_code} {reply.text[:200]}"
        )
        return f"mistake: {reply.status_code}"

    async def half_a_request(self, http: httpx.AsyncClient) -> str:
        """Bytes that are no request, or half of one, and then the connection ends."""
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
        )
        data = self.rng.choice([head + b'{"prompt": ', head[:40], b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n"])
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(self.rng.uniform(0, 0.2))
        writer.close()
        return "half a request"

    async def embed(self, http: httpx.AsyncClient) -> str:
        text = "a text " * self.rng.randrange(1, 20)
        reply = await http.post("/v1/embeddings", json={"input": [text, "another"]})
        if not _busy(reply):
            _expect(len(reply.json()["data"]) == 2, reply.text[:200])
        score = await http.post("/v1/score", json={"text_1": text, "text_2": ["another", text]})
        return "busy" if _busy(score) else "embeddings and scores"

    async def tokens(self, http: httpx.AsyncClient) -> str:
        text = "the quick brown fox " * self.rng.choice([1, 10, 600])
        ids = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
        back = (await http.post("/detokenize", json={"tokens": ids})).json()["prompt"]
        _expect(back == text, f"{back[:50]!r} is not {text[:50]!r}")
        return "tokenize and back"

    async def beams(self, http: httpx.AsyncClient) -> str:
        body = {
            "prompt": [self.rng.randrange(1, VOCAB)] * 9,
            "max_tokens": 6,
            "use_beam_search": True,
            "n": 3,
            "temperature": 0,
        }
        reply = await http.post("/v1/completions", json=body)
        return "busy" if _busy(reply) else "beam search"

    async def responses(self, http: httpx.AsyncClient) -> str:
        stream = self.rng.random() < 0.5
        reply = await http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 12, "stream": stream})
        if _busy(reply):
            return "busy"
        _expect(not stream or reply.text.count("event: response.created") == 1, reply.text[:200])
        return "responses"

    async def chat(self, http: httpx.AsyncClient) -> str:
        body = {"messages": [{"role": "user", "content": "hello " * self.rng.randrange(1, 8)}], "max_tokens": 20}
        if self.rng.random() < 0.5:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS[0]}}
        reply = await http.post("/v1/chat/completions", json=body)
        return "busy" if _busy(reply) else "chat"


def _expect(what: bool, text: str) -> None:
    if not what:
        raise AssertionError(text)


def _busy(reply: httpx.Response) -> bool:
    """True for a full queue; every other status but 200 is wrong."""
    if reply.status_code == 503 and "retry-after" in reply.headers:
        return True
    _expect(reply.status_code == 200, f"{reply.status_code} {reply.text[:300]}")
    return False
