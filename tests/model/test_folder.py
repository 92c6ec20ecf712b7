"""What is no model folder says what it is, wherever folders are opened; names on the Hub are fetched when they are named so."""

from __future__ import annotations

import json
import os
import shutil

import httpx
import pytest

import hone
from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, HoneError, MachineError, SpecError
from hone.base.plan import facts_of
from hone.cli import main
from hone.model.folder import model_folder
from hone.model.hf import Checkpoint
from hone.model.shards import INDEX, SINGLE
from hone.model.tokenizer import load_tokenizer
from hone.serve.http import serve


def _open_as_a_parent(folder):
    return facts_of(Artifact.read(folder))


OPENERS = [hone.load, Checkpoint, hone.Engine, serve, _open_as_a_parent]
"""Python's ways to a model folder: loading, reading, serving, a stage's input."""


@pytest.mark.parametrize("opened", OPENERS)
def test_what_is_no_model_folder_says_what_it_is(opened, tmp_path):
    gguf = tmp_path / "small-Q4_0.gguf"
    gguf.write_bytes(b"GGUF")
    adapter, converted = tmp_path / "adapter", tmp_path / "converted"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    converted.mkdir()
    shutil.copy(gguf, converted)
    plain = tmp_path / "notes.txt"
    plain.write_text("notes")
    for path, what, way in [
        (gguf, "small-Q4_0.gguf is a GGUF file", "safetensors"),
        (converted, "small-Q4_0.gguf is a GGUF file", "safetensors"),
        (adapter, "is an adapter .* belongs to owner/base", "base_model_name_or_path"),
        (plain, "is a file, not a model folder", "config.json"),
        ("owner/name", "no folder owner/name", "hf:owner/name"),
    ]:
        with pytest.raises(ArtifactError, match=what) as caught:
            opened(path)
        assert way in str(caught.value), path


def test_show_and_generate_say_it_too(tmp_path, capsys):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for words in (["show", str(tmp_path / "adapter")], ["generate", str(tmp_path / "adapter"), "hello"]):
        assert main(words) == 2
        assert "is an adapter" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_says_which_file_is_missing(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"has no tokenizer\.json"):
        load_tokenizer(folder)
    with pytest.raises(SpecError, match="needs a tokenizer"):
        hone.Engine(folder).generate(["hello"])
    (folder / "tokenizer.model").write_bytes(b"spm")
    with pytest.raises(ArtifactError, match=r"SentencePiece tokenizer\.model") as caught:
        load_tokenizer(folder)
    assert "AutoTokenizer" in caught.value.fix


def test_a_name_on_the_hub_is_fetched_into_its_cache(tiny_llama, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision))
        return str(tiny_llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_folder("hf:owner/name") == tiny_llama
    assert hone.load("hf:owner/name@v2").config == Checkpoint(tiny_llama).config
    assert facts_of(Artifact.read("hf:owner/na.me-1")).config == Checkpoint(tiny_llama).config
    assert asked == [("owner/name", None), ("owner/name", "v2"), ("owner/na.me-1", None)]


def test_what_the_hub_does_not_give_is_said(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    for error, kind, what in [
        (LocalEntryNotFoundError("no network\nand more"), MachineError, "cannot be reached: no network"),
        (ConnectionError("refused"), MachineError, "cannot be reached: refused"),
        (OSError("disk full"), MachineError, "could not be downloaded: disk full"),
        (RepositoryNotFoundError("404 nothing here", response=response), ArtifactError, "refused hf:owner/name"),
    ]:

        def download(*args, error=error, **more):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(kind, match=what) as caught:
            model_folder("hf:owner/name")
        assert "and more" not in str(caught.value)
    for name in ("hf:", "hf:owner", "hf:a/b/c", "hf:../etc"):
        with pytest.raises(HoneError) as caught:
            model_folder(name)
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "file", [7, None, ["a"], "../model.safetensors", "/etc/passwd", "sub/model.safetensors", "", ".."]
)
def test_an_index_names_files_beside_it(tiny_llama, tmp_path, file):
    folder = shutil.copytree(tiny_llama, tmp_path / "indexed")
    shutil.copy(folder / SINGLE, tmp_path / SINGLE)
    names = Checkpoint(folder).names()
    (folder / INDEX).write_text(json.dumps({"weight_map": {**dict.fromkeys(names, SINGLE), names[0]: file}}))
    with pytest.raises(ArtifactError, match=r"is corrupt: .* names no file beside it"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", SINGLE, INDEX, "tokenizer.json"])
def test_a_pipe_in_a_folder_is_refused_at_once(tiny_llama, tmp_path, name):
    folder = shutil.copytree(tiny_llama, tmp_path / "piped")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ArtifactError, match="pipe"):
        Checkpoint(folder).tensor("model.embed_tokens.weight")
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "template",
    [["{{ messages }}"], [{"name": "default"}], [1], 7, {"default": "x"}, [{"name": "default", "template": 3}]],
)
def test_a_chat_template_is_a_text_or_a_list_of_named_ones(tiny_llama, tmp_path, template):
    folder = shutil.copytree(tiny_llama, tmp_path / "chat")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    with pytest.raises(ArtifactError, match="chat_template in"):
        load_tokenizer(folder)
