"""Compressive Transformer: which slots a token sees, whom the compression's loss teaches, and bounded decoding."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.feed.load import Batch
from hone.model.context import Causal
from hone.model.shape import Shape
from hone.train.activation_checkpointing import EveryNth, KeepAll
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine
from tests.model.mixers.small import (
    check_apart,
    check_causal,
    check_incremental,
    check_saved,
    prompt,
    small,
    state_count,
)

SMALL = {"kind": "compressive", "segment": 4, "memory": 4, "compressed": 3, "ratio": 2}
LONG = {"kind": "compressive", "segment": 4, "memory": 10, "compressed": 5, "ratio": 2}
WIDE = {"kind": "compressive", "segment": 6, "memory": 6, "compressed": 4, "ratio": 3}


def formula(mixer, x: torch.Tensor) -> torch.Tensor:
    """arXiv:1911.05507, section 3, segment by segment with lists that are appended to and cut."""
    spec, rows = mixer.spec, []
    memory: list[torch.Tensor] = []
    slots: list[torch.Tensor] = []
    for begin in range(0, x.shape[1], spec.segment):
        own = [x[:, place] for place in range(begin, min(begin + spec.segment, x.shape[1]))]
        for count in range(1, len(own) + 1):
            sources = torch.stack([*slots, *memory, *own[:count]], 1)
            _, k, v = mixer._heads(mixer.qkv(sources))
            q, _, _ = mixer._heads(mixer.qkv(own[count - 1][:, None]))
            known = k.shape[1]
            seen = torch.ones(1, known, dtype=torch.bool)
            rows.append(mixer.attend(q[:, None], k[:, None], v[:, None], seen)[:, 0].flatten(-2))
        memory += own
        while len(memory) > spec.memory:
            oldest = torch.cat(memory[: spec.ratio], -1)
            slots.append(oldest @ mixer.compress.weight.T + mixer.compress.bias)
            memory = memory[spec.ratio :]
        slots = slots[-spec.compressed :]
    return mixer.out(torch.cat(rows, 1))


@torch.no_grad()
@pytest.mark.parametrize("spec", [SMALL, LONG, WIDE])
@pytest.mark.parametrize("length", [3, 4, 12, 33])
def test_memory_then_slots_then_nothing(spec, length):
    mixer = small(spec).layers[0].mixer
    x = torch.randn(2, length, 24, dtype=torch.float64)
    torch.testing.assert_close(mixer(x, Causal(x[..., 0])), formula(mixer, x), atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("spec", [SMALL, LONG, WIDE])
def test_the_loss_is_attention_lost_to_compression(spec):
    mixer = small(spec, num_layers=1).layers[0].mixer
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    context = Causal(x[..., 0])
    mixer(x, context)
    segment, memory, ratio = mixer.spec.segment, mixer.spec.memory, mixer.spec.ratio
    errors = []
    for end in range(segment, 31, segment):
        old = x[:, end - segment - memory : end - memory] if end - segment >= memory else None
        if old is None:
            continue
        brief = old.unflatten(1, (-1, ratio)).flatten(2) @ mixer.compress.weight.T + mixer.compress.bias
        outs = []
        for source in (old, brief):
            q, _, _ = mixer._heads(mixer.qkv(x[:, end - segment : end]))
            _, k, v = mixer._heads(mixer.qkv(source))
            weights = (torch.einsum("bnhd,bkhd->bhnk", q, k) / 6**0.5).softmax(-1)
            outs.append(torch.einsum("bhnk,bkhd->bnhd", weights, v))
        errors.append((outs[0] - outs[1]).square())
    assert context.extra_loss.item() == pytest.approx(torch.stack(errors).mean().item(), rel=1e-5)


def test_each_loss_teaches_its_own():
    model, tokens = small(SMALL), prompt(2, 24)
    context = Causal(tokens)
    logits = model(tokens, context)
    named = dict(model.named_parameters())
    from_text = torch.autograd.grad(logits.square().sum(), list(named.values()), allow_unused=True, retain_graph=True)
    from_slots = torch.autograd.grad(context.extra_loss, list(named.values()), allow_unused=True)
    for name, text, slots in zip(named, from_text, from_slots):
        compression = ".compress." in name
        assert (slots is not None and slots.abs().max() > 0) == compression, name
        assert (text is not None and text.abs().max() > 0) != compression, name


def test_a_row_too_short_to_compress_trains():
    model, tokens = small(SMALL), prompt(2, 7)
    context = Causal(tokens)
    (model(tokens, context).square().mean() + context.extra_loss).backward()
    assert model.layers[0].mixer.compress.weight.grad.abs().max() == 0


@pytest.mark.parametrize("spec", [SMALL, LONG, WIDE])
def test_decoding(spec):
    model = small(spec)
    carry = check_incremental(model, 35, [[35], [1] * 35, [6, 1, 20, 8], [4, 5, 5, 14, 7]])
    assert state_count(carry) == 2 * model.config.dims().state_values(35)
    bound = spec["segment"] + spec["memory"]
    assert model.config.dims().state_values(10_003) <= 2 * 24 * (2 * (bound + bound + spec["compressed"]) + 3)


def test_order_and_folder(tmp_path):
    model = small(SMALL)
    check_causal(model, 22)
    check_saved(model, tmp_path)
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())


def test_the_trainer_adds_the_loss_with_and_without_recomputation():
    ids = prompt(4, 24).numpy()
    batch, found = Batch(ids, ids, ids * 0), []
    for policy in (KeepAll(kind="none"), EveryNth(kind="every_nth")):
        model = small(SMALL).float()
        trainer = Trainer(model, steps=40, schedule=Cosine(), activation_checkpointing=policy)
        losses = [trainer.step(batch).loss for _ in range(3)]
        found.append([*losses, *(parameter.sum().item() for parameter in model.parameters())])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    frozen = small(SMALL).float()
    assert not torch.equal(frozen.layers[0].mixer.compress.weight, model.layers[0].mixer.compress.weight)


def test_documents_stay_apart():
    check_apart(small(SMALL), [9, 12, 8])
    check_apart(small(WIDE), [16, 3, 11])


def test_sizes_that_do_not_fit_are_named():
    for wrong in ({"ratio": 3}, {"memory": 2}):
        with pytest.raises(SpecError, match=r"ratio|memory"):
            Shape(mixers=({**SMALL, **wrong},)).config(64)
