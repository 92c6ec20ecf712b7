"""The decoder: embedding, layers, norm, head; one module for training and serving, built from a config."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.model.adapters.token_rows import TokenRows
from hone.model.adapters.wrap import adapted
from hone.model.block import Placement
from hone.model.config import LayerSpec, ModelConfig
from hone.model.context import Causal, Context
from hone.model.linear import MakeLinear, make_dense
from hone.model.linear_spec import INIT_STD, Initial, NormSpec
from hone.model.norm import rms_norm_of
from hone.ops import linear as product


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)); norms stand where `LayerSpec.norms` says."""

    def __init__(self, spec: LayerSpec, config: ModelConfig, index: int, make: MakeLinear = make_dense) -> None:
        super().__init__()
        name, width, eps, offset = f"layers.{index}", config.hidden_size, config.norm_eps, config.norm_offset
        if config.adapters:
            make = adapted(make, lambda path, linear: config.wrappers(index, path.removeprefix(f"{name}."), linear))
        for norm in spec.norm_names("mixer"):
            setattr(self, norm, rms_norm_of(width, eps, offset))
        self.mixer = spec.mixer.build(Placement(width, index, f"{name}.mixer", eps, make, offset))
        source = config.kv_source(index)
        if source is not None:
            self.mixer.source = source
        elif config.shares_kv(index):
            self.mixer.shares_kv = True
        for norm in spec.norm_names("feed_forward"):
            setattr(self, norm, rms_norm_of(width, eps, offset))
        self.feed_forward = spec.feed_forward.build(Placement(width, index, f"{name}.feed_forward", eps, make, offset))
        self.norms, self.multiplier = spec.norms, config.residual_multiplier
        self.usual = self.norms == "pre" and self.multiplier == 1.0
        self.mixer_adapter = self.feed_forward_adapter = None
        for adapter in config.adapters:
            for name, module in adapter.layer_modules(config).items():
                setattr(self, name, module)
                self.usual = False

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, rest = self.in_parts(x, None, context)
        return x if rest is None else x + rest

    @property
    def plain(self) -> bool:
        """Whether a call is `forward` alone: it is not compiled, and no hook sees its input or output."""
        return not (self._forward_pre_hooks or self._forward_hooks or self._compiled_call_impl is not None)

    def in_parts(self, x: Tensor, rest: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """The layer of x + rest, as two parts of the same kind: the next norm adds them in its own pass over memory."""
        if not self.usual:
            return self._general(x if rest is None else x + rest, context), None
        if rest is None:
            normed = self.mixer_norm(x)
        else:
            normed, x = self.mixer_norm.after_sum(rest, x)
        mixed = self.mixer(normed, context)
        normed, x = self.feed_forward_norm.after_sum(mixed, x)
        return x, self.feed_forward(normed, context)

    def _general(self, x: Tensor, context: Context) -> Tensor:
        before, after = self.norms != "post", self.norms != "pre"
        mixed = self.mixer(self.mixer_norm(x) if before else x, context)
        mixed = self._scaled(self.mixer_post_norm(mixed) if after else mixed)
        x = x + (mixed if self.mixer_adapter is None else self.mixer_adapter(mixed, x))
        fed = self.feed_forward(self.feed_forward_norm(x) if before else x, context)
        fed = self._scaled(self.feed_forward_post_norm(fed) if after else fed)
        return x + (fed if self.feed_forward_adapter is None else self.feed_forward_adapter(fed, x))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.multiplier == 1.0 else x * self.multiplier


class Maker(Protocol):
    """Makes the weights of a decoder, a part at a time, so that never all of them need memory."""

    def make(self, part: nn.Module, path: str) -> None:
        """Gives `part`, that at `path` of the decoder ('layers.3', 'lm_head'), which is on the meta device, its weights in float32."""


class Decoder(nn.Module):
    """A language model. Leading shapes are free: [B, S] in training, [T] flat tokens in serving, as the context defines."""

    def __init__(self, config: ModelConfig, make: MakeLinear = make_dense) -> None:
        super().__init__()
        self.config = config
        self.quantization: dict[str, Any] | None = None  # config.json's quantization_config, kept for saving
        ends = config.ends()
        self.embed_tokens = make("embed_tokens", ends["embed_tokens"])
        if ids := config.token_rows():
            from hone.model.adapters.token_rows import TokenRows

            self.embed_tokens = TokenRows(self.embed_tokens, ids, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec, config, index, make) for index, spec in enumerate(config.layers))
        self.norm = rms_norm_of(config.hidden_size, config.norm_eps, config.norm_offset)
        self.lm_head = make("lm_head", ends["lm_head"]) if "lm_head" in ends else None
        self.prompt = None if config.prompt is None else config.prompt.prompt(config)
        self.maker: Maker | None = None
        """Makes the weights of the parts that are on the meta device; None: it has its weights."""

    @property
    def embedding(self) -> nn.Parameter:
        """The [V, D] matrix of an embedding that is not quantized."""
        return self.embed_tokens.weight

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and on the device of hidden states."""
        module = self.embed_tokens
        return module.like if hasattr(module, "like") else module.weight

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """Of hidden states and weights."""
        return self.like.device

    @property
    def head_weight(self) -> Tensor:
        """The [V, D] weight of the head (the embedding when tied), for losses that never materialise the logits; of codes their values."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return head.weight if hasattr(head, "weight") else head.dequantize(self.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [...] -> [..., D]."""
        x = self.embed_tokens(tokens)
        multiplier = self.config.embedding_multiplier
        return x if multiplier == 1.0 else x * _rounded(multiplier, x.dtype)

    def prepare(self, x: Tensor, context: Context) -> None:
        """Computes what the layers share in a pass over x [..., D], before the first of them runs."""
        for layer in self.config.layers:
            layer.mixer.prepare(context, x)
        for layer in self.layers:
            if hasattr(layer.mixer, "draw"):
                layer.mixer.draw(context, x)

    def prompted(self, context: Context) -> Context:
        """The context in which the layers compute: `context`, or what it is after the model's soft prompt."""
        return context if self.prompt is None else self.prompt.before(self, context)

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        """Embedding and layers, before the final norm: [...] -> [..., D]."""
        x = self.embed(tokens)
        context.tokens = tokens
        context = self.prompted(context)
        whole = None if context.taps else context.run_layers(self, x)
        if whole is not None:
            return whole
        self.prepare(x, context)
        rest = None
        for index, layer in enumerate(self.layers):
            if layer.plain:
                x, rest = layer.in_parts(x, rest, context)
            else:
                x, rest = layer(x if rest is None else x + rest, context), None
            if context.taps and index in context.taps:
                context.taps[index] = x if rest is None else x + rest
        return x if rest is None else x + rest

    def head(self, x: Tensor) -> Tensor:
        """Final norm and logits: [..., D] -> [..., V], in x's dtype; of a reward model the scores [..., 1] of the text up to each token."""
        x = self.norm(x)
        if self.config.num_labels:
            return self.lm_head(x)  # type: ignore[misc, no-any-return]
        logits = self._tied(x) if self.lm_head is None else self.lm_head(x)
        config = self.config
        if config.logits_scaling != 1.0:
            logits = logits / config.logits_scaling
        if config.logits_softcap is not None:
            logits = torch.tanh(logits / config.logits_softcap) * config.logits_softcap
        return logits

    def _tied(self, x: Tensor) -> Tensor:
        """x times the embedding's matrix, by the same product as a head of its own (`Dense`, or a quantized linear)."""
        if hasattr(self.embed_tokens, "head"):
            return self.embed_tokens.head(x)
        if torch.is_grad_enabled():
            return F.linear(x, self.embedding)
        return product(x, self.embedding)

    def head_input(self, x: Tensor) -> Tensor:
        """What `head_weight` is multiplied with, for losses without logits: [..., D] normed, divided as logits are.

        Such a loss applies config.logits_softcap itself.
        """
        x = self.norm(x)
        return x if self.config.logits_scaling == 1.0 else x / self.config.logits_scaling

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Logits [..., V] of tokens [...]; without a context each sequence is one causal document."""
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
    parts = ((decoder.get_submodule(path), path) for path in parts_of(config))
    _fill(piece for part, path in parts for piece in _pieces(config, part, path, seed))
    return decoder


def unmade(config: ModelConfig, maker: Maker | None = None) -> Decoder:
    """A decoder on the meta device, whose parts `maker` can give their weights one at a time."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.maker = maker
    return decoder


def parts_of(config: ModelConfig) -> list[str]:
    """The paths of the parts of a decoder in the order in which they are saved: embedding, layers, norm, head and soft prompt if it has them."""
    head = ["lm_head"] if "lm_head" in config.ends() else []
    prompt = ["prompt"] if config.prompt else []
    return ["embed_tokens", *(f"layers.{index}" for index in range(config.num_layers)), "norm", *head, *prompt]


class Drawn:
    """Makes the weights of `build`, on `device`."""

    def __init__(self, config: ModelConfig, device: torch.device | str, seed: int) -> None:
        self._config, self._device, self._seed = config, device, seed

    def make(self, part: nn.Module, path: str) -> None:
        """As `Maker.make`."""
        _fill(_pieces(self._config, part.to_empty(device=self._device), path, self._seed))


def _pieces(config: ModelConfig, part: nn.Module, path: str, seed: int) -> Iterator[tuple[Tensor, str, Initial]]:
    """Every randomly initialised tensor of a part in its checkpoint form: a view, the name to seed it by, and its initial distribution.

    Sets norms to 1 (less their offset) and biases of linears to 0.
    """
    plain, residual = (0.0, INIT_STD), (0.0, INIT_STD / math.sqrt(2 * config.num_layers))
    if path == "norm":
        part.weight.detach().fill_(1.0 - config.norm_offset)
    elif path == "prompt":
        for name, parameter in config.prompt_parameters().items():
            yield part.get_parameter(name).detach(), f"{seed}/{path}.{name}", parameter.initial
    elif not path.startswith("layers."):
        table = part.inner if isinstance(part, TokenRows) else part
        yield table.weight.detach(), f"{seed}/{'embedding' if path == 'embed_tokens' else path}", plain
        if table is not part:
            yield part.rows.detach(), f"{seed}/token_rows", plain
    else:
        index = int(path.removeprefix("layers."))
        for name, linear in config.linears(index).items():
            module, block = part.get_submodule(name), name.partition(".")[0]
            if linear.bias:
                module.bias.detach().zero_()
            views = module.weight.detach().flatten(0, -2).split(list(linear.parts.values()))
            for piece, view in zip(linear.parts, views, strict=True):
                yield view, f"{seed}/{path}.{block}.{piece}", residual if linear.residual else plain
        for name, parameter in config.parameters(index).items():
            tensor = part.get_parameter(name).detach()
            if isinstance(parameter, NormSpec):
                tensor.fill_(1.0 - parameter.offset)
            else:
                yield tensor, f"{seed}/{path}.{name}", parameter.initial


def _fill(pieces: Iterable[tuple[Tensor, str, Initial]]) -> None:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # drawing is serial and lets other threads run
        for _ in pool.map(lambda piece: draw_initial(*piece), pieces):
            pass


def draw_initial(target: Tensor, name: str, initial: Initial) -> None:
    """Fills `target` from the distribution `initial`, drawn in float32 on the CPU; depends on `name` and the shape alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    if callable(initial):
        target.copy_(initial(tuple(target.shape), generator))
        return
    mean, std = initial
    target.copy_(torch.empty(target.shape).normal_(mean, std, generator=generator))


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as a tensor of `dtype` holds it."""
    return torch.tensor(value, dtype=dtype).item()
