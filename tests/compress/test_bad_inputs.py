"""Bad input: one error that names what is wrong and the way out, before anything is written; the given model stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.base.artifact import Artifact
from hone.base.errors import HoneError
from hone.base.run import Run
from hone.compress.stage import Compress
from tests.compress.test_resume import contents

INT4 = {"kind": "rtn", "bits": 4, "group_size": 32}
GPTQ = {"kind": "gptq", "bits": 4, "group_size": 32}


def weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """An edit of the folder's tensors."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return edit


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def quantized(folder: Path) -> None:
    made = folder.parent / "compress-once"
    Compress.read({"steps": [INT4]}).make(made, {"model": Artifact.read(folder)}, Run(quiet=True))
    shutil.rmtree(folder)
    shutil.copytree(made, folder)
    (folder / "hone.json").unlink()


def config(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "already quantized": (quantized, "is quantized already"),
    "not a number": (weights(not_a_number), "up_proj.*not finite"),
    "a missing tensor": (weights(lambda found: found.pop("model.layers.1.mlp.up_proj.weight")), "up_proj"),
    "a tensor of another shape": (
        weights(lambda found: found.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(8, 64)})),
        r"up_proj.* has shape \[8, 64\]",
    ),
    "integers for weights": (
        weights(lambda found: found.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)})),
        "model.norm.weight",
    ),
    "truncated weights": (truncated, "corrupt"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "a config that is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "an unknown family": (config(model_type="mystery"), "mystery"),
    "a smaller vocabulary than the tokenizer's": (config(vocab_size=40), "embed_tokens|vocab"),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "tokenizer"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_is_named(name: str, family_folder, calibration_text: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "compress-out"
    shutil.copytree(family_folder("llama"), folder)
    edit, words = MODELS[name]
    edit(folder)
    before = contents(folder)
    spec = {"steps": [GPTQ], "calibration_text": str(calibration_text), "num_sequences": 4, "seq_len": 32}
    with pytest.raises(HoneError, match=words) as caught:
        Compress.read(spec).make(out, {"model": Artifact.read(folder)}, Run(quiet=True))
    assert caught.value.fix
    assert contents(folder) == before and not out.exists()


SPECS: dict[str, tuple[dict, str]] = {
    "an unknown step": ({"steps": [{"kind": "gtpq"}]}, "gptq"),
    "no steps": ({"steps": []}, "give steps, or fit"),
    "an option that is none": ({"steps": [{**INT4, "bit": 3}]}, "bits"),
    "bits out of range": ({"steps": [{**INT4, "bits": 16}]}, "bits"),
    "groups that do not divide": ({"steps": [{**INT4, "group_size": 48}]}, "48 does not divide the 64 input features"),
    "two quantizers": ({"steps": [INT4, GPTQ]}, "which rtn removes"),
    "a pruner after a quantizer": ({"steps": [INT4, {"kind": "magnitude"}]}, "which rtn removes"),
    "no calibration": ({"steps": [GPTQ], "calibration_text": None}, "needs hessian"),
    "no such text": ({"steps": [GPTQ], "calibration_text": "/nowhere.txt"}, "No such file"),
    "too little text": ({"steps": [GPTQ], "calibration_text": "SHORT"}, "has 0 sequences of 32 tokens"),
    "a text that is none": ({"steps": [GPTQ], "calibration_text": "BINARY"}, "not UTF-8"),
    "too long sequences": ({"steps": [GPTQ], "seq_len": 4096}, "longer than the model's context"),
    "a pattern that is none": ({"steps": [INT4], "targets": ["("]}, "not a regular expression"),
    "targets that match nothing": ({"steps": [INT4], "targets": ["transformer.h"]}, "targets: .* matches none of the"),
    "a name that is misspelled": (
        {"steps": [INT4], "ignore": ["re:.*dwn_proj"]},
        "ignore: 're:\\.\\*dwn_proj' matches none",
    ),
    "all that is targeted ignored": ({"steps": [INT4], "targets": ["mlp"], "ignore": ["_proj"]}, "name no linear"),
    "half of a fused matrix": ({"steps": [INT4], "ignore": ["q_proj"]}, "target or ignore them together|leave out"),
    "AWQ with three bits": ({"steps": [{**INT4, "bits": 3, "layout": "awq"}]}, "awq"),
    "one byte for four bits": ({"steps": [{**INT4, "layout": "int-quantized"}]}, "int-quantized stores 8 bits"),
    "all weights zero": ({"steps": [{"kind": "wanda", "sparsity": 1.0}]}, "sparsity"),
    "a pattern of another sparsity": ({"steps": [{"kind": "wanda", "pattern": "2:4", "sparsity": 0.7}]}, "zeroes half"),
    "fixed scales of inputs without inputs": (
        {"steps": [{**INT4, "activations": "int8_tensor"}], "calibration_text": None},
        "needs calibration inputs",
    ),
    "a size that is none": ({"steps": [], "fit": "six"}, "is no size"),
    "a budget below two bits": ({"steps": [], "fit": "20KB"}, "no compression of"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_bad_spec_is_named(name: str, family_folder, calibration_text: Path, tmp_path: Path) -> None:
    (tmp_path / "SHORT").write_text("too short")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00" * 500)
    fields, words = SPECS[name]
    values = {"calibration_text": str(calibration_text), "num_sequences": 4, "seq_len": 32, **fields}
    if values["calibration_text"] in ("SHORT", "BINARY"):
        values["calibration_text"] = str(tmp_path / values["calibration_text"])
    with pytest.raises(HoneError, match=words) as caught:
        Compress.read(values).make(
            tmp_path / "compress-out", {"model": Artifact.read(family_folder("llama"))}, Run(quiet=True)
        )
    assert caught.value.fix
    assert not (tmp_path / "compress-out").exists()
