"""A rank reads its rows and columns of a folder: side by side, all ranks hold the whole model, dense or quantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hone.base.errors import HoneError, SpecError
from hone.model import hf
from hone.model.decoder import build
from hone.model.linear_spec import LinearSpec, Piece
from hone.model.parallel.cut import cuts, pieces_of
from hone.model.parallel.local import SummedLinear, stage_layers
from hone.model.parallel.reading import LocalCheckpoint
from hone.model.quantized.layouts import shapes_of
from hone.model.quantized.scheme import Scheme
from hone.model.shards import Shards, write_tensors
from hone.model.weights.model import fused_linears
from hone.parallel.group import Group
from hone.parallel.place import Place, stages_of
from tests.model.parallel.quantized_folder import write_quantized
from tests.serve.small import decoder

SIZES = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 256, "vocab_size": 61}

SCHEMES = {
    "int4 in groups": (Scheme(4, 32), "compressed-tensors"),
    "int4 with zero points": (Scheme(4, 32, symmetric=False), "compressed-tensors"),
    "int8 per channel": (Scheme(8, None, layout="int-quantized"), "compressed-tensors"),
    "int8 in blocks": (Scheme(8, block=(32, 32), layout="int-quantized"), "compressed-tensors"),
    "gptq": (Scheme(4, 32, layout="gptq"), "gptq"),
    "awq": (Scheme(4, 32, symmetric=False, layout="awq"), "awq"),
    "fp8 blocks": (Scheme(8, block=(32, 32), number="e4m3", layout="fp8"), "fp8"),
    "mxfp4": (Scheme(4, 32, number="e2m1", scales="e8m0", layout="mxfp4-pack-quantized"), "compressed-tensors"),
    "mxfp8": (Scheme(8, 32, number="e4m3", scales="e8m0", layout="mxfp8-quantized"), "compressed-tensors"),
    "nvfp4": (Scheme(4, 16, number="e2m1", scales="e4m3", layout="nvfp4-pack-quantized"), "compressed-tensors"),
}


def local(folder: Path, rank: int, size: int, stage: int = 0, num_stages: int = 1):
    place = Place(rank, size, stage, num_stages)
    return LocalCheckpoint(folder, place, Group(place)).build().eval()


def dequantized(module) -> torch.Tensor:
    return (module.inner if isinstance(module, SummedLinear) else module).dequantize(torch.float32)


def assert_ranks_hold_the_whole(folder: Path, size: int) -> None:
    whole = hf.load(folder)
    ranks = [local(folder, rank, size) for rank in range(size)]
    config = whole.config
    for index, layer in enumerate(whole.layers):
        for path, linear in config.linears(index).items():
            matrix, modules = dequantized(layer.get_submodule(path)), fused_linears(config, index)[path]
            for rank, model in enumerate(ranks):
                each, first, rows = cuts(linear, modules, rank, size), 0, []
                for cut in each:
                    rows += [matrix[first + one.start : first + one.stop] for one in cut.rows]
                    first += cut.num_rows
                wanted = torch.cat(rows)[:, each[0].columns]
                torch.testing.assert_close(dequantized(model.layers[index].get_submodule(path)), wanted, rtol=0, atol=0)
        for path in config.parameters(index):
            assert all(torch.equal(one.layers[index].get_parameter(path), layer.get_parameter(path)) for one in ranks)
    for name in ("embed_tokens", "lm_head"):
        if getattr(whole, name) is not None:
            found = torch.cat([getattr(one, name).weight for one in ranks])
            wanted = getattr(whole, name).weight
            assert torch.equal(found[: len(wanted)], wanted) and not found[len(wanted) :].any()


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_model(tmp_path: Path, tied: bool) -> None:
    hf.save(decoder(tie_embeddings=tied), tmp_path / "model", max_shard_bytes=9000)
    for size in (2, 4):
        assert_ranks_hold_the_whole(tmp_path / "model", size)


def test_biases_of_summed_linears_stay_with_rank_0(tmp_path: Path) -> None:
    model = decoder(num_layers=1)
    mixer = model.config.layers[0].mixer.model_copy(update={"qkv_bias": True, "out_bias": True, "sinks": True})
    fed = model.config.layers[0].feed_forward.model_copy(update={"bias": True})
    layer = model.config.layers[0].model_copy(update={"mixer": mixer, "feed_forward": fed})
    biased = build(model.config.model_copy(update={"layers": (layer,)}))
    for name, one in biased.named_parameters():
        if name.endswith(("bias", "sinks")):
            one.detach().normal_(generator=torch.Generator().manual_seed(len(name)))
    hf.save(biased, tmp_path / "model")
    ranks = [local(tmp_path / "model", rank, 2) for rank in range(2)]
    for path in ("mixer.out", "feed_forward.down"):
        first, second = (one.layers[0].get_submodule(path).inner for one in ranks)
        assert torch.equal(first.bias, biased.layers[0].get_submodule(path).bias) and second.bias is None
    sinks = torch.cat([one.layers[0].mixer.sinks for one in ranks])
    assert sinks.unique().numel() == 4 and torch.equal(sinks, biased.layers[0].mixer.sinks), (
        "each rank has those of its heads"
    )
    assert torch.equal(
        torch.cat([one.layers[0].feed_forward.gate_up.bias.view(2, -1) for one in ranks], 1).flatten(),
        biased.layers[0].feed_forward.gate_up.bias,
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_a_quantized_model(tmp_path: Path, name: str) -> None:
    folder = write_quantized(decoder(num_layers=1, **SIZES), tmp_path / "model", *SCHEMES[name])
    assert_ranks_hold_the_whole(folder, 2)


def test_groups_that_a_rank_would_cut_are_said(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_kv_heads": 4, "intermediate_size": 192}
    folder = write_quantized(decoder(num_layers=1, **sizes), tmp_path / "model", *SCHEMES["int4 in groups"])
    assert_ranks_hold_the_whole(folder, 2)
    with pytest.raises(SpecError, match=r"mlp\.down_proj\.weight_scale cannot be divided among 4 .* columns 0\.\.\.47"):
        local(folder, 0, 4)


def test_permuted_columns_hadamards_and_runs_of_blocks_are_refused(tmp_path: Path) -> None:
    model = decoder(num_layers=1, **SIZES)
    folder = write_quantized(model, tmp_path / "gptq", *SCHEMES["gptq"])
    tensors = Shards(folder)
    values = {name: tensors.tensor(name).clone() for name in tensors.names()}
    name = "model.layers.0.mlp.down_proj.g_idx"
    values[name] = values[name].flip(0)
    tensors.close()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(iter(values.items()), folder, 10**9)
    with pytest.raises(SpecError, match=r"mlp\.down_proj\.g_idx permutes the columns"):
        local(folder, 0, 2)
    nf4 = Scheme(4, 64, number="nf4", layout="nf4")
    linear = LinearSpec("down", 256, (Piece("down", 128),), "gate*up", "row")
    (cut,) = cuts(linear, {"down_proj": 128}, 0, 2)
    with pytest.raises(SpecError, match=r"down_proj\.weight cannot be divided .* rows and columns in one run"):
        pieces_of(cut, lambda rows, columns: shapes_of(nf4, rows, columns), "weight", 2)


def test_what_cannot_be_divided_is_said(tmp_path: Path) -> None:
    hf.save(decoder(), tmp_path / "model")
    with pytest.raises(SpecError, match=r"layer 0: .*num_heads 4 cannot be divided among 3") as caught:
        local(tmp_path / "model", 0, 3)
    assert "tensor_parallel_size" in caught.value.fix
    with pytest.raises(HoneError, match="2 layers make no 3 pipeline stages"):
        local(tmp_path / "model", 0, 1, 0, 3)


def test_stages_have_the_layers_between_them(tmp_path: Path) -> None:
    model = decoder(num_layers=3, tie_embeddings=False)
    hf.save(model, tmp_path / "model")
    first, last = (local(tmp_path / "model", 0, 1, stage, 2) for stage in range(2))
    assert [*first.stage_layers, *last.stage_layers] == [0, 1, 2]
    assert [layer.mixer.layer for layer in last.layers] == list(last.stage_layers)
    assert torch.equal(first.embedding, model.embedding) and first.norm is None and first.lm_head is None
    assert last.embedding.numel() == 0 and torch.equal(last.lm_head.weight, model.lm_head.weight)


def test_stages_are_even_in_bytes_and_cut_no_shared_keys() -> None:
    assert stages_of([1.0] * 8, 2, (0, 0), set()) == [range(4), range(4, 8)]
    assert stages_of([1.0] * 8, 2, (2, 0), set()) == [range(3), range(3, 8)]
    assert stages_of([1.0] * 8, 4, (0, 0), set()) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert stages_of([1.0] * 4, 2, (0, 0), {2}) in ([range(1), range(1, 4)], [range(3), range(3, 4)])
    assert [len(one) for one in stage_layers(decoder(num_layers=6).config, 3)] == [2, 2, 2]
