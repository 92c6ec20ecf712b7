"""Encoder: the model room's layers as a text classifier, its training and scoring. Imports torch, so import it on use.

Attention is bidirectional: the layers are those of a decoder, with a context in which every token attends to the whole text.
The mean of their outputs goes through one linear layer to a margin, positive for a good text. A token's input is its own
embedding plus that of the bigram with the token before it, hashed into a table (Joulin et al. 2016, arXiv:1607.01759;
Svenstrup et al. 2017, arXiv:1709.03933): with few training texts, attention alone hardly learns which word follows which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.durable import write_atomic
from hone.model.config import LayerSpec, ModelConfig
from hone.model.context import Context, sdpa
from hone.model.decoder import build
from hone.model.feed_forwards.swiglu import SwiGLU
from hone.model.mixers.attention import Attention

_HEAD_DIM = 32
_WARM_UP = 0.1
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed number: products wrap around
_ROWS = 64
"""Sequences of a batch on a GPU, always the same number: a text's score must not depend on the size of its batch."""


class Sizes(NamedTuple):
    """The sizes of an encoder, stored in the model's files."""

    vocab_size: int
    log_pairs: int
    hidden_size: int
    num_layers: int
    max_tokens: int


class Training(NamedTuple):
    """The training's settings."""

    epochs: int
    batch: int
    learning_rate: float
    weight_decay: float
    dropout: float
    seed: int


class Whole(Context):
    """Each sequence of `tokens` [B, S] is one text, padded after its `lengths` [B] tokens; a token attends to all of its text."""

    def __init__(self, tokens: Tensor, lengths: Tensor | None) -> None:
        super().__init__()
        self._line = torch.arange(tokens.shape[-1], device=tokens.device)
        self.positions = self._line.expand(tokens.shape)
        self.there = None if lengths is None else self._line < lengths[:, None]

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, *, scale: float, window: int | None
    ) -> Tensor:
        k, v = self.keys_and_values(layer, k, v)
        mask = None if self.there is None else self.there[:, None, None, :]
        return sdpa(q, k, v, mask, scale, causal=False)

    def _distinct_positions(self) -> Tensor:
        return self._line


class Encoder(nn.Module):
    """A text classifier whose output is a margin, above 0 for good texts."""

    def __init__(self, sizes: Sizes, seed: int = 0, device: str = "cpu") -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.hidden_size
        heads = width // _HEAD_DIM
        mixer = Attention(kind="attention", num_heads=heads, num_kv_heads=heads, head_dim=_HEAD_DIM)
        layer = LayerSpec(mixer=mixer, feed_forward=SwiGLU(kind="swiglu", intermediate_size=2 * width))
        config = ModelConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=width,
            layers=(layer,) * sizes.num_layers,
            tie_embeddings=True,  # there is no output head over the vocabulary
            max_seq_len=sizes.max_tokens,
        )
        self.body = build(config, device=device, seed=seed)
        self.pairs = nn.Parameter(torch.zeros(1 << sizes.log_pairs, width, device=device))
        self.head = nn.utils.skip_init(nn.Linear, width, 1, device=device)  # without initialisation
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        """Margins [B] of tokens [B, S] with `lengths` (none: all S). `dropout` is the share of tokens that are masked."""
        context = Whole(tokens, lengths)
        x = self.body.embed(tokens) + F.embedding(self._pairs_of(tokens), self.pairs)
        if dropout:
            x = x * (torch.rand(tokens.shape, device=tokens.device) >= dropout)[..., None]
        self.body.prepare(x, context)
        for layer in self.body.layers:
            x = layer(x, context)
        x = self.body.norm(x)
        if context.there is None:
            pooled = x.mean(1)
        else:
            pooled = (x * context.there[..., None]).sum(1) / lengths[:, None]
        return self.head(F.dropout(pooled, dropout, training=dropout > 0)).squeeze(-1)

    def _pairs_of(self, tokens: Tensor) -> Tensor:
        """The bucket of each token with the one before it; token 0 is before the first."""
        before = F.pad(tokens[:, :-1], (1, 0))
        return ((before * self.sizes.vocab_size + tokens) * _ODD >> 20) % len(self.pairs)


def fit(sizes: Sizes, rows: Sequence[np.ndarray], targets: np.ndarray, how: Training, device: str) -> Encoder:
    """An encoder trained to separate `rows` (token ids of each text) with `targets` True from the others; both classes have equal weight.

    AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with warm-up and cosine decay; the train room is a floor above this one.
    The same seed, device and number of threads give the same weights.
    """
    shares = np.where(targets, 0.5 / targets.mean(), 0.5 / (1 - targets.mean()))
    encoder = Encoder(sizes, how.seed, device)
    matrices = [value for value in encoder.parameters() if value.dim() > 1]
    others = [value for value in encoder.parameters() if value.dim() < 2]
    groups = [{"params": matrices, "weight_decay": how.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=how.learning_rate, betas=(0.9, 0.98), fused=True)
    steps = how.epochs * -(-len(rows) // how.batch)
    warm_up = max(round(_WARM_UP * steps), 1)
    step = 0
    with torch.random.fork_rng(devices=[] if device == "cpu" else [torch.device(device)]):
        torch.manual_seed(how.seed)
        for epoch in range(how.epochs):
            for places in _batches(rows, how.batch, (how.seed, epoch)):
                share = (step + 1) / warm_up if step < warm_up else _cosine((step - warm_up) / (steps - warm_up))
                for group in optimizer.param_groups:
                    group["lr"] = how.learning_rate * share
                tokens, lengths = _padded([rows[place] for place in places], device)
                margins = encoder(tokens, lengths, how.dropout)
                truth = torch.tensor(targets[places], dtype=torch.float32, device=device)
                weight = torch.tensor(shares[places], dtype=torch.float32, device=device)
                loss = F.binary_cross_entropy_with_logits(margins, truth, weight)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
                optimizer.step()
                step += 1
    return encoder.requires_grad_(False)


def margins(encoder: Encoder, rows: Sequence[np.ndarray]) -> np.ndarray:
    """The margin of each text's token ids in `rows`, float32 [n]; each depends on its own text alone.

    On a CPU texts are scored one by one, unpadded and on one thread: sums then do not depend on the other texts of
    a batch. On a GPU they are scored in batches of one shape.
    """
    device = encoder.head.weight.device
    found = np.empty(len(rows), np.float32)
    with torch.inference_mode(), _one_thread():
        if device.type == "cpu":
            for place, row in enumerate(rows):
                found[place] = encoder(torch.from_numpy(row.astype(np.int64))[None]).item()
            return found
        for first in range(0, len(rows), _ROWS):
            some = list(rows[first : first + _ROWS])
            filled = [*some, *([some[0][:1]] * (_ROWS - len(some)))]
            tokens, lengths = _padded(filled, device, encoder.sizes.max_tokens)
            found[first : first + len(some)] = encoder(tokens, lengths)[: len(some)].cpu().numpy()
    return found


def _batches(rows: Sequence[np.ndarray], size: int, seed: tuple[int, int]) -> Iterator[np.ndarray]:
    """All indices in a random order, `size` at a time, texts of similar length together to reduce padding."""
    draw = np.random.Generator(np.random.PCG64(seed))
    order = draw.permutation(len(rows))
    lengths = np.array([len(row) for row in rows])
    stretch = 32 * size
    cut = []
    for first in range(0, len(order), stretch):
        part = order[first : first + stretch]
        part = part[np.argsort(lengths[part], kind="stable")]
        cut += [part[start : start + size] for start in range(0, len(part), size)]
    yield from (cut[place] for place in draw.permutation(len(cut)))


def _padded(rows: Sequence[np.ndarray], device: torch.device | str, width: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens [B, S] padded with zeros, lengths [B]) of texts of at most S tokens, which is `width` or that of the longest."""
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), max(width, lengths.max())), np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return torch.from_numpy(tokens).to(device), torch.from_numpy(lengths).to(device)


def _cosine(share: float) -> float:
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def save(encoder: Encoder, path: Path) -> None:
    """The weights as safetensors, by their names in the module."""
    values = {name: value.detach().cpu().contiguous() for name, value in encoder.state_dict().items()}
    write_atomic(path, safetensors.torch.save(values))


def loaded(path: Path, sizes: Sizes, device: str) -> Encoder:
    """The encoder with the weights in `path`. Raises ValueError, RuntimeError or KeyError when they do not match `sizes`."""
    encoder = Encoder(sizes, device=device)
    try:
        values = safetensors.torch.load(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None
    encoder.load_state_dict(values)
    return encoder.requires_grad_(False)
