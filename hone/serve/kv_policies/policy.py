"""The slot `kv_policy`: what a sequence keeps, as numbers for the scheduler, and whether pages are compacted between steps.

Two kinds. One frees whole pages that no later token attends to: the page table gets shorter, nothing is moved, and which
tokens a token attends to depends on its place alone, so chunks, prefix hits and preemption change nothing. The other moves
the kept tokens of each head together into fewer pages after fixed numbers of tokens (`Compaction`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hone.base.errors import SpecError
from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.config import ModelConfig


@dataclass(frozen=True)
class KeptTokens:
    """What stays of a sequence: its first `sink_tokens` and its last `window` tokens (None: all), in whole pages."""

    window: int | None = None
    sink_tokens: int = 0
    masks: bool = False
    """Whether layers attend to these tokens only. Otherwise their own windows are at most `window`."""
    compaction: Compaction | None = None

    def view(self, window: int | None) -> tuple[int | None, int]:
        """(window, sink tokens) of what a layer attends to that has a `window` of its own."""
        if not self.masks or (window is not None and self.window is not None and window <= self.window):
            return window, 0
        return self.window, self.sink_tokens

    def sink_pages(self, block_size: int) -> int:
        """First pages that are never freed."""
        return -(-self.sink_tokens // block_size)

    def num_dropped(self, computed: int, block_size: int) -> int:
        """Tokens in pages, after the sinks, that no token from place `computed` on attends to; whole pages."""
        if self.window is None:
            return 0
        return max(0, (computed - self.window + 1) // block_size - self.sink_pages(block_size)) * block_size

    def most_pages(self, length: int, chunk: int, block_size: int) -> int:
        """Pages that a sequence of `length` tokens has at most, computed in chunks of at most `chunk`."""
        pages = -(-length // block_size)
        if self.window is None:
            return pages
        bound = self.sink_pages(block_size) + -(-self.window // block_size) + 1 + -(-chunk // block_size)
        return min(pages, bound)


class Compaction:
    """When a sequence is compacted, and to which tokens. Results depend on the sequence alone, not on the steps' sizes."""

    accumulates: bool = False
    """Whether scores of earlier observations are added to those of the next."""

    def boundary(self, num_prompt: int, computed: int) -> int:
        """Tokens after which the next compaction is: no chunk of a step goes beyond. Above `computed`."""
        raise NotImplementedError

    def observed(self, num_prompt: int, boundary: int) -> int:
        """First of the tokens, up to `boundary`, whose attention decides."""
        raise NotImplementedError

    def num_kept(self, num_slots: int) -> int:
        """How many of `num_slots` tokens in the cache stay; equal for every head and layer."""
        raise NotImplementedError

    def select(self, scores: Tensor, num_kept: int) -> Tensor:
        """int64 [KV, num_kept], ascending: slots that stay, by scores [KV, slots] (attention received, summed)."""
        raise NotImplementedError


class KVPolicy(Technique):
    """Base of the slot."""

    moves: ClassVar[bool] = False
    """Whether it moves keys and values to other pages (`KeptTokens.compaction`)."""

    def open(self, config: ModelConfig) -> KeptTokens:
        """What sequences of a model keep. Raises SpecError for a model with which the policy cannot work."""
        raise NotImplementedError


def windows(config: ModelConfig) -> list[int | None]:
    """The window of every layer."""
    return [getattr(layer.mixer, "window", None) for layer in config.layers]


def check_heads(policy: KVPolicy, config: ModelConfig) -> None:
    """Raises SpecError naming the first layer that keeps no keys and values per head."""
    for index, layer in enumerate(config.layers):
        if not layer.mixer.reuses_kv and {one.name for one in layer.mixer.cache()} != {"k", "v"}:
            raise SpecError(
                f"engine.kv_policy is {policy.kind}, and layer {index} ('{layer.mixer.kind}') keeps no keys and values of heads",
                fix="leave engine.kv_policy out",
            )


def check_global(policy: KVPolicy, config: ModelConfig) -> None:
    """Raises SpecError naming the first layer with a window: in compacted pages distances between tokens are unknown."""
    for index, window in enumerate(windows(config)):
        if window is not None:
            raise SpecError(
                f"engine.kv_policy is {policy.kind}, and layer {index} has a sliding window of {window} tokens",
                fix="use engine.kv_policy window or streaming_llm, or leave it out",
            )


def check_combination(spec: Any) -> None:
    """Raises SpecError where the kv_policy of an engine's spec excludes another of its fields."""
    policy = spec.kv_policy
    if policy is None or policy.kind == "full":
        return
    if spec.num_ranks > 1:
        raise SpecError(
            f"engine.kv_policy is {policy.kind}: several ranks keep all keys and values so far",
            fix="leave engine.kv_policy out, or use one device",
        )
    if spec.drafter is not None or spec.draft is not None:
        raise SpecError(
            f"engine.kv_policy is {policy.kind} and a drafter is given: guesses that are refused would already have freed pages",
            fix="leave out engine.kv_policy, or engine.drafter and engine.draft",
        )
    if spec.eviction is not None and spec.eviction.reads_retention:
        raise SpecError(
            f"engine.kv_policy is {policy.kind} and engine.eviction {spec.eviction.kind}: token ranges have no pages of their own",
            fix="use engine.eviction lru, lfu, slru or fifo, or leave engine.kv_policy out",
        )
    check_bits(policy, spec.kv_cache_dtype)


def check_bits(policy: Any, dtype: str) -> None:
    """Raises SpecError for a policy that moves keys of 8 bits. `dtype` of the cache, as engine.kv_cache_dtype or torch names it."""
    if policy is not None and policy.moves and dtype in ("fp8", "fp8_e4m3", "float8_e4m3fn", "int8"):
        raise SpecError(
            f"engine.kv_policy is {policy.kind} and the numbers of the KV cache are {dtype}: pages of 8 bits are not compacted",
            fix="set engine.kv_cache_dtype to bfloat16, float16 or float32, or leave engine.kv_policy out",
        )
