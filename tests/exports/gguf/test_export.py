"""Export of model folders: names, row order, types, notes, and what is refused."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

import hone
from hone.base.errors import ArtifactError, SpecError
from hone.base.run import Run
from hone.cli import main
from hone.exports.api import export
from hone.exports.base import Exported
from hone.exports.gguf import container, source
from hone.model.decoder import build
from hone.model.hf import load
from hone.model.shape import Shape
from hone.model.tokenizer import load_tokenizer

GPTQ = {"kind": "gptq", "bits": 4, "group_size": 32, "scale": "signed"}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor's weights in float32, as gguf-py reads them."""
    gguf = pytest.importorskip("gguf")
    return {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(path).tensors}


def metadata(path: Path) -> dict:
    gguf = pytest.importorskip("gguf")
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i and i + d / 2 of every head become rows 2 i and 2 i + 1."""
    out, size = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for place in range(size // 2):
            out[head * size + 2 * place] = rows[head * size + place]
            out[head * size + 2 * place + 1] = rows[head * size + size // 2 + place]
    return out


def changed(folder: Path, to: Path, **values) -> Path:
    """A copy of a model folder with other fields in config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | values))
    return to


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_where_llama_cpp_looks_for_it(family: str, family_folder, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    made = export(family_folder(family), tmp_path / "model.gguf", type="f32")
    found, model = tensors(made.path), load(family_folder(family))
    arch = gguf.MODEL_ARCH.LLAMA if family in ("llama", "mistral") else getattr(gguf.MODEL_ARCH, family.upper())
    known = {gguf.TENSOR_NAMES[one].format(bid=index) for one in gguf.MODEL_TENSORS[arch] for index in range(2)}
    assert {name.rpartition(".")[0] for name in found} <= known
    heads = {"q": 4, "k": 2} if family in ("llama", "mistral") else {}
    for index, layer in enumerate(model.layers):
        weight, bias = layer.mixer.qkv.weight.detach(), layer.mixer.qkv.bias
        begin = 0
        for piece in ("q", "k", "v"):
            rows = found[f"blk.{index}.attn_{piece}.weight"]
            own = weight[begin : begin + len(rows)].numpy()
            assert np.array_equal(rows, interleaved(own, heads[piece]) if piece in heads else own), piece
            if bias is not None:
                assert np.array_equal(found[f"blk.{index}.attn_{piece}.bias"], bias[begin : begin + len(rows)].detach())
            begin += len(rows)
    assert ("output.weight" in found) == (family not in ("llama", "qwen3"))
    assert made.num_bytes == made.path.stat().st_size
    assert made.types.keys() == found.keys()


def test_int4_codes_are_kept_without_loss(family_folder, compress, tmp_path: Path) -> None:
    folder = compress(family_folder("llama"), {**GPTQ, "scale_dtype": "float16"}).folder
    made = export(folder, tmp_path / "model.gguf")
    found, model = tensors(made.path), load(folder, dtype=torch.float32)
    for index, layer in enumerate(model.layers):
        whole = layer.mixer.qkv.dequantize(torch.float32).numpy()
        assert np.array_equal(found[f"blk.{index}.attn_q.weight"], interleaved(whole[:64], 4))
        assert np.array_equal(found[f"blk.{index}.attn_k.weight"], interleaved(whole[64:96], 2))
        assert np.array_equal(found[f"blk.{index}.attn_v.weight"], whole[96:])
        down = layer.feed_forward.down.dequantize(torch.float32).numpy()
        assert np.array_equal(found[f"blk.{index}.ffn_down.weight"], down)
    assert made.types["blk.0.ffn_up.weight"] == "q4_0" and made.types["token_embd.weight"] == "q8_0"
    assert "14 matrices keep the codes of the folder, without loss" in made.notes
    assert metadata(made.path)["hone.notes"] == made.notes
    assert metadata(made.path)["general.file_type"] in (2, 7)
    wider = tensors(export(folder, tmp_path / "wider.gguf", type="q8_0").path)
    for name, rows in found.items():
        assert np.array_equal(wider[name], rows), "eight bits hold four"


STORED = {
    "int8-channel": ({"kind": "rtn", "bits": 8, "group_size": 0}, "q8_0", "keep the codes"),
    "int3": ({"kind": "rtn", "bits": 3, "group_size": 32}, "q4_0", "keep the codes"),
    "int5": ({"kind": "rtn", "bits": 5, "group_size": 32}, "q5_0", "keep the codes"),
    "int4-eights": (
        {"kind": "rtn", "bits": 4, "group_size": 8},
        "q8_0",
        "dequantized from int4 (group), stored as q8_0",
    ),
}


@pytest.mark.parametrize("stored", STORED)
def test_other_integers_are_kept_or_said_to_be_dequantized(
    stored: str, family_folder, compress, tmp_path: Path
) -> None:
    step, kind, note = STORED[stored]
    folder = compress(family_folder("qwen2"), {**step, "scale_dtype": "float16"}).folder
    made = export(folder, tmp_path / "model.gguf")
    assert made.types["blk.1.ffn_down.weight"] == kind
    assert any(note in one for one in made.notes), made.notes
    own = load(folder, dtype=torch.float32).layers[1].feed_forward.down.dequantize(torch.float32).numpy()
    error = np.abs(tensors(made.path)["blk.1.ffn_down.weight"] - own).max()
    assert error == 0 if note == "keep the codes" else error < 0.01 * np.abs(own).max()


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
def test_layouts_of_other_libraries_give_the_same_tensors(layout: str, family_folder, compress, tmp_path: Path) -> None:
    step = {"kind": "rtn", "group_size": 32, "scale_dtype": "float16"}
    made = {}
    for name in ("pack-quantized", layout):
        folder = compress(family_folder("llama"), {**step, "layout": name}, name=name).folder
        made[name] = export(folder, tmp_path / f"{name}.gguf")
    assert made[layout].types == made["pack-quantized"].types
    found, wanted = tensors(made[layout].path), tensors(made["pack-quantized"].path)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_nf4_is_dequantized(family_folder, compress, tmp_path: Path) -> None:
    folder = compress(family_folder("llama"), {"kind": "nf4", "block_size": 32, "double_quant": True}).folder
    found = tensors(export(folder, tmp_path / "model.gguf", type="f32").path)["blk.1.ffn_down.weight"]
    assert np.array_equal(found, load(folder).layers[1].feed_forward.down.dequantize(torch.float32).numpy())


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_floats_with_scales_of_one_byte_are_dequantized(kind: str, family_folder, compress, tmp_path: Path) -> None:
    folder = compress(family_folder("qwen2"), {"kind": kind}).folder
    made = export(folder, tmp_path / "model.gguf", type="f32")
    own = load(folder, dtype=torch.float32).layers[1].feed_forward.down.dequantize(torch.float32).numpy()
    assert np.array_equal(tensors(made.path)["blk.1.ffn_down.weight"], own)


def test_scales_that_float16_rounds_are_said(family_folder, compress, tmp_path: Path) -> None:
    folder = compress(family_folder("qwen2"), {**GPTQ, "scale_dtype": "float32"}).folder
    made = export(folder, tmp_path / "model.gguf", type="q4_0")
    (note,) = (one for one in made.notes if "keep the codes" in one)
    assert "rounded to float16 (by up to 4" in note  # half of 2^-10 at most
    own = load(folder, dtype=torch.float32).layers[1].feed_forward.down.dequantize(torch.float32).numpy()
    assert np.allclose(tensors(made.path)["blk.1.ffn_down.weight"], own, rtol=2**-11, atol=0)


def test_scales_that_float16_cannot_hold_are_refused(family_folder, compress, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "copy"
    shutil.copytree(compress(family_folder("qwen2"), {**GPTQ, "scale_dtype": "float32"}).folder, folder)
    (shard,) = folder.glob("model-00002*")
    for value, other in ((1e-9, "f16"), (1e9, "f32")):
        state = load_file(shard)
        state["model.layers.0.mlp.up_proj.weight_scale"][0, 0] = value
        save_file(state, shard, metadata={"format": "pt"})
        with pytest.raises(ArtifactError, match=r"layers\.0\.mlp\.up_proj: float16 cannot hold its scales"):
            export(folder, tmp_path / "model.gguf")
        assert export(folder, tmp_path / f"{other}.gguf", type=other).path.exists()


def test_rows_that_do_not_fit_are_said_and_recorded(family_folder, tmp_path: Path) -> None:
    folder = family_folder("mistral")
    made = export(folder, tmp_path / "model.gguf", type="q4_k", embedding_type="q6_k")
    assert set(made.types.values()) == {"q5_0", "q8_0", "f32"}
    assert any(one.startswith("blk.*.ffn_down.weight (2): q5_0, because rows of 96") for one in made.notes), made.notes
    assert any(one.startswith("token_embd.weight, output.weight: q8_0, because rows of 64") for one in made.notes)
    assert metadata(made.path)["hone.notes"] == made.notes


def test_a_folder_that_mixes_dense_and_quantized_says_so(family_folder, compress, tmp_path: Path) -> None:
    folder = compress(family_folder("qwen2"), {**GPTQ, "scale_dtype": "float16"}, targets=("mlp",)).folder
    made = export(folder, tmp_path / "model.gguf")
    assert made.types["blk.0.attn_q.weight"] == "q8_0" and made.types["blk.0.ffn_up.weight"] == "q4_0"
    assert any("not quantized in the folder, stored as q8_0" in one for one in made.notes)


def test_a_dense_folder_keeps_its_dtype_and_large_matrices_come_in_pieces(
    family_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.exports.gguf import source

    whole = export(family_folder("llama"), tmp_path / "whole.gguf", type="q4_0")
    monkeypatch.setitem(source.CHUNK, "cpu", 256)
    parts = export(family_folder("llama"), tmp_path / "parts.gguf", type="q4_0")
    assert whole.path.read_bytes() == parts.path.read_bytes()
    assert set(export(family_folder("llama"), tmp_path / "plain.gguf").types.values()) == {"f32"}


def test_ends_that_gguf_has_no_key_for_are_said(family_folder, tmp_path: Path) -> None:
    folder = changed(family_folder("llama"), tmp_path / "ends", eos_token_id=[5, 6, 7, 8])
    (folder / "generation_config.json").unlink(missing_ok=True)
    made = export(folder, tmp_path / "model.gguf")
    ends = load_tokenizer(folder).eos_ids
    assert len(ends) > 3 and any(f"ends at {load_tokenizer(folder).token_text(ends[3])}" in one for one in made.notes)
    kept = [metadata(made.path)[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert kept == list(ends[:3])
    assert not any("end a text" in one for one in export(family_folder("llama"), tmp_path / "one.gguf").notes)


def test_importance_reaches_its_module(family_folder, tmp_path: Path) -> None:
    plain = tensors(export(family_folder("qwen2"), tmp_path / "plain.gguf", type="q4_0").path)
    importance = {"model.layers.1.mlp.up_proj": torch.logspace(-4, 2, 64)}
    made = tensors(export(family_folder("qwen2"), tmp_path / "made.gguf", None, importance, type="q4_0").path)
    different = [name for name in made if not np.array_equal(made[name], plain[name])]
    assert different == ["blk.1.ffn_up.weight"]
    for given, says in (
        ({"layers.1.feed_forward.up": torch.ones(64)}, "'layers.1.feed_forward.up', which is no matrix"),
        ({"model.layers.1.self_attn.q_proj": torch.ones(3)}, r"has the shape \(3,\), the matrix 64 columns"),
        ({"model.norm": torch.ones(64)}, "which is no matrix"),
    ):
        with pytest.raises(SpecError, match=says):
            export(family_folder("qwen2"), tmp_path / "none.gguf", None, given)


def test_a_model_that_llama_cpp_computes_otherwise_is_refused(family_folder, tmp_path: Path) -> None:
    folder, out = family_folder("llama"), tmp_path / "model.gguf"
    own = build(Shape(hidden_size=32, num_heads=4, num_kv_heads=2, num_layers=2, mixers=("retnet",)).config(60))
    with pytest.warns(RuntimeWarning, match="Only hone reads"):
        hone.save(own, tmp_path / "own")
    with pytest.raises(SpecError, match="type 'hone' cannot be exported as GGUF") as error:
        export(tmp_path / "own", out)
    assert "llama, mistral, qwen2, qwen3, phi3" in error.value.fix
    cases = {
        "hidden_act": ("gelu_pytorch_tanh", "computes SiLU"),
        "rope_scaling": ({"rope_type": "dynamic", "factor": 2.0}, "rotary scaling 'dynamic'"),
    }
    for number, (field, (value, message)) in enumerate(cases.items()):
        values = {field: value, "rope_parameters": None} if field == "rope_scaling" else {field: value}
        with pytest.raises(SpecError, match=message):
            export(changed(folder, tmp_path / f"changed-{number}", **values), out)
    assert not out.exists()


def test_a_window_shortens_the_context_with_a_note(family_folder, tmp_path: Path) -> None:
    folder = changed(family_folder("mistral"), tmp_path / "windowed", sliding_window=32)
    made = export(folder, tmp_path / "model.gguf")
    assert metadata(made.path)["llama.context_length"] == 32
    assert any("the sliding window" in one for one in made.notes)


def test_existing_files_folders_and_foreign_names(family_folder, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(ArtifactError, match="exists"):
        export(family_folder("llama"), out)
    assert out.read_bytes() == b"mine"
    assert export(family_folder("llama"), out, Run(redo=True, quiet=True)).num_bytes == out.stat().st_size
    with pytest.raises(SpecError, match=r"does not end in \.gguf"):
        export(family_folder("llama"), tmp_path / "folder")
    with pytest.raises(ArtifactError, match="no folder"):
        export(tmp_path / "nothing", tmp_path / "b.gguf")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    with pytest.raises(ArtifactError, match="is an adapter"):
        export(adapter, tmp_path / "b.gguf")


def test_of_two_exports_into_one_file_the_second_ends_and_the_first_is_whole(
    family_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, alone = family_folder("llama"), tmp_path / "model.gguf", tmp_path / "alone.gguf"
    export(folder, alone, type="q8_0")
    whole, begun, goes_on, pieces = alone.read_bytes(), Event(), Event(), source.pieces

    def slow(*arguments):
        begun.set()
        assert goes_on.wait(100)
        return pieces(*arguments)

    with ThreadPoolExecutor(1) as first:
        monkeypatch.setattr(source, "pieces", slow)
        made = first.submit(export, folder, out, type="q8_0")
        assert begun.wait(100)
        for redo in (False, True):
            with pytest.raises(ArtifactError, match=r"another process is writing .*model\.gguf") as caught:
                export(folder, out, Run(redo=redo, quiet=True), type="q4_0")
            assert caught.value.fix == "wait for it, or give another file"
        goes_on.set()
        assert made.result(100).path == out
    assert out.read_bytes() == whole


def test_an_export_does_not_replace_what_another_one_has_finished_since_it_began(
    family_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, header = family_folder("llama"), tmp_path / "model.gguf", container.header

    def late(*arguments):
        monkeypatch.setattr(container, "header", header)
        export(folder, out, type="q8_0")
        return header(*arguments)

    monkeypatch.setattr(container, "header", late)
    with pytest.raises(ArtifactError, match=r"model\.gguf exists"):
        export(folder, out, type="q4_0")
    assert out.read_bytes() == export(folder, tmp_path / "again.gguf", type="q8_0").path.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"again.gguf", "model.gguf"}


def test_weights_that_are_not_finite_or_missing_are_refused(family_folder, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed(family_folder("qwen2"), tmp_path / "broken")
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.inf
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"layers\.1\.mlp\.up_proj\.weight has values that are not finite"):
        export(folder, tmp_path / "model.gguf", type="q4_0")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match="has no tensor"):
        export(folder, tmp_path / "model.gguf", type="q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_the_command_line(family_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.gguf"
    assert main(["export", str(family_folder("llama")), "--type=q4_k", f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    assert str(out) in printed and "q5_0 14" in printed and "note: blk.*" in printed
    assert main(["export", str(family_folder("llama")), f"--out={out}"]) == 2
    assert "--redo" in capsys.readouterr().err
    assert main(["export", str(family_folder("llama")), "--type=q9"]) == 2
    assert "--out=" in capsys.readouterr().err
    assert main(["export", str(family_folder("llama")), "--typ=q8_0", f"--out={out}"]) == 2
    assert "type" in capsys.readouterr().err
    assert main(["export", "--help"]) == 0
    assert "--embedding_type" in capsys.readouterr().out
    assert isinstance(hone.export(family_folder("llama"), tmp_path / "b.gguf", type="f16"), Exported)
