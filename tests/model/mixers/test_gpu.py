"""Every mixer on a CUDA device: hidden states and gradients near those of the CPU, and text that whole passes would write."""

from __future__ import annotations

import pytest
import torch

from hone.model.context import Causal, Packed
from hone.model.decoder import build
from hone.model.incremental import Incremental, generate
from hone.model.mixers import MIXERS
from hone.model.shape import Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = {
    "window": 100,
    "segments": [64, 256],
    "dilations": [1, 4],
    "block": 64,
    "num_buckets": 8,
    "chunk": 32,
    "segment": 64,
    "memory": 64,
    "compressed": 16,
    "rank": 32,
    "latent_dim": 64,
    "rope_dim": 32,
}


def config(name: str):
    cls = MIXERS[name]
    entry = {"kind": name, **{field: value for field, value in SIZES.items() if field in cls.model_fields}}
    if name == "attention":
        del entry["window"]
    mixers = ["attention", name] if cls.reuses_kv else [entry]
    sizes = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 256}
    return Shape.read({**sizes, "num_layers": 2, "max_seq_len": 512, "mixers": mixers}).config(300)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 300, (rows, length), generator=torch.Generator().manual_seed(0))


def gradients(name: str, device: str, dtype: torch.dtype, packed: bool) -> dict[str, torch.Tensor]:
    """Hidden states and every parameter's gradient, float32 on the CPU."""
    model = build(config(name), device=device, dtype=dtype, seed=1)
    ids = (torch.arange(300) // 110).expand(2, 300).to(device)
    inputs = tokens(2, 300).to(device)
    context = Packed(ids) if packed else Causal(inputs)
    hidden = model.hidden(inputs, context)
    loss = model.head(hidden).float().log_softmax(-1)[..., 3].mean()
    (loss if context.extra_loss is None else loss + context.extra_loss).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {key: value.detach().float().cpu() for key, value in {"hidden": hidden, **found}.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [*MIXERS])
def test_bfloat16_is_near_the_cpu(name: str, packed: bool) -> None:
    if name == "linformer" and packed:
        pytest.skip("keeps no documents apart")
    got, want = (gradients(name, *where, packed) for where in (("cuda", torch.bfloat16), ("cpu", torch.float32)))
    # A rounding may turn a vector into another of Reformer's buckets; gates are exponents of sums.
    close = {"reformer": 0.3, "gated_linear": 0.3, "retnet": 0.1}.get(name, 0.06)
    for key, value in want.items():
        if value.norm() > 1e-6:
            error = ((got[key] - value).norm() / value.norm()).item()
            assert error < close, (key, error)


@torch.no_grad()
@pytest.mark.parametrize("name", [*MIXERS])
def test_bit_by_bit_is_as_whole(name: str) -> None:
    if not config(name).layers[1].mixer.causal:
        pytest.skip("an encoder")
    model = build(config(name), device="cuda", seed=1)
    inputs = tokens(2, 200).cuda()
    whole = model.hidden(inputs, Causal(inputs))
    carry, parts, done = {}, [], 0
    for part in inputs.split([130, 1, 1, 20, 1, 47], 1):
        parts.append(model.hidden(part, Incremental(part, done, carry)))
        done += part.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-4, rtol=2e-3)
    assert generate(model.bfloat16(), inputs[:, :50], 20).shape == (2, 70)
