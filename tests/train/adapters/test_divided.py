"""Adapters beside a frozen model that ranks divide among them (zero3, HSDP, tensor parallelism): the training is that of one process."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.cost.activations.segments import keep_all
from hone.cost.train.figures import state_bytes
from hone.cost.train.replicas import Divided
from hone.cost.train.tensor import part_of
from hone.cost.train.training import Training
from hone.model import hf
from hone.model.adapters.lora import LoRA
from hone.model.adapters.peft import adapted
from hone.model.adapters.pissa import PiSSA
from hone.model.decoder import build
from hone.model.facts import CheckpointFacts
from hone.model.quantized.nf4_base import nf4_base
from hone.parallel.cut import Cut
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.stage import Train
from hone.train.tensor_parallel.decoder import _maker, cuts_of
from hone.train.tensor_parallel.parts import PartDecoder
from hone.train.to_cost.training import codes_of
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
    "tensor, pissa": ("dense", 2, {"tensor_parallel_degree": 2}),
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
    if "pissa" in case:
        spec["adapter"] = {"kind": "pissa", "rank": 4}
    on_ranks(count, bases, data_folder, base, tmp_path / "ranks", parallelism=layout, **spec)
    same(tmp_path / "ranks", alone(bases, data_folder, base, **spec))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"data_parallel": "zero3"}, {"tensor_parallel_degree": 2}])
def test_a_killed_training_goes_on_in_another_layout(
    layout: dict[str, Any], bases: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with a divided quantized model are killed after checkpoints; one process ends the training, with its own numbers."""
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


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@pytest.mark.parametrize("sizes", [{}, {"rank_pattern": {"down_proj": 5}}])
def test_the_parts_of_the_ranks_are_those_that_their_modules_have(family: str, sizes: dict[str, Any]) -> None:
    """With biases (Qwen2), and with q, k and v in one checkpoint module (Phi-3), of which a rank has rows of each."""
    plain = SHAPE.model_copy(update=SIZES).config(61, eos=0).model_copy(update={"family": family})
    config = adapted(plain, LoRA.read({"kind": "lora", "rank": 4, **sizes}))
    whole, ranks = build(config, seed=1), 2
    generator = torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        parameter.data.normal_(generator=generator)
    x, tokens = torch.randn(3, 128, generator=generator), torch.arange(12).view(1, 12)
    parts = [PartDecoder(whole, config.local(ranks), _Alone(rank), _maker(_Alone(rank))) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        part.take(whole, cuts_of(config, rank, ranks))
    names = [name for name in whole.state_dict() if "lora_" in name]
    assert names and {name for name in parts[1].cuts if "lora_" in name} == {
        name for name in names if ("lora_A" in name) == (".mixer.out." in name or ".down." in name)
    }
    for layer in range(config.num_layers):
        block = whole.layers[layer].mixer
        rows = [part.layers[layer].mixer.qkv(x) for part in parts]
        cut = [part.cuts[f"layers.{layer}.mixer.qkv.inner.weight"] for part in parts]
        found = torch.zeros(cut[0].shape[0], len(x))
        for one, part in zip(cut, rows, strict=True):
            one.put(part.T, found)
        torch.testing.assert_close(found.T, block.qkv(x), atol=1e-4, rtol=1e-4)
        inputs = torch.randn(3, 256, generator=generator)
        down = [
            part.layers[layer].feed_forward.down(half) for part, half in zip(parts, inputs.chunk(2, 1), strict=True)
        ]
        torch.testing.assert_close(sum(down), whole.layers[layer].feed_forward.down(inputs), atol=1e-3, rtol=1e-4)
    assert whole(tokens).isfinite().all()


class _Alone:
    """An axis of two ranks that sends nothing."""

    size = 2

    def __init__(self, index: int) -> None:
        self.index = index


def test_parts_of_a_matrix_of_codes_are_parts_of_its_values(bases: Path) -> None:
    whole = hf.Checkpoint(bases / "nf4").build().layers[0].feed_forward.down
    values = whole.dequantize(torch.float32)
    assert whole.doubled and values.shape == (128, 256)
    rows = whole.cut(Cut((128, 256), 0, ((0, 10), (64, 70))), bias=False)
    columns = whole.cut(Cut((128, 256), 1, ((128, 256),)), bias=False)
    assert torch.equal(rows.dequantize(torch.float32), values[[*range(10), *range(64, 70)]])
    assert torch.equal(columns.dequantize(torch.float32), values[:, 128:])
    with pytest.raises(SpecError, match="begin or end inside a block of 64 codes"):
        whole.cut(Cut((128, 256), 1, ((0, 96),)), bias=False)


def test_the_plan_of_tensor_parallel_ranks_counts_parts(bases: Path) -> None:
    """By hand: of the factors a rank has half of B's rows or of A's columns and the other factor; of codes half, with float32 scales."""
    given = CheckpointFacts.of(bases / "nf4")
    config = adapted(given.config, LoRA.read(SPEC["adapter"]))
    local, hidden, inner, layers = config.local(2).trained_dims(), 128, 256, 2
    columns = 3 * 4 * hidden + 4 * 256 // 2 + 2 * 4 * hidden + 4 * 2 * inner // 2  # A and B of q, k, v and of gate, up
    rows = 4 * hidden // 2 + 4 * hidden + 4 * inner // 2 + 4 * hidden  # of out and down
    assert local is not None and local.num_params == layers * (columns + rows)
    part = part_of(config.local(2).dims(), 2)
    coded = layers * (256 * hidden + hidden * hidden + 3 * inner * hidden)
    found = codes_of(config, given, "float32", part, local)
    ends = given.weights_bytes - coded * (0.5 + (1 + 4 / 256) / 64)
    assert found == pytest.approx(coded / 2 * (0.5 + 4 / 64) + ends / 2, rel=0.1)
    costs = partial(AdamW().cost, dtype="float32", device="cpu")
    shared = Parallelism.read({"tensor_parallel_degree": 2}).shared(config, costs, 1, 64)
    work = Training(
        model=config.dims(), steps=1, batch_size=2, seq_len=64, dtype="float32", segments=keep_all(2),
        update=shared.update, tensor=shared.tensor, trained=config.trained_dims(), trained_part=local,
    )  # fmt: skip
    # A checkpoint has the factors of all ranks once.
    assert state_bytes(work) == pytest.approx(8 * config.trained_params)


def test_the_rank_of_pissa_may_be_above_the_rows_of_a_part() -> None:
    """The directions are those of the whole weight, of 64 rows of k; a rank has 32 of them."""
    plain = SHAPE.model_copy(update=SIZES).config(61, eos=0)
    config = adapted(plain, PiSSA.read({"kind": "pissa", "rank": 40}))
    assert "layers.0.mixer.qkv.lora_B_k" in cuts_of(config, 0, 2) and config.local(2).trained_dims() is not None
    with pytest.raises(SpecError, match="rank 80 takes more directions than the 64"):
        adapted(plain, PiSSA.read({"kind": "pissa", "rank": 80}))


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
