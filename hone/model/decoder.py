"""The decoder: embedding, layers, norm, head; one module for training and serving, built from a config."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.model.config import LayerSpec, ModelConfig
from hone.model.context import Causal, Context
from hone.model.linear import MakeLinear, make_dense
from hone.model.mixer import Initial
from hone.model.norm import RMSNorm

INIT_STD = 0.02


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, spec: LayerSpec, config: ModelConfig, index: int, make: MakeLinear = make_dense) -> None:
        super().__init__()
        name, width = f"layers.{index}", config.hidden_size
        self.mixer_norm = RMSNorm(width, config.norm_eps)
        self.mixer = spec.mixer.build(width, index, f"{name}.mixer", config.norm_eps, make)
        source = config.source_of(index)
        if source is not None:
            self.mixer.source = source
        elif config.lends(index):
            self.mixer.lends = True
        self.feed_forward_norm = RMSNorm(width, config.norm_eps)
        self.feed_forward = spec.feed_forward.build(width, f"{name}.feed_forward", make)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        mixed = self.mixer(self.mixer_norm(x), context)
        normed, x = self.feed_forward_norm.after_sum(mixed, x)
        return x + self.feed_forward(normed)


class Decoder(nn.Module):
    """A language model. Leading shapes are free: [B, S] in training, [T] flat tokens in serving; the context says which."""

    def __init__(self, config: ModelConfig, make: MakeLinear = make_dense) -> None:
        super().__init__()
        self.config = config
        self.quantization: dict[str, Any] | None = None  # config.json's block of that name, for who saves it again
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(spec, config, index, make) for index, spec in enumerate(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else make("lm_head", config.hidden_size, config.vocab_size, False)

    @property
    def head_weight(self) -> Tensor:
        """The [V, D] matrix behind the logits (the embedding itself when tied), for losses that never keep logits."""
        return self.embedding if self.lm_head is None else self.lm_head.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [...] -> [..., D]."""
        return F.embedding(tokens, self.embedding)

    def prepare(self, x: Tensor, context: Context) -> None:
        """What layers share in a pass over x [..., D], made before the first of them runs."""
        for layer in self.config.layers:
            layer.mixer.prepare(context, x)
        for layer in self.layers:
            if hasattr(layer.mixer, "draw"):
                layer.mixer.draw(context, x)

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        """Embedding and layers, before the final norm: [...] -> [..., D]."""
        x = self.embed(tokens)
        self.prepare(x, context)
        for layer in self.layers:
            x = layer(x, context)
        return x

    def head(self, x: Tensor) -> Tensor:
        """Final norm and logits: [..., D] -> [..., V], in x's dtype."""
        x = self.norm(x)
        return F.linear(x, self.embedding) if self.lm_head is None else self.lm_head(x)

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Logits [..., V] of tokens [...]; without a context each row is one causal document."""
        return self.head(self.hidden(tokens, Causal(tokens) if context is None else context))


def build(
    config: ModelConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Decoder:
    """A decoder with random weights: normal of std 0.02, projections into the residual stream / sqrt(2 * num_layers).

    Every parameter is drawn on its own, from a generator seeded by (seed, its name), in the shape it has in a
    checkpoint (q, k and v apart): the same seed gives the same weights however they are fused, split or placed.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for module in decoder.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif "bias" in module._parameters and module.bias is not None:
                module.bias.zero_()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # drawing is serial and lets other threads run
        for _ in pool.map(lambda piece: _draw(*piece), _pieces(decoder, seed)):
            pass
    return decoder


def _pieces(decoder: Decoder, seed: int) -> Iterator[tuple[Tensor, str, float | Initial]]:
    """Every tensor as it stands in a checkpoint, norms and biases of linears aside: a view of it, its name with the seed,
    its spread or how else it begins."""
    yield decoder.embedding.detach(), f"{seed}/embedding", INIT_STD
    residual_std = INIT_STD / math.sqrt(2 * decoder.config.num_layers)
    for index, layer in enumerate(decoder.layers):
        for block in ("mixer", "feed_forward"):
            module = getattr(layer, block)
            for attribute, pieces in module.pieces.items():
                std = residual_std if attribute == module.residual else INIT_STD
                views = getattr(module, attribute).weight.detach().split(module.rows[attribute])
                for piece, view in zip(pieces, views, strict=True):
                    yield view, f"{seed}/layers.{index}.{block}.{piece}", std
            for path, tensor in _loose(module).items():
                yield (
                    tensor,
                    f"{seed}/layers.{index}.{block}.{path}",
                    getattr(module, "initial", {}).get(path, INIT_STD),
                )
    if decoder.lm_head is not None:
        yield decoder.lm_head.weight.detach(), f"{seed}/lm_head", INIT_STD


def outside(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a mixer or feed-forward that are in no linear of its `pieces`, by name."""
    linears = tuple(f"{name}." for name in module.pieces)
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if not name.startswith(linears)}


def _loose(module: nn.Module) -> dict[str, Tensor]:
    """`outside` without norms."""
    norms = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, RMSNorm))
    return {name: tensor for name, tensor in outside(module).items() if not name.startswith(norms)}


def _draw(target: Tensor, name: str, initial: float | Initial) -> None:
    """Fills `target` with what depends on `name` and the shape alone, drawn in float32 on the CPU.

    `initial` is the std of normals around 0, or what `hone.model.mixer` says of it.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    if callable(initial):
        target.copy_(initial(tuple(target.shape), generator))
        return
    mean, std = (0.0, initial) if isinstance(initial, float) else initial
    target.copy_(torch.empty(target.shape).normal_(mean, std, generator=generator))
