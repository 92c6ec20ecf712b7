"""Model folders: finding one, refusing what is not one, and its size and config, without importing torch."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from hone.base.durable import kind_of
from hone.base.errors import ArtifactError, MachineError, SpecError

HUB = "hf:"
"""Prefix of models on the Hugging Face Hub where a folder is expected: hf:OWNER/NAME, hf:OWNER/NAME@REVISION."""

CONFIG = "config.json"
ADAPTER = "adapter"
"""The subfolder of a model folder that keeps its adapter (hone.model.adapters.peft)."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file by which a folder with an adapter alone is recognized, in PEFT's format; it names the folder of the model."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "tokenizer.model",
)
_ABOUT_WEIGHTS = {CONFIG, "hone.json", ADAPTER_CONFIG, "quantize_config.json", "quant_config.json"}
"""Files that say what the weights beside them are: whoever writes other weights writes them anew, or they would be wrong."""
_COMPANIONS = re.compile(
    r"(?!\.)(?!.*\.index\.json$).*\.(json|jinja|model|tiktoken|txt|md|rst|py)|(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)[^.]*",
    re.I,
)
"""Names of files that are no weights and that a model is not whole without: tokenizer, templates, licence, its own code."""
_TEMPLATES = "additional_chat_templates"
_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_FILES = (
    "*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.md", "*.py", "LICEN?E*", "NOTICE*", "USE_POLICY*"
)  # fmt: skip


def model_folder(where: Path | str) -> Path:
    """The model folder that `where` names: a folder, or hf:OWNER/NAME, which is fetched into the Hub's own cache.

    Raises ArtifactError for anything that is no model folder, MachineError when the Hub cannot be reached.
    """
    if str(where).startswith(HUB):
        return fetched(str(where))
    refuse_others(Path(where))
    return Path(where)


def refuse_others(path: Path) -> None:
    """Raises ArtifactError when `path` is no model folder that hone opens: an adapter without its model, a GGUF file, an empty folder ..."""
    if not path.is_dir():
        raise no_folder(path)
    if is_adapter(path):
        base_of(path)
    elif not (path / CONFIG).exists():
        raise no_whole_model(path) or ArtifactError(
            f"{path} has no {CONFIG}: it is not a model folder",
            fix="point at a folder that `hone train` or transformers wrote",
        )
    elif (kind := heads_kind(path)) is not None:
        raise ArtifactError(
            f"{path} has draft heads ({kind}), not a model",
            fix="give the model that they guess for, and them as its drafter: engine.draft",
        )


def is_adapter(folder: Path) -> bool:
    """Whether the folder has an adapter in PEFT's format and no model: it is opened as its base model with the adapter."""
    return (folder / ADAPTER_CONFIG).exists() and not (folder / CONFIG).exists()


def heads_kind(folder: Path) -> str | None:
    """'medusa' or 'eagle3' for a folder of draft heads, by its config.json; None for any other."""
    if not (folder / CONFIG).is_file():
        return None
    values = read_json(folder / CONFIG)
    if "medusa_num_heads" in values:
        return "medusa"
    names = [str(name).lower() for name in values.get("architectures") or ()]
    if values.get("speculators_model_type") == "eagle3" or any("eagle3" in name for name in names):
        return "eagle3"
    return None


def base_of(folder: Path) -> Path:
    """The folder of the model to which the adapter in `folder` belongs, by its base_model_name_or_path.

    A relative path is tried from the working directory, then from `folder`. Raises ArtifactError when it names no model folder.
    """
    if folder.name == ADAPTER and (folder.parent / CONFIG).exists():
        raise ArtifactError(
            f"{folder} is the adapter of the model in {folder.parent}",
            fix=f"give {folder.parent}, which applies it",
        )
    values = read_json(folder / ADAPTER_CONFIG)
    key = "base_model_name_or_path" if "base_model_name_or_path" in values else "model_name"  # PEFT's, AdapterHub's
    named = str(values.get(key) or "")
    if named.startswith(HUB):
        return fetched(named)
    for path in (Path(named), folder / named):
        if named and (path / CONFIG).exists():
            return path
    said = f"belongs to {named}, which is no model folder here" if named else "does not name its model"
    hub = f", or {HUB}{named}" if _NAME.fullmatch(named) else ""
    raise ArtifactError(
        f"{folder} is an adapter ({ADAPTER_CONFIG}), not a whole model: it {said}",
        fix=f"set base_model_name_or_path in its {ADAPTER_CONFIG} to the folder of its model{hub}",
    )


def no_whole_model(folder: Path) -> ArtifactError | None:
    """The error of a folder without config.json that holds an adapter whose model is not here, or a GGUF file; None for any other."""
    if is_adapter(folder):
        try:
            base_of(folder)
        except ArtifactError as error:
            return error
        return None
    gguf = sorted(folder.glob("*.gguf"))
    return _gguf(gguf[0]) if gguf else None


def no_folder(path: Path, near: str = "") -> ArtifactError:
    """The error of a path that is no folder: a file, a GGUF file, a name on the Hub. `near` names similar paths that exist."""
    if path.suffix == ".gguf":
        return _gguf(path)
    if path.exists():
        return ArtifactError(
            f"{path} is {kind_of(path) or 'a file'}, not a model folder",
            fix="give the folder that holds config.json and *.safetensors",
        )
    if _NAME.fullmatch(str(path)):
        return ArtifactError(
            f"no folder {path}",
            fix=f"check the path; {near}{'; ' if near else ''}if it is a name on the Hugging Face Hub, give {HUB}{path}",
        )
    return ArtifactError(f"no folder {path}", fix=f"check the path; {near or 'a model on the Hub is hf:OWNER/NAME'}")


def _gguf(path: Path) -> ArtifactError:
    there = "is a GGUF file" if path.exists() else "names a GGUF file and does not exist"
    return ArtifactError(
        f"{path} {there}: hone opens folders of safetensors",
        fix="use the model that it was converted from (a folder with config.json, or hf:OWNER/NAME)",
    )


def fetched(where: str) -> Path:
    """The folder of hf:OWNER/NAME in the Hub's cache, downloaded when missing. Called for such names only.

    Raises SpecError for a malformed name, MachineError without huggingface_hub or network, ArtifactError when the Hub
    has no such model or refuses access.
    """
    found = _NAME.fullmatch(where.removeprefix(HUB))
    if found is None:
        raise SpecError(f"{where} names no model on the Hub", fix="write hf:OWNER/NAME or hf:OWNER/NAME@REVISION")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError:
        raise MachineError(
            f"{where} is fetched by the package 'huggingface_hub', which is not installed",
            fix="pip install huggingface_hub, or download the model yourself and give its folder",
        ) from None
    try:
        return Path(snapshot_download(found["name"], revision=found["revision"], allow_patterns=list(_FILES)))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        raise MachineError(
            f"{where} is not in the Hub's cache of this machine, and the Hub cannot be reached: {_line(error)}",
            fix="try again with a network, or copy the model here and give its folder",
        ) from None
    except HfHubHTTPError as error:
        raise ArtifactError(
            f"the Hub refused {where}: {_line(error)}",
            fix="check the name and the revision; for a gated or private model run `hf auth login` first",
        ) from None
    except OSError as error:
        raise MachineError(f"{where} could not be downloaded: {_line(error)}", fix="try again") from None


def _line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def weights_bytes(folder: Path | str) -> int:
    """Bytes of the *.safetensors files of the folder and of its adapter, of an adapter those of its model too; 0 when it has none."""
    folder = Path(folder)
    places = (folder, base_of(folder)) if is_adapter(folder) else (folder, folder / ADAPTER)
    return sum(path.stat().st_size for where in places for path in where.glob("*.safetensors"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ArtifactError when it is missing or broken."""
    try:
        kind = kind_of(path)
        if kind:  # opening a pipe would block for ever
            raise ArtifactError(f"{path} is {kind}, not a file", fix="download or write the folder again")
        values = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ArtifactError(f"no file {path}", fix="point at a folder that hone or transformers wrote") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is corrupt: {error}", fix="download or write the folder again") from None
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} is not a JSON object", fix="download or write the folder again")
    return values


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the tokenizer files of `source`, and its generation defaults when it has any. Raises ArtifactError when it has no tokenizer.json."""
    if not (source / "tokenizer.json").exists():
        raise ArtifactError(f"{source} has no tokenizer.json", fix="name a folder that has one")
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).exists() and source.resolve() != folder.resolve():
            shutil.copyfile(source / name, folder / name)


def copy_companions(source: Path, folder: Path) -> None:
    """Copies what lies beside the weights in the model folder `source` to another model made of it.

    That is the tokenizer in whatever form, chat templates, generation defaults, licence and notices, and the model's own code.
    README.md, the card of the model that was given, becomes README.base.md.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in _ABOUT_WEIGHTS and _COMPANIONS.fullmatch(path.name):
            name = "README.base.md" if path.name.lower() == "readme.md" else path.name
            shutil.copyfile(path, folder / name)
    for path in sorted((source / _TEMPLATES).glob("*.jinja")):
        (folder / _TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / _TEMPLATES / path.name)
