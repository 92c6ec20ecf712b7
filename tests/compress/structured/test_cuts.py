"""Cut models against the whole ones with the same parts taken out by hand, in every family, here and in transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import hone
from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress.capture import Flow
from hone.compress.stage import Compress
from hone.compress.structured.cut import Cut, cut_model
from hone.compress.structured.importance import block_influence, width_scores
from hone.measure.machine import describe
from hone.model.facts import CheckpointFacts
from hone.model.hf import Checkpoint, load
from hone.model.shape import Shape
from tests.compress.conftest import MORE

FAMILIES = ["llama", *MORE, "qwen2", "mistral", "olmo2"]
WIDTHS = {"num_heads": 2, "intermediate_size": 32, "hidden_size": 48}


@pytest.fixture
def prune(compress, calibration_text: Path):
    """prune(model folder, *steps) -> folder, calibrated where the model is not cut by names alone."""

    def make(model: Path, *steps: dict, **spec) -> Path:
        return compress(model, *steps, calibration_text=str(calibration_text), num_sequences=4, **spec).folder

    return make


def agree(folder: Path, whole: hone.Decoder, tolerance: float = 2e-4) -> None:
    """Logits of the cut folder, here and in transformers, against those of the whole model changed by hand."""
    tokens = torch.arange(2 * 30).reshape(2, 30) * 7 % 250
    with torch.no_grad():
        expected, ours = whole(tokens), load(folder)(tokens)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    assert torch.allclose(ours, expected, atol=tolerance, rtol=tolerance)
    assert torch.allclose(theirs, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name != "smollm3" else []) for name in FAMILIES]
)
@pytest.mark.parametrize("stays", [0, 1])
def test_a_layer_that_leaves_takes_its_window_and_rotation_along(family: str, stays: int, family_folder, prune) -> None:
    folder = family_folder(family)
    whole = load(folder)
    whole.layers = nn.ModuleList([whole.layers[stays]])
    made = prune(folder, {"kind": "depth", "layers": [stays]})
    agree(made, whole, 1e-5)
    assert load(made).config.layers == (whole.config.layers[stays],)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] if name not in ("phi3", "olmo2") else []) for name in FAMILIES],
)
def test_narrower_models_are_the_whole_ones_with_zeros(
    family: str, family_folder, calibration_text: Path, prune
) -> None:
    folder = family_folder(family)
    source = Checkpoint(folder)
    widths = dict(WIDTHS) if not family.startswith("gemma") else {**WIDTHS, "hidden_size": None}
    made = prune(folder, {"kind": "width", **widths})
    whole, config = load(folder), source.config
    head = config.layers[0].mixer.head_dim
    from hone.compress.calibration import from_text

    samples = from_text(calibration_text, folder, num_sequences=4, seq_len=32, seed=0)
    scores = width_scores(source, Flow(samples, 8, "cpu", torch.float32), Run(quiet=True))
    leaves = torch.ones(64, dtype=torch.bool)
    leaves[scores.hidden.topk(widths["hidden_size"] or 64).indices] = False
    with torch.no_grad():
        for index, layer in enumerate(whole.layers):
            group = int(scores.kv_heads[index].argmin())
            layer.mixer.out.weight[:, 2 * head * group : 2 * head * (group + 1)] = 0
            if family == "olmo2":  # its norm over all heads sees fewer of them
                for norm, count in ((layer.mixer.q_norm, 4), (layer.mixer.k_norm, 2)):
                    width = count * head // 2
                    rows = slice(width * group, width * (group + 1))
                    begin = 0 if count == 4 else 4 * head
                    layer.mixer.qkv.weight[begin : begin + count * head][rows] = 0
                    norm.weight *= math.sqrt(0.5)
                    norm.eps *= 0.5
            smallest = scores.intermediate[index].topk(96 - 32, largest=False).indices
            layer.feed_forward.down.weight[:, smallest] = 0
            for linear in (layer.mixer.out, layer.feed_forward.down):
                linear.weight[leaves] = 0
                if getattr(linear, "bias", None) is not None:
                    linear.bias[leaves] = 0
        whole.embedding[:, leaves] = 0
        for name, norm in whole.named_modules():
            if widths["hidden_size"] and (name == "norm" or name.endswith(("mixer_norm", "forward_norm", "post_norm"))):
                norm.weight[leaves] = 0
                norm.weight *= math.sqrt(48 / 64)
                norm.eps *= 48 / 64
    agree(made, whole)
    mixer = load(made).config.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (2, 1, head)


def test_steps_follow_on_what_the_one_before_leaves(tiny_llama: Path, calibration_text: Path, compress) -> None:
    steps = [
        {"kind": "depth", "num_layers": 1},
        {"kind": "width", "intermediate_size": 0.4},
        {"kind": "gptq", "group_size": 32},
    ]
    made = compress(tiny_llama, *steps, calibration_text=str(calibration_text))
    from hone.compress.calibration import from_text

    samples = from_text(calibration_text, tiny_llama, num_sequences=16, seq_len=32, seed=0)
    flow = Flow(samples, 8, "cpu", torch.float32)
    source, quiet = Checkpoint(tiny_llama), Run(quiet=True)
    influences = block_influence(source, flow, quiet)
    best = max(range(2), key=lambda index: influences[index])
    shallow = cut_model(source, Cut((best,)))
    channels = tuple(sorted(width_scores(shallow, flow, quiet).intermediate[0].topk(64).indices.tolist()))
    cut = cut_model(shallow, Cut((0,), intermediate=(channels,)))
    down = source.tensor(f"model.layers.{best}.mlp.down_proj.weight")[:, list(channels)]
    assert torch.equal(cut.tensor("model.layers.0.mlp.down_proj.weight"), down)
    model = load(made.folder)
    assert model.config.num_layers == 1 and model.config.layers[0].feed_forward.intermediate_size == 64
    packed = model.layers[0].feed_forward.down.dequantize(torch.float32)
    assert 0 < float((packed - down).norm() / down.norm()) < 0.2
    kept, *_ = made.techniques
    assert kept["layers"] == [best] and kept["scores"] == pytest.approx(influences)
    assert [row["slot"] for row in made.techniques] == ["structured pruner", "structured pruner", "quantizer"]
    rows = [json.loads(line) for line in (made.folder / "layers.jsonl").read_text().splitlines()]
    assert {row["name"].split(".")[2] for row in rows} == {"0"}


@pytest.mark.parametrize(
    "steps",
    [
        [{"kind": "depth", "num_layers": 1}],
        [{"kind": "depth", "importance": "loss"}, {"kind": "width", **WIDTHS}],
        [{"kind": "width", "num_heads": 0.5, "hidden_size": 0.8}],
    ],
)
def test_the_result_is_planned_to_the_byte(
    steps: list[dict], tiny_llama: Path, calibration_text: Path, compress
) -> None:
    spec = Compress.read({"steps": steps, "calibration_text": str(calibration_text)})
    facts = CheckpointFacts.of(tiny_llama)
    there, before = (spec.plan({"model": one}, describe())
                     for one in (facts, facts.model_copy(update={"where": "train-base"})))  # fmt: skip
    made = compress(tiny_llama, *steps, calibration_text=str(calibration_text))
    size = sum(path.stat().st_size for path in made.folder.glob("*.safetensors"))
    found = CheckpointFacts.of(made.folder)
    for plan in (there, before):
        assert plan.estimates["model_bytes"].value == size == plan.facts.weights_bytes
        assert plan.estimates["num_params"].value == found.config.num_params == made.figures["num_params"].value
        assert plan.facts == found.model_copy(update={"where": plan.facts.where})
    assert made.figures["bits_per_weight"].value == pytest.approx(8 * size / found.config.num_params)
    assert not (made.folder / "layers.jsonl").exists() and "sparsity" not in made.figures


def test_a_stack_that_only_hone_reads_is_cut_too(tmp_path: Path) -> None:
    from hone.model.decoder import build

    mixers = ["attention", {"kind": "retnet"}]
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 48, "max_seq_len": 64}
    model = build(Shape.read({**sizes, "num_layers": 4, "mixers": mixers}).config(40), seed=1)
    with pytest.warns(RuntimeWarning, match="Only hone reads"):
        hone.save(model, tmp_path / "model")
    parents = {"model": Artifact.read(tmp_path / "model")}
    spec = Compress.read({"steps": [{"kind": "depth", "layers": [1, 2]}]})
    made = load(spec.make(tmp_path / "compress-x", parents, Run(quiet=True)).folder)
    model.layers = nn.ModuleList([model.layers[1], model.layers[2]])
    tokens = torch.arange(20)[None]
    assert torch.equal(made(tokens), model(tokens))
    facts, machine = {"model": CheckpointFacts.of(tmp_path / "model")}, describe()
    text = tmp_path / "text.txt"
    text.write_text("x" * 5000)
    for step, says in (
        ({"kind": "depth"}, "layer 1 has other weights"),
        ({"kind": "width", "num_heads": 2}, "'retnet'"),
    ):
        with pytest.raises(SpecError, match=says):
            Compress.read({"steps": [step], "calibration_text": str(text)}).plan(facts, machine)


def test_what_importances_take_is_planned(tiny_llama: Path, calibration_text: Path) -> None:
    facts, machine = {"model": CheckpointFacts.of(tiny_llama)}, describe()
    found = []
    for step in ({"layers": [0]}, {}, {"importance": "loss"}):
        spec = {"steps": [{"kind": "depth", **step}], "calibration_text": str(calibration_text), "seq_len": 128}
        estimates = Compress.read(spec).plan(facts, machine).estimates
        found.append((estimates["time_s"].value, estimates["memory_growth_bytes"].value))
    (named, _), (once, states), (often, more) = found
    assert named < once < often and "importances" in estimates["time_s"].formula
    text = calibration_text.stat().st_size / 3.5 // 128
    assert more - states == pytest.approx(2 * text * 128 * 64 * 4), "two more of the hidden states"


@pytest.mark.parametrize(
    ("step", "says", "helps"),
    [
        ({"kind": "depth", "num_layers": 2}, "depth: num_layers is 2, of 2", "from 1 to 1"),
        ({"kind": "depth", "num_layers": 1.5}, "is 1.5, of 2", "a whole number"),
        ({"kind": "depth", "layers": [0, 2]}, r"layers \[0, 2\] of a model with 2", "from 0 to 1"),
        ({"kind": "width"}, "names nothing to remove", "num_heads, intermediate_size, hidden_size"),
        ({"kind": "width", "num_heads": 3}, "no multiple of the 2 query heads", "use 2"),
        ({"kind": "width", "num_heads": 8}, "width: num_heads is 8, of 4", "from 1 to 3"),
        ({"kind": "width", "intermediate_size": 160}, "width: intermediate_size is 160, of 160", "below 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    step: dict, says: str, helps: str, tiny_llama: Path, calibration_text: Path
) -> None:
    spec = Compress.read({"steps": [step], "calibration_text": str(calibration_text)})
    with pytest.raises(SpecError, match=says) as raised:
        spec.plan({"model": CheckpointFacts.of(tiny_llama)}, describe())
    assert helps in raised.value.fix


def test_orders_and_inputs_that_cannot_be_are_refused(tiny_llama: Path, family_folder, calibration_text: Path) -> None:
    facts, machine = {"model": CheckpointFacts.of(tiny_llama)}, describe()
    with pytest.raises(SpecError, match="depth measures importances on calibration inputs") as raised:
        Compress.read({"steps": [{"kind": "depth"}]}).plan(facts, machine)
    assert "calibration_text" in raised.value.fix
    for steps, says in (
        ([{"kind": "magnitude"}, {"kind": "depth"}], "depth changes the shapes of matrices: put it before magnitude"),
        ([{"kind": "rtn"}, {"kind": "width"}], "width needs weights:float, which rtn removes"),
        ([{"kind": "depth", "layers": [1, 0]}], "must ascend"),
        ([{"kind": "depth", "layers": [1], "num_layers": 1}], "drop num_layers"),
    ):
        with pytest.raises(SpecError, match=says):
            Compress.read({"steps": steps})
    named = Compress.read({"steps": [{"kind": "depth", "layers": [1]}]})
    assert Compress.read(named.model_dump(mode="json")) == named
    gemma = {"model": CheckpointFacts.of(family_folder("gemma2"))}
    spec = {"steps": [{"kind": "width", "hidden_size": 32}], "calibration_text": str(calibration_text)}
    with pytest.raises(SpecError, match="square root of hidden_size"):
        Compress.read(spec).plan(gemma, machine)


@pytest.mark.slow
@pytest.mark.parametrize("allocation", ["hessian", "kl"])
def test_bits_are_allocated_to_what_stays(allocation: str, tiny_llama: Path, calibration_text: Path, compress) -> None:
    steps = [{"kind": "width", "hidden_size": 32}, {"kind": "rtn", "group_size": 32}]
    chosen = {"kind": allocation, "bits_per_weight": 5.5}
    made = compress(tiny_llama, *steps, allocation=chosen, calibration_text=str(calibration_text))
    rows = [json.loads(line) for line in (made.folder / "layers.jsonl").read_text().splitlines()]
    assert len({row["bits"] for row in rows}) > 1
    assert torch.isfinite(load(made.folder)(torch.arange(20)[None])).all()
