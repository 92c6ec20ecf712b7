"""PackedInt arranged for a GPU's kernel: the same checkpoint, the same numbers, and back again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.model.quantized import packed_int
from hone.model.quantized.packed_int import tiles_on
from hone.model.quantized.scheme import Scheme
from tests.model.quantized.test_quantized import make_module, make_parts

SCHEMES = [Scheme(4, 32), Scheme(4, 64), Scheme(4, 0), Scheme(8, 0, "int-quantized"), Scheme(8, 0), Scheme(8, 64)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [[8, 4, 4], [7], [130]])
@pytest.mark.parametrize("bias", [False, True])
def test_tiles_keep_the_checkpoint_and_its_numbers(scheme: Scheme, rows: list[int], bias: bool, monkeypatch) -> None:
    monkeypatch.setattr(packed_int, "tiles_on", lambda *_: True)
    parts, weight, offset = make_parts(scheme, rows, 128, bias)
    module = make_module(scheme, parts, rows, 128, bias)
    assert module.tiled and module.codes.dim() == module.scales.dim() == 4
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(module(x).double(), F.linear(x.double(), weight, offset), atol=1e-4, rtol=1e-5)
    assert torch.equal(module.dequantize(torch.float64), weight)
    for before, after in zip(parts, module.parts(rows), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[suffix]) for suffix, tensor in before.items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_move_arranges_the_codes_anew_and_changes_nothing(scheme: Scheme, monkeypatch) -> None:
    parts, weight, _ = make_parts(scheme, [12, 8], 128)
    module = make_module(scheme, parts, [12, 8], 128)
    plain = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert not module.tiled
    monkeypatch.setattr(packed_int, "tiles_on", lambda *_: True)
    module.to(torch.device("cpu"))  # stands for a GPU
    assert module.tiled and torch.equal(module.dequantize(torch.float64), weight)
    monkeypatch.undo()
    module.to(torch.device("cpu"))
    assert not module.tiled
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, plain[name])


def test_who_gets_tiles(monkeypatch) -> None:
    cpu = torch.device("cpu")
    assert not tiles_on(cpu, Scheme(4, 128), 4096)
    from hone.ops import dispatch
    from hone.ops.dispatch import Where

    monkeypatch.setattr(dispatch, "locate", lambda device: Where("cuda", (9, 0), 132, (3, 6)))
    for scheme in (Scheme(4, 128), Scheme(8, 0), Scheme(4, 4096), Scheme(4, 32)):
        assert tiles_on(cpu, scheme, 4096)
    for scheme, columns in ((Scheme(3, 128), 4096), (Scheme(4, 16), 4096), (Scheme(4, 96), 4032), (Scheme(4, 0), 4064)):
        assert not tiles_on(cpu, scheme, columns)
    monkeypatch.setattr(dispatch, "locate", lambda device: Where("cuda", (8, 0), 108, (3, 6)))
    assert not tiles_on(cpu, Scheme(4, 128), 4096)
