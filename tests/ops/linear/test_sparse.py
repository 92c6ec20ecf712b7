"""2:4 weights: compressed by a naive loop and by torch's own conversion, and the kernel's unpacking instruction by instruction."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from hone.base.errors import SpecError
from hone.ops import sparse_linear
from hone.ops.dispatch import Where, choose
from hone.ops.linear import sparse
from hone.ops.linear.sparse import RUN, compress_24, is_24, masks_of, pack_24, unpack_24

HOPPER = Where("cuda", (9, 0), 132, (3, 6))


def pruned(rows: int, columns: int, dtype: torch.dtype = torch.float32, empty: float = 0.0) -> Tensor:
    """A random 2:4 weight; about `empty` of its kept values are zero, too."""
    weight = torch.randn(rows, columns // 4, 4, generator=torch.Generator().manual_seed(columns)).to(dtype)
    kept = weight.abs().topk(2, -1).indices
    weight = torch.zeros_like(weight).scatter(-1, kept, weight.gather(-1, kept)).view(rows, columns)
    return weight * (torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) >= empty)


def spelled(values: Tensor, masks: Tensor) -> Tensor:
    """`unpack_24` group by group, in plain Python."""
    rows, groups = len(values), values.shape[1] // 2
    half = RUN // 2 if groups % RUN == 0 else groups // 2
    weight = torch.zeros(rows, 4 * groups, dtype=values.dtype)
    for row in range(rows):
        for group in range(groups):
            run, place = divmod(group, 2 * half)
            byte = int(masks[row, run * half + place % half])
            bits = byte >> 4 if place >= half else byte & 15
            kept = [column for column in range(4) if bits >> column & 1]
            assert len(kept) == 2
            for column, value in zip(kept, values[row, 2 * group : 2 * group + 2]):
                weight[row, 4 * group + column] = value
    return weight


@pytest.mark.parametrize("empty", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("columns", [8, 64, 512, 768])
def test_a_compressed_weight_is_the_weight(columns: int, empty: float) -> None:
    weight = pruned(3, columns, empty=empty)
    values, masks = pack_24(weight)
    assert values.shape == (3, columns // 2) and masks.shape == (3, columns // 8) and masks.dtype == torch.uint8
    assert torch.equal(spelled(values, masks), weight)
    assert torch.equal(unpack_24(values, masks), weight)


@pytest.mark.parametrize("empty", [0.0, 0.4])
def test_masks_follow_from_what_torch_keeps(empty: float) -> None:
    weight = pruned(32, 256, torch.bfloat16, empty)
    values, _ = sparse_semi_structured_from_dense_cutlass(weight)
    masks = masks_of(weight, values)
    assert masks is not None and torch.equal(spelled(values, masks), weight)
    if not empty:  # then there is no choice
        assert torch.equal(values, pack_24(weight)[0]) and torch.equal(masks, pack_24(weight)[1])


def test_values_in_another_order_have_no_masks() -> None:
    weight = pruned(4, 64)
    values, _ = pack_24(weight)
    assert masks_of(weight, values.roll(2, 1)) is None
    assert masks_of(weight, values.unflatten(1, (-1, 2)).flip(-1).flatten(1)) is None


def run(assembly: str, inputs: list[int]) -> list[int]:
    """The outputs $0-$7 of PTX made of prmt, shl, and, lop3 (a ? b : c), whose inputs are $8 and on. PTX ISA 8, 9.7."""
    registers = {f"${8 + at}": value for at, value in enumerate(inputs)}

    def read(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    body = re.sub(r"\.reg[^;]*;", "", assembly.strip("{} "))
    for line in filter(None, (part.strip() for part in body.split(";"))):
        op, rest = line.split(" ", 1)
        into, *given = (one.strip() for one in rest.split(","))
        values = [read(one) for one in given]
        if op == "shl.b32":
            made = values[0] << values[1] & 0xFFFFFFFF
        elif op == "and.b32":
            made = values[0] & values[1]
        elif op == "lop3.b32":
            assert values[3] == 0xCA
            made = values[0] & values[1] | ~values[0] & values[2]
        else:
            assert op == "prmt.b32", op
            eight = (values[0] | values[1] << 32).to_bytes(8, "little")
            made = 0
            for at in range(4):
                choice = values[2] >> 4 * at & 15
                byte = eight[choice & 7]
                made |= ((0xFF if byte & 0x80 else 0) if choice & 8 else byte) << 8 * at
        registers[into] = made
    return [registers[f"${at}"] for at in range(8)]


@pytest.mark.parametrize("half", [0, 1])
def test_the_kernels_instructions_unpack_every_mask(half: int) -> None:
    pytest.importorskip("triton")
    from hone.ops.linear.gluon_sparse import _assembly

    assembly = _assembly(half)
    masks = [3, 5, 9, 6, 10, 12]
    for start in range(36):
        mine = [masks[start % 6], masks[start // 6], masks[(start + 1) % 6], masks[(start // 6 + 3) % 6]]
        other = [masks[(start + at) % 6] for at in range(4)]  # the other half of each byte
        packed = sum((m << 4 * half | o << 4 * (1 - half)) << 8 * at for at, (m, o) in enumerate(zip(mine, other)))
        values = [[0x8001 + 0x111 * at, 0x7F02 + 0x101 * at] for at in range(4)]
        pairs = [first | second << 16 for first, second in values]
        found = run(assembly, [*pairs, packed])
        for group in range(4):
            kept = [place for place in range(4) if mine[group] >> place & 1]
            for place in range(4):
                got = found[2 * place + group // 2] >> 16 * (group % 2) & 0xFFFF
                assert got == (values[group][kept.index(place)] if place in kept else 0)


def test_the_product_is_that_of_the_dense_weight() -> None:
    weight, bias, x = pruned(32, 64), torch.randn(32), torch.randn(2, 3, 64)
    packed = compress_24(weight)
    assert packed.shape == (32, 64) and packed.nbytes == weight.nbytes // 2 + weight.numel() // 8
    assert torch.equal(sparse_linear(x, packed, bias), F.linear(x, weight, bias))
    assert torch.equal(sparse_linear(x[0, 0], packed), F.linear(x[0, 0], weight))


def test_what_is_not_two_of_four_is_named() -> None:
    weight = pruned(2000, 64)
    assert is_24(weight) and not is_24(weight[:, :62])
    weight[1807, 40:43] = 1
    assert not is_24(weight)
    with pytest.raises(SpecError, match="row 1807 keeps more than two of columns 40 to 43"):
        compress_24(weight)
    with pytest.raises(SpecError, match="multiples of 8"):
        compress_24(weight[:, :60])


def test_the_kernel_is_a_torch_op_that_knows_its_outputs() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, values = torch.empty(2, 3, 256, dtype=torch.bfloat16), torch.empty(96, 128, dtype=torch.bfloat16)
        masks = torch.empty(96, 32, dtype=torch.uint8)
        assert torch.ops.hone.sparse_linear(x, values, masks, None).shape == (2, 3, 96)


def test_x_of_another_dtype_runs_in_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would read the weight's bits as x's dtype."""
    given: dict = {}
    monkeypatch.setattr(sparse, "backend_of", lambda *_, **case: given.update(case) or "reference")
    packed = compress_24(pruned(8, 256, torch.bfloat16))
    sparse_linear(torch.ones(1, 256, dtype=torch.bfloat16), packed)
    assert choose("sparse_linear", HOPPER, **given).backend == "gluon"
    with pytest.raises(RuntimeError, match="dtype"):
        sparse_linear(torch.ones(1, 256, dtype=torch.float16), packed)
    assert choose("sparse_linear", HOPPER, **given).backend == "torch"
