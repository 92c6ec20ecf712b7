"""What KV policies lose, what evictions hit, what batching is worth: `python -m benchmarks.kv_policies --model FOLDER --heldout FILE`.

- `kv`: perplexity of the text after a long prompt, on held-out documents, beside the full cache, at 50, 25 and 12.5 % of the
  prompt; StreamingLLM also with positions counted within the cache (dense), and beyond the length of training.
- `eviction`: part of the prompt tokens found in the prefix cache, on a synthetic trace of chats that share system prompts and
  of long documents read once; no model is run.
- `batching`: static, dynamic and continuous batching under requests that arrive at random times, ABC in turns. The clock is
  the process's CPU time, which other work on the machine does not stretch; run it with one thread.

FILE is jsonl of {"text": ...}, .gz or not. Rows go to benchmarks/ledger/kv_policies.jsonl. `--only kv` runs one section.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ledger import append, table
from benchmarks.quality import texts
from hone.base.interval import half_width
from hone.model import hf
from hone.model.context import Context
from hone.model.decoder import Decoder
from hone.model.tokenizer import load_tokenizer
from hone.ops import rope
from hone.serve import EVICTIONS
from hone.serve.engine import Engine, EngineSpec
from hone.serve.paging.paged import Paged
from hone.serve.paging.pages import PagePool, root_key
from hone.serve.request import Request, Retention, SamplingParams
from hone.serve.step_builder import StepBuilder

SINKS = 4
SECTIONS = ("eviction", "kv", "batching")


def main() -> None:
    """Runs the sections, each printed as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (kv, batching)")
    parser.add_argument("--heldout", type=Path, help="held-out documents (kv, batching)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--documents", type=int, default=64, help="documents that are scored")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of `batching`")
    parser.add_argument("--seconds", type=float, default=1200, help="after which no further method is begun")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    for section in arguments.only:
        for rows in {"eviction": evictions, "kv": losses, "batching": batchings}[section](arguments):
            print(table(rows), flush=True)
            if not arguments.no_ledger:
                append("kv_policies", rows, arguments.device)
            if time.monotonic() > until:
                print(f"stopped after {arguments.seconds:.0f} s", flush=True)
                return


# kv ------------------------------------------------------------------------------------------------------------------


def losses(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Rows of each policy and budget, after prompts within the length of training and beyond it."""
    model = hf.load(arguments.model, arguments.device, torch.float32).eval()
    tokenizer = load_tokenizer(arguments.model)
    documents = [tokenizer.encode(text) for text in texts(arguments.heldout)]
    for prompt, count, budgets in ((768, 256, (384, 192, 96)), (1792, 256, (384,))):
        fitting = [one[: prompt + count] for one in documents if len(one) >= prompt + count][: arguments.documents]
        setting = f"{arguments.model.name}, {len(fitting)} prompts of {prompt} tokens, {count} tokens after each"
        full, _ = scored(model, None, fitting, prompt, arguments.device)
        for budget in budgets:
            for policy in _policies(budget):
                if prompt > 1024 and policy["kind"] != "streaming_llm":
                    continue
                begun = time.monotonic()
                found, kept = scored(model, policy, fitting, prompt, arguments.device)
                name = policy["kind"] + (" without sinks" if policy.get("sink_tokens") == 0 else "")
                yield [_row(name, policy, budget, prompt, setting, found, full, kept, time.monotonic() - begun)]
            begun = time.monotonic()
            found = [dense_streaming(model, one, prompt, budget - SINKS) for one in fitting]
            flat = [value for one in found for value in one]
            name = "streaming_llm, positions in the cache"
            yield [_row(name, {}, budget, prompt, setting, flat, full, budget, time.monotonic() - begun)]


def _policies(budget: int) -> list[dict[str, Any]]:
    return [
        {"kind": "streaming_llm", "sink_tokens": SINKS, "window": budget - SINKS},
        {"kind": "streaming_llm", "sink_tokens": 0, "window": budget},
        {"kind": "snapkv", "budget": budget},
        {"kind": "h2o", "budget": budget},
    ]


def _row(
    name: str, policy: dict[str, Any], budget: int, prompt: int, setting: str, found: list[float], full: list[float],
    kept: float, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """A ledger row. `kept`: tokens in the cache, mean over the continuation."""
    value, whole = math.exp(-statistics.mean(found)), math.exp(-statistics.mean(full))
    share = f"{100 * budget / prompt:.3g} %"
    plain = policy.get("sink_tokens") != 0 and policy and budget == prompt // 4
    return {
        "figure": f"perplexity after {prompt} tokens, {name}, {share} of the prompt kept",
        "value": value,
        "unit": "",
        "n": len(found),
        "ci95": half_width([a - b for a, b in zip(found, full)]),
        "ci95_of": "difference of the mean log-probabilities, nats",
        "peer": "full",
        "peer_value": whole,
        "ratio": value / whole,
        "technique": f"KV policy/{policy['kind']}" if plain else None,
        "policy": policy,
        "setting": setting,
        "mean_tokens_kept": kept,
        "seconds": seconds,
    }


@torch.inference_mode()
def scored(
    model: Decoder, policy: dict[str, Any] | None, documents: list[list[int]], prompt: int, device: str
) -> tuple[list[float], float]:
    """Log-probabilities of the tokens after each document's prompt, by the engine's own scheduler, pages and compaction;
    and the mean number of tokens in the cache meanwhile."""
    found: list[float] = []
    kept: list[int] = []
    spec = {
        "kv_policy": policy,
        "max_num_seqs": 1,
        "num_pages": 160,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
    }
    engine = Engine(model, EngineSpec.read(spec | {"enable_prefix_caching": False}), device=device)
    builder = StepBuilder(engine.spec.block_size)
    for number, document in enumerate(documents):
        rest = len(document) - prompt
        seq = engine._seq(Request(str(number), document[:prompt], SamplingParams(max_tokens=rest + 1)))
        seq.tokens += document[prompt:]  # known beforehand, as those of a sequence that was preempted
        engine.scheduler.add(seq)
        while seq.num_computed < len(document):
            if engine._compactor is not None:
                assert not engine._compactor.run(), "a compaction failed"
            output = engine.scheduler.schedule()
            engine.runner.cache.wipe(output.new_pages)
            context = Paged(engine.runner.cache, builder.build(output).batch, device)
            hidden = model.hidden(context.tokens, context)
            item = output.seqs[0]
            end = item.start + item.count
            first = max(item.start, prompt - 1)
            targets = document[first + 1 : end + 1]
            if targets:
                logits = model.head(hidden[first - item.start : first - item.start + len(targets)])
                picked = logits.float().log_softmax(-1).gather(1, torch.tensor(targets, device=device)[:, None])
                found += picked[:, 0].tolist()
                # Pages are freed here as when a token at a time is written, not after a chunk.
                rule = engine.scheduler.pages.kept
                for place in range(first + 1, first + 1 + len(targets)):
                    kept.append(place + 1 - max(seq.num_dropped, rule.num_dropped(place, engine.spec.block_size)))
            engine.scheduler.pages.advance(seq, end)
        engine.scheduler.finish(seq)
    return found, statistics.mean(kept)


class CachePositions(Context):
    """One sequence that attends to sinks and a window, with the positions that Xiao et al. give them: places in the cache."""

    def __init__(self, tokens: list[int], window: int, turns: Any) -> None:
        super().__init__()
        self.tokens = torch.tensor([tokens])
        self.positions = torch.arange(len(tokens))[None]
        self._window, self._turns = window, turns

    def attend(
        self, layer: int, q: Tensor, k: Any, v: Any, *, scale: float, window: Any, softcap: Any = None
    ) -> Tensor:
        place = self.positions[0]
        beyond = (place - (SINKS + self._window - 1)).clamp_min(0)  # what a query's position loses in the cache
        cos, sin = self._turns(beyond, q.shape[-1])
        back = rope(q, cos[None], -sin[None])
        group = q.shape[2] // k.shape[2]
        k, v = (x[0].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        near, far = (x[0].transpose(0, 1) @ k.transpose(1, 2) for x in (q, back))
        scores = torch.where(place < SINKS, far, near) * scale
        seen = (place <= place[:, None]) & ((place < SINKS) | (place > place[:, None] - self._window))
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)[None]


@torch.inference_mode()
def dense_streaming(model: Decoder, document: list[int], prompt: int, window: int) -> list[float]:
    """Log-probabilities as of `scored`, of one dense pass with positions in the cache."""
    turns = model.config.layers[0].mixer.rope
    context = CachePositions(document, window, lambda places, dim: turns.tables(places, dim, torch.float32, None))
    logits = model.head(model.hidden(context.tokens, context)[0, prompt - 1 : -1]).float().log_softmax(-1)
    return logits.gather(1, torch.tensor(document[prompt:])[:, None])[:, 0].tolist()


# eviction ------------------------------------------------------------------------------------------------------------


def evictions(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Hit rates of every technique at three sizes of the pool."""
    requests = list(trace(random.Random(0)))
    asked = sum(len(prompt) for _, prompt, _, _ in requests)
    for num_pages in (1000, 2000, 4000):
        rows: list[dict[str, Any]] = []
        for kind in EVICTIONS:
            hits = replay(kind, requests, num_pages)
            rows.append(
                {
                    "figure": f"prefix hit rate, chats and documents, {num_pages} pages of 16, {kind}",
                    "value": hits / asked,
                    "unit": "of prompt tokens",
                    "n": len(requests),
                    "peer": "lru",
                    "peer_value": rows[0]["value"] if rows else hits / asked,
                    "technique": f"eviction/{kind}" if num_pages == 2000 else None,
                    "prompt_tokens": asked,
                    "note": "priorities of the trace: system prompts 90, chats 50 for 120 s, documents 0"
                    if kind == "priority_duration"
                    else None,
                }
            )
            rows[-1]["ratio"] = rows[-1]["value"] / rows[-1]["peer_value"]
        yield rows


Turn = tuple[float, list[int], list[int], tuple[Retention, ...]]


def trace(draw: random.Random) -> Iterator[Turn]:
    """(time, prompt, reply, retention) of 400 chats of 1 to 8 turns that begin 5 s apart in the mean, and of 300 documents.

    Five system prompts of 512 tokens, the first in half of the chats. A turn comes 30 s in the mean after the one before and
    repeats the whole chat. A document has 2,000 to 6,000 tokens and is asked about once.
    """
    systems = [[draw.randrange(32000) for _ in range(512)] for _ in range(5)]
    turns: list[Turn] = []
    begun = 0.0
    for _ in range(400):
        begun += draw.expovariate(1 / 5)
        now, history = begun, list(draw.choices(systems, (8, 4, 2, 1, 1))[0])
        for _ in range(draw.randint(1, 8)):
            history = history + [draw.randrange(32000) for _ in range(draw.randint(20, 200))]
            reply = [draw.randrange(32000) for _ in range(draw.randint(50, 300))]
            chat = (Retention(end=512, priority=90), Retention(start=512, priority=50, duration_s=120))
            turns.append((now, history, reply, chat))
            history = history + reply
            now += draw.expovariate(1 / 30)
    last = max(now for now, *_ in turns)
    for _ in range(300):
        document = [draw.randrange(32000) for _ in range(draw.randint(2000, 6000))]
        turns.append((draw.uniform(0, last), document, document[:50], (Retention(priority=0),)))
    return iter(sorted(turns, key=lambda turn: turn[0]))


def replay(kind: str, requests: list[Turn], num_pages: int) -> int:
    """Prompt tokens found in the cache, requests one after another."""
    clock = [0.0]
    pool = PagePool(num_pages, 16, eviction=EVICTIONS.read(kind), clock=lambda: clock[0])
    found = 0
    for now, prompt, reply, retention in requests:
        clock[0] = now
        tokens = prompt + reply
        pages = pool.match(prompt)
        pool.count_hits(pages)
        found += len(pages) * 16
        key = pool.key_of(pages[-1]) if pages else root_key("")
        more = pool.allocate(-(-len(tokens) // 16) - len(pages))
        assert more is not None, "the pool holds one request"
        begin, pages = len(pages), pages + more
        for place in range(begin, len(tokens) // 16):
            key = pool.publish(pages[place], key, tokens[16 * place : 16 * place + 16])
        pool.retain(pages, retention)
        pool.free(pages)
    return found


# batching ------------------------------------------------------------------------------------------------------------


def batchings(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The three kinds in turns; medians of rate and latency."""
    model = hf.load(arguments.model, arguments.device, torch.float32).eval()
    tokenizer = load_tokenizer(arguments.model)
    words = [token for text in texts(arguments.heldout)[:20] for token in tokenizer.encode(text)[:1000]]
    kinds = ("static", "dynamic", "continuous")
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(arguments.rounds):
        for kind in kinds:
            found[kind].append(_served(model, words, kind, arguments.device))
    rows = []
    for figure, unit in (("tokens_per_s", "tokens/s"), ("latency_p50_s", "s"), ("ttft_p50_s", "s"), ("steps", "")):
        medians = {kind: statistics.median(one[figure] for one in found[kind]) for kind in kinds}
        for kind in kinds:
            rows.append(
                {
                    "figure": f"{figure}, 48 requests in 8 places, {kind} batching, {arguments.model.name}",
                    "value": medians[kind],
                    "unit": unit,
                    "n": arguments.rounds,
                    "note": "seconds are CPU time of one thread",
                    "peer": "static",
                    "peer_value": medians["static"],
                    "ratio": medians[kind] / medians["static"],
                    "technique": None,
                }
            )
    yield rows


def _served(model: Decoder, words: list[int], kind: str, device: str) -> dict[str, float]:
    """Requests of 32 tokens and 8 to 128 tokens of output, which arrive at random, 0.3 s apart in the mean."""
    spec = {"batching": kind, "max_delay_s": 0.2, "max_num_seqs": 8, "num_pages": 400, "max_num_batched_tokens": 512}
    engine = Engine(model, EngineSpec.read(spec | {"enable_prefix_caching": False}), device=device)
    draw, coming, moment = random.Random(1), [], 0.0
    for number in range(48):
        moment += draw.expovariate(1 / 0.3)
        begin, count = draw.randrange(len(words) - 32), draw.randint(8, 128)
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        coming.append((moment, Request(str(number), words[begin : begin + 32], params)))
    arrival = {request.id: moment for moment, request in coming}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    tokens, idle, begun = 0, 0.0, time.process_time()

    def now() -> float:
        return time.process_time() - begun + idle

    engine.scheduler._clock = now
    while coming or engine.has_work:
        if coming and not engine.has_work:
            idle += max(0.0, coming[0][0] - now())
        while coming and coming[0][0] <= now():
            engine.add(coming.pop(0)[1])
        outputs = engine.step()
        if engine.scheduler.delay_s:  # it has waited for more requests
            idle += 1e-3
        for output in outputs:
            moment = now()
            first.setdefault(output.request_id, moment)
            last[output.request_id] = moment
            tokens += len(output.tokens)
    return {
        "tokens_per_s": tokens / max(last.values()),
        "latency_p50_s": statistics.median(last[name] - arrival[name] for name in last),
        "ttft_p50_s": statistics.median(first[name] - arrival[name] for name in first),
        "steps": engine.stats()["steps"],
    }


if __name__ == "__main__":
    main()
