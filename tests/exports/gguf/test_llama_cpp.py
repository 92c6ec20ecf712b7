"""llama.cpp loads exported files and computes what hone computes with the same weights; its tokens are hone's."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from hone.base.errors import SpecError
from hone.exports.api import export
from hone.exports.gguf.formats import FORMATS
from hone.model.hf import load
from hone.model.tokenizer import load_tokenizer
from tests.exports.gguf.llama_cpp import LlamaCpp
from tests.exports.gguf.test_export import FAMILIES, GPTQ, changed, metadata, tensors

TOKENS = torch.randint(1, 300, (48,), generator=torch.Generator().manual_seed(1)).tolist()
TEXTS = [
    "The quick brown fox's 12345 jumps, over\n\n  the lazy dog!",
    "def f(x):\n\treturn {'a': x ** 2}  # don't\r\n\r\n",
    " leading, trailing  ",
    "na\u00efve caf\u00e9 \u00fcber \u4f60\u597d\uff0c\u4e16\u754c \U0001f600\U0001f3fd \u0e20\u0e32\u0e29\u0e32 100\u20ac",
    "I'LL WE'VE it'S \u00bd \u0663\u0664 a1b22c333d4444",
    "",
]


def logits(path: Path, tokens: list[int] = TOKENS) -> torch.Tensor:
    model = LlamaCpp(path)
    found = torch.from_numpy(model.logits(tokens))
    model.close()
    return found


@torch.no_grad()
def own_logits(folder: Path, tokens: list[int] = TOKENS) -> torch.Tensor:
    return load(folder, dtype=torch.float32)(torch.tensor([tokens]))[0]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference of logits, in their standard deviations."""
    return float((found - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_hone(family: str, family_folder, tmp_path: Path) -> None:
    made = export(family_folder(family), tmp_path / "model.gguf", type="f32")
    assert distance(logits(made.path), own_logits(family_folder(family))) < 0.02  # its cache of keys is float16


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_logits_of_kept_codes_are_those_of_the_quantized_folder(family: str, family_folder, compress, tmp_path: Path):
    folder = compress(family_folder(family), {**GPTQ, "scale_dtype": "float16"}).folder
    made = export(folder, tmp_path / "model.gguf", embedding_type="f32")
    assert "q4_0" in made.types.values()
    # llama.cpp rounds the inputs of quantized matrices to 8 bits; a wrong place of one code would be far more.
    assert distance(logits(made.path), own_logits(folder)) < 0.25
    exact = export(folder, tmp_path / "exact.gguf", type="f32", embedding_type="f32")
    assert distance(logits(exact.path), own_logits(folder)) < 0.02
    assert all(np.array_equal(weight, tensors(exact.path)[name]) for name, weight in tensors(made.path).items())


@pytest.mark.parametrize("kind", FORMATS)
def test_every_type_is_computed_as_its_weights_say(kind: str, wide_folder, tmp_path: Path) -> None:
    made = export(wide_folder, tmp_path / "model.gguf", type=kind, embedding_type=kind)
    assert set(made.types.values()) == {kind, "f32"} and not made.notes
    plain = load(wide_folder, dtype=torch.float32)
    weights = tensors(made.path)
    with torch.no_grad():
        plain.embed_tokens.weight.copy_(torch.from_numpy(weights["token_embd.weight"]))
        for index, layer in enumerate(plain.layers):
            pieces = [undone(weights[f"blk.{index}.attn_{piece}.weight"], piece) for piece in ("q", "k", "v")]
            layer.mixer.qkv.weight.copy_(torch.cat(pieces))
            layer.mixer.out.weight.copy_(torch.from_numpy(weights[f"blk.{index}.attn_output.weight"]))
            both = [torch.from_numpy(weights[f"blk.{index}.ffn_{piece}.weight"]) for piece in ("gate", "up")]
            layer.feed_forward.gate_up.weight.copy_(torch.cat(both))
            layer.feed_forward.down.weight.copy_(torch.from_numpy(weights[f"blk.{index}.ffn_down.weight"]))
        wanted = plain(torch.tensor([TOKENS]))[0]
    # llama.cpp rounds the inputs of a matrix, too: to 8 bits for blocks, to bfloat16, to float16.
    assert distance(logits(made.path), wanted) < (0.25 if FORMATS[kind].parts else {"bf16": 0.1}.get(kind, 0.02))


def undone(rows: np.ndarray, piece: str) -> torch.Tensor:
    """Query and key rows in the checkpoint's order again: the even rows of each head, then the odd ones."""
    found = torch.from_numpy(rows)
    if piece == "v":
        return found
    return found.view(4 if piece == "q" else 2, -1, 2, found.shape[1]).transpose(1, 2).reshape(found.shape)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose rows are whole numbers of every block."""
    import transformers

    from tests.conftest import byte_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("wide"), byte_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-betas": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 20.0, "beta_slow": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_scaling(rope: str, family_folder, tmp_path: Path) -> None:
    given = {"rope_theta": 500.0, "rope_scaling": ROPES[rope], "rope_parameters": None}
    folder = changed(family_folder("llama"), tmp_path / "scaled", **given)
    made = export(folder, tmp_path / "model.gguf", type="f32")
    wanted = own_logits(folder)
    assert distance(wanted, own_logits(family_folder("llama"))) > 0.2, "the scaling changes nothing"
    assert distance(logits(made.path), wanted) < 0.02
    if rope == "llama3":
        with pytest.raises(SpecError, match="llama3"):
            export(changed(family_folder("qwen2"), tmp_path / "qwen", **given), tmp_path / "qwen.gguf")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases(family: str, family_folder, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "biased"
    config = transformers.AutoConfig.from_pretrained(family_folder(family))
    config.attention_bias = True
    config.mlp_bias = True
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    for path in family_folder(family).glob("tokenizer*"):
        shutil.copy(path, folder)
    if family == "qwen3":
        with pytest.raises(SpecError, match="no biases on the attention output"):
            export(folder, tmp_path / "model.gguf")
        return
    made = export(folder, tmp_path / "model.gguf", type="f32")
    assert "blk.0.attn_k.bias" in made.types and "blk.0.ffn_down.bias" in made.types
    assert distance(logits(made.path), own_logits(folder)) < 0.02


_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}|"
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}|"
    r"\p{{N}}{1}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_HEAD + r"\p{N}" + _TAIL), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_HEAD + r"\p{N}{1,3}" + _TAIL), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "dbrx": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_HEAD + r"\p{N}{1,3}" + _TAIL), "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "gpt-4o": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_CASED.format(_ENDS, r"{1,3}")), "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "tekken": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_CASED.format("", "")), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
}  # fmt: skip


def with_tokenizer(folder: Path, core: tokenizers.Tokenizer, to: Path, **settings) -> Path:
    """A copy of the model with another tokenizer, padded to the embedding."""
    shutil.copytree(folder, to)
    core.save(str(to / "tokenizer.json"))
    (to / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | settings))
    return to


@pytest.mark.parametrize("name", SPLITS)
def test_tokens_of_byte_level_bpe(name: str, family_folder, tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    core.pre_tokenizer, core.decoder = SPLITS[name], decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=298,
        show_progress=False,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator([*TEXTS, "the the 123 123 's 's  \n\n  \n\n"] * 3, trainer)
    core.add_tokens(["<tool>"])
    folder = with_tokenizer(family_folder("llama"), core, tmp_path / "model", eos_token="<|end|>")
    made = export(folder, tmp_path / "model.gguf", type="f16")
    model, tokenizer = LlamaCpp(made.path), load_tokenizer(folder)
    assert model.vocab_size == 300, "the embedding's rows"
    assert metadata(made.path)["tokenizer.ggml.pre"] == name
    assert any("letters beyond ASCII" in note for note in made.notes) == (name in ("gpt-4o", "tekken"))
    for text in [*TEXTS, "a<|end|>b<tool> c"]:
        assert model.tokenize(text) == tokenizer.encode(text), text
    model.close()


def test_tokens_of_sentencepiece(shared_data: Path, tmp_path: Path) -> None:
    from tests.model.llama2c import convert

    source = shared_data / "models" / "stories260K"
    folder = convert(source / "stories260K.bin", source / "tok512.bin", tmp_path / "stories")
    made = export(folder, tmp_path / "model.gguf", type="q8_0")
    assert any("ffn_down.weight (5): f16, because rows of 172" in note for note in made.notes)
    model, tokenizer = LlamaCpp(made.path), load_tokenizer(folder)
    story = (shared_data / "lm_text" / "tinystories-200K.txt").read_text(encoding="utf8")[:20000]
    for text in [*TEXTS[:-1], story]:
        assert model.tokenize(text) == tokenizer.encode(text)
    model.close()
    exact = export(folder, tmp_path / "exact.gguf", type="f32")
    ids = tokenizer.encode(story)[:200]
    assert distance(logits(exact.path, ids), own_logits(folder, ids)) < 0.02


def sentencepiece(words: list[str], added: list[tokenizers.AddedToken], *, prefix: bool) -> tokenizers.Tokenizer:
    """SentencePiece's BPE as transformers converts it: `words` are built letter by letter."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *map(chr, range(97, 123))]
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            tokens += [word[:end]] if word[:end] not in tokens else []
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [merge for merge in dict.fromkeys(merges) if set(merge) <= vocab.keys()]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    space = normalizers.Replace(" ", "\u2581")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space]) if prefix else space
    if not prefix:  # as Gemma has it
        core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.add_tokens(added)
    return core


def added(text: str, **options: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, **{"normalized": False, "special": False, **options})


@pytest.mark.parametrize("name", ["model", "phi-3-mini"])
@pytest.mark.parametrize("stripping", [True, False])
def test_spaces_behind_the_special_tokens_of_phi_3(name: str, stripping: bool, family_folder, tmp_path: Path) -> None:
    """llama.cpp strips them, or fails for want of a token, by the name of the model."""
    tokens = [added("<unk>", special=True), added("<s>", special=True), added("</s>", rstrip=stripping)]
    tokens += [added("<|endoftext|>", special=True)] if stripping else []
    tokens += [added(text, special=True, rstrip=stripping) for text in ("<|user|>", "<|end|>")]
    core = sentencepiece(["\u2581the", "\u2581fox"], tokens, prefix=True)
    folder = with_tokenizer(family_folder("phi3"), core, tmp_path / name, bos_token="<s>", eos_token="<|end|>")
    made = export(folder, tmp_path / "model.gguf", type="f16")
    assert not any("strips" in note for note in made.notes)
    model, tokenizer = LlamaCpp(made.path), load_tokenizer(folder)
    for text in ["<|user|>\nthe fox<|end|>\n  <|user|> the", "<s> the </s> fox", "the  fox"]:
        assert model.tokenize(text) == tokenizer.encode(text), text
    model.close()


def test_tokens_of_gemma(family_folder, tmp_path: Path) -> None:
    """Runs of spaces that merges make, line breaks that are added, a token without a row in the embedding."""
    tokens = [added(text, special=True) for text in ("<unk>", "<s>", "</s>")]
    tokens += [added("\n\n"), added("\u2581\u2581"), added("<table>"), added("a\u2581b", normalized=True)]
    core = sentencepiece(["\u2581the", "\u2581\u2581", "fox"], tokens, prefix=False)
    core.add_special_tokens([f"<unused{number}>" for number in range(300 - core.get_vocab_size())])
    core.add_special_tokens(["<image>"])
    model = family_folder("gemma3_text", query_pre_attn_scalar=32)
    folder = with_tokenizer(model, core, tmp_path / "model", bos_token="<s>", eos_token="</s>")
    made = export(folder, tmp_path / "model.gguf", type="f16")
    assert "left out, for want of a row in the embedding: <image>" in made.notes
    model, tokenizer = LlamaCpp(made.path), load_tokenizer(folder)
    for text in ["the fox", "  the\n\n   fox", "<table>fox</s> the", "a b", " fox \u00e9\u4f60"]:
        assert model.tokenize(text) == tokenizer.encode(text), text
    kinds = dict(zip(*(metadata(made.path)[f"tokenizer.ggml.{one}"] for one in ("tokens", "token_type"))))
    assert (kinds["\u2581\u2581"], kinds["\n\n"], kinds["a b"]) == (1, 4, 4)
    model.close()


def test_tokenizers_without_an_equal_are_refused(family_folder, tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(family_folder("llama") / "tokenizer.json"))
    cases = {
        "lower": (lambda: setattr(core, "normalizer", normalizers.Lowercase()), "no normalizer Lowercase"),
        "split": (lambda: setattr(core, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])), "pre-tokenizer is not known"),
        "spaces": (lambda: setattr(core, "pre_tokenizer", pre_tokenizers.Whitespace()), "no equal of this tokenizer"),
    }  # fmt: skip
    for name, (change, message) in cases.items():
        core = tokenizers.Tokenizer.from_file(str(family_folder("llama") / "tokenizer.json"))
        change()
        folder = with_tokenizer(family_folder("llama"), core, tmp_path / name)
        with pytest.raises(SpecError, match=message):
            export(folder, tmp_path / f"{name}.gguf")
    made = export(tmp_path / "split", tmp_path / "named.gguf", pre_tokenizer="gpt-2")
    assert made.path.exists(), "the user may name it"
    core = tokenizers.Tokenizer.from_file(str(family_folder("llama") / "tokenizer.json"))
    core.normalizer = normalizers.NFC()
    made = export(with_tokenizer(family_folder("llama"), core, tmp_path / "nfc"), tmp_path / "nfc.gguf")
    assert any("NFC" in note for note in made.notes)


@pytest.mark.slow
def test_a_trained_model_keeps_its_quality(shared_data: Path, tmp_path: Path) -> None:
    """Perplexity of held-out text in llama.cpp: of the float16 file that of hone, of types within a few per cent."""
    import gzip

    folder = shared_data / "models" / "reference-29m"
    with gzip.open(folder / "heldout.jsonl.gz", "rt", encoding="utf8") as file:
        text = "\n\n".join(json.loads(line)["text"][:4000] for line, _ in zip(file, range(4), strict=False))
    ids = load_tokenizer(folder).encode(text)[:512]

    def perplexity(found: torch.Tensor) -> float:
        return math.exp(torch.nn.functional.cross_entropy(found[:-1], torch.tensor(ids[1:])).item())

    own = own_logits(folder, ids)
    for kind, bound in {"f16": 1e-3, "q8_0": 0.01, "q4_k": 0.06}.items():
        made = export(folder, tmp_path / f"{kind}.gguf", type=kind)
        found = logits(made.path, ids)
        assert abs(perplexity(found) / perplexity(own) - 1) < bound, kind
        if kind == "f16":
            assert bool((found.argmax(-1) == own.argmax(-1)).float().mean() > 0.99)
