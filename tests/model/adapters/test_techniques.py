"""Every adapter of the slot: its formula and gradients in float64, its first values, and PEFT as the oracle, both ways."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.adapters import ADAPTERS, peft
from hone.model.adapters.trainable import Trainable
from hone.model.decoder import Decoder, build
from hone.model.shape import Shape
from hone.train.adapters.rates import adapter_groups
from hone.train.optimizers.adamw import AdamW
from hone.train.update import Update

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
TOKENS = torch.arange(40).view(2, 20) * 7 % 50
TECHNIQUES: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 4},
    "rslora": {"kind": "lora", "rank": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "kind": "lora",
        "rank": 4,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3},
        "alpha_pattern": {"k_proj": 5.0},
    },
    "expression": {"kind": "lora", "rank": 2, "target_modules": [r".*1\.self_attn\.(q|v)_proj"]},
    "dora": {"kind": "dora", "rank": 4},
    "pissa": {"kind": "pissa", "rank": 4},
    "ia3": {"kind": "ia3"},
    "ia3 of a longer name": {"kind": "ia3", "feedforward_modules": ["mlp.down_proj"]},
    "ia3 of one layer": {"kind": "ia3", "feedforward_modules": ["layers.1.mlp.down_proj"]},
}
PEFT: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3},
        "alpha_pattern": {"k_proj": 5},
    },
    "expression": {"r": 2, "target_modules": r".*1\.self_attn\.(q|v)_proj"},
    "dora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "down_proj"], "use_dora": True},
    "ia3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    hf.save(build(Shape(**SIZES, max_seq_len=64).config(50), seed=1), folder)
    return folder


def begun(base: Path, name: str, *, filled: bool = True) -> Decoder:
    """The model with a new adapter, whose parameters are random where they would not change it at first."""
    model = Trainable(hf.Checkpoint(base), ADAPTERS.read(TECHNIQUES[name])).build("cpu", torch.float32)
    draw = torch.Generator().manual_seed(0)
    for part in adapters(model).values() if filled else ():
        with torch.no_grad():
            part.add_(torch.empty_like(part).normal_(std=0.2, generator=draw))
    return model


def adapters(model: Decoder) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def written(model: Decoder, base: Path, folder: Path) -> Path:
    """Its PEFT folder."""
    names = peft.keys(model.config)
    stored = {
        one: path
        for at in range(2)
        for path, one in model.config.singles(at).items()
        if one in names
        for path in [f"layers.{at}.{path}"]
    }
    tensors = {names[name]: model.get_parameter(path).detach() for name, path in stored.items()}
    adapter, tensors = model.config.adapters[0].exported(tensors)
    peft.write(folder, model.config.model_copy(update={"adapters": (adapter,)}), tensors, str(base))
    return folder


@pytest.mark.parametrize("name", TECHNIQUES)
def test_it_begins_as_the_model_and_trains_itself_alone(name: str, base: Path) -> None:
    model, plain = begun(base, name, filled=False), hf.load(base)
    with torch.no_grad():
        assert float((model(TOKENS) - plain(TOKENS)).abs().max()) <= (2e-6 if name in ("dora", "pissa") else 0.0)
    own = adapters(model)
    assert own and sum(one.numel() for one in own.values()) == model.config.trained_params
    assert all(one.dtype == torch.float32 for one in own.values())
    model(TOKENS).square().sum().backward()
    assert all(one.grad is not None for one in own.values())
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)


@torch.no_grad()
@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_folder_read_again_computes_the_same(name: str, base: Path, tmp_path: Path) -> None:
    model = begun(base, name)
    again = hf.load(written(model, base, tmp_path / "adapter"))
    torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=0, atol=1e-5)
    for layer, other in zip(model.layers, again.layers, strict=True):
        dense = layer.mixer.qkv.dequantize(torch.float32) if hasattr(layer.mixer.qkv, "dequantize") else None
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
        if dense is not None:
            torch.testing.assert_close(other.mixer.qkv(x), x @ dense.T, rtol=1e-5, atol=1e-5)


def formula(name: str, model: Decoder, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """y of the first layer's queries, keys and values in float64 by the paper's formula, and its parameters."""
    qkv, rows = model.layers[0].mixer.qkv, {"q": slice(0, 32), "k": slice(32, 48), "v": slice(48, 64)}
    weight = qkv.inner.weight.detach().double()
    own = {key: one.detach().double().requires_grad_() for key, one in qkv.named_parameters() if one.requires_grad}
    ys = []
    for piece in ("q", "k", "v"):
        w = weight[rows[piece]]
        if name.startswith("ia3"):
            y = x @ w.T
            ys.append(y * own[f"ia3_l_{piece}"].view(-1) if f"ia3_l_{piece}" in own else y)
            continue
        if f"lora_A_{piece}" not in own:
            ys.append(x @ w.T)
            continue
        down, up = own[f"lora_A_{piece}"], own[f"lora_B_{piece}"]
        alpha = 5.0 if name == "patterns" and piece == "k" else 32.0
        w = w + alpha / (len(down) ** 0.5 if name == "rslora" else len(down)) * up @ down
        if name == "dora":
            w = own[f"lora_magnitude_vector_{piece}"][:, None] * w / w.norm(dim=1, keepdim=True).detach()
        ys.append(x @ w.T)
    return torch.cat(ys, -1), own


@pytest.mark.parametrize("name", [name for name in TECHNIQUES if name != "expression"])
def test_values_and_gradients_are_those_of_the_formula(name: str, base: Path) -> None:
    model = begun(base, name)
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    weights = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    y, own = formula(name, model, theirs)
    (y * weights.double()).sum().backward()
    qkv = model.layers[0].mixer.qkv
    out = qkv(ours)
    (out * weights).sum().backward()
    torch.testing.assert_close(out.double(), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)
    for key, one in own.items():
        torch.testing.assert_close(qkv.get_parameter(key).grad.double(), one.grad, rtol=1e-4, atol=1e-4)


def test_pissa_begins_as_the_largest_directions_and_is_saved_beside_the_weights_as_they_were(
    base: Path, tmp_path: Path
) -> None:
    model, plain = begun(base, "pissa", filled=False), hf.load(base)
    qkv, whole = model.layers[0].mixer.qkv, plain.layers[0].mixer.qkv.weight.detach()[:32]
    left, values, right = torch.linalg.svd(whole.double())
    best = left[:, :4] * values[:4] @ right[:4]
    own = 8.0 * (qkv.lora_B_q @ qkv.lora_A_q).detach().double()
    torch.testing.assert_close(own, best, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(qkv.inner.weight.detach()[:32].double(), whole - best, rtol=1e-4, atol=1e-5)
    again = hf.load(written(model, base, tmp_path / "adapter"))
    assert again.config.adapters[0].kind == "lora" and again.config.adapters[0].rank == 8
    assert torch.equal(again.layers[0].mixer.qkv.inner.weight[:32], whole)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "pissa", "rank": 40}, "rank 40 takes more directions than the"),
        ({"kind": "lora", "rank_pattern": {"q_proj": 0}}, "give a number above 0"),
        ({"kind": "lora", "alpha_pattern": {"[q": 1.0}}, "no regular expression"),
    ],
)
def test_options_that_do_not_fit_are_one_error(spec: dict[str, Any], said: str, base: Path) -> None:
    with pytest.raises(SpecError, match=said):
        Trainable(hf.Checkpoint(base), ADAPTERS.read(spec)).build("cpu", torch.float32)


def test_dropout_is_of_training_steps_alone(base: Path) -> None:
    adapter = ADAPTERS.read({"kind": "lora", "rank": 4, "dropout": 0.5})
    model = Trainable(hf.Checkpoint(base), adapter).build("cpu", torch.float32).train()
    for part in adapters(model).values():
        part.data.fill_(0.1)
    steps = [model(TOKENS).detach() for _ in range(2)]
    assert not torch.equal(*steps)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), model(TOKENS))


def test_lora_plus_and_ia3_have_groups_of_their_own(base: Path) -> None:
    adapter = ADAPTERS.read({"kind": "lora", "rank": 4, "loraplus_lr_ratio": 16.0})
    model = Trainable(hf.Checkpoint(base), adapter).build("cpu", torch.float32)
    groups = Update(model, AdamW(), torch.float32, accumulate=False).groups
    factors = {name: group.lr_factor for group in groups for name in group.names}
    assert {key: {factors[name] for name in factors if key in name} for key in ("lora_A", "lora_B")} == {
        "lora_A": {1.0},
        "lora_B": {16.0},
    }
    factors_of_ia3 = Update(begun(base, "ia3"), AdamW(), torch.float32, accumulate=False).groups
    assert [group.weight_decay for group in factors_of_ia3] == [0.0]
    plain = build(Shape(**SIZES, max_seq_len=64).config(50), seed=1)
    whole = AdamW().groups({})
    assert adapter_groups(whole, plain.config) == whole


def library() -> Any:
    found = pytest.importorskip("peft")
    warnings.simplefilter("ignore")
    return found


def theirs(base: Path) -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", TECHNIQUES)
def test_peft_computes_what_hone_wrote(name: str, base: Path, tmp_path: Path) -> None:
    found = library()
    model = begun(base, name)
    folder = written(model, base, tmp_path / "adapter")
    loaded = found.PeftModel.from_pretrained(theirs(base), str(folder)).eval()
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS), rtol=0, atol=5e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", PEFT)
def test_hone_computes_what_peft_wrote(name: str, base: Path, tmp_path: Path) -> None:
    found = library()
    kind = found.IA3Config if name == "ia3" else found.LoraConfig
    model = found.get_peft_model(theirs(base), kind(task_type="CAUSAL_LM", **PEFT[name]))
    draw = torch.Generator().manual_seed(0)
    for part in model.parameters():
        if part.requires_grad:
            part.add_(torch.empty_like(part).normal_(std=0.2, generator=draw))
    model.save_pretrained(tmp_path / "adapter")
    ours = hf.load(tmp_path / "adapter")
    torch.testing.assert_close(ours(TOKENS), model.eval()(TOKENS).logits, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["lora", "dora", "ia3"])
def test_twenty_steps_are_those_of_peft(name: str, base: Path, tmp_path: Path) -> None:
    found = library()
    model = begun(base, name)
    folder = written(model, base, tmp_path / "adapter")
    other = found.PeftModel.from_pretrained(theirs(base), str(folder), is_trainable=True)
    numbers = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0}
    for one in (model, other):
        optimizer = torch.optim.AdamW([part for part in one.parameters() if part.requires_grad], **numbers)
        for step in range(20):
            tokens = (TOKENS + step) % 50
            logits = one(tokens) if one is model else one(tokens).logits
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    other.save_pretrained(tmp_path / "after")
    written(model, base, tmp_path / "ours")
    from safetensors.torch import load_file

    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "after"))
    assert one.keys() == two.keys()
    assert max(float((one[key] - two[key]).abs().max()) for key in one) <= 1e-5
