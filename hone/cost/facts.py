"""Plain numbers about a model, all that a cost needs to know; `ModelConfig.facts()` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hone.cost.cache import LayerCache, keys_and_values


class Mixing(Protocol):
    """What a layer's tokens do to see each other, in numbers; every mixer's spec is one."""

    def mixing_flops(self, seq_len: int) -> float:
        """FLOPs a token of a sequence of `seq_len` needs on average besides the layer's matmuls."""
        ...

    def state_values(self, seq_len: int) -> float:
        """Numbers kept of a sequence of `seq_len` to go on from it, which a decoding step reads."""
        ...


@dataclass(frozen=True)
class Attending:
    """Causal softmax attention of `num_heads` query heads over `num_kv_heads` shared ones."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Positions a query sees at most; None for all before it."""

    def mixing_flops(self, seq_len: int) -> float:
        """4 a head value a position seen: scores and weighted sum."""
        return 4.0 * self.num_heads * self.head_dim * mean_positions(seq_len, self.window)

    def state_values(self, seq_len: int) -> float:
        """Keys and values that the next token attends to."""
        return 2.0 * self.num_kv_heads * self.head_dim * min(seq_len, self.window or seq_len)


class Widths(NamedTuple):
    """Numbers a token that a mixer makes on the way, all kept for the backward pass."""

    projected: int
    """By its input projections (queries, keys, values)."""
    turned: int
    """From those before tokens are mixed (rotated queries and keys, feature maps)."""
    mixed: int
    """By the mixing: what the output projection reads."""
    extra: int = 0
    """Anything else."""

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer: a mixer, then a feed-forward.

    `matmuls` are the products of one token: weight matrices as they are multiplied (fused ones once, of experts those that a
    token visits), each (out_features, in_features).
    """

    matmuls: tuple[tuple[int, int], ...]
    mixing: Mixing
    widths: Widths
    intermediate_size: int
    cache: LayerCache = ()
    """What it keeps of a sequence when the engine serves it."""

    @classmethod
    def attention(
        cls, matmuls: tuple[tuple[int, int], ...], attending: Attending, intermediate_size: int
    ) -> LayerFacts:
        """Facts of a layer of softmax attention with rotary positions."""
        return cls(
            matmuls=matmuls,
            mixing=attending,
            widths=attention_widths(attending.num_heads, attending.num_kv_heads, attending.head_dim),
            intermediate_size=intermediate_size,
            cache=keys_and_values(attending.num_kv_heads, attending.head_dim),
        )

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the pages hold of one token in this layer."""
        return sum(one.num_values for one in self.cache if one.paged)

    @property
    def matmul_params(self) -> int:
        return sum(rows * columns for rows, columns in self.matmuls)


def attention_widths(num_heads: int, num_kv_heads: int, head_dim: int) -> Widths:
    """Queries, keys and values as projected; queries and keys as rotated; the heads' results; the rotation's angles."""
    query, kv = num_heads * head_dim, num_kv_heads * head_dim
    return Widths(projected=query + 2 * kv, turned=query + kv, mixed=query, extra=head_dim)


@dataclass(frozen=True)
class ModelFacts:
    """A decoder of `layers` between an embedding and a head of `vocab_size` rows.

    `num_params` counts every stored number once, a tied embedding once too; `active_params` leaves out the experts that a
    token does not visit.
    """

    num_params: int
    active_params: int
    vocab_size: int
    hidden_size: int
    max_seq_len: int
    tie_embeddings: bool
    layers: tuple[LayerFacts, ...]

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        max_seq_len: int,
        tie_embeddings: bool = False,
        window: int | None = None,
    ) -> ModelFacts:
        """Facts of a Llama-shaped decoder whose layers are all alike (no biases, two norms a layer, one at the end)."""
        query, kv = num_heads * head_dim, num_kv_heads * head_dim
        layer = LayerFacts.attention(
            (
                (query + 2 * kv, hidden_size),
                (hidden_size, query),
                (2 * intermediate_size, hidden_size),
                (hidden_size, intermediate_size),
            ),
            Attending(num_heads, num_kv_heads, head_dim, window),
            intermediate_size,
        )
        ends = vocab_size * hidden_size * (1 if tie_embeddings else 2) + hidden_size
        num_params = num_layers * (layer.matmul_params + 2 * hidden_size) + ends
        return cls(
            num_params=num_params,
            active_params=num_params,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            max_seq_len=max_seq_len,
            tie_embeddings=tie_embeddings,
            layers=(layer,) * num_layers,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers a paged cache keeps for one token in all layers; times bytes a number gives its bytes."""
        return sum(layer.kv_values_per_token for layer in self.layers)

    @property
    def matmul_params(self) -> int:
        """Weights a token is multiplied with: the layers' matrices (of experts those it visits) and the head."""
        return sum(layer.matmul_params for layer in self.layers) + self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_len: int) -> float:
        """Forward floating-point operations a token of a causal sequence of `seq_len` needs on average.

        2 a weight, and what each layer's mixing takes (attention: 4 a head value a position seen, (seq_len + 1) / 2 of
        them on average).
        """
        return 2.0 * self.matmul_params + sum(layer.mixing.mixing_flops(seq_len) for layer in self.layers)

    def state_values(self, seq_len: int) -> float:
        """Numbers that all layers keep of a sequence of `seq_len` to go on from it."""
        return sum(layer.mixing.state_values(seq_len) for layer in self.layers)


def mean_positions(seq_len: int, window: int | None = None) -> float:
    """Positions a query sees on average in a causal sequence of `seq_len`, at most `window` each."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
