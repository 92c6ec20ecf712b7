"""Facts of a model folder: its config, the format of its weights and its tokenizer's identity, without reading a tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from hone.base.errors import ArtifactError
from hone.base.plan import Facts
from hone.cost.memory import BYTES
from hone.model.adapters.peft import with_adapter
from hone.model.config import ModelConfig
from hone.model.families.stored import read_config
from hone.model.folder import no_whole_model, weights_bytes

_STORED = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Number formats by their names in a safetensors header."""


class CheckpointFacts(Facts):
    """Facts of a model folder, written by hone or by another library."""

    noun: ClassVar[str] = "model"
    mark: ClassVar[str] = "config.json"

    config: ModelConfig = Field(description="Sizes and layers.")
    dtype: str = Field(description="Number format of the weights that are not quantized: 'float32', 'bfloat16'.")
    quantization: dict[str, Any] | None = Field(None, description="config.json's quantization_config, if it has one.")
    weights_bytes: int = Field(description="Bytes of the *.safetensors files, an adapter's included.")
    tokenizer: str | None = Field(
        description="Identity of its tokenizer (`Tokenizer.identity`); None without a tokenizer."
    )

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The facts of a Hugging Face folder. Raises ArtifactError for a corrupt file, SpecError for a config hone cannot run."""
        from hone.model.tokenizer import identity_of

        values, config = read_config(folder)
        stated = str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch.")
        return cls(
            where=str(folder),
            config=with_adapter(config, values, folder),
            dtype=stated if stated in BYTES else _dtype(folder),
            quantization=values.get("quantization_config"),
            weights_bytes=weights_bytes(folder),
            tokenizer=identity_of(folder),
        )

    @classmethod
    def refuse(cls, folder: Path) -> None:
        error = no_whole_model(folder)
        if error is not None:
            raise error

    @property
    def given(self) -> frozenset[str]:
        """'weights:float' or 'weights:quantized'."""
        return frozenset({"weights:quantized" if self.quantization else "weights:float"})

    @property
    def packed(self) -> bool:
        """Whether weights are stored as codes or factors."""
        return stores_weights(self.quantization)

    def loaded_bytes(self, dtype: str) -> float:
        """Bytes of the weights in memory: quantized ones stay packed, others are converted to `dtype`."""
        return self.weights_bytes if self.packed else self.config.num_params * BYTES[dtype]


def stores_weights(quantization: dict[str, Any] | None) -> bool:
    """Whether a `quantization_config` is of weights: one with scales of a KV cache alone is not."""
    return bool(quantization and quantization.get("config_groups", True))


def _dtype(folder: Path) -> str:
    """The number format of most bytes of the first weights file, from its header; 'float32' for a folder without weights."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors"))[:1]:
        with open(path, "rb") as file:
            try:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            except (ValueError, struct.error, MemoryError, OverflowError):
                raise ArtifactError(f"{path} is corrupt: its header cannot be read", fix="get the file again") from None
        for name, row in header.items():
            if name != "__metadata__" and row["dtype"] in _STORED:
                kind = _STORED[row["dtype"]]
                sizes[kind] = sizes.get(kind, 0) + row["data_offsets"][1] - row["data_offsets"][0]
    return max(sizes, key=lambda name: sizes[name], default="float32")
