"""A way to serve run for some requests: the real engine with weights of random codes, its output tokens a second and latencies."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from hone.base.errors import MachineError
from hone.plan.search.goal import Requests
from hone.plan.search.shapes import Candidate
from hone.plan.search.ways import Format


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


def folder_of(candidate: Candidate, one: Format, under: Path, dtype: str) -> Path:
    """A folder with the config.json of a model in a format, without weights: an engine draws them. Raises MachineError for a format whose
    weights cannot be drawn."""
    from hone.compress.stage import Compress
    from hone.model.families.config_json import to_hf
    from hone.model.quantized.config import to_json
    from hone.model.quantized.scheme import Quantization

    facts = candidate.checkpoint(dtype)
    values = to_hf(facts.config) | {"torch_dtype": facts.dtype, "dtype": facts.dtype}
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
    candidate: Candidate, one: Format, engine: dict[str, Any], asked: Requests, *, device: str, rounds: float = 2.0
) -> Served:
    """Serves `rounds` times as many requests as run at once, each of the goal's prompt and output, closed loop."""
    import torch

    from hone.serve.engine import Engine, EngineSpec
    from hone.serve.request import Request, SamplingParams

    concurrency = int(engine["max_num_seqs"])
    fields = {name: value for name, value in engine.items() if value not in (None, "none")}
    spec = EngineSpec.read({**fields, "load_format": "dummy", "enable_prefix_caching": False})
    vocab = candidate.dims.vocab_size
    with tempfile.TemporaryDirectory(prefix="hone-plan-") as under:
        served = Engine(
            folder_of(candidate, one, Path(under), "bfloat16" if device.startswith("cuda") else "float32"),
            spec,
            device=device,
        )
    draw = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=asked.output_tokens, temperature=0, ignore_eos=True)
    count = max(int(rounds * concurrency), 2)
    prompts = [torch.randint(1, vocab, (asked.prompt_tokens,), generator=draw).tolist() for _ in range(count)]
    # What is compiled or captured on first use is no part of the run.
    served.generate(prompts[:concurrency], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    while served.idle():
        pass
    begins, firsts, lasts = [0.0] * count, [0.0] * count, [0.0] * count
    begun, sent, done = time.perf_counter(), 0, 0
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
    took = time.perf_counter() - begun
    served.close()
    del served
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    later = range(min(concurrency, count - 1), count)
    return Served(
        count * asked.output_tokens / took,
        statistics.median(
            (last - first) / max(asked.output_tokens - 1, 1) for first, last in zip(firsts, lasts, strict=True)
        ),
        statistics.median(firsts[place] - begins[place] for place in later),
        count,
        took,
    )
