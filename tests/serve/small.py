"""Small models, and the oracle of every serving test: one dense forward pass over the whole sequence per token."""

from __future__ import annotations

import torch

from hone.model.decoder import Decoder, build
from hone.model.shape import Shape
from hone.serve.engine import Engine, EngineSpec
from hone.serve.request import Output, Request, SamplingParams

VOCAB = 61


def decoder(seed: int = 0, *, num_layers: int = 2, hidden_size: int = 32, vocab_size: int = VOCAB, **shape) -> Decoder:
    """A random model whose greedy text is not constant."""
    fields = {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48, "max_seq_len": 128, **shape}
    config = Shape(hidden_size=hidden_size, num_layers=num_layers, **fields).config(vocab_size, None, 0)
    model = build(config, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.0 / 0.02 * (0.6 if "embedding" in name else 0.35))
    return model


def dense_greedy(model: Decoder, prompt: list[int], max_tokens: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """Greedy tokens without any cache."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            if tokens[-1] in eos:
                break
    return tokens[len(prompt) :]


def greedy(max_tokens: int = 16, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **more)


def engine(model: Decoder, draft: Decoder | None = None, tokenizer=None, **spec) -> Engine:
    sizes = {"block_size": 4, "num_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, **spec}
    return Engine(model, EngineSpec.read(sizes), draft=draft, tokenizer=tokenizer)


def poison_freed_pages(one: Engine) -> None:
    """From now on a page that nobody can reach any more is full of NaN until it is given out again."""
    real = one.pool.free

    def free(pages):
        gone = real(pages)
        one.runner.cache.wipe(gone, float("nan"))
        return gone

    one.pool.free = free


def drain(one: Engine) -> dict[str, list[Output]]:
    """Steps until nothing is left; all outputs by request."""
    found: dict[str, list[Output]] = {}
    while one.has_work:
        for output in one.step():
            found.setdefault(output.request_id, []).append(output)
        one.pool.check()
    return found


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def assert_all_free(one: Engine) -> None:
    one.pool.check()
    assert one.pool.num_used == 0
    assert one.pool.num_free == one.pool.num_pages
    assert not one.scheduler.running and not list(one.scheduler.waiting())
    assert one.scheduler.num_waiting == 0


def request(name: str, prompt: list[int], params: SamplingParams, **more) -> Request:
    return Request(name, prompt, params, **more)
