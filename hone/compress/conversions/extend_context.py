"""Longer contexts: rotary positions are scaled, and the config says so; the weights stay."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from hone.base.durable import write_atomic
from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.conversions.base import Conversion, with_layers
from hone.compress.step import Targets
from hone.cost.compress.compression import Passes

if TYPE_CHECKING:
    from pathlib import Path

    from hone.compress.capture import Flow
    from hone.model.config import LayerSpec, ModelConfig
    from hone.model.weights.model import ModelSource

divisors = lazy("hone.compress.conversions.divisors")

_OF_SCALING = {
    "attention_factor": ("yarn", "longrope"),
    "short_factor": ("longrope",),
    "long_factor": ("longrope",),
    "population": ("longrope",),
    "rounds": ("longrope",),
    "seed": ("longrope",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
}


class ExtendContext(Conversion):
    """Scales rotary positions for sequences `factor` times as long: YaRN, position interpolation, NTK-aware, LongRoPE. Peng et al. 2023, arXiv:2309.00071.

    Perplexity at the new length falls at once, and a short training on long sequences brings more. `linear`: arXiv:2306.15595.
    `longrope`: arXiv:2402.13753, with divisors that a search found.
    """

    paper: ClassVar[str] = "arXiv:2309.00071"
    converts: ClassVar[bool] = False
    wanted: ClassVar[str] = "rotary positions"

    scaling: Literal["yarn", "linear", "ntk", "dynamic", "llama3", "longrope"] = Field(
        "yarn",
        description="yarn: short wavelengths stay, long ones are divided by factor, a ramp between, scores are sharpened; linear: all are "
        "divided; ntk: a larger base; dynamic: a base that grows with the sequence; llama3: as yarn, between wavelengths; longrope: "
        "divisors of your own.",
    )
    factor: float = Field(4.0, gt=1, description="The new context over the old one.")
    original_max_seq_len: int | None = Field(
        None, gt=1, description="The old context, as the model was trained; empty: that in its config."
    )
    attention_factor: float | None = Field(
        None,
        gt=0,
        description="yarn, longrope: rotated queries and keys are multiplied by it; empty: 0.1 ln(factor) + 1, of longrope "
        "sqrt(1 + ln(factor) / ln(old context)).",
    )
    beta_fast: float = Field(32.0, gt=0, description="yarn: wavelengths with more turns in the old context stay.")
    beta_slow: float = Field(1.0, gt=0, description="yarn: wavelengths with fewer turns there are divided by factor.")
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: wavelengths longer than old context / this are divided by factor."
    )
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: wavelengths shorter than old context / this stay.")
    short_factor: tuple[PositiveFloat, ...] = Field(
        (), description="longrope: a divisor of each frequency in sequences up to the old context; empty: 1."
    )
    long_factor: tuple[PositiveFloat, ...] = Field(
        (),
        description="longrope: a divisor of each frequency in longer sequences; empty: a search on the calibration sequences, whose "
        "seq_len should be the new context.",
    )
    population: int = Field(16, ge=4, description="longrope: divisors that the search keeps and makes in each round.")
    rounds: int = Field(10, ge=0, description="longrope: rounds of the search.")
    seed: int = Field(0, ge=0, description="longrope: seed of the search.")

    @model_validator(mode="after")
    def _options_are_read(self) -> Self:
        for name, scalings in _OF_SCALING.items():
            if self.scaling not in scalings and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"scaling {self.scaling} does not read {name}: it is an option of {' and '.join(scalings)}"
                )
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low} must be below {high}: between them is the ramp")
        return self

    @property
    def searches(self) -> bool:
        """Whether divisors are searched for."""
        return self.scaling == "longrope" and not self.long_factor

    def convert(self, index: int, layer: LayerSpec, config: ModelConfig) -> LayerSpec | None:
        mixer = layer.mixer
        rotated = [one.mixer for one in config.layers if getattr(one.mixer, "rope", None) is not None]
        far = [one for one in rotated if getattr(one, "window", None) is None]
        if getattr(mixer, "rope", None) is None or getattr(mixer, "rotary_dim", None) == 0:
            return None
        if far and getattr(mixer, "window", None) is not None:
            return None  # it never sees positions further apart than its window
        if mixer.rope.scaling != "none":
            raise SpecError(
                f"{self.kind}: the positions of layer {index} are scaled already ({mixer.rope.scaling}, factor {mixer.rope.factor:g})",
                fix="give the model before they were scaled; of steps together, extend_context comes first",
            )
        latent = mixer.kind == "mla"
        dim = mixer.rope_dim if latent else getattr(mixer, "rotary_dim", None) or mixer.head_dim
        rope = self._rope(mixer.rope.theta, dim, self.original_max_seq_len or config.max_seq_len)
        more = {}
        if latent and self.scaling == "yarn":
            # DeepSeek's classes sharpen all scores, not the rotated part of a key alone.
            if rope["attention_factor"] < 1:
                raise SpecError(
                    f"{self.kind}: attention_factor {self.attention_factor} of layer {index}, whose latent attention can only sharpen",
                    fix="give 1 or more, or leave it out",
                )
            more = {"mscale_all_dim": 10 * (rope["attention_factor"] - 1) / math.log(self.factor)}
            rope["attention_factor"] = 1.0
        values = layer.model_dump(mode="json")
        return type(layer).read({**values, "mixer": {**values["mixer"], "rope": rope, **more}})

    def _rope(self, theta: float, dim: int, length: int) -> dict[str, Any]:
        """The fields of the scaled positions of `dim` channels."""
        if self.scaling == "ntk":
            return {"theta": theta * self.factor ** (dim / (dim - 2))}
        found: dict[str, Any] = {"theta": theta, "scaling": self.scaling, "factor": self.factor}
        if self.scaling == "linear":
            return found
        found["original_max_seq_len"] = length
        for name in ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            if self.scaling in _OF_SCALING[name]:
                found[name] = getattr(self, name)
        if self.scaling == "longrope":
            long = self.long_factor or (self.factor,) * (dim // 2)  # to be searched for
            found |= {"long_factor": long, "short_factor": self.short_factor or (1.0,) * (dim // 2)}
            usual = math.sqrt(1 + math.log(self.factor) / math.log(length))
            found["attention_factor"] = self.attention_factor or usual
        if self.scaling == "yarn":
            found["attention_factor"] = self.attention_factor or 0.1 * math.log(self.factor) + 1
        return found

    def reshape(self, config: ModelConfig) -> ModelConfig:
        # Of a dynamic scaling every config.json says the old context.
        old = self.original_max_seq_len or config.max_seq_len
        longer = old if self.scaling == "dynamic" else round(self.factor * old)
        return with_layers(config, self.converted(config), max_seq_len=longer)

    def rewrite(
        self, checkpoint: ModelSource, flow: Flow | None, targets: Targets, state: Path, run: Run
    ) -> tuple[ModelSource, dict[str, Any]]:
        if not self.searches:
            return super().rewrite(checkpoint, flow, targets, state, run)
        entry = run.mesh.from_leader(lambda: json.loads(state.read_text(encoding="utf8")) if state.exists() else None)
        if entry is None:
            assert flow is not None, "a search needs calibration inputs"
            entry = self._found(checkpoint, flow, run)
            if run.mesh.leads:
                write_atomic(state, json.dumps(entry).encode())
        chosen = self.model_copy(update={"long_factor": tuple(entry["long_factor"])})
        return chosen.rewrite(checkpoint, flow, targets, state, run)[0], entry

    def _found(self, checkpoint: ModelSource, flow: Flow, run: Run) -> dict[str, Any]:
        """The divisors that the search finds, and its losses."""
        config = checkpoint.config
        layers = self.converted(config)
        ropes = [layer.mixer.rope for layer in layers.values()]
        if any(rope != ropes[0] for rope in ropes):
            raise SpecError(
                f"{self.kind}: layers have other rotary positions than each other, for which there is no common search",
                fix="give long_factor, or take another scaling",
            )

        def of(values: tuple[float, ...]) -> dict[int, Any]:
            made = self.model_copy(update={"long_factor": values}).converted(config)
            return {index: layer.mixer.rope for index, layer in made.items()}

        old = self.original_max_seq_len or config.max_seq_len
        given = config.layers[next(iter(layers))].mixer.rope.model_copy(update={"original_max_seq_len": old})
        first = divisors.usual(self.factor, 2 * len(ropes[0].long_factor), given)
        options = (self.factor, self.population, self.rounds, self.seed)
        found, loss, begun = divisors.search(checkpoint, flow, run, of, first, *options)
        run.say(
            f"longrope: loss {loss:.4f} on {flow.calibration.tokens.shape[1]} tokens; with the divisors of linear {begun[0]:.4f}, "
            f"of a larger base {begun[1]:.4f}, of yarn {begun[2]:.4f}"
        )
        return {"long_factor": list(found), "loss": loss, "begun": begun}

    def passes(self, config: ModelConfig) -> Passes | None:
        if not self.searches:
            return None
        tried = self.population + self.rounds * self.population // 2
        return Passes(tried + 1.0, logits=tried, whole=True)

    def recipe(self, index: int, made: Any, source: ModelConfig, config: ModelConfig) -> Any:
        return None
