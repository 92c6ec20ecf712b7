"""The fields of an engine's LoRA adapters. Read by the CLI, so it never imports torch; names are vLLM's."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from hone.base.spec import Spec


class LoRASpec(Spec):
    """How many LoRA adapters run at once, and how large they may be."""

    max_loras: int | None = Field(
        None, ge=1, description="Adapters that one step may mix: slots on the device. Empty: the engine serves none."
    )
    max_lora_rank: int = Field(
        16, ge=1, le=512, description="Largest rank of an adapter; a slot has room for it in every linear."
    )
    max_cpu_loras: int | None = Field(
        None, ge=1, description="Adapters kept in host memory; those used longest ago are read from disk again. Empty: all are kept."
    )  # fmt: skip

    lora_modules: tuple[str, ...] = Field(
        (), description="Adapters that are there from the start, each NAME=FOLDER; clients of a server ask for model NAME."
    )  # fmt: skip
    allow_runtime_lora_updating: bool = Field(
        False, description="A server's clients may have it read other adapters from its disk, and unload them: /v1/load_lora_adapter."
    )  # fmt: skip

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.max_loras is None and self != LoRASpec.model_construct():
            raise ValueError("fields of lora have no effect without lora.max_loras, the adapters that run at once")
        self.named_paths()
        if self.max_cpu_loras is not None and self.max_cpu_loras < (self.max_loras or 0):
            raise ValueError(
                f"lora.max_cpu_loras {self.max_cpu_loras} is less than lora.max_loras {self.max_loras}: slots are filled from host memory"
            )
        return self

    def named_paths(self) -> dict[str, str]:
        """The folders of `lora_modules` by their names. Raises ValueError for another form, or a name that comes twice."""
        found: dict[str, str] = {}
        for one in self.lora_modules:
            name, sign, path = one.partition("=")
            if not (name and sign and path):
                raise ValueError(f"lora_modules has {one!r}: give NAME=FOLDER")
            if name in found:
                raise ValueError(f"lora_modules names '{name}' twice")
            found[name] = path
        return found
