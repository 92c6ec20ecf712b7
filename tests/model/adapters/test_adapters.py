"""LoRA: its product, its initial weights, and PEFT's folder inside a model folder, written and read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.base.errors import ArtifactError
from hone.model import hf
from hone.model.adapters import ADAPTERS, peft
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder, build
from hone.model.facts import CheckpointFacts
from hone.model.folder import weights_bytes
from hone.model.shape import Shape

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
TOKENS = torch.arange(40).view(2, 20) * 7 % 50


def adapted(family: str = "llama", **options) -> ModelConfig:
    values = Shape(**SIZES, max_seq_len=64, family=family).config(50).model_dump(mode="json")
    lora = {"kind": "lora", "rank": 3, "alpha": 6, **options}
    return ModelConfig.read({**values, "adapters": [lora]})


def filled(config: ModelConfig) -> Decoder:
    """The model with random weights, B too."""
    model, draw = build(config, seed=1), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=draw)
    return model


@torch.no_grad()
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"], ["1.mlp.down_proj"]])
def test_lora_adds_the_scaled_product_of_its_factors(targets: list[str]) -> None:
    config = adapted(target_modules=targets)
    model, x = filled(config), torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    qkv = model.layers[1].mixer.qkv
    wrapped = [name for name in ("q", "k", "v") if hasattr(qkv, f"lora_A_{name}")]
    assert wrapped == {"all-linear": ["q", "k", "v"], "q_proj": ["q", "v"]}.get(targets[0], [])
    if wrapped:
        weight, rows = qkv.inner.weight.clone(), {"q": slice(0, 32), "k": slice(32, 48), "v": slice(48, 64)}
        for name in wrapped:
            weight[rows[name]] += 6 / 3 * getattr(qkv, f"lora_B_{name}") @ getattr(qkv, f"lora_A_{name}")
        torch.testing.assert_close(qkv(x), x @ weight.T)
        torch.testing.assert_close(qkv.dequantize(torch.float32), weight)
    assert config.num_params == sum(parameter.numel() for parameter in model.parameters())


def test_training_starts_from_the_model_as_it_is() -> None:
    config = adapted()
    model, plain = build(config, seed=1), build(config.model_copy(update={"adapters": ()}), seed=1)
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=1e-6)
    down = model.layers[0].feed_forward.down.lora_A_down
    assert 0.9 * 48**-0.5 < float(down.detach().abs().max()) <= 48**-0.5
    trained = {
        name.rpartition(".")[2][:6] for name, one in model.named_parameters() if one.requires_grad and ".lora_" in name
    }
    assert trained == {"lora_A", "lora_B"}
    assert not any(one.requires_grad for name, one in model.named_parameters() if ".inner." in name)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_saved_adapter_is_pefts_folder(family: str, tmp_path: Path) -> None:
    """Beside weights that are those of the model without it."""
    model = filled(adapted(family))
    hf.save(model, tmp_path)
    again = hf.load(tmp_path)
    assert peft.keys(again.config) == peft.keys(model.config) and torch.equal(again(TOKENS), model(TOKENS))
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] == family and values["peft_adapter"] == "adapter"
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    modules = ["qkv_proj"] if family == "phi3" else ["q_proj", "k_proj", "v_proj"]
    rows = {"qkv_proj": 64, "q_proj": 32, "k_proj": 16, "v_proj": 16}
    for module in modules:
        key = f"base_model.model.model.layers.1.self_attn.{module}"
        assert tensors[f"{key}.lora_A.weight"].shape == (3, 32)
        assert tensors[f"{key}.lora_B.weight"].shape == (rows[module], 3)
    assert not any("lora" in name for name in load_file(tmp_path / "model.safetensors"))
    assert weights_bytes(tmp_path) == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    with pytest.raises(ArtifactError, match="is the adapter of the model in") as caught:
        hf.load(tmp_path / "adapter")
    assert str(tmp_path) in caught.value.fix
    facts = CheckpointFacts.of(tmp_path)
    assert facts.config == again.config and facts.weights_bytes == weights_bytes(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_peft_computes_the_same(family: str, tmp_path: Path) -> None:
    library = pytest.importorskip("peft")
    import transformers

    model = filled(adapted(family, target_modules=["q_proj", "qkv_proj", "down_proj"]))
    hf.save(model, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = library.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()(TOKENS).logits
        torch.testing.assert_close(theirs, model(TOKENS), rtol=1e-4, atol=1e-5)


def test_names_choose_exactly_the_modules() -> None:
    config = adapted()
    every = [f"model.layers.{index}.self_attn.q_proj" for index in (0, 1)]
    assert peft.target_modules(config, every) == ("q_proj",)
    assert peft.target_modules(config, every[:1]) == (every[0],)


def changed(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter" / "adapter_model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)

    return edit


def elsewhere(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_adapter": "../other"}))


KEY = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "another type": (changed(peft_type="ADALORA"), "peft_type is 'ADALORA'"),
    "DoRA": (changed(use_dora=True), "lora_magnitude_vector"),
    "ranks by module": (changed(rank_pattern={"q_proj": 8}), r"has shape \[3, "),
    "weights that PEFT changes": (changed(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    "inputs that PEFT pools": (changed(use_qalora=True), "use_qalora is True"),
    "no rank": (changed(r=None), "r is None"),
    "a regular expression": (changed(target_modules="(q_proj"), "no regular expression"),
    "modules that are none": (changed(target_modules=["query"]), "name no linear"),
    "a rank of other tensors": (changed(r=4), r"has shape \[3, "),
    "no config": (lambda folder: (folder / "adapter" / "adapter_config.json").unlink(), "adapter_config.json"),
    "no weights": (lambda folder: (folder / "adapter" / "adapter_model.safetensors").unlink(), "adapter_model"),
    "a missing tensor": (tensors(lambda found: found.pop(KEY)), "no tensor .*down_proj.lora_A"),
    "a tensor of no module": (tensors(lambda found: found.update({"base_model.model.x": torch.ones(1)})), "base_model.model.x is not"),
    "a NaN": (tensors(lambda found: found[KEY].fill_(float("nan"))), "not finite"),
    "another folder": (elsewhere, "names no adapter"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_an_adapter_that_hone_cannot_apply_is_refused(name: str, tmp_path: Path) -> None:
    hf.save(filled(adapted()), tmp_path)
    edit, says = BROKEN[name]
    edit(tmp_path)
    with pytest.raises(ArtifactError, match=says) as caught:
        hf.load(tmp_path)
    assert caught.value.fix


def test_the_table_reads_it() -> None:
    assert ADAPTERS.read({"kind": "lora", "rank": 8}).scale == 4.0
