"""The products on a GPU: random ragged shapes against float64, poisoned memory, bit-equal runs, graphs, compile."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.model.decoder import build
from hone.model.hf import load, save
from hone.model.linear import Dense
from hone.model.quantized.packed_int import PackedInt
from hone.model.quantized.scheme import Scheme
from hone.model.shape import Shape
from hone.ops import formats, fp8_linear, gated_linear, linear, quantized_linear, sparse_linear
from hone.ops.dispatch import locate
from hone.ops.linear.api import fp8_codes
from hone.ops.linear.reference import fp8_values
from hone.ops.linear.sparse import compress_24
from tests.model.quantized.test_quantized import make_parts

pytestmark = pytest.mark.gpu
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def hopper() -> None:
    if not locate("cuda").runs_gluon:
        pytest.skip("the kernel needs compute capability 9.0")


def poison(*shapes: tuple[int, ...]) -> None:
    """Leaves NaN in memory that outputs and parts of these sizes will be made of."""
    made = [torch.full(shape, float("nan"), device="cuda", dtype=torch.float32) for shape in shapes for _ in range(2)]
    made += [torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16) for shape in shapes for _ in range(2)]
    del made


def far_from(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def twice(run, shape: tuple[int, ...]) -> Tensor:
    poison(shape, (4, *shape), (8, *shape))
    first = run()
    poison(shape, (4, *shape), (8, *shape))
    assert torch.equal(first, run()), "two runs differ"
    assert first.shape == shape
    return first


def sizes(count: int, step: int, most_rows: int) -> list[tuple[int, int, int]]:
    draw = random.Random(1)
    fixed = [(1, 4096, 4096), (16, 1024, 14336), (most_rows, 640, 2048), (3, 8, step)]
    return fixed + [
        (draw.randint(1, most_rows), draw.randint(1, 700), step * draw.randint(1, 40)) for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("rows", "features", "columns"), [*sizes(8, 8, 64), (5, 12300, 200), (33, 12288, 256), (64, 14336, 1000)]
)
def test_linear(rows: int, features: int, columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, columns + 8, device="cuda", dtype=dtype)[:, :columns]  # rows that do not follow each other
    weight, bias = (torch.randn(*s, device="cuda", dtype=dtype) for s in ((features, columns), (features,)))
    got = twice(lambda: linear(x, weight, bias, backend="triton"), (rows, features))
    wanted = F.linear(x.double(), weight.double(), bias.double())
    assert far_from(got, wanted) <= 2 * far_from(F.linear(x, weight, bias), wanted) + 1e-5


QUANTIZED = [
    (4, 128, torch.bfloat16), (4, 0, torch.bfloat16), (4, 32, torch.bfloat16), (4, 64, torch.float16),
    (4, 256, torch.float16), (8, 128, torch.bfloat16), (8, 0, torch.float16), (8, 32, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("bits", "group", "dtype"), QUANTIZED)
def test_quantized_linear(hopper, bits: int, group: int, dtype: torch.dtype) -> None:
    step = max(64, group)
    cases = [(2, 1, 256), (1, 4096, 14336), (11, 520, 5 * step), (150, 300, 4 * step)]
    if group == 128:
        cases += [*sizes(6, step, 80), (16, 640, 64 * step), (350, 520, 3 * step)]
    for rows, features, columns in cases:
        low, high = formats.code_range(bits)
        codes = torch.randint(low, high + 1, (features, columns), dtype=torch.int8, device="cuda")
        scales = (torch.randn(features, columns // group if group else 1, device="cuda") * 0.1).to(dtype)
        x, bias = (torch.randn(*s, device="cuda", dtype=dtype) for s in ((2, rows, columns), (features,)))
        tiles = formats.tile_codes(codes, bits), formats.tile_scales(scales)
        run = lambda: quantized_linear(x, *tiles, bias, bits=bits, out_features=features, backend="gluon")  # noqa: B023, E731
        got = twice(run, (2, rows, features))
        exact = formats.dequantize(codes.double(), scales.double(), torch.float64)
        wanted = F.linear(x.double(), exact, bias.double())
        plain = quantized_linear(x, codes, scales, bias, bits=bits)
        assert far_from(got, wanted) <= 2 * far_from(plain, wanted) + 1e-5, (rows, features, columns)


def test_quantized_linear_takes_scales_of_any_dtype(hopper) -> None:
    codes = torch.randint(-8, 8, (256, 512), dtype=torch.int8, device="cuda")
    x = torch.randn(5, 512, device="cuda", dtype=torch.bfloat16)
    for groups in (1, 4):
        scales = torch.rand(256, groups, device="cuda")
        tiles = formats.tile_codes(codes, 4), formats.tile_scales(scales)
        got = quantized_linear(x, *tiles, out_features=256)
        wanted = F.linear(x.double(), formats.dequantize(codes.double(), scales.double(), torch.float64))
        assert far_from(got, wanted) < 5e-3


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize(("rows", "features", "columns"), [*sizes(6, 128, 300), (512, 768, 1024)])
def test_fp8_linear(blockwise: bool, rows: int, features: int, columns: int) -> None:
    x, x_scales = fp8_codes(torch.randn(rows, columns, device="cuda"), "1x128" if blockwise else "row")
    weight, weight_scales = fp8_codes(torch.randn(features, columns, device="cuda"), "128x128" if blockwise else "row")
    bias = torch.randn(features, device="cuda", dtype=torch.bfloat16)
    got = twice(lambda: fp8_linear(x, x_scales, weight, weight_scales, bias), (rows, features))
    wanted = fp8_values(x, x_scales, torch.float64) @ fp8_values(weight, weight_scales, torch.float64).T + bias.double()
    assert far_from(got, wanted) < 4e-3


def pruned(features: int, columns: int) -> Tensor:
    """A random 2:4 weight in which some groups have one value or none."""
    weight = torch.randn(features, columns // 4, 4, device="cuda", dtype=torch.bfloat16)
    kept = weight.abs().topk(2, -1).indices
    weight = torch.zeros_like(weight).scatter(-1, kept, weight.gather(-1, kept)).view(features, columns)
    return weight * (torch.rand_like(weight) > 0.1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("features", "columns"), [(256, 512), (6144, 4096), (1056, 14336), (96, 320)])
def test_sparse_linear(features: int, columns: int, dtype: torch.dtype) -> None:
    """Both backends; 320 columns are no multiple of 256, which leaves torch's product alone."""
    weight, bias = pruned(features, columns).to(dtype), torch.randn(features, device="cuda", dtype=dtype)
    packed = compress_24(weight)
    assert packed.masks is not None, "torch's kept values are not in rows: the kernel for few rows never runs"
    assert torch.equal(packed.dense(), weight)
    for rows in (1, 7, 16, 31, 64, 65, 300):
        x = torch.randn(rows, columns, device="cuda", dtype=dtype)
        wanted = F.linear(x.double(), weight.double(), bias.double())
        got = twice(lambda x=x: sparse_linear(x, packed, bias), (rows, features))
        assert far_from(got, wanted) < 5e-3
        plain = sparse_linear(x[None], packed, backend="torch")
        assert far_from(plain[0], wanted - bias.double()) < 5e-3


def test_sparse_linear_under_a_graph_and_compiled(hopper) -> None:
    weight, x = pruned(512, 1024), torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    packed = compress_24(weight)
    wanted = sparse_linear(x, packed)
    for backend in ("gluon", "torch"):
        sparse_linear(x, packed, backend=backend)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = sparse_linear(x, packed, backend=backend)
        got.fill_(float("nan"))
        graph.replay()
        assert far_from(got, wanted.double()) < 5e-3
    compiled = torch.compile(lambda x: sparse_linear(x, packed, backend="gluon") + 1, fullgraph=True)
    assert far_from(compiled(x), wanted.double() + 1) < 5e-3


def test_a_row_does_not_depend_on_its_neighbours(hopper) -> None:
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
    codes = torch.randint(-8, 8, (1024, 4096), dtype=torch.int8, device="cuda")
    scales = torch.rand(1024, 32, device="cuda", dtype=torch.bfloat16)
    tiles = formats.tile_codes(codes, 4), formats.tile_scales(scales)
    whole = linear(x, weight), quantized_linear(x, *tiles, out_features=1024)
    assert torch.equal(linear(x[3:4], weight)[0], whole[0][3])
    assert torch.equal(quantized_linear(x[2:11], *tiles, out_features=1024), whole[1][2:11])


def test_layers_under_graphs_and_compile(hopper) -> None:
    """Dense and PackedInt, alone, replayed from a graph, and compiled: one answer."""
    dense = Dense(512, 384, bias=True).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.normal_()
    parts, weight, _ = make_parts(Scheme(4, 128), [200, 184], 512, dtype=torch.bfloat16)
    packed = PackedInt(512, 384, False, scheme=Scheme(4, 128))
    packed.load(parts)
    before = packed(torch.ones(1, 512))
    packed.to("cuda")
    assert packed.tiled and torch.equal(packed.dequantize(torch.float64).cpu(), weight)
    for given, after in zip(parts, packed.parts([200, 184]), strict=True):
        assert all(torch.equal(tensor, after[suffix].cpu()) for suffix, tensor in given.items())
    x = torch.randn(3, 5, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in (dense, packed):
            alone = layer(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = layer(x)
            graph.replay()
            assert torch.equal(replayed, alone)
            assert torch.equal(torch.compile(layer, fullgraph=True)(x), alone)
        wanted = F.linear(x.double(), weight.cuda())
        assert far_from(packed(x), wanted) < 5e-3
    packed.to("cpu")
    assert torch.equal(packed(torch.ones(1, 512)), before)


def test_training_sees_torchs_own_product() -> None:
    dense = Dense(64, 32, bias=True).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.normal_()
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = dense(x)
    assert torch.equal(out, F.linear(x, dense.weight, dense.bias))
    out.sum().backward()
    assert x.grad is not None and dense.weight.grad is not None


@pytest.mark.parametrize(
    ("bits", "group", "backend"), [(4, 128, "gluon"), (4, 0, "gluon"), (8, 0, "gluon"), (4, 96, "reference")]
)
def test_a_quantized_checkpoint_decodes_as_its_dense_weights(
    hopper, bits: int, group: int, backend: str, tmp_path
) -> None:
    """RTN's files (GPTQ writes the same) through hone.model.hf.load: tiles on the GPU, logits of the dense weights."""
    pytest.importorskip("safetensors")
    shape = Shape(num_layers=2, hidden_size=384, num_heads=6, num_kv_heads=2, intermediate_size=768)
    save(build(shape.config(256), dtype=torch.bfloat16), tmp_path / "model")
    steps = [{"kind": "rtn", "bits": bits, "group_size": group}]
    spec = Compress.read({"steps": steps})
    made = spec.make(tmp_path / "small", {"model": Artifact.read(tmp_path / "model")}, Run(quiet=True))
    packed, dense = load(made.folder, "cuda"), load(made.folder, "cuda")
    layers = {name: layer for name, layer in dense.named_modules() if isinstance(layer, PackedInt)}
    assert len(layers) >= 8 and all(layer.tiled == (backend == "gluon") for layer in layers.values())
    for name, layer in layers.items():
        plain = Dense(layer.in_features, layer.out_features, False)
        plain.load([{"weight": layer.dequantize(torch.bfloat16)}])
        dense.set_submodule(name, plain)
    for count in (1, 40):
        tokens = torch.randint(0, 256, (2, count), device="cuda")
        with torch.no_grad():
            found, wanted = packed(tokens).double(), dense(tokens).double()
        assert far_from(found, wanted) < 3e-2


@pytest.mark.parametrize("dtype", HALVES)
def test_gated_linear(hopper, dtype: torch.dtype) -> None:
    for rows, features, columns in [(1, 8, 64), (77, 1000, 512), (130, 136, 256), (300, 3072, 1024), (1000, 640, 72)]:
        x = torch.randn(rows, columns, device="cuda").to(dtype)
        weight = (torch.randn(2 * features, columns, device="cuda") * columns**-0.5).to(dtype)
        both = x.double() @ weight.double().T
        wanted = F.silu(both[:, :features]) * both[:, features:]
        got = twice(lambda x=x, w=weight: gated_linear(x, w, backend="gluon"), (rows, features))
        assert far_from(got, wanted) <= 1.05 * far_from(gated_linear(x, weight, backend="separate"), wanted) + 1e-4
    wide = torch.randn(2, 150, 2 * columns, device="cuda").to(dtype)[..., columns:]  # rows apart in memory
    assert torch.equal(gated_linear(wide, weight, backend="gluon"), gated_linear(wide.clone(), weight, backend="gluon"))
