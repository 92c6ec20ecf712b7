"""Every export loads in transformers with hone's own logits, for every family."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hone.model.hf import load
from hone.model.quantized.packed_int import PackedInt

FORMATS = {
    "int4": {"kind": "gptq", "bits": 4, "group_size": 32},
    "int8-channel": {"kind": "rtn", "bits": 8, "group_size": 0},
    "int8-packed": {"kind": "rtn", "bits": 8, "group_size": 32},
    "int3": {"kind": "rtn", "bits": 3, "group_size": 32, "scale": "search"},
    "int4-channel": {"kind": "rtn", "bits": 4, "group_size": 0},
    "int4-uneven": {"kind": "rtn", "bits": 4, "group_size": 64, "uneven": "nearest"},
    "pruned": {"kind": "magnitude"},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LATER = ("phi3", "granite", "olmo2", "gemma2", "gemma3_text", "smollm3")
"""What a family adds besides names is tested with Llama's four: two formats are enough."""
QUICK = {("llama", form) for form in FORMATS} | {(family, "int4") for family in FAMILIES}
CELLS = [
    pytest.param(family, form, marks=() if (family, form) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for form in FORMATS
] + [(family, form) for family in LATER for form in ("int4", "int8-channel")]


def transformers_logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), CELLS)
def test_transformers_loads_it_with_the_same_logits(family: str, form: str, family_folder, compress) -> None:
    pytest.importorskip("compressed_tensors")
    made = compress(family_folder(family), FORMATS[form])
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = load(made.folder)(tokens)
    theirs = transformers_logits(made.folder, tokens)
    assert (ours - theirs).abs().max() <= 1e-5
    whole = transformers_logits(family_folder(family), tokens)
    assert (ours - whole).abs().max() > 1e-4, "nothing was compressed"


def test_a_bfloat16_checkpoint_keeps_its_dtype(family_folder, compress, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "half"
    shutil.copytree(family_folder("llama"), folder)
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    made = compress(folder, FORMATS["int4"])
    model = load(made.folder)
    assert model.embedding.dtype == torch.bfloat16
    assert model.layers[0].mixer.qkv.scales.dtype == torch.bfloat16
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = load(made.folder, dtype=torch.float32)(tokens)
    assert (exact - transformers_logits(made.folder, tokens)).abs().max() <= 1e-5
    assert (model(tokens).float() - exact).abs().max() < 0.15


def test_ignored_and_untargeted_modules_stay_dense(family_folder, compress) -> None:
    made = compress(family_folder("qwen2"), FORMATS["int8-channel"], targets=("mlp",), ignore=(r"layers\.1\.",))
    model = load(made.folder)
    packed = [name for name, module in model.named_modules() if isinstance(module, PackedInt)]
    assert packed == ["layers.0.feed_forward.gate_up", "layers.0.feed_forward.down"]
    tokens = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
    assert (ours - transformers_logits(made.folder, tokens)).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # tied, untied
def test_embedding_and_head_may_be_stored_narrower(family: str, family_folder, compress) -> None:
    wide = compress(family_folder(family), FORMATS["int8-channel"], name="wide")
    made = compress(family_folder(family), FORMATS["int8-channel"], rest_dtype="float16")
    saved = wide.figures["model_bytes"].value - made.figures["model_bytes"].value
    ends = load(wide.folder).embedding.numel() * (1 if family == "llama" else 2)
    assert saved == pytest.approx(2 * ends, abs=64)
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    model = load(made.folder)
    assert model.embedding.dtype == torch.float32
    tokens = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
    assert (ours - transformers_logits(made.folder, tokens)).abs().max() <= 1e-5
    with torch.no_grad():
        assert (ours - load(wide.folder)(tokens)).abs().max() < 0.01


def test_loading_never_unpacks_a_matrix(family_folder, compress) -> None:
    from tests.model.quantized.test_quantized import Largest

    made = compress(family_folder("llama"), FORMATS["int4"])
    with Largest() as largest:
        model = load(made.folder)
    held = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    expected = 0
    for module in model.modules():
        if isinstance(module, PackedInt):
            columns = -(-module.in_features // 128) * 128 if module.blocked else module.in_features
            expected += module.out_features * (columns // 2 + module.in_features // 32 * 2)
    assert held == expected
    assert largest.bytes <= 320 * 64 * 4, "only the embedding may be a large floating tensor"


def test_what_is_no_weight_travels(family_folder, compress, tmp_path) -> None:
    """Also of a model whose tokenizer is SentencePiece's alone; what describes the old weights stays behind."""
    given = shutil.copytree(family_folder("llama"), tmp_path / "given")
    (given / "tokenizer.json").rename(given / "tokenizer.model")
    wanted = {"LICENSE": "free", "USE_POLICY.md": "kindly", "qwen.tiktoken": "YQ== 0", "modeling_own.py": "pass"}
    wanted["additional_chat_templates/tools.jinja"] = "{{ tools }}"
    left = {"quantize_config.json": "{}", ".gitattributes": "*", "model.safetensors.index.json.old": "{}", "x.bin": "0"}
    for name, text in {**wanted, **left, "README.md": "# Given"}.items():
        (given / name).parent.mkdir(exist_ok=True)
        (given / name).write_text(text)
    made = compress(given, FORMATS["int8-channel"])
    for name, text in {**wanted, "README.base.md": "# Given"}.items():
        assert (made.folder / name).read_text() == text
    assert (made.folder / "tokenizer.model").read_bytes() == (given / "tokenizer.model").read_bytes()
    assert not any((made.folder / name).exists() for name in (*left, "tokenizer.json"))
    made.verify()
