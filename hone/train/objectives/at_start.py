"""The reference of a training of adapters: the model as it was when the training began, without a second model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hone.model.context import Context
    from hone.model.decoder import Decoder


class AtStart:
    """In place of a teacher: `model` with the trained parameters as they were when this was made, of which it has a copy.

    A new adapter changes nothing at first, so that this is the model without it; one that is trained on is taken as it was. Made
    once the parameters are in the dtype with which they compute; a resumed training must make it before it restores them.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._first = {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}
        frozen = sum(one.numel() for one in model.parameters() if not one.requires_grad)
        assert frozen, "only a model with frozen weights is its own reference: another one would be copied whole"

    @property
    def config(self) -> Any:
        return self._model.config

    @property
    def layers(self) -> Any:
        return self._model.layers

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(one.nbytes for one in self._first.values())

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        """As `Decoder.hidden`, without gradients."""
        with torch.no_grad(), self._as_then():
            return self._model.hidden(tokens, context)

    def head_input(self, x: Tensor) -> Tensor:
        """As `Decoder.head_input`, without gradients."""
        with torch.no_grad(), self._as_then():
            return self._model.head_input(x)

    @property
    def head_weight(self) -> Tensor:
        """As `Decoder.head_weight`."""
        with self._as_then():
            return self._model.head_weight.detach()

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Inside, the trained parameters are those of the start; dropout is off."""
        parameters, training = dict(self._model.named_parameters()), self._model.training
        now = {name: parameters[name].data for name in self._first}
        for name, value in self._first.items():
            parameters[name].data = value
        self._model.eval()
        try:
            yield
        finally:
            self._model.train(training)
            for name, value in now.items():
                parameters[name].data = value
