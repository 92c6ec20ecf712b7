"""GGUF's options; the work is in `hone.exports.gguf.export`, which needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.base.lazy import resolve
from hone.base.run import Run
from hone.exports.base import Export, Exported
from hone.exports.gguf.formats import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

TypeName = Literal[("auto", *FORMATS)]


class GGUF(Export):
    """One file for llama.cpp and what is built on it; the codes of int4 and int8 folders are kept."""

    ending: ClassVar[str] = ".gguf"

    type: TypeName = Field(
        "auto",
        description="Type of the layers' matrices. auto: the codes of a quantized folder without loss (q4_0, q5_0, q8_0), "
        "else q8_0; a dense folder's own dtype.",
    )
    embedding_type: TypeName = Field(
        "auto",
        description="Type of embedding and head; auto: the codes of quantized ones without loss, else q8_0 in a file of quantized types, "
        "or as the layers.",
    )
    pre_tokenizer: str = Field(
        "auto",
        description="llama.cpp's name of the rule that splits texts (gpt-2, llama-bpe, qwen2 ...); auto finds it.",
    )

    def write(self, model: Path, path: Path, run: Run, importance: Mapping[str, Tensor]) -> Exported:
        types = (self.type, self.embedding_type)
        return resolve("hone.exports.gguf.export:write")(model, path, run, importance, types, self.pre_tokenizer)
