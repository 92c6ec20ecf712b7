"""Facts of a model folder: its config, the format of its weights and its tokenizer's identity, without reading a tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from hone.base.artifact import MANIFEST, Artifact
from hone.base.errors import ArtifactError
from hone.base.plan import Facts
from hone.cost.memory import BYTES
from hone.model.adapters.peft import opened
from hone.model.config import ModelConfig
from hone.model.folder import is_adapter, no_whole_model, weights_bytes
from hone.model.weights.header import DTYPES, FLOATS, read_header

POSITION_FILE = "position.json"
TRAINING_STATE = "training_state"
"""The folder of a finished training in which one checkpoint is, with the state of the optimizer."""


class Position(BaseModel):
    """The place in its schedule and in its data at which a training is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(description="Optimizer steps done, with those of the trainings whose schedule it went on with.")
    total_steps: int = Field(description="Steps of the schedule.")
    warmup: int = Field(description="Steps of its warm-up.")
    tokens: int = Field(description="Input tokens of the steps done.")
    sequences: int = Field(description="Sequences of the steps done.")
    sources: dict[str, int] = Field(
        default_factory=dict, description="Sequences read of each source, by its data's fingerprint, by all trainings."
    )


class Trained(BaseModel):
    """What is known of the training that made a model, for one that goes on from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: dict[str, Any] = Field(description="Its spec.")
    data: tuple[str, ...] = Field(description="The fingerprints of its data; of planned data where they will be.")
    ended: Position | None = Field(description="Where it ended; None: it is of a version of hone that does not say.")
    kept: Position | None = Field(None, description="Where the state that it kept is; None: there is none.")
    state: Path | None = Field(None, description="The checkpoint of that state.")
    flops_before: float | None = Field(
        None,
        description="FLOPs of the trainings of the smaller models that it was grown from; None: it was not, or none is known.",
    )

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Of a finished training's folder; None for any other. Raises ArtifactError for a corrupt file."""
        if not (folder / MANIFEST).exists():
            return None
        made = Artifact.read(folder)
        if made.kind != "train":
            return None
        state = next(iter(sorted((folder / TRAINING_STATE).glob("step-*/numbers.json"))), None)
        data = tuple(row["fingerprint"] for row in made.manifest["parents"] if row["role"].startswith("data"))
        told = (folder / POSITION_FILE).exists()
        grown = made.figures.get("flops_before_growth")
        return cls(
            spec=made.manifest["spec"],
            data=data,
            ended=_position(folder / POSITION_FILE) if told else _by_figures(made, data),
            kept=None if state is None else _position(state, "position"),
            state=None if state is None else state.parent,
            flops_before=grown and grown.value,
        )


def _by_figures(made: Artifact, data: tuple[str, ...]) -> Position | None:
    """Where a training of one source ended that a version of hone without POSITION_FILE made, from the start of its data."""
    steps, each = made.figures.get("num_steps"), made.manifest["spec"].get("batch_size")
    if steps is None or not steps.value or not each or len(data) != 1 or made.manifest["spec"].get("mixture"):
        return None
    done = int(steps.value)
    read = done * each
    return Position(steps=done, total_steps=done, warmup=0, tokens=0, sequences=read, sources={data[0]: read})


def _position(path: Path, key: str = "") -> Position:
    try:
        values = json.loads(path.read_text("utf8"))
        return Position.model_validate(values[key] if key else values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is corrupt: {type(error).__name__}",
            fix="get the file again, or load less: checkpoint.load: weights",
        ) from None


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
    trained: Trained | None = Field(None, description="How hone trained it; None for any other model.")

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The facts of a Hugging Face folder, or of an adapter's with its model. Raises ArtifactError for a corrupt file, SpecError for a config hone cannot run."""
        from hone.model.tokenizer import identity_of

        where, _, values, _, config = opened(folder)
        stated = str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch.")
        return cls(
            where=str(folder),
            config=config,
            dtype=stated if stated in BYTES else _dtype(where),
            quantization=values.get("quantization_config"),
            weights_bytes=weights_bytes(folder),
            tokenizer=identity_of(folder if (folder / "tokenizer.json").exists() else where),
            trained=Trained.of(folder),
        )

    @classmethod
    def marks(cls, folder: Path) -> bool:
        return super().marks(folder) or (is_adapter(folder) and no_whole_model(folder) is None)

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
        for tensor in read_header(path).values():
            kind = DTYPES.get(tensor.dtype)
            if kind in FLOATS:
                sizes[kind] = sizes.get(kind, 0) + tensor.end - tensor.begin
    return max(sizes, key=lambda name: sizes[name], default="float32")
