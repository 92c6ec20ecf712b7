"""A larger model of a smaller one's weights: the same logits, by transformers too, for every family and every mixer; or an error that says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from hone.base.errors import ArtifactError, SpecError
from hone.model import hf
from hone.model.config import LayerSpec, ModelConfig
from hone.model.decoder import Decoder, build
from hone.model.growth import GROWTHS
from hone.model.growth.base import grown_checkpoint, grown_config
from hone.model.growth.block_expansion import BlockExpansion
from hone.model.growth.net2net import Net2Net
from hone.model.growth.stack import Stack
from hone.model.growth.zero_expansion import ZeroExpansion
from hone.model.mixers import MIXERS
from hone.model.shape import Shape

SIZES = {
    "vocab_size": 199, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": (transformers.Phi3Config, {}),
    "olmo2": (transformers.Olmo2Config, {}),
    "granite": (transformers.GraniteConfig, {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "gemma2": (transformers.Gemma2Config, {}),
    "gemma3": (transformers.Gemma3TextConfig, {"layer_types": ["sliding_attention", "full_attention"] * 2}),
}
TWICE = {"hidden_size": 96, "intermediate_size": 160, "num_heads": 12}
ODD = {"hidden_size": 60, "intermediate_size": 101, "num_heads": 12, "num_kv_heads": 6}
EXACT = [
    {"kind": "block_expansion", "num_layers": 5},
    {"kind": "net2net", **TWICE},
    {"kind": "net2net", **ODD, "mapping": "random", "shares": "even"},
    {"kind": "net2net", "num_kv_heads": 6},
    {"kind": "net2net", "num_heads": 12, "num_kv_heads": 2},
    {"kind": "zero_expansion", **ODD, "num_kv_heads": 4},
]


def theirs(name: str) -> transformers.PreTrainedModel:
    """A random transformers model whose every parameter, norms and biases too, matters."""
    make, more = FAMILIES[name]
    torch.manual_seed(0)
    values = {**SIZES, **more}
    values["num_hidden_layers"] = len(more.get("layer_types", range(3)))
    model = transformers.AutoModelForCausalLM.from_config(make(**values)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


@torch.no_grad()
def losses(model: object, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of every token, by hone's decoder or by transformers'."""
    logits = model(tokens)
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten(), reduction="none"
    )


def random_weights(config: ModelConfig) -> Decoder:
    """A model with random norms and biases too."""
    model = build(config, seed=1)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            else:
                parameter.mul_(5)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_loss_before_and_after(name: str, tmp_path: Path) -> None:
    small = theirs(name)
    small.save_pretrained(tmp_path / "small")
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 41))
    before = losses(small, tokens)
    for number, options in enumerate(EXACT):
        growth = GROWTHS.read(options)
        assert growth.exact
        large = grown_checkpoint(hf.Checkpoint(tmp_path / "small"), [growth]).build(dtype=torch.float32)
        assert large.config.num_params == sum(one.numel() for one in large.parameters()) > small.num_parameters()
        hf.save(large, tmp_path / f"large-{number}")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"large-{number}", dtype=torch.float32)
        for after in (losses(large, tokens), losses(again.eval(), tokens)):
            assert (after.mean() - before.mean()).abs() <= 1e-5
            torch.testing.assert_close(after, before, atol=5e-5, rtol=0)


def kinds() -> list[str]:
    return [kind for kind in MIXERS if MIXERS[kind].causal]


def stack_of(kind: str, num_layers: int = 3) -> ModelConfig:
    """A decoder of `kind`, in front of it the attention that a mixer without keys of its own needs."""
    options = {"shared_kv": ["attention", "shared_kv", "shared_kv"]}.get(kind, [_options(kind)])
    shape = Shape(
        hidden_size=32, num_layers=num_layers, num_heads=4, num_kv_heads=2, intermediate_size=48, max_seq_len=64,
        mixers=tuple(options),
    )  # fmt: skip
    return shape.config(97)


def _options(kind: str) -> dict:
    more = {
        "sliding_window": {"window": 8}, "longformer": {"window": 8}, "bigbird": {"block": 16},
        "mla": {"latent_dim": 16, "rope_dim": 8}, "transformer_xl": {"segment": 16, "memory": 16},
        "compressive": {"segment": 16, "memory": 16, "compressed": 8}, "longnet": {"segments": (16, 32), "dilations": (1, 2)},
        "linformer": {"rank": 8}, "reformer": {"num_buckets": 4, "chunk": 8},
    }  # fmt: skip
    return {"kind": kind, **more.get(kind, {})}


REFUSED = {
    "hidden_size": {"transformer_xl": "distances", "compressive": "would grow"},
    "num_heads": dict.fromkeys(("retnet", "reformer", "bigbird", "longnet", "compressive"), "heads are not alike"),
    "block_expansion": dict.fromkeys(("performer", "reformer", "bigbird"), "from its place"),
}
"""Where a mixer cannot be grown with the same result, and what the error says."""


@pytest.mark.filterwarnings("ignore:Only hone reads this folder")
@torch.no_grad()
@pytest.mark.parametrize("kind", kinds())
def test_every_mixer_grows_with_the_same_logits_or_says_why_not(kind: str, tmp_path: Path) -> None:
    config = stack_of(kind)
    small = random_weights(config).eval()
    hf.save(small, tmp_path)
    tokens = torch.randint(0, 97, (2, 64))
    before = small(tokens)
    both = {"num_heads": 8, "intermediate_size": 96, "hidden_size": 64}
    cases = {
        "hidden_size": [{"kind": "net2net", "hidden_size": 64}, {"kind": "zero_expansion", "hidden_size": 44}],
        "num_heads": [
            {"kind": "net2net", "num_heads": 8},
            {"kind": "zero_expansion", "num_heads": 8, "intermediate_size": 50},
        ],
        "block_expansion": [{"kind": "block_expansion", "num_layers": 5}],
        "all": [] if kind in REFUSED["hidden_size"] | REFUSED["num_heads"] else [{"kind": "net2net", **both}],
    }
    if kind == "shared_kv":  # a copy between a layer and those that use its keys would be their source
        with pytest.raises(SpecError, match="reuses the keys of layer 0"):
            grown_config(config, [BlockExpansion(kind="block_expansion", num_layers=6)])
    for name, growths in cases.items():
        why = REFUSED.get(name, {}).get(kind)
        for options in growths:
            growth = GROWTHS.read(options)
            if why is not None:
                with pytest.raises(SpecError, match=why) as error:
                    grown_checkpoint(hf.Checkpoint(tmp_path), [growth])
                assert error.value.fix
                continue
            large = grown_checkpoint(hf.Checkpoint(tmp_path), [growth]).build(dtype=torch.float32)
            torch.testing.assert_close(large.eval()(tokens), before, atol=2e-4, rtol=1e-4)
    # Copies of layers are no matter of declarations.
    assert grown_checkpoint(hf.Checkpoint(tmp_path), [Stack(kind="stack")]).build().config.num_layers == 6


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers."""
    folder = tmp_path_factory.mktemp("growth") / "small"
    shape = Shape(hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=48, max_seq_len=64)
    hf.save(random_weights(shape.config(97)), folder)
    return folder


def test_a_stack_is_the_layers_again(small: Path) -> None:
    source = hf.Checkpoint(small)
    whole = source.build()
    for order, expected in {"stack": [0, 1, 2, 3, 0, 1], "interleave": [0, 0, 1, 2, 2, 3]}.items():
        made = grown_checkpoint(source, [Stack(kind="stack", num_layers=6, order=order)]).build()
        for layer, index in zip(made.layers, expected, strict=True):
            for mine, theirs in zip(layer.parameters(), whole.layers[index].parameters(), strict=True):
                assert torch.equal(mine, theirs)


def test_expanded_blocks_stand_behind_their_originals_and_learn(small: Path) -> None:
    made = grown_checkpoint(hf.Checkpoint(small), [BlockExpansion(kind="block_expansion", num_layers=6)]).build()
    silent = [not layer.mixer.out.weight.any() and not layer.feed_forward.down.weight.any() for layer in made.layers]
    assert silent == [False, False, True, False, False, True]
    assert torch.equal(made.layers[2].mixer.qkv.weight, made.layers[1].mixer.qkv.weight)
    made(torch.randint(0, 97, (1, 16))).logsumexp(-1).mean().backward()
    assert made.layers[2].mixer.out.weight.grad.any() and made.layers[5].feed_forward.down.weight.grad.any()


def parted(growth: Net2Net | ZeroExpansion, small: Path) -> bool:
    """Whether the gradients of the first feed-forward channel and of what it was copied to differ."""
    made = grown_checkpoint(hf.Checkpoint(small), [growth]).build(dtype=torch.float32)
    tokens = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(made(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gate = made.layers[0].feed_forward.gate_up.weight.grad
    return bool((gate[0] - gate[48]).abs().max() > 1e-3 * gate.abs().max())


def test_copies_with_equal_shares_stay_copies_and_others_part(small: Path) -> None:
    wide = {"kind": "net2net", "intermediate_size": 96, "hidden_size": 64}
    assert not parted(Net2Net(**wide, shares="even"), small)
    assert parted(Net2Net(**wide), small)
    assert parted(Net2Net(**wide, shares="even", noise_std=0.3), small)
    assert not Net2Net(**wide, noise_std=0.3).exact
    assert parted(ZeroExpansion(**{**wide, "kind": "zero_expansion"}), small)


def test_bert2bert_takes_rows_of_the_next_layer(small: Path) -> None:
    """Of the layer after it with their columns widened in the same way; the last layer copies its own."""
    source, whole = hf.Checkpoint(small), hf.load(small)
    made = grown_checkpoint(
        source, [GROWTHS.read({"kind": "bert2bert", "intermediate_size": 96, "num_heads": 8})]
    ).build()
    for index, after in ((0, 1), (3, 3)):
        gate, up = made.layers[index].feed_forward.gate_up.weight.split(96)
        for mine, piece in ((gate, 0), (up, 1)):
            own, theirs = (whole.layers[one].feed_forward.gate_up.weight.split(48)[piece] for one in (index, after))
            assert torch.equal(mine, torch.cat((own, theirs)))
        q = made.layers[index].mixer.qkv.weight.split([64, 32, 32])[0]
        assert torch.equal(q, torch.cat([whole.layers[one].mixer.qkv.weight[:32] for one in (index, after)]))
        down = made.layers[index].feed_forward.down.weight
        torch.testing.assert_close(down, whole.layers[index].feed_forward.down.weight.repeat(1, 2) / 2)
    assert not GROWTHS.read("bert2bert").exact


@torch.no_grad()
def test_growths_follow_each_other_and_the_seed_decides(small: Path) -> None:
    growths = [
        GROWTHS.read({"kind": "net2net", "hidden_size": 64}),
        GROWTHS.read({"kind": "block_expansion", "num_layers": 5}),
    ]
    tokens = torch.randint(0, 97, (1, 20))
    made = grown_checkpoint(hf.Checkpoint(small), growths, seed=3)
    large = made.build(dtype=torch.float32)
    torch.testing.assert_close(large(tokens), hf.load(small)(tokens), atol=5e-5, rtol=1e-4)
    again = grown_checkpoint(hf.Checkpoint(small), growths, seed=3).build(dtype=torch.float32).state_dict()
    assert all(torch.equal(one, again[name]) for name, one in large.state_dict().items())
    other = grown_checkpoint(hf.Checkpoint(small), growths, seed=4).build(dtype=torch.float32)
    assert not torch.equal(other.layers[0].mixer.qkv.weight, large.layers[0].mixer.qkv.weight)
    assert grown_config(hf.Checkpoint(small).config, growths) == made.config


def test_no_tensor_is_made_before_it_is_read(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and shapes come from headers; a layer reads the tensors of a layer, of bert2bert those of two."""
    read: list[str] = []
    tensor = hf.Checkpoint.tensor
    monkeypatch.setattr(hf.Checkpoint, "tensor", lambda self, name: read.append(name) or tensor(self, name))
    made = grown_checkpoint(hf.Checkpoint(small), [GROWTHS.read({"kind": "bert2bert", "hidden_size": 64})])
    made.empty()
    assert not read
    made.build_layer(1)
    assert {name.split(".")[2] for name in read} == {"1", "2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "stack", "num_layers": 4}, "num_layers 4 is no growth: the smaller model has 4"),
        ({"kind": "block_expansion", "num_layers": 3}, "no growth"),
        ({"kind": "net2net"}, "names nothing to widen"),
        ({"kind": "net2net", "hidden_size": 16}, "hidden_size 16 is less than the 32"),
        ({"kind": "net2net", "hidden_size": 32}, "the sizes are those"),
        ({"kind": "net2net", "hidden_size": 34}, "hidden_size 34 is no multiple of num_heads 4"),
        ({"kind": "net2net", "num_heads": 5}, "no multiple of the 2 query heads"),
        ({"kind": "zero_expansion", "num_kv_heads": 4}, "no place beside their own key head"),
        ({"kind": "net2net", "num_heads": 9, "num_kv_heads": 2, "hidden_size": 36}, "no multiple of num_kv_heads 2"),
        ({"kind": "net2net", "head_dim": 16}, "no field 'head_dim'"),
        ({"kind": "net3net"}, "unknown growth 'net3net'"),
    ],
)
def test_what_cannot_grow_is_said(options: dict, message: str, small: Path) -> None:
    with pytest.raises(SpecError) as error:
        grown_checkpoint(hf.Checkpoint(small), [GROWTHS.read(options)])
    assert message in str(error.value) and error.value.fix


def test_layers_of_different_sizes_and_quantized_weights_are_said(small: Path, tmp_path: Path) -> None:
    config = hf.Checkpoint(small).config
    one = config.layers[0]
    wide = one.model_copy(update={"feed_forward": one.feed_forward.model_copy(update={"intermediate_size": 64})})
    mixed = config.model_copy(update={"layers": (one, LayerSpec.read(wide.model_dump(mode="json")))})
    with pytest.raises(SpecError, match=r"layers\.1 has another intermediate_size"):
        grown_config(mixed, [Net2Net(kind="net2net", intermediate_size=128)])
    assert grown_config(mixed, [Net2Net(kind="net2net", hidden_size=64)]).layers[1].feed_forward.intermediate_size == 64
    hf.save(hf.load(small), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 5}))
    with pytest.raises(ArtifactError, match=r"no tensor model\.layers\.4"):
        grown_checkpoint(hf.Checkpoint(tmp_path), [Stack(kind="stack")])
