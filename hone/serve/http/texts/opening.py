"""The tokenizer of a served folder, opened alike by the front and by its text processes."""

from __future__ import annotations

from pathlib import Path

from hone.base.errors import ArtifactError, SpecError
from hone.model.tokenizer import Tokenizer, load_tokenizer


def read_tokenizer(folder: Path, chat_template: str) -> Tokenizer | None:
    """The tokenizer of a model folder, None when it has no tokenizer.json; `chat_template` is a Jinja file or ''.

    Raises SpecError for a template without a tokenizer, ArtifactError for a file that cannot be read.
    """
    if not (folder / "tokenizer.json").exists():
        if chat_template:
            raise SpecError(
                f"chat_template is given, but {folder} has no tokenizer.json", fix="copy the tokenizer into the folder"
            )
        return None
    tokenizer = load_tokenizer(folder)
    if not chat_template:
        return tokenizer
    try:
        return tokenizer.with_chat_template(Path(chat_template).read_text(encoding="utf8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"cannot read the chat template {chat_template}: {error}", fix="give a Jinja text file"
        ) from None
