"""The paged attention kernels on a GPU: random shapes against float64, unused slots NaN, the same bits twice, one graph for all lengths."""

from __future__ import annotations

import pytest
import torch

from hone.ops import attend_latent, attend_paged, attend_shared, quantize_kv, write_kv
from tests.ops.paged.paged_case import TREE, Case, distance

pytestmark = pytest.mark.gpu

RAGGED = [1, 63, 64, 65, 1000, 4097, 300, 7]
MIXED = ([700, 64, 1, 4097, 300, 77, 2000], [700, 1, 1, 1000, 3, 77, 2])


def case(seq_lens, query_lens=None, **options):
    return Case(seq_lens, query_lens, device="cuda",
                **{"kv_heads": 8, "groups": 4, "head_dim": 128, "page_size": 64, "dtype": torch.bfloat16, **options})  # fmt: skip


@pytest.mark.parametrize("query_lens", [None, [1, 3, 1, 4, 2, 4, 1, 2], "mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16},
        {"page_size": 16},
        {"page_size": 256},
        {"page_size": 24, "groups": 3, "kv_heads": 2},
        {"kv_heads": 4, "groups": 1},
        {"kv_heads": 1, "groups": 16},
        {"head_dim": 64},
        {"head_dim": 96},
        {"head_dim": 256},
        {"head_dim": 192, "value_dim": 128},
        {"window": 100},
        {"window": 100, "sink_tokens": 4},
        {"sinks": True},
        {"page_dtype": torch.float8_e4m3fn},
        {"page_dtype": torch.int8, "page_size": 16},
        {"page_dtype": torch.float8_e4m3fn, "head_dim": 64, "window": 500, "sinks": True},
        {"page_dtype": torch.int8, "head_dim": 96},
    ],
)
def test_agrees_with_float64_twice_alike(query_lens, options):
    made = case(*MIXED, **options) if query_lens == "mixed" else case(RAGGED, query_lens, **options)
    given = made.poisoned()
    most = max(made.counts)
    outs = [attend_paged(*given, **made.options, max_query_len=limit, backend="triton") for limit in (None, most, most)]
    assert distance(outs[0], made.expected()) < 5e-3
    assert distance(outs[1], made.expected()) < 5e-3
    assert torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("options", [{"page_size": 16}, {"head_dim": 64, "groups": 2, "dtype": torch.float16}])
def test_new_tokens_that_are_a_tree(options):
    made = case([700, 3, 67, 4097, 10], [5, 0, 5, 5, 5], tree=TREE.cuda(), **options)
    found = attend_paged(*made.poisoned(), **made.options, max_query_len=5, backend="triton")
    assert distance(found, made.expected()) < 5e-3


@pytest.mark.parametrize("seq_lens", [[70_000], [1], [5] * 300, [1, 30_000, 17]])
def test_lengths(seq_lens):
    made = case(seq_lens, kv_heads=2)
    assert distance(attend_paged(*made.poisoned(), **made.options, backend="triton"), made.expected()) < 5e-3


@pytest.mark.parametrize(
    ("backend", "heads", "page_size"),
    [("triton", 16, 64), ("triton", 64, 64), ("triton", 128, 16), ("gluon", 128, 64), ("gluon", 40, 128)],
)
@pytest.mark.parametrize("query_lens", [None, [1, 2, 1, 3, 1, 1, 4, 1]])
def test_latents(backend, heads, page_size, query_lens):
    made = case(RAGGED, query_lens, kv_heads=1, groups=heads, head_dim=576, value_dim=512, page_size=page_size)
    made.pages[1] = made.pages[0][..., :512]
    if query_lens:
        made.lens[0], made.counts[0] = 1, 1
    q, keys, _, table, lens, counts = made.poisoned()
    outs = [
        attend_latent(q, keys[:, 0], table, lens, counts, value_dim=512, scale=made.options["scale"], backend=backend)
        for _ in range(2)
    ]
    assert distance(outs[0], made.expected()) < 5e-3
    assert torch.equal(*outs)


def test_latents_of_many_rows_in_one_graph():
    """Programs with several tiles, tiles of several programs; then rows that end elsewhere, one of them empty."""
    made = case([33 + 61 * i for i in range(60)], kv_heads=1, groups=128, head_dim=576, value_dim=512)
    made.pages[1] = made.pages[0][..., :512]
    q, keys, _, table, lens, _ = made.poisoned()

    def run():
        return attend_latent(q, keys[:, 0], table, lens, value_dim=512, scale=made.options["scale"], backend="gluon")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for change in (0, 17):
        lens.sub_(change)
        made.lens = [length - change for length in made.lens]
        out.fill_(float("nan"))
        graph.replay()
        assert distance(out, made.expected()) < 5e-3
    lens[3] = 0
    graph.replay()
    assert (out[3] == 0).all() and out.isfinite().all()


def test_a_row_without_tokens_gives_zeros():
    made = case([5, 3, 900])
    q, k, v, table, lens, _ = made.poisoned()
    expected = made.expected()
    lens[1] = 0
    out = attend_paged(q, k, v, table, lens, scale=made.options["scale"], backend="triton")
    assert (out[1] == 0).all()
    assert distance(out[[0, 2]], expected[[0, 2]]) < 5e-3


def test_one_graph_serves_all_lengths():
    long, short = case([4000, 3000, 77, 2500]), case([1, 300, 4000, 64])
    given = long.poisoned()
    q, k, v, table, lens = [x.clone() for x in given[:5]]

    def run():
        return attend_paged(q, k, v, table, lens, scale=long.options["scale"], backend="triton")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for made in (long, short):
        for into, x in zip((q, k, v, table, lens), made.poisoned()):
            into.copy_(x)
        out.fill_(float("nan"))
        graph.replay()
        assert distance(out, made.expected()) < 5e-3


def test_compiles_whole():
    made = case([100, 2000])
    q, k, v, table, lens, _ = made.poisoned()

    def run(q, k, v):
        return attend_paged(q * 2, k, v, table, lens, scale=0.1, backend="triton") + 1

    torch.testing.assert_close(torch.compile(run, fullgraph=True)(q, k, v), run(q, k, v))


def test_queries_may_be_a_slice_of_fused_ones():
    made = case(RAGGED)
    q, *given = made.poisoned()
    fused = torch.full((len(q), 48, 128), float("nan"), dtype=q.dtype, device="cuda")
    fused[:, :32] = q
    assert distance(attend_paged(fused[:, :32], *given, **made.options), made.expected()) < 5e-3


@pytest.mark.parametrize("page_dtype", [torch.float8_e4m3fn, torch.int8])
def test_what_is_written_is_read(page_dtype):
    k, v = torch.randn(2, 100, 8, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.tensor([[2, 0]], dtype=torch.int32, device="cuda")
    pages = torch.zeros(2, 3, 8, 64, 128, device="cuda").to(page_dtype)
    scales = torch.zeros(2, 3, 8, 64, device="cuda")
    places = torch.arange(100, device="cuda")
    write_kv(k, v, *pages, table[0, places // 64].long(), places % 64, *scales)
    q = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([100], device="cuda")
    out = attend_paged(q, *pages, table, lens, scale=0.1, k_scale=scales[0], v_scale=scales[1], backend="triton")
    wide = [
        number.double() * scale.double()[..., None] for number, scale in (quantize_kv(x, page_dtype) for x in (k, v))
    ]
    weights = (torch.einsum("hgd,khd->hgk", q[0].double().view(8, 4, 128), wide[0]) * 0.1).softmax(-1)
    assert distance(out[0], torch.einsum("hgk,khd->hgd", weights, wide[1]).reshape(32, 128)) < 5e-3


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 4, 128), (8, 2, 128), (2, 7, 64), (1, 8, 96)])
def test_shared_pages_are_read_once_and_count_once(kv_heads: int, group: int, dim: int) -> None:
    """Runs of sequences that share pages, and none: as the reference, and one captured graph serves them all."""
    count, page_size, per = 70, 64, 12
    k_pages, v_pages = torch.randn(2, count * per, kv_heads, page_size, dim, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(count, kv_heads * group, dim, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(count * per, device="cuda").view(count, per).int()
    lens = torch.randint(1, per * page_size, (count,), device="cuda", dtype=torch.int32)
    shared = torch.zeros(3, dtype=torch.int32, device="cuda")
    attend_shared(q, k_pages, v_pages, table, lens, shared, scale=dim**-0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_shared(q, k_pages, v_pages, table, lens, shared, scale=dim**-0.5)
    for begin, end, pages in ((0, 0, 0), (0, count, 9), (3, 61, 1), (69, 70, 4), (10, 43, 12)):
        shared.copy_(torch.tensor([begin, end, pages], dtype=torch.int32))
        table[begin:end, :pages] = table[begin, :pages].clone()
        lens[begin:end] = lens[begin:end].clamp(min=pages * page_size)
        graph.replay()
        exact = attend_paged(
            q.double(), k_pages.double(), v_pages.double(), table, lens, scale=dim**-0.5, backend="reference"
        )
        assert float((out.double() - exact).norm() / exact.norm()) < 5e-3
