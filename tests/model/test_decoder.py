"""Building, contexts, gradients."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from hone.model import context as context_module
from hone.model.context import Causal, Packed
from hone.model.decoder import build
from hone.model.incremental import Incremental
from hone.model.shape import Shape
from hone.ops import dispatch
from hone.ops.attention import masks, reference

SMALL = Shape(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48)


def documents(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
def test_packed_documents_equal_separate_forwards(window: int | None) -> None:
    model = build(SMALL.model_copy(update={"window": window, "family": "mistral"}).config(64)).double()
    lengths = [7, 1, 13, 11]
    tokens = torch.randint(0, 64, (1, sum(lengths)))
    together = model(tokens, Packed(documents(lengths)))
    apart = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(together, apart, atol=1e-12, rtol=0)


def test_packed_ids_that_come_back_are_new_documents() -> None:
    context = Packed(torch.tensor([[3, 3, 5, 5, 3, 3]]))
    assert context.positions.tolist() == [[0, 1, 0, 1, 0, 1]]
    q = torch.randn(1, 6, 2, 4, dtype=torch.float64)
    mixed = context.attend(0, q, q, q, scale=0.5, window=None)
    apart, _ = reference.attend(q, q, q, masks.documents(torch.tensor([[0, 0, 1, 1, 2, 2]])), scale=0.5)
    torch.testing.assert_close(mixed, apart)


@pytest.mark.parametrize("window", [None, 1, 4, 99])
@pytest.mark.parametrize("packed", [False, True])
def test_contexts_equal_the_reference(window: int | None, packed: bool) -> None:
    q = torch.randn(2, 17, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 17, 2, 8, dtype=torch.float64)
    ids = torch.stack([documents([4, 13])[0], documents([17])[0]]) if packed else None
    context = Causal(torch.zeros(2, 17)) if ids is None else Packed(ids)
    mixed = context.attend(0, q, k, v, scale=0.3, window=window)
    mask = masks.documents(torch.zeros(2, 17, dtype=torch.int64) if ids is None else ids, window)
    torch.testing.assert_close(mixed, reference.attend(q, k, v, mask, scale=0.3)[0])


@pytest.mark.parametrize("window", [None, 4, 99])
@pytest.mark.parametrize("packed", [False, True])
def test_sinks_are_a_key_without_a_value_and_its_score(window: int | None, packed: bool) -> None:
    """A key of zeros in front of all others, whose score a sink replaces: the softmax written out."""
    q = torch.randn(2, 17, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 17, 2, 8, dtype=torch.float64)
    sinks = torch.tensor([-3.0, 0.0, 0.5, 1.0, 2.0, 6.0], dtype=torch.float64)
    ids = torch.stack([documents([4, 13])[0], documents([17])[0]])
    line, wide = torch.arange(17), 17 if window is None else window
    seen = (line <= line[:, None]) & (line > line[:, None] - wide)
    seen = seen & (ids[:, None] == ids[..., None]) if packed else seen.expand(2, 17, 17)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(3, 2)) * 0.3
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    column = sinks.view(1, 6, 1, 1).expand(2, 6, 17, 1)
    wanted = torch.einsum(
        "bhqk,bkhd->bqhd", torch.cat((scores, column), -1).softmax(-1)[..., :17], v.repeat_interleave(3, 2)
    )
    context = Packed(ids) if packed else Causal(torch.zeros(2, 17))
    context.expect(q.flatten(2), 8, window, sinks=True)
    torch.testing.assert_close(context.attend(0, q, k, v, scale=0.3, window=window, sinks=sinks), wanted)
    if not packed:
        later, parts = Incremental(torch.zeros(2, 9)), []
        for start, stop in ((0, 9), (9, 16), (16, 17)):
            later = Incremental(torch.zeros(2, stop - start), start, later.carry)
            some = (x[:, start:stop] for x in (q, k, v))
            parts.append(later.attend(0, *some, scale=0.3, window=window, sinks=sinks))
        torch.testing.assert_close(torch.cat(parts, 1), wanted)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_a_gpus_masks_are_the_same(window: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What contexts ask of hone.ops.attend, which on a CPU is its reference."""
    q = torch.randn(2, 17, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 17, 2, 8, dtype=torch.float64)
    ids = torch.stack([documents([4, 13])[0], documents([9, 8])[0]])

    def attended() -> list[torch.Tensor]:
        context = Packed(ids) if packed else Causal(torch.zeros(2, 17))
        parts = [context.attend(0, q, k, v, scale=0.3, window=window)]
        if not packed:
            parts.append(Causal(torch.zeros(17)).attend(0, q[0], k[0], v[0], scale=0.3, window=window))
            for new in (1, 3, 17):
                later = Incremental(torch.zeros(2, new), 17 - new)
                parts.append(later.attend_joined(q[:, -new:], k, v, scale=0.3, window=window))
        return parts

    plain = attended()
    for module in ("context", "incremental"):
        monkeypatch.setattr(f"hone.model.{module}.has_fused", lambda q, v: True)
    for one, other in zip(attended(), plain):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_leading_shapes_are_free() -> None:
    model = build(SMALL.config(64))
    tokens = torch.randint(0, 64, (3, 9))
    torch.testing.assert_close(model(tokens)[1], model(tokens[1]))


def test_weights_depend_on_seed_and_name_alone() -> None:
    config = SMALL.config(64)
    one, two, other = build(config, seed=3), build(config, seed=3), build(config, seed=4)
    deeper = build(SMALL.model_copy(update={"num_layers": 3}).config(64), seed=3)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(name))
        assert parameter.dim() == 1 or not torch.equal(parameter, other.get_parameter(name))
    assert torch.equal(one.layers[1].mixer.qkv.weight, deeper.layers[1].mixer.qkv.weight)
    # Fewer key heads leave the queries as they were: pieces are drawn apart.
    fewer = build(SMALL.model_copy(update={"num_kv_heads": 1}).config(64), seed=3)
    assert torch.equal(one.layers[0].mixer.qkv.weight[:32], fewer.layers[0].mixer.qkv.weight[:32])


def test_spread_of_the_weights() -> None:
    model = build(Shape(hidden_size=128, num_layers=8, num_heads=4, num_kv_heads=4).config(512))
    layer = model.layers[0]
    assert layer.mixer.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.mixer.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert layer.feed_forward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(128))
    assert build(SMALL.config(64), dtype=torch.bfloat16).embedding.dtype == torch.bfloat16


def test_every_parameter_gets_the_gradient_of_the_plain_formulas() -> None:
    """The hand-written backward passes against finite differences through the whole model."""
    model = build(SMALL.model_copy(update={"family": "qwen3", "num_layers": 1}).config(20)).double()
    tokens = torch.randint(0, 20, (1, 6))
    model(tokens).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        where = parameter.grad.abs().argmax()
        found = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.view(-1)[where] += step
                found.append(model(tokens).square().sum().item())
                parameter.view(-1)[where] -= step
        slope = (found[0] - found[1]) / 2e-5
        assert parameter.grad.view(-1)[where].item() == pytest.approx(slope, rel=1e-4), name


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_compiles_whole_and_once_for_all(packed: bool) -> None:
    torch.compiler.reset()
    decoder = build(Shape(hidden_size=32, num_layers=10, num_heads=2, num_kv_heads=1, intermediate_size=64).config(50))
    tokens = torch.arange(24).view(2, 12)
    context = Packed((torch.arange(12) // 5).expand(2, 12)) if packed else Causal(tokens)
    plain = decoder(tokens, context)
    counter = CompileCounter()
    for layer in decoder.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=counter)
    assert torch.allclose(decoder(tokens, context), plain, atol=1e-5)
    assert counter.frame_count == 1, "a layer's own numbers, or what the first one makes, are compiled in"


class Traced(Exception):
    """Raised in place of running a traced graph."""


@pytest.mark.parametrize("packed", [False, True])
def test_what_a_gpu_runs_traces_whole_and_once_for_all_layers(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' way through a layer, on a machine without a GPU: traced, not run."""
    torch.compiler.reset()
    monkeypatch.setattr(dispatch, "_locate", lambda *_: dispatch.Where("cuda", (9, 0), 132, (3, 6)))
    monkeypatch.setattr(context_module, "has_fused", lambda *_: True)
    shape = Shape(hidden_size=64, num_layers=10, num_heads=2, num_kv_heads=1, head_dim=64, intermediate_size=64)
    decoder = build(shape.config(50)).to(torch.bfloat16)
    tokens = torch.arange(256).view(2, 128) % 50
    context = Packed((torch.arange(128) // 50).expand(2, 128)) if packed else Causal(tokens)
    if packed:
        context._whole = False  # which only a CPU asks
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])

        def run(*_):
            raise Traced

        return run

    x = torch.randn(2, 128, 64, dtype=torch.bfloat16)
    decoder.prepare(x, context)
    for layer in decoder.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=backend)
        with pytest.raises(Traced):
            layer(x, context)
    assert len(graphs) == 1, "a layer's own numbers, or what the first one makes, are compiled in"
    assert graphs[0].count("hone.attend.default") == 1


def test_the_embeddings_multiplier_is_rounded_to_their_format() -> None:
    """As transformers does for Gemma: sqrt(3072) is 55.5 in bfloat16."""
    config = Shape(hidden_size=48, num_layers=1).config(40).model_copy(update={"embedding_multiplier": 3072**0.5})
    model, tokens = build(config, dtype=torch.bfloat16), torch.arange(40)
    assert torch.equal(model.embed(tokens), model.embedding * torch.tensor(3072**0.5).bfloat16())
    assert torch.equal(model.double().embed(tokens), model.embedding * 3072**0.5)
