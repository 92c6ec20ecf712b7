"""A way to serve run for some requests: the real engine with weights of random codes, its output tokens a second and latencies."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hone.base.errors import MachineError
from hone.plan.search.goal import Requests
from hone.plan.search.shapes import Candidate
from hone.plan.search.ways import Format

if TYPE_CHECKING:
    from hone.model.decoder import Decoder
    from hone.serve.engine import Engine

ROUNDS = 2.0
"""Requests of a run, in times of those that are served at once: what the plan of a way is of, too (`Way.recipe`)."""


class Served(NamedTuple):
    """What a run took."""

    tokens_per_s: float
    """Output tokens a second, from the first request to the last token."""
    tpot_s: float
    """Median over requests of (last token - first) / (tokens - 1)."""
    ttft_s: float
    """Median time to the first token of requests that began when the others were running."""
    num: int
    seconds: float
    open_s: float = 0.0
    """Until the engine was there: weights drawn, cache allocated."""
    warm_s: float = 0.0
    """Of the same requests before they counted: kernels compiled, graphs captured."""


class Models:
    """The models that were served on a device, by format: ways that differ in their engine's sizes alone share the weights."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._held: dict[tuple[str, str], Decoder] = {}

    def engine(self, candidate: Candidate, one: Format, engine: dict[str, Any]) -> Engine:
        """An engine of these fields; its model is drawn when its format comes first. Raises MachineError as `folder_of`."""
        from hone.serve.engine import Engine, EngineSpec

        fields = {name: value for name, value in engine.items() if value not in (None, "none")}
        spec = EngineSpec.read({**fields, "load_format": "dummy", "enable_prefix_caching": False})
        held = self._held.get((candidate.name, one.name))
        if held is not None:
            return Engine(held, spec, device=self.device)
        dtype = "bfloat16" if self.device.startswith("cuda") else "float32"
        with tempfile.TemporaryDirectory(prefix="hone-plan-") as under:
            opened = Engine(folder_of(candidate, one, Path(under), dtype), spec, device=self.device)
        self._held[candidate.name, one.name] = opened.model
        return opened


def folder_of(candidate: Candidate, one: Format, under: Path, dtype: str) -> Path:
    """A folder with the config.json of a model in a format, without weights: an engine draws them. Raises MachineError for a format whose
    weights cannot be drawn."""
    from hone.compress.stage import Compress
    from hone.model.families.config_json import to_hf
    from hone.model.quantized.config import to_json
    from hone.model.quantized.scheme import Quantization

    facts = candidate.checkpoint(dtype)
    values = to_hf(facts.config) | {"torch_dtype": facts.dtype, "dtype": facts.dtype}
    if one.allocation is not None:
        raise MachineError(
            f"the bits of {one.name} are chosen by what real weights lose: they are not drawn",
            fix="execute the recipe of the row instead",
        )
    if one.steps:
        spec = Compress.read({"steps": [dict(step) for step in one.steps]})
        if spec.quantizer is None:
            raise MachineError(
                f"{one.name} is not a format of codes that can be drawn", fix="execute the recipe of the row instead"
            )
        scheme = spec.quantizer.scheme(facts.config.hidden_size)
        values["quantization_config"] = to_json(Quantization(((("Linear",), scheme),), ("lm_head", "re:.*mlp\\.gate$")))
    folder = under / "".join(letter if letter.isalnum() else "-" for letter in one.name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf8")
    return folder


def run(
    candidate: Candidate,
    one: Format,
    engine: dict[str, Any],
    asked: Requests,
    *,
    device: str,
    rounds: float = ROUNDS,
    models: Models | None = None,
) -> Served:
    """Serves `rounds` times as many requests as run at once, each of the goal's prompt and output, closed loop.

    On a GPU the same requests are served once before: its kernels are compiled and its graphs captured by what the load asks for, which
    took longer than the load itself. `models`: the models that are there already, which gets this one.
    """
    import torch

    begun = time.perf_counter()
    on_gpu = device.startswith("cuda")
    concurrency = int(engine["max_num_seqs"])
    served = (models or Models(device)).engine(candidate, one, engine)
    open_s = time.perf_counter() - begun
    draw = torch.Generator().manual_seed(0)
    count = max(int(rounds * concurrency), 2)
    shape = (count, asked.prompt_tokens)
    prompts = torch.randint(1, candidate.dims.vocab_size, shape, generator=draw).tolist()
    begun = time.perf_counter()
    if on_gpu:
        closed_loop(served, prompts, asked.output_tokens, concurrency)
        if served.runner.graphs is not None:
            served.runner.graphs.capture_seen()
        torch.cuda.synchronize(device)
    else:
        closed_loop(served, prompts[:concurrency], min(4, asked.output_tokens), concurrency)
    warm_s = time.perf_counter() - begun
    found = closed_loop(served, prompts, asked.output_tokens, concurrency)
    served.close()
    del served
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return found._replace(open_s=open_s, warm_s=warm_s)


def closed_loop(served: Engine, prompts: Sequence[list[int]], output_tokens: int, concurrency: int) -> Served:
    """All prompts answered with `output_tokens` each, `concurrency` in flight. Raises MachineError where a request fails."""
    from hone.serve.device.heap import frozen_heap
    from hone.serve.request import Request, SamplingParams

    params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    count = len(prompts)
    begins, firsts, lasts = [0.0] * count, [0.0] * count, [0.0] * count
    begun, sent, done = time.perf_counter(), 0, 0
    with frozen_heap():
        while done < count:
            while sent < count and sent - done < concurrency:
                begins[sent] = time.perf_counter()
                served.add(Request(str(sent), prompts[sent], params))
                sent += 1
            for output in served.step():
                place, now = int(output.request_id), time.perf_counter()
                firsts[place] = firsts[place] or now
                lasts[place] = now
                done += output.finish is not None
                if output.error is not None:
                    raise MachineError(f"a request failed: {output.error}", fix="serve the way's recipe: it says more")
    took = time.perf_counter() - begun
    tokens = max(output_tokens - 1, 1)
    later = range(min(concurrency, count - 1), count)
    return Served(
        count * output_tokens / took,
        statistics.median((last - first) / tokens for first, last in zip(firsts, lasts, strict=True)),
        statistics.median(firsts[place] - begins[place] for place in later),
        count,
        took,
    )
