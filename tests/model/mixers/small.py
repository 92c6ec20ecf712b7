"""Small stacks of one mixer in float64, and what every mixer's tests ask of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.model import hf
from hone.model.context import Packed
from hone.model.decoder import Decoder, build
from hone.model.incremental import Incremental, generate
from hone.model.shape import Shape

VOCAB = 40


def small(*mixers: str | dict[str, Any], num_layers: int = 2, **shape: Any) -> Decoder:
    """A decoder whose weights are wide enough that every one of them matters, in float64."""
    sizes = {"hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "intermediate_size": 32}
    config = Shape.read({**sizes, "max_seq_len": 96, "num_layers": num_layers, "mixers": mixers, **shape}).config(VOCAB)
    model = build(config, seed=7).double()
    widen(model)
    return model


def widen(model: Decoder) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3 + mean)


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Softmax attention written out: q [B, n, H, Dh], k and v [B, m, KV, .], seen bool [.., n, m] -> [B, n, H, Dv]."""
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def prompt(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def check_incremental(model: Decoder, length: int, cuts: Iterable[Iterable[int]]) -> dict[int, Any]:
    """Hidden states and greedy tokens bit by bit are those of the whole; returns the last carry."""
    tokens = prompt(2, length)
    whole = model(tokens)
    carry: dict[int, Any] = {}
    for lengths in cuts:
        carry = {}
        done, parts = 0, []
        for part in tokens.split(list(lengths), dim=1):
            parts.append(model(part, Incremental(part, done, carry)))
            done += part.shape[1]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=1e-9)
    written = greedy(model, tokens[:, :5], 12)
    assert torch.equal(generate(model, tokens[:, :5], 12), written)
    assert torch.equal(generate(model, tokens[:, :5], 12, chunk=2), written)
    return carry


@torch.no_grad()
def greedy(model: Decoder, tokens: Tensor, count: int) -> Tensor:
    """The text that whole forward passes write."""
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    return tokens


@torch.no_grad()
def check_causal(model: Decoder, length: int) -> None:
    """Later tokens change nothing."""
    tokens = prompt(2, length)
    other = tokens.clone()
    for place in (1, length // 2, length - 1):
        other[:, place:] = (tokens[:, place:] + 1) % VOCAB
        assert torch.equal(model(tokens)[:, :place], model(other)[:, :place]) or torch.allclose(
            model(tokens)[:, :place], model(other)[:, :place], atol=1e-11, rtol=0
        )
        assert not torch.allclose(model(tokens)[:, place:], model(other)[:, place:], atol=1e-6)
        other = tokens.clone()


@torch.no_grad()
def check_apart(model: Decoder, lengths: list[int]) -> None:
    """A packed document does not see the one before it or after it."""
    tokens = prompt(1, sum(lengths))
    ids = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    logits = model(tokens, Packed(ids)).split(lengths, dim=1)
    for changed in range(len(lengths)):
        other = list(tokens.split(lengths, dim=1))
        other[changed] = (other[changed] + 1) % VOCAB
        found = model(torch.cat(other, 1), Packed(ids)).split(lengths, dim=1)
        for number in range(len(lengths)):
            same = torch.allclose(found[number], logits[number], atol=1e-11, rtol=0)
            assert same == (number != changed), f"document {changed} changed, {number} noticed: {not same}"


@torch.no_grad()
def check_together(model: Decoder, lengths: list[int]) -> None:
    """Packed documents give what each gives alone."""
    tokens = prompt(1, sum(lengths))
    ids = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    apart = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(model(tokens, Packed(ids)), apart, atol=1e-10, rtol=1e-9)


@torch.no_grad()
def check_saved(model: Decoder, folder: Path, length: int = 24) -> None:
    """A folder gives the same logits and the same config."""
    hf.save(model, folder, dtype=torch.float64)
    again = hf.load(folder, dtype=torch.float64)
    assert again.config == model.config
    tokens = prompt(2, length)
    assert torch.equal(again(tokens), model(tokens))


def check_gradients(
    model: Decoder, length: int, loss: Any = None, skip: tuple[str, ...] = (), step: float = 1e-5
) -> None:
    """Every parameter's gradient against a difference of two `step`s in its steepest direction."""
    tokens = prompt(2, length)

    def value() -> Tensor:
        return model(tokens).square().mean() if loss is None else loss(model, tokens)

    model.zero_grad()
    value().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.endswith(skip or ("\0",)):
            continue
        direction = parameter.grad / parameter.grad.norm()
        found = []
        for way in (step, -step):
            with torch.no_grad():
                parameter += way * direction
                found.append(value().item())
                parameter -= way * direction
        slope = (found[0] - found[1]) / (2 * step)
        assert abs(slope - parameter.grad.norm().item()) <= 1e-4 * abs(slope) + 1e-9, (name, slope)


def state_count(carry: dict[int, Any]) -> int:
    """Numbers in a carry, over all rows."""
    return sum(_count(value) for value in carry.values())


def _count(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    if isinstance(value, (tuple, list)):
        return sum(map(_count, value))
    return 0
