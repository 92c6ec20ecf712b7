"""Sliding-window attention: a token attends to itself and the window - 1 tokens before it; decoding keeps only these."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.model.mixers.attention import Attention


class SlidingWindow(Attention):
    """Attention to itself and the window - 1 tokens before, window tokens in all. Beltagy et al. 2020, arXiv:2004.05150.

    Mistral's and Gemma's local layers: `mixers: [sliding_window, sliding_window, attention]` makes every third layer
    global. The receptive field grows by window - 1 tokens per layer.
    """

    paper: ClassVar[str] = "arXiv:2004.05150"
    complexity: ClassVar[str] = "O(S w)"

    window: int = Field(gt=0, description="Tokens that a token attends to, itself included.")

    def as_attention(self) -> Attention:
        """The same layer as `attention` with `window` set, the form that transformers' configs express."""
        return Attention(**{**self.model_dump(), "kind": "attention", "rope": self.rope})
