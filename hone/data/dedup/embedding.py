"""Embedding: one vector of a text by a decoder model, its final hidden states pooled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hone.model.context import Causal
from hone.model.hf import load
from hone.model.tokenizer import load_tokenizer

Embed = Callable[[str, str, int], np.ndarray]


@functools.lru_cache(maxsize=1)
def opened(folder: str, device: str) -> Embed:
    """A function (text, pooling, most tokens) -> float32 [D] of the model in `folder`."""
    path = Path(folder).expanduser()
    model, tokenizer = load(path, device).eval(), load_tokenizer(path)

    @torch.inference_mode()
    def embed(text: str, pooling: str, most: int) -> np.ndarray:
        ids = tokenizer.encode(text)[: min(most, model.config.max_seq_len)]
        if not ids:
            return np.full(model.config.hidden_size, np.nan, np.float32)
        tokens = torch.tensor([ids], device=device)
        states = model.norm(model.hidden(tokens, Causal(tokens)))[0].float()
        return (states.mean(0) if pooling == "mean" else states[-1]).cpu().numpy()

    return embed
