"""The serve stage: a measured run that repeats itself, with figures and forecasts."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import FitError, SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.measure.machine import describe
from hone.model.facts import CheckpointFacts
from hone.model.mixers import MIXERS
from hone.serve.bench.workload import make_workload
from hone.serve.stage import Serve

SMALL = {"num_requests": 6, "concurrency": 3, "prompt_tokens": [4, 12], "output_tokens": [2, 8], "shared_prefix": 16}
TEXT = "the quick brown fox jumps over the lazy dog and the cat sat on the mat. " * 12


@pytest.fixture(scope="module")
def data(tiny_llama, tmp_path_factory):
    """A data artifact as the data room writes it, in the tokens of `tiny_llama`."""
    from hone.model.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("data")
    tokenizer = load_tokenizer(tiny_llama)
    (folder / "tokenizer.json").write_bytes((tiny_llama / "tokenizer.json").read_bytes())
    documents = [[*tokenizer.encode(TEXT[start:]), tokenizer.eos_ids[0]] for start in (0, 5, 9)]
    starts = np.cumsum([0, *map(len, documents)])
    (folder / "tokens").mkdir()
    row = {"tokens": int(starts[-1]), "documents": len(documents), "bytes": 3 * len(TEXT)}
    for split in ("train", "val"):
        np.concatenate(documents).astype("<u2").tofile(folder / "tokens" / f"{split}.bin")
        np.save(folder / "tokens" / f"{split}.starts.npy", starts)
    meta = {
        "dtype": "uint16",
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": tokenizer.eos_ids[0],
        "splits": {"train": row, "val": row},
    }
    (folder / "tokens" / "meta.json").write_text(json.dumps(meta))
    return Artifact.read(folder)


def serve(tmp_path, tiny_llama, data, name="serve-a", **fields):
    spec = Serve.read({**SMALL, **fields})
    return spec.make(tmp_path / name, {"model": Artifact.read(tiny_llama), "data": data}, Run(quiet=True))


@pytest.mark.slow
def test_figures_and_forecasts_are_there(tmp_path, tiny_llama, data):
    made = serve(tmp_path, tiny_llama, data)
    figures = made.figures
    assert {
        "tokens_per_s", "requests_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "joules_per_token",
        "prefix_hit_rate", "acceptance_rate", "model_bytes", "kv_cache_bytes", "page_waste", "time_s", "peak_memory_bytes",
    } <= set(figures)  # fmt: skip
    assert figures["acceptance_rate"].value is None
    assert 0 < figures["prefix_hit_rate"].value < 1
    assert 0 < figures["page_waste"].value < 1 and figures["page_waste"].how == "measured"
    for name in ("time_s", "tokens_per_s", "peak_memory_bytes"):
        assert figures[name].estimate is not None and figures[name].estimate.value > 0
    assert abs(figures["peak_memory_bytes"].error) < 0.2
    rows = read_jsonl(made.folder / "log" / "requests.jsonl")
    assert len(rows) == 6 and all(2 <= row["output_tokens"] <= 8 for row in rows)
    samples = read_jsonl(made.folder / "samples.jsonl")
    assert len(samples) == 3 and all(sample["prompt"] and sample["text"] for sample in samples)


def test_a_request_that_would_be_cut_short_is_said(tmp_path, tiny_llama, data):
    with pytest.raises(FitError, match="max_model_len is 48"):
        serve(tmp_path, tiny_llama, data, prompt_tokens=(20, 20), output_tokens=(60, 60), engine={"max_model_len": 48})


@pytest.mark.slow
def test_content_is_the_same_every_time(tmp_path, tiny_llama, data):
    one = serve(tmp_path, tiny_llama, data, "serve-one")
    for name, fields in {
        "static": {"engine": {"batching": "static"}},
        "bare": {"engine": {"enable_prefix_caching": False}},
    }.items():
        other = serve(tmp_path, tiny_llama, data, f"serve-{name}", **fields)
        assert other.content == one.content
        assert other.fingerprint != one.fingerprint


def test_the_workload_is_a_function_of_its_arguments(tiny_llama, data):
    sizes = {"num_requests": 5, "prompt_tokens": (4, 9), "output_tokens": (2, 8), "shared_prefix": 16}
    one, other = (make_workload(data.folder, tiny_llama, seed=0, **sizes) for _ in range(2))
    assert one == other
    assert make_workload(data.folder, tiny_llama, seed=1, **sizes) != one
    assert len({tuple(prompt[:16]) for prompt in one.prompts}) == 1
    assert all(20 <= len(prompt) <= 25 for prompt in one.prompts)


def test_prompts_longer_than_the_text_are_a_mistake(tmp_path, tiny_llama, data):
    with pytest.raises(SpecError, match="validation split"):
        serve(tmp_path, tiny_llama, data, prompt_tokens=[4, 100_000])


def test_a_draft_model_without_a_drafter_is_a_mistake(tmp_path, tiny_llama, data):
    with pytest.raises(SpecError, match="drafter"):
        Serve.read(SMALL).make(
            tmp_path / "serve-d",
            {"model": Artifact.read(tiny_llama), "data": data, "draft": Artifact.read(tiny_llama)},
            Run(quiet=True),
        )


@pytest.mark.slow
def test_formats_are_the_engines_as_in_serving(tmp_path, tiny_llama, data):
    """What `hone bench` measures is what `hone serve` runs: one EngineSpec."""
    plain, half = (
        serve(
            tmp_path,
            tiny_llama,
            data,
            f"serve-{dtype}",
            num_requests=2,
            engine={"num_pages": 40, "kv_cache_dtype": dtype},
        )
        for dtype in ("auto", "bfloat16")
    )
    sizes = [made.figures["kv_cache_bytes"] for made in (plain, half)]
    assert sizes[1].value == sizes[0].value / 2
    assert all(figure.value == figure.estimate.value for figure in sizes)
    assert "in bfloat16" in sizes[1].note and half.figures["max_num_seqs"].value > 0
    with pytest.raises(SpecError, match=r"engine\.draft"):
        serve(tmp_path, tiny_llama, data, engine={"draft": str(tiny_llama)})


def test_a_plan_needs_no_parent_to_exist(tiny_llama, data):
    """From facts alone, those of a model and of data that are yet to be made too; what cannot be served is said then."""
    facts = {"model": CheckpointFacts.of(tiny_llama), "data": facts_of(data)}
    later = {role: one.model_copy(update={"where": "a stage"}) for role, one in facts.items()}
    spec, machine = Serve.read(SMALL), describe("cpu")
    planned = spec.plan(later, machine)
    assert planned.facts is None and planned.estimates == spec.plan(facts, machine).estimates
    assert {"time_s", "tokens_per_s", "memory_growth_bytes", "kv_cache_bytes"} == set(planned.estimates)
    layer = later["model"].config.layers[0]
    sees_later = layer.model_copy(update={"mixer": MIXERS.read({"kind": "retnet", "num_heads": 4, "head_dim": 8})})
    config = later["model"].config.model_copy(update={"layers": (sees_later,)})
    with pytest.raises(SpecError, match="layer 0: mixer 'retnet'"):
        spec.plan({**later, "model": later["model"].model_copy(update={"config": config})}, machine)


def test_reading_the_spec_does_not_import_torch():
    code = "import sys; import hone.serve.stage; print('torch' in sys.modules, 'numpy' in sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert seen == ["False", "False"]
