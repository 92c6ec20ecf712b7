"""The decoder on a CUDA device against the same weights on the CPU."""

from __future__ import annotations

import pytest
import torch

from hone.model import decoder
from hone.model.context import Packed
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.ops.loss.reference import linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPE = Shape(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256)


def loss_and_gradient(family: str, device: str, dtype: torch.dtype) -> tuple[float, torch.Tensor]:
    shape = SHAPE.model_copy(update={"family": family, "window": 40 if family == "mistral" else None})
    model = build(shape.config(512), device=device, dtype=dtype, seed=1)
    draw = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 512, (2, 2, 128), generator=draw).to(device)
    ids = (torch.arange(128) // 50).expand(2, 128).to(device)
    x = model.hidden(tokens, Packed(ids))
    loss = linear_cross_entropy(model.norm(x), model.head_weight, targets)
    loss.backward()
    return loss.item(), model.layers[0].mixer.qkv.weight.grad.float().cpu()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_loss_and_gradients_are_those_of_the_cpu(family: str, dtype: torch.dtype, close: float) -> None:
    loss, gradient = loss_and_gradient(family, "cuda", dtype)
    expected_loss, expected = loss_and_gradient(family, "cpu", torch.float32)
    assert loss == pytest.approx(expected_loss, rel=close / 3)
    assert (gradient - expected).norm() / expected.norm() < close


def test_weights_are_the_same_on_every_device() -> None:
    one, two = build(SHAPE.config(64), device="cuda", seed=2), build(SHAPE.config(64), seed=2)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter.cpu(), two.get_parameter(name))


def test_a_tied_head_is_the_product_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(SHAPE.model_copy(update={"tie_embeddings": True}).config(512), device="cuda", dtype=torch.bfloat16)
    calls, product = [], decoder.product
    monkeypatch.setattr(decoder, "product", lambda *a: calls.append(a[0].shape) or product(*a))
    x = torch.randn(3, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        logits, plain = model.head(x), model.norm(x).float() @ model.embedding.float().T
    assert model.lm_head is None and calls == [x.shape]
    assert (logits - plain).norm() / plain.norm() < 1e-2
