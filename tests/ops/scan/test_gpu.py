"""The scan kernels on a GPU: random shapes against float64, poisoned surroundings, the same bits twice, graphs."""

from __future__ import annotations

import random

import pytest
import torch

from hone.ops import scan
from hone.ops.scan.reference import scan_chunks

pytestmark = pytest.mark.gpu


def drawn(batch, seq_len, heads, dim_k, dim_v, form, dtype=torch.bfloat16, share=1, strength=0.3):
    q = torch.randn(batch, seq_len, heads, dim_k, device="cuda").to(dtype)
    k = (torch.randn(batch, seq_len, heads // share, dim_k, device="cuda") * dim_k**-0.5).to(dtype)
    v = torch.randn(batch, seq_len, heads, dim_v, device="cuda").to(dtype)
    shape = {"head": (heads,), "token": (batch, seq_len, heads), "channel": (batch, seq_len, heads, dim_k)}.get(form)
    decay = None if shape is None else -strength * torch.rand(shape, device="cuda")
    return [q, k, v, decay, torch.randn(batch, heads, dim_k, dim_v, device="cuda")]


def distance(mine, oracle):
    """Relative, or absolute where the oracle is nothing: no gradient passes a reset."""
    return ((mine.double() - oracle).norm() / (oracle.norm() if oracle.any() else 1.0)).item()


def agrees_twice_alike(shape, form, resets, backend=None, **options):
    """Outputs, state and all gradients near float64, and the same bits from memory that held NaN beforehand."""
    torch.manual_seed(0)
    given = drawn(*shape, form, **options)
    reset = torch.rand(shape[:2], device="cuda") < 4 / shape[1] if resets else None
    decay = given[3]
    taking = [x.requires_grad_() for x in given if x is not None]
    wide = [None if x is None else x.detach().double().requires_grad_() for x in given]
    wanted = scan_chunks(*wide[:4], state=wide[4], reset=reset, scale=0.7)
    weights = [torch.randn_like(x) for x in wanted]
    oracles = torch.autograd.grad([*wanted], [x for x in wide if x is not None], weights)
    runs = []
    for _ in range(2):
        poison = [torch.full((n,), torch.nan, device="cuda") for n in (1 << 22, 1 << 16, 1 << 10)]
        del poison  # the next tensors stand where these stood
        got = scan(*given[:4], state=given[4], reset=reset, scale=0.7, return_state=True, backend=backend)
        gradients = torch.autograd.grad([*got], taking, [w.to(x.dtype) for w, x in zip(weights, got, strict=True)])
        runs.append([*got, *gradients])
    names = ["out", "final", "dq", "dk", "dv", *(["d_decay"] if decay is not None else []), "d_state"]
    for name, first, second, oracle in zip(names, *runs, [*wanted, *oracles], strict=True):
        assert torch.equal(first, second), name
        # A decay's gradient is the difference of large sums that were rounded to bfloat16 on the way, a head's the sum of
        # thousands of such differences. A channel's is made of pairs whose roundings cancel: the same arithmetic on a CPU
        # gave 0.006 (0.013 where decays are strong), and at most 0.0035 for all else.
        bound = (6e-2 if form == "head" else 2e-2) if name == "d_decay" else 5e-3
        assert distance(first, oracle) < bound, (name, distance(first, oracle))


@pytest.mark.parametrize(
    ("shape", "form", "resets", "options"),
    [
        ((2, 3000, 2, 128, 128), "token", True, {}),
        ((1, 2048, 2, 128, 128), "none", False, {}),
        ((2, 3000, 2, 128, 128), "token", True, {"backend": "triton"}),
        ((1, 2049, 4, 64, 64), "head", False, {}),
        ((2, 1100, 4, 64, 128), "token", True, {"share": 2}),
        ((1, 4096, 2, 128, 128), "token", False, {"strength": 30.0}),
        ((1, 5000, 2, 256, 256), "token", True, {}),
        ((1, 777, 3, 72, 136), "token", False, {}),
        ((1, 2048, 2, 128, 128), "token", False, {"dtype": torch.float16}),
        ((3, 1, 4, 128, 128), "token", True, {}),
        ((3, 5, 4, 128, 129), "token", True, {}),
    ],
)
def test_agrees_with_float64_twice_alike(shape, form, resets, options):
    agrees_twice_alike(shape, form, resets, **options)


def test_random_shapes():
    dice = random.Random(1)
    for _ in range(6):
        shape = (dice.randint(1, 3), dice.randint(17, 2000), dice.randint(1, 5), *dice.choices(range(65, 129), k=2))
        agrees_twice_alike(shape, "token", dice.random() < 0.7, strength=dice.choice([0.1, 1.0]))


def test_slices_of_a_fused_tensor_among_nan():
    fused = torch.full((2, 1000, 4, 512), torch.nan, device="cuda", dtype=torch.bfloat16)
    fused[:, 10:990, :, :384].normal_()
    q, k, v = (fused[:, 10:990, :, 128 * i : 128 * i + 128] for i in range(3))
    wanted, _ = scan_chunks(*(x.double() for x in (q, k, v)), scale=0.1)
    assert distance(scan(q, k, v, scale=0.1), wanted) < 1e-2


def test_steps_in_a_captured_graph_do_what_the_whole_does():
    torch.manual_seed(0)
    q, k, v, decay, _ = drawn(2, 40, 4, 64, 64, "token")
    whole, last = scan(q, k, v, decay, return_state=True)
    token = [x[:, :1].clone() for x in (q, k, v, decay)]
    state = torch.zeros_like(last)

    def step():
        out, after = scan(*token, state=state, return_state=True)
        state.copy_(after)
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    state.zero_()
    for place in range(40):
        for into, x in zip(token, (q, k, v, decay), strict=True):
            into.copy_(x[:, place : place + 1])
        graph.replay()
        assert distance(out, whole[:, place : place + 1].double()) < 1e-2
    assert distance(state, last.double()) < 1e-2


def test_compiled_with_gradients():
    q, k, v, decay, _ = drawn(1, 1030, 2, 64, 64, "token")
    for x in (q, k, v, decay):
        x.requires_grad_()
    run = torch.compile(lambda *given: scan(*given).square().sum(), fullgraph=True)
    mine = torch.autograd.grad(run(q, k, v, decay), (q, k, v, decay))
    plain = torch.autograd.grad(scan(q, k, v, decay).square().sum(), (q, k, v, decay))
    for one, other in zip(mine, plain, strict=True):
        assert distance(one, other.double()) < 1e-2


def test_seventy_thousand_tokens():
    torch.manual_seed(0)
    q, k, v, decay, _ = drawn(1, 70001, 1, 64, 64, "token")
    wanted, _ = scan_chunks(*(x.double() for x in (q, k, v, decay)))
    assert distance(scan(q, k, v, decay), wanted) < 1e-2


@pytest.mark.parametrize(
    ("shape", "resets", "options"),
    [
        ((2, 3000, 2, 64, 128), True, {}),
        ((1, 2048, 2, 128, 128), False, {}),
        ((2, 7, 2, 40, 24), True, {}),
        ((1, 1100, 2, 128, 256), True, {"strength": 30.0}),
        ((1, 1700, 1, 256, 256), True, {}),
        ((1, 1500, 4, 128, 128), True, {"share": 2}),
        ((1, 2048, 2, 128, 64), False, {"dtype": torch.float16}),
    ],
)
def test_a_decay_a_channel(shape, resets, options):
    agrees_twice_alike(shape, "channel", resets, backend="triton", **options)
