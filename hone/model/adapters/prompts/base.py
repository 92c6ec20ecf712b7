"""The base of soft prompts: the numbers they train, and how PEFT stores them.

Every document follows the prompt: its tokens attend to the keys and values of `num_virtual_tokens` places, and their own positions
begin after those. Nothing before a document attends to it, so an embedding's keys and values are the same for all documents: they are
computed once a pass, and sequences do not grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from hone.model.adapters.base import Adapter
from hone.model.adapters.initial import uniform
from hone.model.linear_spec import ParameterSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

KEY = "prompt_embeddings"
"""The one tensor of a PEFT folder."""


class SoftPrompt(Adapter):
    """Base of the specs of soft prompts."""

    num_virtual_tokens: int = Field(20, gt=0, description="Places before the first token of every document.")

    initials: ClassVar[tuple[str, ...]] = ("random",)
    """Values of `init`."""

    @property
    def encoded(self) -> bool:
        """Whether an encoder makes the prompt in training; its result is what is saved."""
        return False

    def check(self, config: Any) -> None:
        """Raises ValueError for a layer whose keys and values cannot follow others."""
        for index, layer in enumerate(config.layers):
            if not layer.mixer.can_share_kv:
                raise ValueError(
                    f"layer {index} mixes with '{layer.mixer.kind}', and a '{self.kind}' needs attention with keys and values of its own"
                )

    def prompt(self, config: Any) -> nn.Module:
        """Its module in the model of `config`: an `hone.model.adapters.prompts.module.Prompt`."""
        raise NotImplementedError

    def start(self, module: nn.Module, first: Any) -> None:
        """To be called once on what `prompt` made, drawn, when its training begins; `first` gives a
        `hone.model.adapters.prompts.first_values.FirstValues` of the model."""

    def plain(self) -> Self:
        """The same when it is trained: without encoder and first values."""
        raise NotImplementedError

    def encoder(self, width: int, out: int) -> nn.Module | None:
        """What makes `out` numbers a place of `width`, in training; None where the numbers themselves are trained."""
        return None

    def exported(self, tensors: Mapping[str, Tensor]) -> tuple[Adapter, dict[str, Tensor]]:
        """The encoder's result; encoders are not kept."""
        if not self.encoded or not tensors:
            return self.plain(), dict(tensors)
        import torch

        own = {key.removeprefix("prompt."): one.float() for key, one in tensors.items()}
        given = own.pop("embedding")
        ends = [own[key] for key in own if key.endswith(".weight")]
        encoder = self.encoder(given.shape[1], len(ends[-1]))
        assert encoder is not None, "it is encoded"
        encoder.load_state_dict({key.removeprefix("encoder."): one for key, one in own.items()})
        with torch.no_grad():
            made = encoder(given)
        return self.plain(), {KEY: made.to(tensors["prompt.embedding"].dtype)}

    def keys(self, config: Any) -> dict[str, str]:
        """The key in adapter_model.safetensors of its tensors, by their name in hone's checkpoints; of an encoder these names."""
        names = [f"prompt.{one.name}" for one in self.prompt_parameters(config)]
        return {name: name for name in names} if self.encoded else {names[0]: KEY}

    def peft_values(self) -> dict[str, Any]:
        return {"num_virtual_tokens": self.num_virtual_tokens}

    def peft_sizes(self, config: Any) -> dict[str, Any]:
        return {"token_dim": config.hidden_size, "num_transformer_submodules": 1, "num_layers": config.num_layers}

    @classmethod
    def of_peft(cls, values: Mapping[str, Any]) -> SoftPrompt | None:
        """Of a folder with num_virtual_tokens; without task_type PEFT computes something else."""
        if values.get("task_type") != "CAUSAL_LM":
            raise ValueError(f"task_type is {values.get('task_type')!r}, not CAUSAL_LM")
        if values.get("num_transformer_submodules") not in (None, 1):
            raise ValueError("num_transformer_submodules is not 1")
        return cls.model_validate({"num_virtual_tokens": values["num_virtual_tokens"]}).plain()


def linear(name: str, inputs: int, outputs: int, *, zero: bool = False) -> tuple[ParameterSpec, ParameterSpec]:
    """Weight and bias of an encoder's linear, as torch's begin, or zero."""
    first = (0.0, 0.0) if zero else uniform(inputs)
    return (
        ParameterSpec(f"encoder.{name}.weight", (outputs, inputs), first),
        ParameterSpec(f"encoder.{name}.bias", (outputs,), first),
    )
