"""The goal of a search: what is wanted, of which model, on which machines, within which limits. Never imports torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hone.base.errors import SpecError
from hone.base.spec import Spec, in_file, read_yaml

What = Literal["train", "serve", "compress+serve", "train+compress+serve"]
AXES = ("hours", "dollars", "joules", "grams", "loss")
"""The axes of a front, by the names that `weights` uses; all are better when smaller."""

HERE = "here"
"""The name of this machine in `machines`."""

_MACHINE = re.compile(r"(\d+)\s*[x\u00d7]\s*(.+)")
_SIZE = re.compile(r"(\d+\.?\d*)\s*([kKmMbBtT]?)")
_POWER = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def count_of(text: str | float) -> float:
    """The number that '8B', '1.5T' or 7e9 names. Raises ValueError for another text."""
    if isinstance(text, int | float):
        return float(text)
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"'{text}' is no number: write 8B, 300M, 1.5T or 7e9") from None
    return float(found[1]) * _POWER[found[2].upper()]


class Sizes(Spec):
    """A range of model sizes, for goals that leave the size open."""

    smallest: float = Field(description="Parameters of the smallest model: 1B, 300M.")
    largest: float = Field(description="Parameters of the largest model.")
    points: int = Field(4, ge=1, le=32, description="Sizes in between and at both ends, by equal factors.")
    vocab_size: int = Field(32768, gt=0, description="Tokens of the vocabulary.")
    max_seq_len: int = Field(8192, gt=0, description="Longest sequence of the models.")

    @field_validator("smallest", "largest", mode="before")
    @classmethod
    def _counts(cls, value: Any) -> float:
        return count_of(value)

    @model_validator(mode="after")
    def _in_order(self) -> Sizes:
        if not 0 < self.smallest <= self.largest:
            raise ValueError(f"smallest {self.smallest:g} is larger than largest {self.largest:g}, or no size at all")
        return self


class Quality(Spec):
    """Limits of quality. A configuration whose quality nobody measured or fitted does not meet them."""

    loss: float | None = Field(None, gt=0, description="Highest loss in nats a token of the trained model.")
    max_increase: float | None = Field(
        None, gt=0, description="Most loss in nats a token that compression may add to the given model."
    )


class Requests(Spec):
    """What is served, and how fast."""

    prompt_tokens: int = Field(1024, ge=1, description="Tokens of a prompt.")
    output_tokens: int = Field(256, ge=1, description="Tokens of an answer.")
    ttft_s: float | None = Field(None, gt=0, description="Longest time to the first token, in seconds.")
    tpot_s: float | None = Field(None, gt=0, description="Longest time of each further token, in seconds.")
    tokens_per_s: float | None = Field(
        None, gt=0, description="Least output tokens a second, of all replicas together."
    )
    tokens: float | None = Field(
        None,
        gt=0,
        description="Output tokens to be served in all, from which money, energy and grams follow; empty: 1B.",
    )

    @field_validator("tokens", mode="before")
    @classmethod
    def _counts(cls, value: Any) -> Any:
        return None if value is None else count_of(value)


class Space(Spec):
    """The values of each axis that a search tries; an empty axis has every value that can work."""

    data_parallel: tuple[Literal["ddp", "zero1", "zero2", "zero3"], ...] = Field(
        ("ddp", "zero1", "zero2", "zero3"), description="What of the training's state each rank holds."
    )
    tensor_parallel: tuple[int, ...] = Field(
        (), description="Ranks that share every layer; empty: powers of two within a host."
    )
    pipeline_parallel: tuple[int, ...] = Field(
        (), description="Stages of layers; empty: every divisor of the ranks up to the layers."
    )
    context_parallel: tuple[int, ...] = Field(
        (), description="Ranks that share a sequence; empty: powers of two up to seq_len / 4096."
    )
    schedules: tuple[Literal["1f1b", "interleaved", "zb_h1"], ...] = Field(
        ("1f1b", "interleaved", "zb_h1"), description="Pipeline schedules."
    )
    stages_per_rank: tuple[int, ...] = Field(
        (2, 3, 4, 5, 6, 8), description="Stages of a rank of schedule interleaved."
    )
    micro_batch: tuple[int, ...] = Field((), description="Sequences of one pass of one rank; empty: powers of two.")
    recomputation: tuple[str, ...] = Field(
        ("none", "selective", "every_nth 4", "every_nth 2", "full", "layers"),
        description="Which activations are recomputed; layers: exactly those that each rank's memory asks for, in the ways that are simulated.",
    )
    precision: tuple[Literal["fp32", "bf16", "fp8", "fp8_blockwise"], ...] = Field(
        (), description="Number formats of training; empty: those that the device multiplies."
    )
    formats: tuple[str, ...] = Field(
        (), description="Formats of weights that are served; empty: those that run fast on the target."
    )
    kv_cache_dtype: tuple[Literal["auto", "fp8", "int8"], ...] = Field(
        (), description="Formats of the KV cache; empty: auto and fp8 where it runs."
    )
    max_num_seqs: tuple[int, ...] = Field((), description="Most sequences of a step; empty: powers of two up to 512.")
    max_num_batched_tokens: tuple[int, ...] = Field((2048, 8192), description="Most tokens of a step.")
    drafter: tuple[Literal["none", "prompt_lookup"], ...] = Field(
        ("none",),
        description="Speculation. What it gains depends on the text, so it is not ranked until it was executed.",
    )

    @field_validator("recomputation")
    @classmethod
    def _known(cls, found: tuple[str, ...]) -> tuple[str, ...]:
        for one in found:
            kind, _, n = one.partition(" ")
            if kind not in ("none", "selective", "full", "layers", "every_nth") or (kind == "every_nth") != n.isdigit():
                raise ValueError(f"'{one}' is none of none, selective, full, layers, 'every_nth N'")
        if found == ("layers",):
            raise ValueError(
                "layers replaces one of the rules in a way that was found with it: add full, every_nth 2 or none"
            )
        return found


class Goal(Spec):
    """What a search should find: the cheapest ways to train, compress and serve a model within limits."""

    goal: What = Field(description="train, serve, compress+serve, or the chain train+compress+serve.")
    model: str | dict[str, Any] | Sizes = Field(
        description="A model's folder (config.json is enough), the sizes of a new one as in a train stage's `model`, or a range: "
        "{smallest: 1B, largest: 8B}."
    )
    vocab_size: int | None = Field(
        None, gt=0, description="Vocabulary of a new model given by its sizes; empty: 32768."
    )
    data: str | None = Field(
        None,
        description="Training data: a data stage's folder, or a source of text for one; empty: this is named in each recipe, to be replaced.",
    )
    machines: tuple[str, ...] = Field((HERE,), description="Machines to choose among: 8xH100, 1024xH200, or here.")
    tokens: tuple[float, ...] = Field(
        (), description="Numbers of training tokens to choose among: 20B; empty: 20 a parameter."
    )
    seq_len: int = Field(2048, gt=1, description="Tokens of a training sequence.")
    batch_size: tuple[int, ...] = Field((256,), description="Sequences of an optimizer step to choose among.")
    quality: Quality = Field(Quality(), description="Limits of quality.")
    requests: Requests = Field(Requests(), description="What is served, and how fast.")
    deadline_h: float | None = Field(None, gt=0, description="Most hours of all stages together, serving excepted.")
    budget: float | None = Field(None, gt=0, description="Most dollars of all stages together.")
    energy_kwh: float | None = Field(None, gt=0, description="Most energy of all stages together, in kWh.")
    memory: str | None = Field(
        None, description="Most memory of a device that may be used, as in 70GB; empty: 95 % of it."
    )
    target: Literal["intel-vnni", "nvidia-hopper", "apple", "qualcomm"] | None = Field(
        None, description="Hardware that serves, which restricts formats to those that it runs fast."
    )
    price_per_hour: float | dict[str, float] | None = Field(
        None, description="Dollars an hour of one device, for all or by its name; empty: the catalogue's, else unknown."
    )
    grid_g_per_kwh: float | None = Field(None, gt=0, description="Grams of CO2 a kWh; empty: unknown.")
    utilization: float | None = Field(
        0.8,
        gt=0,
        le=1,
        description="Part of a data sheet's rates that machines elsewhere reach; empty: all of it, a bound.",
    )
    measured: tuple[str, ...] = Field(
        (), description="Artifacts of compressions or evaluations of this model, whose measured quality counts."
    )
    weights: dict[str, float] = Field(
        {"hours": 1.0, "dollars": 1.0},
        description="How much each axis counts for the choice: hours, dollars, joules, grams, loss.",
    )
    space: Space = Field(Space(), description="Values of each axis to try.")

    @field_validator("model", mode="before")
    @classmethod
    def _range(cls, value: Any) -> Any:
        """A mapping with `smallest` or `largest` is a range."""
        return Sizes.read(value) if isinstance(value, dict) and {"smallest", "largest"} & set(value) else value

    @field_validator("tokens", mode="before")
    @classmethod
    def _counts(cls, value: Any) -> Any:
        return tuple(count_of(one) for one in (value if isinstance(value, list | tuple) else [value]))

    @field_validator("machines")
    @classmethod
    def _machines(cls, found: tuple[str, ...]) -> tuple[str, ...]:
        if not found:
            raise ValueError("a search needs a machine: write machines: [8xH100], or leave it out for this one")
        for one in found:
            if one != HERE:
                parts_of(one)
        return found

    @field_validator("weights")
    @classmethod
    def _axes(cls, found: dict[str, float]) -> dict[str, float]:
        for name, weight in found.items():
            if name not in AXES:
                raise ValueError(f"'{name}' is no axis; the axes are: {', '.join(AXES)}")
            if weight < 0:
                raise ValueError(f"the weight of {name} is {weight:g}, below 0")
        if not any(found.values()):
            raise ValueError("all weights are 0: nothing would be chosen")
        return found

    @model_validator(mode="after")
    def _fits_together(self) -> Goal:
        if not self.trains and isinstance(self.model, Sizes):
            raise ValueError(f"goal {self.goal} is of a model that exists: give its folder or its sizes, not a range")
        if self.quality.loss is not None and not self.trains:
            raise ValueError("quality.loss is of a trained model; of a compression give quality.max_increase")
        return self

    @property
    def trains(self) -> bool:
        return "train" in self.goal

    @property
    def compresses(self) -> bool:
        return "compress" in self.goal

    @property
    def serves(self) -> bool:
        return "serve" in self.goal

    @classmethod
    def load(cls, path: Path | str) -> Goal:
        """The goal in a YAML file. Raises SpecError with the line of a mistake."""
        try:
            return cls.read(read_yaml(Path(path)))
        except SpecError as error:
            raise in_file(error, Path(path)) from None


def parts_of(machine: str) -> tuple[int, str]:
    """(devices, name) of '8xH100'. Raises ValueError for another text."""
    found = _MACHINE.fullmatch(machine.strip())
    if found is None or int(found[1]) < 1:
        raise ValueError(f"'{machine}' is no machine: write 8xH100, 1xH200, or here")
    return int(found[1]), found[2]


def is_goal(path: Path) -> bool:
    """Whether a YAML file is a goal, not a recipe: it has a key `goal`. Raises SpecError for a file that cannot be read or is neither."""
    values = read_yaml(path)
    if not isinstance(values, dict) or not values.keys() & {"goal", "line", "stages"}:
        raise SpecError(
            f"{path} is neither a recipe nor a goal",
            fix="a recipe has the fields `line` and `stages`, a goal `goal` and `model`",
        )
    return "goal" in values
