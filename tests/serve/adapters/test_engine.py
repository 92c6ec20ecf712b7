"""Many adapters in one engine: every sequence's text is that of its own merged model, and memory follows use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hone.base.errors import ArtifactError, FitError, SpecError
from hone.model import hf
from hone.model.adapters.dora import DoRA
from hone.model.adapters.ia3 import IA3
from hone.model.adapters.lora import LoRA
from hone.model.quantized.nf4_base import nf4_base
from hone.serve.adapters.reading import NoAdapterError
from hone.serve.engine import EngineSpec
from tests.serve.adapters.folders import adapter_folder, merged
from tests.serve.small import assert_all_free, decoder, dense_greedy, drain, engine, greedy, request, tokens_of

MODEL = decoder()
PROMPTS = [[(7 * i + 3 * j) % 61 for j in range(1, 6 + 5 * i)] for i in range(4)]
OPTIONS = {
    "all": {"rank": 4},
    "qv": {"rank": 16, "target_modules": ("q_proj", "v_proj"), "alpha": 8.0},
    "dora": {"kind": DoRA, "rank": 4},
    "ia3": {"kind": IA3},
    "varied": {"rank": 3, "rank_pattern": {"down_proj": 7}, "alpha_pattern": {"k_proj": 9.0}, "use_rslora": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: adapter_folder(root / name, MODEL, seed, **more) for seed, (name, more) in enumerate(OPTIONS.items())}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    models = {"": MODEL} | {name: merged(MODEL, folder) for name, folder in folders.items()}
    return {name: [dense_greedy(one, prompt, 8) for prompt in PROMPTS] for name, one in models.items()}


@pytest.mark.parametrize("spec", [
    {"lora": {"max_loras": 3}},
    {"lora": {"max_loras": 1, "max_cpu_loras": 1}, "max_num_batched_tokens": 8},
    {"lora": {"max_loras": 2}, "num_pages": 14, "drafter": {"kind": "prompt_lookup"}},
    {"lora": {"max_loras": 2}, "async_scheduling": True},
])  # fmt: skip
def test_mixed_requests_have_the_text_of_their_merged_models(
    spec: dict, folders: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    one = engine(MODEL, **spec)
    for name, folder in folders.items():
        one.adapters.load(name, str(folder))
    asked = [(name, index) for index in range(len(PROMPTS)) for name in expected]
    done = one.generate([PROMPTS[index] for _, index in asked], greedy(8), adapters=[name for name, _ in asked])
    for (name, index), completion in zip(asked, done, strict=True):
        assert completion.error is None and completion.tokens == expected[name][index], (name, index)
    assert len({tuple(tokens[2]) for tokens in expected.values()}) == len(expected)  # the adapters do change the text
    stats = one.stats()
    assert stats["adapter_slots_running"] == 0 and stats["adapters"] == 5 and stats["adapter_fills"] >= 3
    assert_all_free(one)


def test_a_step_has_no_more_adapters_than_slots(folders: dict[str, Path]) -> None:
    one = engine(MODEL, lora={"max_loras": 2})
    for name, folder in folders.items():
        one.adapters.load(name, str(folder))
    for index, name in enumerate([*folders, "", *folders]):
        one.add(request(str(index), PROMPTS[0], greedy(6), adapter=name))
    most = set()
    while one.has_work:
        one.step()
        running = {seq.adapter.name for seq in one.scheduler.running if seq.adapter}
        assert len(running) <= 2
        most.add(len(running))
    assert 2 in most


def test_an_adapter_that_waits_for_a_slot_is_not_passed_for_ever(folders: dict[str, Path]) -> None:
    one = engine(MODEL, lora={"max_loras": 1}, max_num_seqs=2)
    one.adapters.load("all", str(folders["all"]))
    one.adapters.load("qv", str(folders["qv"]))
    one.add(request("first", PROMPTS[0], greedy(4), adapter="all"))
    one.step()
    one.add(request("other", PROMPTS[0], greedy(2), adapter="qv"))
    finished: list[str] = []
    for number in range(120):  # one of the adapter that runs comes with every step
        one.add(request(f"more {number}", PROMPTS[0], greedy(4), adapter="all"))
        finished += [output.request_id for output in one.step() if output.finish]
        if "other" in finished:
            break
    assert "other" in finished and len(finished) > 20
    drain(one)


def test_a_reload_from_the_same_path_never_finds_the_old_keys(tmp_path: Path) -> None:
    one = engine(MODEL, lora={"max_loras": 2})
    prompt = PROMPTS[3]
    folder = adapter_folder(tmp_path / "a", MODEL, 5, rank=4)
    one.adapters.load("a", str(folder))
    before = one.generate([prompt, prompt], greedy(8), adapters=["a", ""])
    again = one.generate([prompt], greedy(8), adapters=["a"])[0]
    assert again.num_cached_tokens and again.tokens == before[0].tokens
    one.add(request("old", prompt, greedy(8), adapter="a"))  # a running request keeps what it began with
    first = one.step()
    adapter_folder(tmp_path / "a", MODEL, 6, rank=4)
    with pytest.raises(SpecError, match="already been loaded"):
        one.adapters.load("a", str(folder))
    one.adapters.load("a", str(folder), load_inplace=True)
    one.add(request("new", prompt, greedy(8), adapter="a"))
    outputs = drain(one)
    assert tokens_of(first + outputs["old"]) == before[0].tokens
    assert tokens_of(outputs["new"]) == dense_greedy(merged(MODEL, folder), prompt, 8) != before[0].tokens
    assert outputs["new"][-1].num_cached_tokens == 0
    one.adapters.load("b", str(folder))  # the same content under another name shares what is cached
    assert one.generate([prompt], greedy(8), adapters=["b"])[0].num_cached_tokens > 0


def test_unloading_waits_for_running_requests(folders: dict[str, Path], expected: dict[str, list[list[int]]]) -> None:
    one = engine(MODEL, lora={"max_loras": 1})
    one.adapters.load("all", str(folders["all"]))
    one.add(request("runs", PROMPTS[1], greedy(8), adapter="all"))
    first, told = one.step(), []
    one.adapters.remove("all", lambda: told.append("gone"))
    with pytest.raises(SpecError, match="no adapter 'all' is loaded; it has none"):
        one.add(request("late", PROMPTS[1], greedy(8), adapter="all"))
    assert not told and one.stats()["adapters_in_host_memory"] == 1
    assert tokens_of(first + drain(one)["runs"]) == expected["all"][1]
    assert told == ["gone"] and one.stats()["adapters_in_host_memory"] == 0 == one.stats()["adapters"]


def test_an_adapter_that_left_host_memory_and_changed_ends_its_requests_with_the_reason(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    one = engine(MODEL, lora={"max_loras": 1, "max_cpu_loras": 1})
    folder = adapter_folder(tmp_path / "a", MODEL, 5, rank=4)
    one.adapters.load("a", str(folder))
    one.adapters.load("all", str(folders["all"]))  # the first leaves host memory
    adapter_folder(tmp_path / "a", MODEL, 6, rank=4)
    (done,) = one.generate([PROMPTS[0]], greedy(4), adapters=["a"])
    assert done.finish == "error" and "are not those that were loaded" in str(done.error)
    assert one.generate([PROMPTS[0]], greedy(4), adapters=["all"])[0].error is None


def test_what_cannot_be_served_is_refused_with_a_way_out(folders: dict[str, Path], tmp_path: Path) -> None:
    one = engine(MODEL, lora={"max_loras": 1, "max_lora_rank": 8})
    wide = adapter_folder(tmp_path / "wide", decoder(hidden_size=64), 1, rank=4)
    for path, kind, said in (
        (tmp_path / "none", NoAdapterError, "no adapter in"),
        (folders["qv"], FitError, "rank 16 of .* above engine.lora.max_lora_rank 8"),
        (wide, ArtifactError, r"lora_A.weight is \(4, 64\), the model needs \(4, 32\)"),
    ):
        with pytest.raises(kind, match=said) as caught:
            one.adapters.load("x", str(path))
        assert caught.value.fix
    with pytest.raises(SpecError, match="and the engine serves none"):
        engine(MODEL).add(request("0", PROMPTS[0], greedy(4), adapter="x"))
    for wrong in ({"tensor_parallel_size": 2}, {"gpu_memory": "1GiB"}, {"kv_policy": "h2o"}):
        with pytest.raises(SpecError, match="exclude each other so far"):
            EngineSpec.read({"lora": {"max_loras": 1}, **wrong})
    with pytest.raises(SpecError, match="have no effect without"):
        EngineSpec.read({"lora": {"max_lora_rank": 8}})


@pytest.mark.parametrize(("more", "said"), [
    ({"modules_to_save": ["norm"]}, "changes norm.weight itself"),
    ({"trainable_token_indices": [3, 5]}, "changes rows of embed_tokens itself"),
    ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}, "kind 'prompt_tuning' cannot be served"),
])  # fmt: skip
def test_adapters_of_more_than_linears_are_refused(
    more: dict, said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Whether or not their tensors are in the file: left out they would change the text without a word."""
    one = engine(MODEL, lora={"max_loras": 1})
    values = json.loads((folders["all"] / "adapter_config.json").read_text()) | more
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    (tmp_path / "adapter_model.safetensors").write_bytes((folders["all"] / "adapter_model.safetensors").read_bytes())
    with pytest.raises(ArtifactError, match=said):
        one.adapters.load("x", str(tmp_path))


def test_factors_that_are_infinite_in_the_models_dtype_are_refused(tmp_path: Path) -> None:
    """They are multiplied with the zeros of other rows: one adapter would end the requests of all others."""
    model = decoder().half()
    one, folder = engine(model, lora={"max_loras": 1}), adapter_folder(tmp_path / "a", model, 3, rank=4, alpha=1e6)
    with pytest.raises(ArtifactError, match="q_proj times their scale 250000 are beyond the largest number in float16"):
        one.adapters.load("x", str(folder))


def test_dora_leaves_the_bias_of_the_base_as_it_is(tmp_path: Path) -> None:
    model = decoder(family="qwen2")
    for layer in model.layers:
        layer.mixer.qkv.bias.data.normal_(generator=torch.Generator().manual_seed(1))
    one = engine(model, lora={"max_loras": 1})
    folder = adapter_folder(tmp_path / "dora", model, 3, DoRA, rank=4)
    one.adapters.load("dora", str(folder))
    found = one.generate([PROMPTS[2], PROMPTS[2]], greedy(8), adapters=["dora", ""])
    assert found[0].tokens == dense_greedy(merged(model, folder), PROMPTS[2], 8)
    assert found[1].tokens == dense_greedy(model, PROMPTS[2], 8) != found[0].tokens


@pytest.mark.parametrize("kind", [LoRA, DoRA])
def test_adapters_over_a_quantized_model_are_those_over_its_values(kind: type[LoRA], tmp_path: Path) -> None:
    dense = decoder(hidden_size=64, intermediate_size=128)
    hf.save(dense, tmp_path / "model")
    model = nf4_base(hf.Checkpoint(tmp_path / "model")).build().eval()
    for index in range(dense.config.num_layers):
        for path in dense.config.linears(index):
            values = model.layers[index].get_submodule(path).dequantize(torch.float32)
            dense.layers[index].get_submodule(path).weight.data.copy_(values)
    folder = adapter_folder(tmp_path / "adapter", dense, 3, kind, rank=4)
    one = engine(model, lora={"max_loras": 1})
    one.adapters.load("a", str(folder))
    (found,) = one.generate([PROMPTS[2]], greedy(8), adapters=["a"])
    assert found.tokens == dense_greedy(merged(dense, folder), PROMPTS[2], 8) != dense_greedy(dense, PROMPTS[2], 8)


def test_the_bytes_of_slots_count_the_scales_of_adapters_that_have_some(folders: dict[str, Path]) -> None:
    one = engine(MODEL, lora={"max_loras": 2})
    slots, before = one.adapters.slots, one.adapters.slots.num_bytes
    one.adapters.load("dora", str(folders["dora"]))
    one.generate([PROMPTS[0]], greedy(1), adapters=["dora"])
    layout, width = slots.layout, slots.numbers.element_size()
    assert slots.num_bytes - before == 2 * (layout.num_rows * 2 * 4 + layout.num_columns * width)
