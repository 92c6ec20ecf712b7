"""Experts that leave: the model without them is the whole one whose router never chooses them, and importances are those of a loop."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress.calibration import Calibration, from_text
from hone.compress.capture import Flow
from hone.compress.stage import Compress
from hone.compress.structured.cut import Cut, cut_model
from hone.compress.structured.importance import expert_scores, width_scores
from hone.measure.machine import describe
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
from hone.model.facts import CheckpointFacts
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.hf import Checkpoint, load
from hone.model.linear_spec import Computed, LinearSpec, Parameter, ParameterSpec
from tests.model.extensions.routed_model import NUM_EXPERTS, UNUSED
from tests.model.extensions.top_experts import TopExperts

TOKENS = torch.arange(2 * 30).reshape(2, 30) * 7 % 250
pytestmark = pytest.mark.usefixtures("experts_line")


class Biased(TopExperts):
    """With a number for each expert outside the linears."""

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        return (ParameterSpec("score_bias", (self.num_experts,)),)


class Unrouted(TopExperts):
    """Whose router reads something that it does not declare."""

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        router, *others = super().linears(hidden_size)
        return LinearSpec(router.name, router.in_features, router.pieces, Computed("other")), *others


def without(model: Decoder, stay: tuple[tuple[int, ...], ...]) -> Decoder:
    """The model whose routers never choose an expert that leaves."""
    for layer, kept in zip(model.layers, stay, strict=True):
        left = [expert for expert in range(NUM_EXPERTS) if expert not in kept]

        def never(module, args, out, left=left):
            out[..., left] = -torch.inf
            return out

        layer.feed_forward.router.register_forward_hook(never)
    return model


@torch.no_grad()
def test_what_stays_computes_as_if_the_others_were_never_chosen(experts_folder: Path) -> None:
    stay = ((0, 2, 3), (1, 3, 4))
    source = cut_model(Checkpoint(experts_folder), Cut((0, 1), experts=stay))
    assert Cut.of_json(json.loads(json.dumps(Cut((0, 1), experts=stay).to_json()))) == Cut((0, 1), experts=stay)
    assert all(source.shape(name) == tuple(source.tensor(name).shape) for name in source.names())
    expected = without(load(experts_folder), stay)(TOKENS)
    torch.testing.assert_close(source.build()(TOKENS), expected, atol=1e-5, rtol=1e-4)
    third = Checkpoint(experts_folder).tensor("model.layers.0.mlp.experts.3.up_proj.weight")
    assert torch.equal(source.tensor("model.layers.0.mlp.experts.2.up_proj.weight"), third)
    one_layer = cut_model(Checkpoint(experts_folder), Cut((1,), experts=(stay[1],)))
    assert one_layer.build().layers[0].feed_forward.down.weight.shape[0] == 3


@torch.no_grad()
def test_a_hidden_channel_and_a_head_leave_a_model_with_experts(
    experts_folder: Path, calibration_text: Path, compress
) -> None:
    whole, source = load(experts_folder), Checkpoint(experts_folder)
    with torch.enable_grad():
        step = {"kind": "width", "num_heads": 2, "hidden_size": 48}
        made = load(compress(experts_folder, step, num_sequences=4, calibration_text=str(calibration_text)).folder)
    samples = from_text(calibration_text, experts_folder, num_sequences=4, seq_len=32, seed=0)
    scores = width_scores(source, Flow(samples, 8, "cpu", torch.float32), Run(quiet=True))
    leaves = torch.ones(64, dtype=torch.bool)
    leaves[scores.hidden.topk(48).indices] = False
    for index, layer in enumerate(whole.layers):
        group = int(scores.kv_heads[index].argmin())
        layer.mixer.out.weight[:, 32 * group : 32 * (group + 1)] = 0
        layer.mixer.out.weight[leaves] = 0
        layer.feed_forward.down.weight[:, leaves] = 0
    whole.embedding[:, leaves] = 0
    for name, norm in whole.named_modules():
        if name == "norm" or name.endswith(("mixer_norm", "forward_norm")):
            norm.weight *= math.sqrt(48 / 64)  # the mean square is that of fewer channels
            norm.eps *= 48 / 64
    torch.testing.assert_close(made(TOKENS), whole(TOKENS), atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_scores_are_those_of_a_loop_over_tokens(experts_folder: Path, calibration_text: Path) -> None:
    samples = from_text(calibration_text, experts_folder, num_sequences=4, seq_len=16, seed=0)
    owners = torch.zeros(samples.tokens.shape, dtype=torch.int32).numpy()
    owners[::2, 11:] = -1
    padded = Calibration(samples.tokens, owners, samples.source)
    model, kept = load(experts_folder), {}
    model.layers[0].feed_forward.register_forward_pre_hook(lambda _, args: kept.update(x=args[0]))
    model(torch.from_numpy(padded.tokens))  # padding comes last, and no token before sees it
    block = model.layers[0].feed_forward
    norms, counts = [0.0] * NUM_EXPERTS, [0] * NUM_EXPERTS
    for token in kept["x"][torch.from_numpy(owners) >= 0]:
        for weight, expert in zip(*block.router(token).softmax(-1).topk(2), strict=True):
            gate, up = (block.gate_up.weight[expert] @ token).chunk(2)
            norms[expert] += float(weight * (block.down.weight[expert] @ (F.silu(gate) * up)).norm())
            counts[expert] += 1
    source, quiet = Checkpoint(experts_folder), Run(quiet=True)
    found, frequencies = (
        expert_scores(source, Flow(padded, 2, "cpu", torch.float32), quiet, weighted=weighted)
        for weighted in (True, False)
    )
    assert found[0] == pytest.approx(
        [norm / max(count, 1) for norm, count in zip(norms, counts, strict=True)], rel=1e-4
    )
    assert frequencies[0] == counts and counts[UNUSED] == 0 and sum(counts) == 2 * padded.num_tokens


@pytest.mark.parametrize("importance", ["reap", pytest.param("frequency", marks=pytest.mark.slow)])
def test_experts_leave_and_the_rest_is_quantized(
    importance: str, experts_folder: Path, calibration_text: Path, compress
) -> None:
    steps = [{"kind": "experts", "num_experts": 0.6, "importance": importance}, {"kind": "gptq", "group_size": 32}]
    made = compress(experts_folder, *steps, num_sequences=4, calibration_text=str(calibration_text))
    samples = from_text(calibration_text, experts_folder, num_sequences=4, seq_len=32, seed=0)
    flow = Flow(samples, 8, "cpu", torch.float32)
    scores = expert_scores(Checkpoint(experts_folder), flow, Run(quiet=True), weighted=importance == "reap")
    stay = [sorted(sorted(range(NUM_EXPERTS), key=lambda one: (-each[one], one))[:3]) for each in scores]
    assert made.techniques[0]["experts"] == stay and UNUSED not in stay[0]
    model = load(made.folder)
    assert model.config.layers[0].feed_forward.num_experts == 3 and model(TOKENS).isfinite().all()
    whole = load(experts_folder)
    for layer, given, kept in zip(model.layers, whole.layers, stay, strict=True):
        assert torch.equal(layer.feed_forward.router.weight, given.feed_forward.router.weight[kept])
        down = given.feed_forward.down.weight[kept].detach()
        assert float((layer.feed_forward.down.dequantize(torch.float32) - down).norm() / down.norm()) < 0.2
    for name in ("model_bytes", "num_params"):
        assert made.figures[name].value == made.figures[name].estimate.value
    assert made.figures["kl_to_dense"].value > 0 and "given model" in made.figures["kl_to_dense"].note


def test_numbers_outside_the_linears_leave_with_their_experts(
    experts_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FEED_FORWARDS.rows, "top_experts", f"{__name__}:Biased")
    source = Checkpoint(experts_folder)
    source.weights = _Biases(source.weights)
    made = cut_model(source, Cut((0, 1), experts=((0, 2, 3), (1, 3, 4))))
    assert made.tensor("model.layers.1.feed_forward.score_bias").tolist() == [1.0, 3.0, 4.0]


class _Biases:
    """A source with 0, 1, 2 ... for the numbers of `Biased`."""

    def __init__(self, source) -> None:
        self.source = source

    def __getattr__(self, name: str):
        return getattr(self.source, name)

    def tensor(self, name: str) -> torch.Tensor:
        return torch.arange(float(NUM_EXPERTS)) if name.endswith("score_bias") else self.source.tensor(name)


def planned(folder: Path, calibration_text: Path, **options) -> ModelConfig:
    spec = Compress.read({"steps": [{"kind": "experts"} | options], "calibration_text": str(calibration_text)})
    return spec.plan({"model": CheckpointFacts.of(folder)}, describe()).facts.config


def test_what_cannot_be_cut_is_said(
    experts_folder: Path, tiny_llama: Path, calibration_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="num_experts is 1, and a token of layer 0 visits 2") as raised:
        planned(experts_folder, calibration_text, num_experts=1)
    assert raised.value.fix == "keep at least 2"
    with pytest.raises(SpecError, match="no layer of the model has experts"):
        planned(tiny_llama, calibration_text)
    with pytest.raises(SpecError, match="feed-forward 'top_experts', of which channels cannot be removed") as raised:
        planned(experts_folder, calibration_text, kind="width", intermediate_size=16)
    assert "kind=experts" in raised.value.fix
    with pytest.raises(SpecError, match="of layer 0 is 5, of 5"):
        planned(experts_folder, calibration_text, num_experts=5)
    assert planned(experts_folder, calibration_text).layers[1].feed_forward.num_experts == 3
    monkeypatch.setitem(FEED_FORWARDS.rows, "top_experts", f"{__name__}:Unrouted")
    with pytest.raises(SpecError, match="'top_experts' of layer 0 declares no router"):
        planned(experts_folder, calibration_text)
