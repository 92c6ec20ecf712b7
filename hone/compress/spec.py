"""What a compression computes: its steps, calibration and budget, checked without torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from hone.base.stage import Stage
from hone.base.table import Choice
from hone.compress import ALLOCATIONS, STEPS
from hone.compress.allocations.base import Allocation, read_bytes, read_seconds
from hone.compress.quantizers.base import Quantizer, quantizer_of
from hone.compress.step import PHASES, CacheStep, ModelStep, Phase, Step, check_phases, giving

Engine = Literal["any", "hone", "transformers", "vllm", "llama.cpp"]


class CompressSpec(Stage):
    """The fields of `hone.compress.stage.Compress`, and its steps by phase."""

    steps: tuple[Annotated[Step, Choice(STEPS)], ...] = Field(
        (),
        description="Steps in order: conversions and structured pruners, transforms, pruners, at most one quantizer, at most one low-rank step; "
        "kv_cache anywhere; empty with fit, target_latency or max_kl, which choose them.",
    )
    fit: str | None = Field(
        None, description="Bytes that the weights may take, as 6GB or 5.5GiB: chooses the best steps that fit."
    )
    target_latency: str | None = Field(
        None, description="Time for one token of one sequence, as 8ms: chooses the best steps that are fast enough."
    )
    max_kl: float | None = Field(
        None,
        gt=0,
        description="Divergence from the given model in nats a token that is predicted at most: chooses the fewest bytes within it; with "
        "fit, no more than these.",
    )
    allocation: Annotated[Allocation, Choice(ALLOCATIONS)] | None = Field(
        None, description="Gives each matrix bits of its own, within a budget; empty: the quantizer's bits for all."
    )
    targets: tuple[str, ...] = Field(
        (r"\.layers\.",),
        description="Regular expressions; a linear is compressed if one of them is found in its checkpoint name. 're:EXPRESSION' "
        "begins at the name's start, as in vLLM and compressed-tensors.",
    )
    ignore: tuple[str, ...] = Field(
        ("lm_head",),
        description="Regular expressions, as those of targets; a linear is left unchanged if one of them is found in its name. "
        "The head, lm_head, and the embedding, embed_tokens, are compressed where targets has them and ignore does not.",
    )
    num_sequences: int = Field(128, gt=0, description="Calibration sequences.")
    seq_len: int = Field(0, ge=0, description="Tokens of one sequence; 0: the model's context, up to 512.")
    batch_size: int = Field(8, gt=0, description="Sequences computed at once.")
    seed: int = Field(0, ge=0, description="Seed of the choice of sequences.")
    check_sequences: int = Field(
        8,
        ge=0,
        description="Sequences outside the calibration, on which predictions are compared with the given model's.",
    )
    calibration_text: str | None = Field(
        None,
        description="Texts to calibrate with, in place of the role data: a text file, JSONL (.gz, .zst, .xz), JSON or Parquet with rows of "
        "text or messages, a folder of them, or hf:owner/name.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of the forward passes; auto is float32 on a CPU, bfloat16 on a GPU."
    )

    rest_dtype: Literal["keep", "bfloat16", "float16"] = Field(
        "keep", description="Dtype of the stored embedding and head, which are most of a small model's bytes."
    )
    engine: Engine = Field(
        "any",
        description="Engine that is to load the folder: a format that it refuses is an error. llama.cpp: after `hone export`.",
    )
    requantize: bool = Field(
        False,
        description="Whether a quantized model may be given: its weights are dequantized, which adds both errors.",
    )

    @model_validator(mode="after")
    def _steps_follow(self) -> Self:
        # Checks the order of the steps; `plan` checks whether there is calibration data.
        wanted = self.fit is not None or self.target_latency is not None or self.max_kl is not None
        if wanted == bool(self.steps):
            raise ValueError("give steps, or fit, target_latency or max_kl, which choose them: one of the two")
        for text, read in ((self.fit, read_bytes), (self.target_latency, read_seconds)):
            if text is not None:
                read(text)
        if wanted and self.allocation is not None:
            raise ValueError("fit, target_latency and max_kl choose the allocation of bits as well: leave it out")
        if wanted and self.engine == "llama.cpp":
            raise ValueError(
                "fit, target_latency and max_kl are of the folder, not of a GGUF file: give steps for llama.cpp"
            )
        check_phases(self.steps)
        if self.gradient_sequences and any(step.phase in ("model", "layer") for step in self.steps):
            raise ValueError(
                f"observer {self.quantizer.observer.kind} reads gradients of the given model, which conversions, structured "
                "pruners and transforms change: use observer mse"
            )
        if self.allocation is not None:
            self.allocation.check(self.quantizer)
            adapter = giving("weights:corrected", self.steps)
            if adapter is not None:
                raise ValueError(f"an allocation budgets weights alone, not the adapter of {adapter.kind}: use one")
        for step in self.layer_steps[1:]:
            if step.reads_model:
                raise ValueError(f"{step.kind} reads the weights of the given model: it must be the first step")
        for pattern in (*self.targets, *self.ignore):
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None
        return self

    def of_phase(self, *phases: Phase) -> tuple[Step, ...]:
        """The steps of some phases, in the order given."""
        return tuple(step for step in self.steps if step.phase in phases)

    @property
    def ordered(self) -> tuple[Step, ...]:
        """All steps in the order of their phases."""
        return tuple(sorted(self.steps, key=lambda step: PHASES.index(step.phase)))

    @property
    def model_steps(self) -> tuple[ModelStep, ...]:
        """The steps that rewrite the checkpoint."""
        return cast("tuple[ModelStep, ...]", self.of_phase("model"))

    @property
    def layer_steps(self) -> tuple[Step, ...]:
        """The steps that work on the targets, in the checkpoint or layer by layer."""
        return tuple(step for step in self.steps if step.targeted)

    @property
    def cache(self) -> CacheStep | None:
        """The step that calibrates the caches of layers."""
        return cast("CacheStep | None", next(iter(self.of_phase("cache")), None))

    @property
    def reshapes(self) -> bool:
        """Whether the model becomes one of other shapes."""
        return any(step.reshapes for step in self.steps)

    @property
    def converts(self) -> bool:
        """Whether decoding keeps something else of a token."""
        return any(step.converts for step in self.steps)

    @property
    def calibrated_steps(self) -> tuple[Step, ...]:
        """The steps that work on layers, with calibration inputs if there are any."""
        return (*self.layer_steps, *self.of_phase("cache"))

    @property
    def fits_hessian(self) -> bool:
        """Whether a step fits weights to second moments of their inputs."""
        return any("hessian" in step.needs for step in self.layer_steps)

    @property
    def quantizer(self) -> Quantizer | None:
        """The step that stores codes and scales."""
        return quantizer_of(self.steps)

    @property
    def gradient_sequences(self) -> int:
        """Sequences on which the whole uncompressed model is differentiated for scales of inputs; 0: none."""
        return 0 if self.quantizer is None else self.quantizer.gradient_sequences
