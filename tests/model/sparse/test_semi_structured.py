"""2:4 linears: the dense product, the tensors of a checkpoint in and out; and a model whose linears become such, or may not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hone
from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, MachineError, SpecError
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.model.decoder import Decoder, build
from hone.model.linear import LINEARS, Dense
from hone.model.quantized.hadamard import multiply_inputs
from hone.model.shape import Shape
from hone.model.sparse import sparsify as sparsifying
from hone.model.sparse.semi_structured import SemiStructured
from hone.model.sparse.sparsify import Sparsified, sparsify

SHAPE = Shape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=128, max_seq_len=32)


def kept(weight: Tensor) -> Tensor:
    """`weight` without the first and the last of every four columns."""
    return weight * ((torch.arange(weight.shape[-1]) % 4 == 1) | (torch.arange(weight.shape[-1]) % 4 == 2))


def pruned(dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A random model whose linears are 2:4, but for layer 1's down projection."""
    model = build(SHAPE.config(50), dtype=dtype).eval()
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            for path in model.config.linears(index):
                if (index, path) != (1, "feed_forward.down"):
                    layer.get_submodule(path).weight.copy_(kept(layer.get_submodule(path).weight))
    return model


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU stand for a GPU, where the compressed form and the products are the reference's."""
    monkeypatch.setattr(sparsifying, "_problem", lambda model, where: None)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_it_multiplies_as_the_dense_linear(bias: bool) -> None:
    with torch.device("meta"):
        linear = LINEARS["semi_structured"](16, 8, bias)
    weight, shift = kept(torch.randn(8, 16)), torch.randn(8)
    parts = [
        {"weight": one} | ({"bias": b} if bias else {}) for one, b in zip(weight.split([3, 5]), shift.split([3, 5]))
    ]
    linear.load(parts)
    x = torch.randn(2, 3, 16)
    assert torch.equal(linear(x), F.linear(x, weight, shift if bias else None))
    assert torch.equal(linear.dequantize(torch.float64), weight.double())
    assert linear.values.nbytes + linear.packed.masks.nbytes == weight.nbytes // 2 + weight.numel() // 8
    found = linear.parts([3, 5])
    assert linear.part_shapes([3, 5]) == [{name: tuple(one.shape) for name, one in part.items()} for part in found]
    assert all(torch.equal(one[name], two[name]) for one, two in zip(found, parts) for name in two)
    half = linear.to(torch.bfloat16)  # the compressed form is made again
    assert half.packed.values.dtype == torch.bfloat16 and torch.equal(
        half.dequantize(torch.float32), weight.bfloat16().float()
    )


def test_a_dense_weight_does_not_load() -> None:
    linear = SemiStructured(16, 8, False)
    with pytest.raises(ArtifactError, match="row 0 keeps more than two of columns 0 to 3"):
        linear.load([{"weight": torch.ones(8, 16)}])


@torch.no_grad()
def test_a_compressed_model_computes_the_same(monkeypatch, tmp_path) -> None:
    without_gpu(monkeypatch)
    model, tokens = pruned(), torch.randint(0, 50, (2, 9))
    expected = model(tokens)
    found = sparsify(model, "2:4")
    weights = 2 * (128 * 64 + 64 * 64 + 256 * 64) + 64 * 128  # qkv, out, gate and up of both layers; one down
    assert found == Sparsified(packed=7, dense=1, saved_bytes=2 * weights * 7 // 16)
    assert found.said.startswith("2:4 products in 7 of 8 linears") and found.said.endswith("dense: 1 not 2:4")
    assert isinstance(model.layers[0].mixer.qkv, SemiStructured) and type(model.layers[1].feed_forward.down) is Dense
    assert torch.equal(model(tokens), expected)
    hone.save(model, tmp_path)
    assert torch.equal(hone.load(tmp_path)(tokens), expected)


def test_a_folder_loads_with_it(monkeypatch, tmp_path) -> None:
    hone.save(pruned(), tmp_path)
    with pytest.raises(MachineError, match="the device is cpu"):
        hone.load(tmp_path, sparsity="2:4")
    with pytest.raises(SpecError, match="sparsity is 'half'"):
        hone.load(tmp_path, sparsity="half")
    without_gpu(monkeypatch)
    with pytest.warns(RuntimeWarning, match="2:4 products in 7 of 8 linears"):
        model = hone.load(tmp_path, sparsity="2:4")
    assert isinstance(model.layers[0].feed_forward.down, SemiStructured)


@torch.no_grad()
def test_what_a_pruner_writes_runs_with_it(monkeypatch, tmp_path) -> None:
    without_gpu(monkeypatch)
    hone.save(build(SHAPE.config(50)), tmp_path / "dense")
    with torch.enable_grad():
        Compress.read({"steps": [{"kind": "magnitude", "pattern": "2:4"}]}).make(
            tmp_path / "pruned", {"model": Artifact.read(tmp_path / "dense")}, Run(quiet=True)
        )
    model, expected = (hone.load(tmp_path / "pruned", dtype=torch.bfloat16) for _ in range(2))
    assert sparsify(model, "2:4").packed == 8
    tokens = torch.randint(0, 50, (2, 9))
    assert torch.equal(model(tokens), expected(tokens))


@torch.no_grad()
def test_a_corrected_model_runs_with_it_inside_its_adapter(monkeypatch, tmp_path) -> None:
    without_gpu(monkeypatch)
    hone.save(build(SHAPE.config(50)), tmp_path / "dense")
    steps = [{"kind": "magnitude", "pattern": "2:4"}, {"kind": "loftq", "rank": 4}]
    with torch.enable_grad():
        Compress.read({"steps": steps}).make(
            tmp_path / "made", {"model": Artifact.read(tmp_path / "dense")}, Run(quiet=True)
        )
    model, expected = (hone.load(tmp_path / "made", dtype=torch.bfloat16) for _ in range(2))
    assert sparsify(model, "2:4").packed == 8
    assert isinstance(model.layers[0].mixer.qkv.inner, SemiStructured)
    tokens = torch.randint(0, 50, (2, 9))
    assert torch.equal(model(tokens), expected(tokens))


@torch.no_grad()
def test_inputs_are_multiplied_by_hadamard_matrices_as_before(monkeypatch) -> None:
    without_gpu(monkeypatch)
    model, tokens = pruned(), torch.randint(0, 50, (2, 9))
    multiply_inputs(model.layers[0].feed_forward.down, 32)
    expected = model(tokens)
    assert sparsify(model, "2:4").packed == 7
    assert torch.equal(model(tokens), expected)


def test_auto_keeps_what_is_faster(monkeypatch) -> None:
    without_gpu(monkeypatch)
    timed = []

    def faster(packed, weight, rows) -> bool:
        timed.append((tuple(weight.shape), rows))
        return weight.shape[1] == 128  # the down projection's

    monkeypatch.setattr(sparsifying, "_is_faster", faster)
    model = pruned()
    found = sparsify(model, "auto", rows=5)
    assert (found.packed, found.slower, found.dense) == (1, 6, 1)
    assert sorted(timed) == [((64, 64), 5), ((64, 128), 5), ((128, 64), 5), ((256, 64), 5)], "each shape is timed once"
    assert "6 faster dense" in found.said


def test_a_shape_that_a_gpu_cannot_hold_stays_dense(monkeypatch) -> None:
    without_gpu(monkeypatch)
    narrow = SHAPE.model_copy(update={"intermediate_size": 96})  # the down projection has 96 columns
    model = build(narrow.config(50), dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.layers:
            layer.feed_forward.down.weight.copy_(kept(layer.feed_forward.down.weight))
    with pytest.raises(
        ArtifactError, match=r"none of the 8 linears .* 6 keep more than two of four weights, 2 have rows"
    ):
        sparsify(model, "2:4", where="here")


def test_what_cannot_be_is_one_clear_error(monkeypatch) -> None:
    with pytest.raises(MachineError, match="the device is cpu"):
        sparsify(pruned(), "2:4")
    with pytest.raises(SpecError, match="sparsity is '4:8'"):
        sparsify(pruned(), "4:8")
    found = sparsify(pruned(), "auto")
    assert found.packed == 0 and found.dense == 8
    assert found.said == "no 2:4 products: 2:4 products need an NVIDIA GPU, and the device is cpu"
    untouched = pruned()
    assert sparsify(untouched, "none") == Sparsified() and type(untouched.layers[0].mixer.qkv) is Dense
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    fake = pruned()
    monkeypatch.setattr(Decoder, "like", property(lambda self: Fake()))
    with pytest.raises(MachineError, match=r"compute capability 8\.0, and the GPU has 7\.5"):
        sparsify(fake, "2:4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(SpecError, match="float32"):
        sparsify(fake, "2:4")


class Fake:
    """Stands for float32 hidden states on a GPU."""

    device, dtype = torch.device("cuda"), torch.float32


def test_a_quantized_model_has_no_linears_for_it(monkeypatch, tmp_path) -> None:
    hone.save(pruned(), tmp_path / "dense")
    Compress.read({"steps": [{"kind": "rtn", "bits": 8, "group_size": 0}]}).make(
        tmp_path / "made", {"model": Artifact.read(tmp_path / "dense")}, Run(quiet=True)
    )
    model = hone.load(tmp_path / "made")
    monkeypatch.setattr(Fake, "dtype", torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(Decoder, "like", property(lambda self: Fake()))
    with pytest.raises(ArtifactError, match="no dense linears"):
        sparsify(model, "2:4")
