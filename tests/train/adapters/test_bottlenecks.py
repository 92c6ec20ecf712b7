"""A bottleneck adapter in `hone train`: its folder is AdapterHub's, and a training goes on from it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.model.adapters import peft
from hone.train.stage import Train
from tests.train.adapters.test_training import SPEC, base, train  # noqa: F401  (base is a fixture)


def test_hone_trains_one_and_writes_adapterhub_s_folder(base: Path, data_folder: Path) -> None:  # noqa: F811
    made = train(base, data_folder, "tuned", adapter={"kind": "houlsby"}, steps=3)
    tensors = load_file(made.folder / "adapter.safetensors")
    assert len(tensors) == 2 * 2 * 4 and not list(made.folder.glob("adapter_model*"))
    values = json.loads((made.folder / "adapter_config.json").read_text())
    assert values["model_name"] == str(base.resolve()) and values["hidden_size"] == 48
    assert peft.read(made.folder).kind == "houlsby"
    losses = [json.loads(line).get("loss") for line in (made.folder / "steps.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0]
    parents = {"data": Artifact.read(data_folder), "model": made}
    more = Train.read({**SPEC, "adapter": None, "steps": 1, "checkpoint": {"interval": 0}})
    longer = load_file(more.make(base.parent / "longer", parents, Run(quiet=True)).folder / "adapter.safetensors")
    assert longer.keys() == tensors.keys()
    assert not any(torch.equal(longer[name], tensors[name]) for name in tensors)
