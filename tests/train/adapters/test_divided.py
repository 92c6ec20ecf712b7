"""Adapters beside a frozen model that ranks divide among them (zero3, HSDP, tensor parallelism): the training is that of one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.cost.train.replicas import Divided
from hone.model import hf
from hone.model.decoder import build
from hone.model.quantized.nf4_base import nf4_base
from hone.train.loop import Trainer
from hone.train.stage import Train
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY
from tests.train.ranks import made

QUIET = Run(quiet=True)
SIZES = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 256}
SPEC: dict[str, Any] = {
    "adapter": {"kind": "lora", "rank": 4},
    "steps": 4,
    "batch_size": 8,
    "seq_len": 32,
    "optimizer": {"kind": "adamw", "lr": 1e-3, **STEADY},
    "validation": {"sequences": 8},
    "checkpoint": {"interval": 2, "keep": {"optimizer": True}},
}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "lora": ("dense", 2, {"data_parallel": "zero3"}),
    "qlora": ("nf4", 2, {"data_parallel": "zero3"}),
    "hsdp": ("nf4", 4, {"data_parallel": {"kind": "zero3", "data_parallel_replicate_degree": 2}}),
    "pissa": ("dense", 2, {"data_parallel": "zero3"}),
    "neighbours": ("dense", 4, {"data_parallel": {"kind": "zero3", "reshard_after_forward": 2}}),
    "tensor": ("dense", 2, {"tensor_parallel_degree": 2}),
    "tensor, all tokens": ("dense", 2, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
    "tensor, qlora": ("nf4", 2, {"tensor_parallel_degree": 2}),
    "tensor and zero3, qlora": ("nf4", 4, {"tensor_parallel_degree": 2, "data_parallel": "zero3"}),
    "weights stay": ("nf4", 2, {"data_parallel": {"kind": "zero3", "reshard_after_forward": "never"}}),
}


@pytest.fixture(scope="module")
def bases(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of model folders: `dense`, and `nf4` of it, with double quantization."""
    meta, folder = json.loads((data_folder / "tokens" / "meta.json").read_text()), tmp_path_factory.mktemp("divided")
    config = SHAPE.model_copy(update=SIZES).config(meta["vocab_size"], eos=meta["eos_token_id"])
    hf.save(build(config, seed=3), folder / "dense", data_folder)
    hf.save(nf4_base(hf.Checkpoint(folder / "dense")).build(), folder / "nf4", data_folder)
    return folder


def alone(bases: Path, data: Path, base: str, **changes: Any) -> Path:
    """The folder of one process's training."""
    out = bases / f"{base}-alone-{len(list(bases.iterdir()))}"
    parents = {"data": Artifact.read(data), "model": Artifact.read(bases / base)}
    return Train.read({**SPEC, **changes}).make(out, parents, QUIET).folder


def on_ranks(count: int, bases: Path, data: Path, base: str, out: Path, kill_at: int = 0, **changes: Any) -> Any:
    ended = together(count, _made, {**SPEC, **changes}, str(data), str(out), str(bases / base), kill_at)
    if not kill_at:
        assert all(one.returncode == 0 for one in ended), "\n".join(one.stderr[-2000:] for one in ended)
    return ended


def _made(spec: dict[str, Any], data: str, out: str, model: str, kill_at: int) -> str:
    if Run(quiet=True).mesh.rank:  # PiSSA's directions are found by rank 0 alone
        torch.linalg.svd = None
    return made(spec, data, out, kill_at, model=model)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("loss", "val_loss") if key in row]


def same(one: Path, other: Path) -> None:
    """Losses and adapters are equal to 2e-6, and so is all that a PEFT folder says."""
    assert losses(one) == pytest.approx(losses(other), abs=2e-6)
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) <= 2e-6
    assert any(float(value.abs().max()) > 1e-4 for name, value in mine.items() if "lora_B" in name)
    assert (one / "adapter_config.json").read_text() == (other / "adapter_config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kept"), [*((case, "none") for case in CASES), ("qlora", "full")])
def test_a_divided_model_trains_the_adapter_of_one_process(
    case: str, kept: str, bases: Path, data_folder: Path, tmp_path: Path
) -> None:
    base, count, layout = CASES[case]
    spec: dict[str, Any] = {"activation_checkpointing": kept}
    if case == "pissa":
        spec["adapter"] = {"kind": "pissa", "rank": 4}
    on_ranks(count, bases, data_folder, base, tmp_path / "ranks", parallelism=layout, **spec)
    same(tmp_path / "ranks", alone(bases, data_folder, base, **spec))


@pytest.mark.slow
def test_a_killed_training_goes_on_in_another_layout(
    bases: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with a divided quantized model are killed after checkpoints; one process ends the training, with its own numbers."""
    layout = {"data_parallel": "zero3"}
    on_ranks(2, bases, data_folder, "nf4", tmp_path / "killed", kill_at=5, steps=6, parallelism=layout)
    assert not (tmp_path / "killed").exists()
    wanted, made_now, step = alone(bases, data_folder, "nf4", steps=6), [], Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, batch: made_now.append(self.done) or step(self, batch))
    parents = {"data": Artifact.read(data_folder), "model": Artifact.read(bases / "nf4")}
    ended = Train.read({**SPEC, "steps": 6}).make(tmp_path / "killed", parents, QUIET)
    assert made_now[0] in (2, 4)
    same(ended.folder, wanted)


@pytest.mark.slow
def test_a_rank_keeps_its_part_of_the_codes_alone(bases: Path, data_folder: Path, tmp_path: Path) -> None:
    parallelism = {"data_parallel": "zero3"}
    given = ({**SPEC, "parallelism": parallelism}, str(data_folder), str(tmp_path / "ranks"), str(bases / "nf4"))
    for one in together(2, _kept, *given):
        assert one.returncode == 0, one.stderr[-2000:]
        there, kept, total = one.result
        assert there == 0
        assert total / 2 <= kept <= 1.5 * total / 2  # with what aligns its small tensors


def _kept(spec: dict[str, Any], data: str, out: str, model: str) -> tuple[int, int, int]:
    """Between two steps, bytes of the layers' frozen tensors: in memory, of this rank's part of them, and of all."""
    found, step = [], Trainer.step

    def looking(self: Trainer, batch: Any) -> Any:
        stepped, weights = step(self, batch), self.update.weights
        for layer in self.model.layers:
            tensors = [one for one in (*layer.parameters(), *layer.buffers()) if not one.requires_grad]
            there = sum(one.untyped_storage().nbytes() for one in tensors)
            found.append((there, 0, sum(one.nbytes for one in tensors)))
        found.extend((0, one._own.nbytes, 0) for layer in weights._frozen for one in layer)
        return stepped

    Trainer.step = looking  # type: ignore[method-assign]
    made({**spec, "steps": 1}, data, out, model=model)
    return tuple(map(sum, zip(*found, strict=True)))  # type: ignore[return-value]


def test_the_plan_divides_the_frozen_layers() -> None:
    """By hand: 10 layers of 100 bytes of codes, ends of 2 x 8 x 4 numbers in 2 bytes each, four ranks."""
    dims = SHAPE.config(50, eos=0).dims()
    sizes = {"num_params": 64 + 1000, "vocab_size": 8, "hidden_size": 4, "tie_embeddings": False}
    dims = replace(dims, layers=dims.layers[:1] * 10, **sizes)
    held = {within: Divided(4, 4, {"weights"}, within=within).frozen_bytes(dims, 2, 1128.0) for within in (0, 1, 2)}
    assert held == {0: 128 + 250 + 200, 1: 128 + 250 + 1000, 2: 128 + 250 + 200 + 500}
    assert Divided(4, 4, {"optimizer"}).frozen_bytes(dims, 2, 1128.0) == 1128
    found = Divided(4, 4, {"weights"}).frozen_messages(dims, 2, 1128.0, 3)
    assert found == [("all_gather", 4, 100.0, 6, 1)] * 10
    assert Divided(4, 4, {"weights"}, within=1).frozen_messages(dims, 2, 1128.0, 3)[0].times == 3
