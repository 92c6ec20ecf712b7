"""The modules of soft prompts: their numbers, their encoders, and the keys and values that tokens attend to.

Legend: n places of the prompt, D the model's width, L layers, KV key/value heads, Dh their width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hone.model.adapters.prompts.attend import Prompted, Recording, after
from hone.model.context import Context, KeyValues


class Prompt(nn.Module):
    """Trained numbers `embedding` of `sizes`, from which `encoder` makes the prompt's, if there is one."""

    def __init__(self, sizes: tuple[int, int], encoder: nn.Module | None) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(sizes))
        self.encoder = encoder

    def numbers(self) -> Tensor:
        """The prompt's numbers, [n, numbers of a place]."""
        return self.embedding if self.encoder is None else self.encoder(self.embedding)

    def prompted(self, decoder: Any) -> Prompted:
        """The keys and values of every layer."""
        raise NotImplementedError

    def before(self, decoder: Any, context: Context) -> Context:
        """The context in which the layers of `decoder` compute the pass of `context` after the prompt."""
        return after(context, {} if context.start else self.prompted(decoder), len(self.embedding))


class KeysAndValues(Prompt):
    """A prompt that is keys and values: places of 2 L KV Dh numbers, of each layer the keys, then the values; keys are not rotated."""

    def __init__(self, sizes: tuple[int, int], encoder: nn.Module | None, heads: tuple[int, int]) -> None:
        super().__init__(sizes, encoder)
        self.heads = heads

    def prompted(self, decoder: Any) -> Prompted:
        parts = self.numbers().to(decoder.dtype).unflatten(-1, (-1, *self.heads))[None]
        return {at: KeyValues(parts[:, :, 2 * at], parts[:, :, 2 * at + 1]) for at in range(parts.shape[2] // 2)}


class Embeddings(Prompt):
    """A prompt that is embeddings [n, D], whose keys and values the model's layers compute."""

    def prompted(self, decoder: Any) -> Prompted:
        return recorded(decoder.layers, self.numbers().to(decoder.dtype)[None])


class LSTMEncoder(nn.Module):
    """Two layers of an LSTM in both directions, then an MLP: [n, inputs] -> [n, outputs]."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, num_layers=2, bidirectional=True)
        self.head = mlp(2 * hidden, 2 * hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def mlp(*widths: int) -> nn.Sequential:
    """Linears from each of `widths` to the next, with ReLUs between them."""
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def recorded(layers: Any, x: Tensor) -> Prompted:
    """The keys and values of embeddings x [1, n, D], which are at positions 0 to n - 1, in each of `layers`."""
    context = Recording(x[..., 0])
    for layer in layers:
        layer.mixer.spec.prepare(context, x)
    for layer in layers:
        x = layer(x, context)
    return context.kept
