"""The tokenizer against transformers' own, its bytes, its ends, and chat templates in their sandbox."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import ArtifactError, SpecError
from hone.model.tokenizer import Tokenizer, identity_of, load_tokenizer, tokenizers_differ
from tests.conftest import byte_tokenizer
from tests.model.llama2c import convert_tokenizer

TEXT = "the quick brown élan, 日本 \U0001f642\n\tthe  mat<|endoftext|>fox"
MESSAGES = [{"role": "user", "content": "Héllo <b>"}, {"role": "assistant", "content": "hi"}]


def test_ids_and_text_are_those_of_transformers(tiny_llama: Path) -> None:
    ours, theirs = load_tokenizer(tiny_llama), transformers.AutoTokenizer.from_pretrained(tiny_llama)
    ids = ours.encode(TEXT)
    assert ids == theirs(TEXT).input_ids == ours.encode_batch([TEXT, "x"])[0]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == TEXT
    assert ours.vocab_size == len(theirs) and ours.eos_ids == (theirs.eos_token_id,) and ours.bos_id is None


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    core = byte_tokenizer()._tokenizer
    core.add_tokens(["  "])  # an added token that is not special and not spelled in the byte alphabet
    return Tokenizer(core)


@settings(max_examples=100)
@given(st.text(max_size=40))
def test_bytes_of_a_byte_level_text(byte_level: Tokenizer, text: str) -> None:
    assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()


def test_unknown_ids_have_no_bytes(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(10**6) == b"" and byte_level.token_text(10**6) == ""


def test_bytes_of_a_real_vocabulary(shared_data: Path) -> None:
    raw = gzip.decompress((shared_data / "tokenizers" / "pythia-neox" / "tokenizer.json.gz").read_bytes())
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(raw.decode()))
    text = "def f(x):\n        return  x  # naïve 日本\n"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_bytes_of_a_sentencepiece_text(shared_data: Path, tmp_path: Path) -> None:
    convert_tokenizer(shared_data / "models" / "stories260K" / "tok512.bin", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert ids[0] == tokenizer.bos_id == 1 and tokenizer.eos_ids == (2,)
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == (" " + TEXT).encode()
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.token_text(3 + 10) == "<0x0A>" and tokenizer.token_bytes(3 + 10) == b"\n"


def test_ends_are_gathered_from_all_files(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "bos_token_id": 4}))
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.eos_ids == (7, 9, 0) and tokenizer.bos_id == 4


def test_missing_and_corrupt_files_are_named(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json") as error:
        load_tokenizer(tmp_path)
    assert "copy" in error.value.fix
    for name in ("tokenizer.json", "tokenizer_config.json"):
        folder = tmp_path / name
        shutil.copytree(tiny_llama, folder)
        (folder / name).write_text("{broken")
        with pytest.raises(ArtifactError, match=name):
            load_tokenizer(folder)


TEMPLATES = [
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}{{ eos_token }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ strftime_now('%Y') | length }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_is_that_of_transformers(template: str) -> None:
    theirs = byte_tokenizer()
    theirs.chat_template = template
    ours = Tokenizer(theirs._tokenizer, chat_template=template, template_tokens={"eos_token": "<|endoftext|>"})
    tools = [{"type": "function", "function": {"name": "é", "parameters": {}}}]
    for more in ({}, {"tools": tools}):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **more)
        assert ours.chat(MESSAGES, **more) == expected


def test_chat_template_forms(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    path = tmp_path / "model" / "tokenizer_config.json"
    values = json.loads(path.read_text())
    both = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    for stored, text in (("T", "T"), (both, "D"), (both[:1], "R")):
        path.write_text(json.dumps({**values, "chat_template": stored}))
        assert load_tokenizer(tmp_path / "model").chat(MESSAGES) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.x }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_refuses_is_the_users_error(template: str) -> None:
    with pytest.raises(SpecError, match="template"):
        Tokenizer(byte_tokenizer()._tokenizer, chat_template=template).chat(MESSAGES)


def test_no_or_broken_template() -> None:
    core = byte_tokenizer()._tokenizer
    with pytest.raises(SpecError, match="no chat template"):
        Tokenizer(core).chat(MESSAGES)
    with pytest.raises(ArtifactError, match="Jinja"):
        Tokenizer(core, chat_template="{% if %}").chat(MESSAGES)


def test_half_a_character_is_a_users_mistake(tiny_llama):
    with pytest.raises(SpecError, match="is not valid Unicode text"):
        load_tokenizer(tiny_llama).encode("a\udcff")


def test_a_special_token_that_is_no_text(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"eos_token": [1]}')
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ArtifactError, match=r"eos_token is \[1\]"):
        load_tokenizer(folder)


def _changed(folder: Path, source: Path, change) -> Path:
    """A folder with the tokenizer of `source` after `change` of its values."""
    values = json.loads((source / "tokenizer.json").read_text())
    change(values)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(values, indent=2))
    return folder


SAME = {
    "post_processor": lambda values: values.update(post_processor=None),
    "padding and truncation": lambda values: values.update(
        truncation={"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        padding={"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"},
    ),
    "decoder": lambda values: values.update(decoder=None),
    "special": lambda values: [token.update(special=False) for token in values["added_tokens"]],
    "merges as text": lambda values: values["model"].update(merges=[" ".join(pair) for pair in values["model"]["merges"]]),
    "a sequence of one step": lambda values: values.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [values["pre_tokenizer"]]}
    ),
    "order of the vocabulary": lambda values: values["model"].update(
        vocab=dict(sorted(values["model"]["vocab"].items()))
    ),
}  # fmt: skip
OTHER = {
    "merges": lambda values: values["model"]["merges"].clear(),
    "vocabulary": lambda values: values["model"]["vocab"].update(
        zip(values["model"]["vocab"], reversed(values["model"]["vocab"].values()), strict=True)
    ),
    "normalizer": lambda values: values.update(normalizer={"type": "Lowercase"}),
    "pre_tokenizer": lambda values: values["pre_tokenizer"].update(add_prefix_space=True),
    "added token": lambda values: values["added_tokens"][0].update(lstrip=True),
}


@pytest.mark.parametrize("name", SAME)
def test_identity_leaves_out_what_changes_no_id(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    other = _changed(tmp_path / "other", tiny_llama, SAME[name])
    ours, theirs = load_tokenizer(tiny_llama), load_tokenizer(other)
    assert ours.encode(TEXT, add_special_tokens=False) == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.identity == theirs.identity == identity_of(other) and len(ours.identity) == 64
    assert not tokenizers_differ(tiny_llama, other)


@pytest.mark.parametrize("name", OTHER)
def test_identity_tells_other_ids(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    other = _changed(tmp_path / "other", tiny_llama, OTHER[name])
    ours, theirs = load_tokenizer(tiny_llama), load_tokenizer(other)
    text = "The mat, the cat sat <|endoftext|> fox jumps"
    assert ours.encode(text) != theirs.encode(text)  # not only the rules differ: their ids do
    assert ours.identity != theirs.identity and tokenizers_differ(tiny_llama, other)


def test_identity_outlives_being_saved_by_transformers(shared_data: Path, tiny_llama: Path, tmp_path: Path) -> None:
    raw = gzip.decompress((shared_data / "tokenizers" / "pythia-neox" / "tokenizer.json.gz").read_bytes())
    (tmp_path / "neox").mkdir()
    (tmp_path / "neox" / "tokenizer.json").write_bytes(raw)
    for name, loader in (("neox", transformers.GPTNeoXTokenizerFast), ("llama", transformers.AutoTokenizer)):
        source = tiny_llama if name == "llama" else tmp_path / name
        again = tmp_path / f"{name}-again"
        loader.from_pretrained(source, padding_side="left").save_pretrained(again)
        assert identity_of(source) == identity_of(again)
    assert tokenizers_differ(tmp_path / "neox", tiny_llama)


def test_a_folder_without_a_tokenizer_differs_from_none(tiny_llama: Path, tmp_path: Path) -> None:
    assert identity_of(tmp_path) is None
    assert not tokenizers_differ(tmp_path, tiny_llama) and not tokenizers_differ(tiny_llama, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ArtifactError, match="corrupt"):
        tokenizers_differ(tiny_llama, tmp_path)
