"""The dimensions of a model that estimates use; `ModelConfig.dims()` returns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hone.cost.cache import LayerCache, keys_and_values


class Mixing(Protocol):
    """FLOPs and state of mixing a layer's tokens; every mixer's spec implements it."""

    def mixing_flops(self, seq_len: int) -> float:
        """Mean FLOPs per token of a sequence of `seq_len` besides the layer's matmuls."""
        ...

    def state_values(self, seq_len: int) -> float:
        """Numbers cached for a sequence of `seq_len`, which a decoding step reads."""
        ...


@dataclass(frozen=True)
class Attending:
    """Causal softmax attention of `num_heads` query heads over `num_kv_heads` shared ones."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Most positions that a query attends to; None for all before it."""

    def mixing_flops(self, seq_len: int) -> float:
        """4 per head value and position attended to: scores and weighted sum."""
        return 4.0 * self.num_heads * self.head_dim * mean_positions(seq_len, self.window)

    def state_values(self, seq_len: int) -> float:
        """Keys and values that the next token attends to."""
        return 2.0 * self.num_kv_heads * self.head_dim * min(seq_len, self.window or seq_len)


class Widths(NamedTuple):
    """Intermediate numbers per token of a mixer, all saved for the backward pass."""

    projected: int
    """Outputs of its input projections (queries, keys, values)."""
    turned: int
    """Values computed from these before tokens are mixed (rotated queries and keys, feature maps)."""
    mixed: int
    """Outputs of the mixing: the input of the output projection."""
    extra: int = 0
    """Anything else."""

    @property
    def total(self) -> int:
        return sum(self)


class Routed(NamedTuple):
    """The experts of a layer's feed-forward, of which a token visits some."""

    params: int = 0
    """Weights of all experts that a router chooses among."""
    share: float = 1.0
    """The fraction of them that one token visits."""
    products: int = 0
    """Entries of `LayerDims.matmuls` that are those of experts."""

    def read(self, tokens: int) -> float:
        """Weights that are read for `tokens` whose choices are independent: E (1 - (1 - k / E)^tokens) experts."""
        return self.params * (1.0 - (1.0 - self.share) ** tokens)


NOT_ROUTED = Routed()


@dataclass(frozen=True)
class LayerDims:
    """One decoder layer: a mixer, then a feed-forward.

    `matmuls` are the products of one token: weight matrices as multiplied (fused ones once, of experts those used for a
    token), each (out_features, in_features).
    """

    matmuls: tuple[tuple[int, int], ...]
    mixing: Mixing
    widths: Widths
    intermediate_size: int
    cache: LayerCache = ()
    """Its cache tensors in the engine."""
    matrices: tuple[tuple[int, int], ...] = ()
    """The matrices of `matmuls` before they are fused; (): as they are."""
    routed_values: int = 0
    """Numbers per token of the rows that experts are given and give back; 0 without experts."""
    routed: Routed = NOT_ROUTED

    @classmethod
    def attention(
        cls,
        matmuls: tuple[tuple[int, int], ...],
        attending: Attending,
        intermediate_size: int,
        matrices: tuple[tuple[int, int], ...] = (),
    ) -> LayerDims:
        """Dimensions of a layer of softmax attention with rotary positions."""
        return cls(
            matmuls=matmuls,
            mixing=attending,
            widths=attention_widths(attending.num_heads, attending.num_kv_heads, attending.head_dim),
            intermediate_size=intermediate_size,
            cache=keys_and_values(attending.num_kv_heads, attending.head_dim),
            matrices=matrices,
        )

    @property
    def kv_values_per_token(self) -> int:
        """Numbers per token in the pages of this layer."""
        return sum(one.num_values for one in self.cache if one.paged)

    @property
    def matmul_params(self) -> int:
        return sum(rows * columns for rows, columns in self.matmuls)


def attention_widths(num_heads: int, num_kv_heads: int, head_dim: int) -> Widths:
    """Queries, keys and values as projected; queries and keys as rotated; the heads' results; the rotation's angles."""
    query, kv = num_heads * head_dim, num_kv_heads * head_dim
    return Widths(projected=query + 2 * kv, turned=query + kv, mixed=query, extra=head_dim)


@dataclass(frozen=True)
class ModelDims:
    """A decoder of `layers` between an embedding and a head of `vocab_size` rows.

    `num_params` counts every stored number once, a tied embedding too; `active_params` excludes the experts that are not used
    for a token.
    """

    num_params: int
    active_params: int
    vocab_size: int
    hidden_size: int
    max_seq_len: int
    tie_embeddings: bool
    layers: tuple[LayerDims, ...]

    @property
    def layer_params(self) -> tuple[int, ...]:
        """Weights of each layer that are multiplied, with those of experts that one token does not use: equally many in all layers."""
        idle = (self.num_params - self.active_params) // max(len(self.layers), 1)
        return tuple(layer.matmul_params + idle for layer in self.layers)

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
    ) -> ModelDims:
        """Dimensions of a Llama-shaped decoder with equal layers (no biases, two norms per layer, one at the end)."""
        query, kv = num_heads * head_dim, num_kv_heads * head_dim
        layer = LayerDims.attention(
            (
                (query + 2 * kv, hidden_size),
                (hidden_size, query),
                (2 * intermediate_size, hidden_size),
                (hidden_size, intermediate_size),
            ),
            Attending(num_heads, num_kv_heads, head_dim, window),
            intermediate_size,
            (
                *((rows, hidden_size) for rows in (query, kv, kv)),
                (hidden_size, query),
                *((intermediate_size, hidden_size),) * 2,
                (hidden_size, intermediate_size),
            ),
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
        """Numbers per token in a paged cache over all layers; times bytes per number they are its bytes."""
        return sum(layer.kv_values_per_token for layer in self.layers)

    @property
    def matmul_params(self) -> int:
        """Weights that a token is multiplied with: the layers' matrices (of experts those used for it) and the head."""
        return sum(layer.matmul_params for layer in self.layers) + self.vocab_size * self.hidden_size

    def read_params(self, tokens: int) -> float:
        """Weights that a pass over `tokens` is multiplied with, each counted once: of experts those that some token visits."""
        more = (layer.routed.read(tokens) - layer.routed.params * layer.routed.share for layer in self.layers)
        return self.matmul_params + sum(more)

    def flops_per_token(self, seq_len: int) -> float:
        """Mean forward floating-point operations per token of a causal sequence of `seq_len`.

        2 per weight, and each layer's mixing (attention: 4 per head value and position attended to, on average
        (seq_len + 1) / 2 of them).
        """
        return 2.0 * self.matmul_params + sum(layer.mixing.mixing_flops(seq_len) for layer in self.layers)

    def state_values(self, seq_len: int) -> float:
        """Numbers that all layers cache for a sequence of `seq_len`."""
        return sum(layer.mixing.state_values(seq_len) for layer in self.layers)


def mean_positions(seq_len: int, window: int | None = None) -> float:
    """Mean number of positions that a query attends to in a causal sequence of `seq_len`, at most `window` each."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
