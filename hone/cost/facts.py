"""Plain numbers about a model, all that a cost needs to know; `ModelConfig.facts()` makes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer: attention of `num_heads` query heads over `num_kv_heads` shared ones, then a feed-forward.

    `matmuls` are its weight matrices as they are multiplied (fused ones once), each (out_features, in_features).
    """

    matmuls: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    window: int | None = None
    """Positions a query sees at most; None for all before it."""

    @property
    def kv_values_per_token(self) -> int:
        """Numbers the cache keeps for one token in this layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def matmul_params(self) -> int:
        return sum(rows * columns for rows, columns in self.matmuls)


@dataclass(frozen=True)
class ModelFacts:
    """A decoder of `layers` between an embedding and a head of `vocab_size` rows.

    `num_params` counts every stored number once, a tied embedding once too.
    """

    num_params: int
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
        layer = LayerFacts(
            matmuls=(
                (query + 2 * kv, hidden_size),
                (hidden_size, query),
                (2 * intermediate_size, hidden_size),
                (hidden_size, intermediate_size),
            ),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=intermediate_size,
            window=window,
        )
        ends = vocab_size * hidden_size * (1 if tie_embeddings else 2) + hidden_size
        return cls(
            num_params=num_layers * (layer.matmul_params + 2 * hidden_size) + ends,
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
        """Numbers the cache keeps for one token in all layers; times bytes a number gives its bytes."""
        return sum(layer.kv_values_per_token for layer in self.layers)

    @property
    def matmul_params(self) -> int:
        """Weights a token is multiplied with: all layers' matrices and the head."""
        return sum(layer.matmul_params for layer in self.layers) + self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_len: int) -> float:
        """Forward floating-point operations a token of a causal sequence of `seq_len` needs on average.

        2 a weight, and 4 a head value a position seen (scores and weighted sum); the causal mean is (seq_len + 1) / 2.
        """
        flops = 2.0 * self.matmul_params
        for layer in self.layers:
            flops += 4.0 * layer.num_heads * layer.head_dim * mean_positions(seq_len, layer.window)
        return flops


def mean_positions(seq_len: int, window: int | None = None) -> float:
    """Positions a query sees on average in a causal sequence of `seq_len`, at most `window` each."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
