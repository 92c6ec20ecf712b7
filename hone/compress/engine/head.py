"""The head as the engine compresses it: a layer after the last, with weights of its own where it is tied to the embedding."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from hone.compress.layer import original
from hone.compress.targets import EMBEDDING, HEAD
from hone.model.context import Context
from hone.model.decoder import Decoder
from hone.model.families.config_json import OWN
from hone.model.hf import config_values
from hone.model.weights.model import ModelSource
from hone.model.weights.source import View


class HeadLayer(nn.Module):
    """The end of a model as a layer of the engine: its outputs are its inputs, which the norm and the head read."""

    def __init__(self, ends: Decoder) -> None:
        super().__init__()
        self.norm, self.lm_head = ends.norm, _Unmultiplied(ends.lm_head.weight)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self.lm_head(self.norm(x))
        return x

    def original(self, stored: dict[str, Tensor], path: str) -> Tensor:
        """The head's weight, as `LayerWeights.weight`; `stored` are its checkpoint tensors."""
        return original(self.lm_head.weight.detach(), [stored[f"{path}.weight"]])


class _Unmultiplied(nn.Module):
    """A weight whose inputs are observed: logits of a whole batch would take more memory than all of its hidden states."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> None:
        return None


class UntiedWeights(View):
    """The weights of `source`, whose head is tied to the embedding, with a head of the same values."""

    def names(self) -> list[str]:
        return list(dict.fromkeys((*self.source.names(), f"{HEAD}.weight")))  # some store it beside a tied embedding

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(_stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(_stored(name))

    def file(self, name: str) -> Path:
        return self.source.file(_stored(name))


def untied(source: ModelSource) -> ModelSource:
    """The model of `source`, whose head is tied to the embedding, with a head of its own that has the same values."""
    config = source.config.model_copy(update={"tie_embeddings": False})
    own = source.values.get("model_type") == OWN
    values = config_values(config, source.dtype) if own else source.values | {"tie_word_embeddings": False}
    return ModelSource(source.folder, config, values, UntiedWeights(source), hadamards=source.hadamards)


def _stored(name: str) -> str:
    """The tensor of a tied model that holds the values of the one called `name`."""
    return f"{EMBEDDING}.weight" if name == f"{HEAD}.weight" else name
