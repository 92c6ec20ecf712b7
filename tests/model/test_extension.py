"""A feed-forward with a router, and a wrapper on all linears: each a new file and a table line, and no edit elsewhere."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.feed.load import Batch
from hone.model import hf
from hone.model.adapters import ADAPTERS
from hone.model.config import ModelConfig
from hone.model.context import Causal
from hone.model.decoder import Decoder, build
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.shape import Shape
from hone.train import ACTIVATION_CHECKPOINTINGS, SCHEDULES
from hone.train.loop import Trainer
from hone.train.objectives.base import Objective
from hone.train.optimizers.adamw import AdamW

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
EXPERTS = {"kind": "top_experts", "intermediate_size": 24, "num_experts": 4, "top_k": 2}
TOKENS = torch.arange(40).view(2, 20) * 7 % 50


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table lines."""
    place = "tests.model.extensions"
    monkeypatch.setitem(FEED_FORWARDS.rows, "top_experts", f"{place}.top_experts:TopExperts")
    monkeypatch.setitem(ADAPTERS.rows, "low_rank", f"{place}.low_rank:LowRank")


def config(**changes) -> ModelConfig:
    values = Shape(**SIZES, max_seq_len=64).config(50).model_dump(mode="json")
    return ModelConfig.read({**values, **changes})


def with_experts(**options) -> ModelConfig:
    layers = [{**layer, "feed_forward": {**EXPERTS, **options}} for layer in config().model_dump(mode="json")["layers"]]
    return config(layers=layers)


def step(model: Decoder, **options) -> list[float]:
    """Losses of steps on one repeating batch."""
    tokens = np.stack([(np.arange(21) * stride) % 50 for stride in (1, 3)])
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.zeros((2, 20), np.int32))
    optimizer = AdamW(lr=1e-2, weight_decay=0)
    trainer = Trainer(model, steps=8, schedule=SCHEDULES.read("cosine"), optimizer=optimizer, **options)
    return [trainer.step(batch).loss for _ in range(8)]


def saved(model: Decoder, folder: Path) -> Decoder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that transformers cannot read it
        hf.save(model, folder)
    return hf.load(folder)


def test_experts_are_built_trained_saved_and_counted(tmp_path: Path) -> None:
    made = with_experts()
    model = build(made, seed=1)
    layer = model.layers[0].feed_forward
    assert layer.gate_up.weight.shape == (4, 48, 32) and layer.down.weight.shape == (4, 32, 24)
    assert made.num_params == sum(parameter.numel() for parameter in model.parameters())
    expert = 3 * 24 * 32
    assert made.num_params - made.active_params == 2 * 2 * expert  # two layers, two of four experts each
    dims = made.dims()
    assert (dims.num_params, dims.active_params) == (made.num_params, made.active_params)
    assert dims.layers[0].intermediate_size == 2 * 24
    dense = 2 * (4 * 32 + 2 * expert + 32 * 32 + 32 * 64)
    assert dims.matmul_params == dense + 50 * 32
    losses = step(model)
    assert losses[-1] < 0.8 * losses[0]
    again = saved(model, tmp_path)
    assert again.config == made and torch.equal(again(TOKENS), model(TOKENS))
    names = set(hf.Checkpoint(tmp_path).names())
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names and "model.layers.0.mlp.router.weight" in names
    stored = hf.Checkpoint(tmp_path).tensor("model.layers.1.mlp.experts.3.up_proj.weight")
    assert torch.equal(stored, model.layers[1].feed_forward.gate_up.weight[3, 24:])


@torch.no_grad()
def test_experts_are_drawn_and_multiplied_each_on_its_own() -> None:
    model = build(with_experts(), seed=1)
    layer = model.layers[0].feed_forward
    assert len({weight.sum().item() for weight in layer.gate_up.weight}) == 4
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    shares, chosen = layer.router(x).softmax(-1).topk(2, -1)
    expected = torch.zeros_like(x)
    for place in np.ndindex(2, 5):
        for share, expert in zip(shares[place], chosen[place]):
            gate, up = (layer.gate_up.weight[expert] @ x[place]).chunk(2)
            expected[place] += share * (layer.down.weight[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(layer(x, Causal(torch.zeros(2, 5))), expected)


class Nothing(Objective):
    """No loss of the text at all: what the weights learn comes from `add_loss`."""

    def total(self, model, x, targets, teacher, taught):
        return 0.0 * model.head(model.norm(x)).sum()


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_the_trainer_adds_what_a_router_adds_to_the_loss(balance: float) -> None:
    found = []
    for policy in ("none", "every_nth"):
        model = build(with_experts(balance=balance), seed=1)
        before = model.layers[0].feed_forward.router.weight.clone()
        step(model, objective=Nothing(kind="nothing"), activation_checkpointing=ACTIVATION_CHECKPOINTINGS.read(policy))
        found.append(model.layers[0].feed_forward.router.weight.detach())
        assert (not torch.equal(found[-1], before)) == bool(balance)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("all-linear",), {"mixer.qkv", "mixer.out", "feed_forward.gate_up", "feed_forward.down"}),
        (("q_proj", "v_proj"), {"mixer.qkv"}),
        (("1.mlp.down_proj",), {"feed_forward.down"}),
    ],
)
def test_a_wrapper_is_built_trained_saved_and_counted(targets, names, tmp_path: Path) -> None:
    plain = build(config(), seed=1)
    made = config(adapters=[{"kind": "low_rank", "target_modules": targets}])
    model = build(made, seed=1)
    assert made.num_params == sum(parameter.numel() for parameter in model.parameters()) > config().num_params
    found = {name for name, part in model.layers[1].named_modules() if type(part).__name__ == "LowRankLinear"}
    assert found == names
    assert torch.equal(model(TOKENS), plain(TOKENS))  # B is zero
    frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen and all(".inner." in name for name in frozen)
    losses = step(model)
    assert losses[-1] < losses[0]
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in frozen.items())
    added = sum(one.numel() for name, one in model.named_parameters() if ".a_" in name or ".b_" in name)
    assert made.num_params - config().num_params == added
    dims, base = made.dims(), config().dims()
    assert dims.matmul_params - base.matmul_params == added
    again = saved(model, tmp_path)
    assert again.config == made and torch.equal(again(TOKENS), model(TOKENS))
    assert not torch.equal(model(TOKENS), plain(TOKENS))
    # The weights beneath are stored as they always are.
    query = hf.Checkpoint(tmp_path).tensor("model.layers.1.self_attn.q_proj.weight")
    assert torch.equal(query, model.layers[1].mixer.qkv.weight[:32])


@torch.no_grad()
def test_wrappers_nest_and_give_their_whole_weight(tmp_path: Path) -> None:
    both = [{"kind": "low_rank", "rank": 2}, {"kind": "low_rank", "rank": 3, "target_modules": ["q_proj"]}]
    model = build(config(adapters=both), seed=1)
    for parameter in model.parameters():
        parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    qkv = model.layers[0].mixer.qkv
    assert (qkv.spec.rank, qkv.inner.spec.rank) == (3, 2)
    x = torch.randn(3, 32)
    torch.testing.assert_close(x @ qkv.dequantize(torch.float32).T, qkv(x))
    assert torch.equal(saved(model, tmp_path)(TOKENS), model(TOKENS))


def test_a_wrapper_leaves_experts_out_and_says_so_when_they_are_named() -> None:
    values = with_experts().model_dump(mode="json")
    made = ModelConfig.read({**values, "adapters": ["low_rank"]})
    found = {name for name, part in build(made).layers[0].named_modules() if type(part).__name__ == "LowRankLinear"}
    assert found == {"mixer.qkv", "mixer.out", "feed_forward.router"}
    named = {"kind": "low_rank", "target_modules": ["experts.1.up_proj"]}
    with pytest.raises(SpecError, match=r"cannot wrap model\.layers\.0\.mlp\.experts\.1\.up_proj"):
        ModelConfig.read({**values, "adapters": [named]})


def test_rank_and_targets_are_read_and_printed() -> None:
    made = config(adapters=["low_rank"])
    assert made.adapters[0].target_modules == ("all-linear",)
    assert ModelConfig.read(made.model_dump(mode="json")) == made
    with pytest.raises(SpecError, match=r"target_modules \['q_projection'\] of adapter 'low_rank' name no linear"):
        config(adapters=[{"kind": "low_rank", "target_modules": ["q_projection"]}])
    with pytest.raises(SpecError, match="unknown adapter"):
        config(adapters=["lora_typo"])


@pytest.mark.slow
def test_a_model_with_a_wrapper_is_not_compressed(tmp_path: Path) -> None:
    spec = Compress.read({"steps": [{"kind": "rtn", "group_size": 0}]})
    saved(build(config(adapters=["low_rank"]), seed=1), tmp_path / "wrapped")
    with pytest.raises(SpecError, match="has adapters around its linears"):
        spec.make(tmp_path / "z", {"model": Artifact.read(tmp_path / "wrapped")}, Run(quiet=True))
