"""Decoding with each mixer's own state, for every causal mixer: B sequences at once, without an engine.

Serving many requests of softmax attention is `hone.serve.engine`, which keeps keys in pages. Here each layer keeps the
state its mathematics need (keys, a window of them, a running sum), so that every causal stack that can be trained can
also generate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.context import Context, KeyValues, fused, has_fused, is_visible, sdpa
from hone.model.decoder import Decoder
from hone.ops import sample
from hone.ops.sample.noise import noise_keys


class Latents(NamedTuple):
    """Latents that the next token attends to, oldest first: [B, m, D]."""

    latent: Tensor


class Incremental(Context):
    """One pass over the next n >= 1 tokens of B sequences: `tokens` [B, n], after `start` earlier tokens of each.

    `carry` is one dict for all passes, empty at first. A layer with a window keeps no more than the window. `rope_len`
    is needed where rotary frequencies depend on the sequence's length (see `Context.rope_len`); one for all passes.
    """

    cached = True

    def __init__(
        self, tokens: Tensor, start: int = 0, carry: dict[int, Any] | None = None, *, rope_len: int | None = None
    ) -> None:
        super().__init__()
        self.rope_len = rope_len
        self.start = start
        self.carry: dict[int, Any] = {} if carry is None else carry
        self._line = torch.arange(start, start + tokens.shape[-1], device=tokens.device)
        self.positions = self._line.expand(tokens.shape)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if k is None or v is None:
            k, v = self.keys_and_values(layer, k, v)
        else:
            k, v = self._join(layer, k, v, window)
        if softcap is not None or sinks is not None:
            window = None if window is None or window >= k.shape[1] else window
            return fused(q, k, v, scale, window, softcap=softcap, sinks=sinks)
        return self.attend_joined(q, k, v, scale=scale, window=window)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, *, value_dim: int, scale: float) -> Tensor:
        known = self.carry.get(layer)
        if known is not None:
            latent = torch.cat((known.latent, latent), 1)
        self.carry[layer] = Latents(latent)
        return self.attend_joined(q, latent.unsqueeze(2), latent[..., :value_dim].unsqueeze(2), scale=scale)

    def attend_joined(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
        new, known = q.shape[1], k.shape[1]
        if window is not None and window >= known:
            window = None
        if has_fused(q, v):
            return fused(q, k, v, scale, window)
        if window is None and (new == 1 or new == known):
            return sdpa(q, k, v, None, scale, causal=new > 1)
        key = (known, window)
        if key not in self._masks:
            line = torch.arange(known, device=q.device)
            self._masks[key] = is_visible(line[-new:, None], line, window)
        return sdpa(q, k, v, self._masks[key], scale)

    def _join(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Every key and value that this pass attends to; stores those that the next pass needs."""
        known = self.carry.get(layer)
        if known is not None:
            k, v = torch.cat((known.k, k), 1), torch.cat((known.v, v), 1)
        if window is not None:
            k, v = (part[:, -(window - 1 + self.seq_len) :] for part in (k, v))
        kept = window if window is not None else k.shape[1]
        self.carry[layer] = KeyValues(k[:, -kept:], v[:, -kept:])
        if layer in self._shared_kv:
            self._shared_kv[layer] = (k, v)
        return k, v

    def following(self, prompt: Mapping[int, KeyValues], count: int) -> Incremental:
        """As `Context.following`: the first pass caches the prompt's keys and values before its own."""
        found = copy(self)
        found.memo, found._rotary, found._shared_kv, found._masks = {}, {}, {}, {}
        found._line, found.positions = self._line + count, self.positions + count
        rows = len(self.positions)
        for layer, (k, v) in prompt.items() if not self.start else ():
            found.carry[layer] = KeyValues(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1))
        return found

    def _rope_len(self) -> int | None:
        return self.rope_len

    def _distinct_positions(self) -> Tensor:
        return self._line


@torch.no_grad()
def grow(
    model: Decoder,
    tokens: Tensor,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    chunk: int | None = None,
    rope_len: int | None = None,
) -> Iterator[Tensor]:
    """The next `num_tokens` tokens of every sequence of `tokens` int64 [B, S], one after another: int64 [B].

    Temperature 0 takes the most likely token; above it draws by the engine's rules (`hone.ops.sample`), sequence r with
    seed `seed` + r, each draw depending on (seed, position, token) alone. The prompt is read `chunk` tokens at a time
    (default: at once). Rotary frequencies that depend on the sequence's length are those of `rope_len` tokens (default:
    the model's max_seq_len, or S + num_tokens if that is more). Raises SpecError when a layer's mixer is not causal.
    """
    model.config.must_be_causal("it is an encoder and cannot generate")
    if tokens.dim() != 2 or not tokens.numel():
        raise SpecError(f"prompts have shape {tuple(tokens.shape)}", fix="give token ids [sequences, 1 or more tokens]")
    carry: dict[int, Any] = {}
    rope_len = rope_len or max(model.config.max_seq_len, tokens.shape[1] + num_tokens)
    done, step = 0, chunk or tokens.shape[1]
    seeds = [seed + row for row in range(len(tokens))]
    while num_tokens > 0:
        part = tokens[:, done : done + step]
        x = model.hidden(part, Incremental(part, done, carry, rope_len=rope_len))
        done += part.shape[1]
        if done < tokens.shape[1]:
            continue
        logits = model.head(x[:, -1])
        if temperature > 0:
            keys = noise_keys(seeds, [done] * len(seeds), device=logits.device)
            chosen = sample(logits.float(), temperature, top_k, top_p, min_p, keys=keys)
        else:
            chosen = logits.argmax(-1)
        tokens = torch.cat((tokens, chosen[:, None]), 1)
        num_tokens -= 1
        yield chosen


def generate(
    model: Decoder, tokens: Tensor, num_tokens: int, *, stop_tokens: Collection[int] = (), **how: Any
) -> Tensor:
    """Continues every sequence of `tokens` int64 [B, S] by `num_tokens`: int64 [B, S + num_tokens]. `how`: options of `grow`.

    Ends early once every sequence holds one of `stop_tokens`; that token and those after it stay in the result.
    """
    open_rows, found = set(range(len(tokens))), [tokens]
    for chosen in grow(model, tokens, num_tokens, **how):
        found.append(chosen[:, None])
        if stop_tokens:
            open_rows -= {row for row, token in enumerate(chosen.tolist()) if token in stop_tokens}
            if not open_rows:
                break
    return torch.cat(found, 1)


def write(
    folder: Path | str,
    prompt: str,
    num_tokens: int,
    *,
    device: str = "cpu",
    stop_tokens: Collection[int] = (),
    ignore_eos: bool = False,
    **how: Any,
) -> str:
    """Continues the text `prompt` by `generate`, with the model and tokenizer of a folder; returns the new text.

    The text ends before the first of `stop_tokens` or, unless `ignore_eos`, end-of-text tokens. `how`: options of
    `grow`.
    """
    from hone.model.hf import load
    from hone.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    model = load(folder, device=device).eval()
    stops = {*stop_tokens, *(() if ignore_eos else (*model.config.eos_token_ids, *tokenizer.eos_ids))}
    known = torch.tensor([tokenizer.encode(prompt)], dtype=torch.int64, device=device)
    written = generate(model, known, num_tokens, stop_tokens=stops, **how)[0, known.shape[1] :].tolist()
    end = next((place for place, token in enumerate(written) if token in stops), len(written))
    return tokenizer.decode(written[:end])
