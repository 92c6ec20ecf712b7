"""What each of several ranks does in the tests of data-parallel training."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hone.base.artifact import Artifact
from hone.base.errors import HoneError
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.feed.load import PackedTokens
from hone.model.balance import BALANCES
from hone.model.config import ModelConfig
from hone.model.decoder import Drawn, build, unmade
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.mixers import MIXERS
from hone.model.mixers.shared_kv import SharedKV
from hone.model.routers import ROUTERS
from hone.train import ACTIVATION_CHECKPOINTINGS, DATA_PARALLEL, OBJECTIVES, OPTIMIZERS, PIPELINE_SCHEDULES, stage
from hone.train.checkpoint import Checkpoints
from hone.train.faults.checksums import of_tensor
from hone.train.loop import Trainer
from hone.train.objectives.preference.measure import validate
from hone.train.optimizers.adamw import AdamWRule
from hone.train.parallelism import Parallelism
from hone.train.pipeline.stages import Stages
from hone.train.ranks import Ranks
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE, STEADY

# What a rank would import on its way: ranks are forked from this process, which imports it once for all.
for _table, _names in (
    (OPTIMIZERS, [*OPTIMIZERS]),
    (OBJECTIVES, [*OBJECTIVES]),
    (ACTIVATION_CHECKPOINTINGS, [*ACTIVATION_CHECKPOINTINGS]),
    (DATA_PARALLEL, [*DATA_PARALLEL]),
    (PIPELINE_SCHEDULES, [*PIPELINE_SCHEDULES]),
    (MIXERS, ["attention", "mla", "shared_kv", "sliding_window"]),
    (FEED_FORWARDS, ["swiglu", "moe"]),
    (ROUTERS, [*ROUTERS]),
    (BALANCES, [*BALANCES]),
):
    for _name in _names:
        _table[_name]
for _module in ("hone.feed.mix.reading", "hone.train.result", "hone.train.student", "torch.utils.tensorboard"):
    importlib.import_module(_module)

COMPILE, FUSES = torch.compile, AdamWRule.fuses
BATCH, SEQ, STEPS = 8, 32, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": STEADY,
    "muon": STEADY,
    "adafactor": {},
    "lion": {},
    "soap": {"eps": 1e-4},
    "adamw_8bit": {**STEADY, "min_elements": 1024},
}


def sharing(config: ModelConfig, every: int = 2) -> ModelConfig:
    """`config` whose layers, but for each `every`-th, read the keys of an earlier one."""
    mixer = config.layers[0].mixer
    reader = SharedKV(kind="shared_kv", num_heads=mixer.num_heads, head_dim=mixer.head_dim, rope=mixer.rope)
    layers = [one.model_copy(update={"mixer": reader}) if at % every else one for at, one in enumerate(config.layers)]
    return config.model_copy(update={"layers": tuple(layers)})


def trainer(data: PackedTokens, mesh: Mesh, setting: dict[str, Any]) -> Trainer:
    """A trainer of this rank; `setting` is what of it differs from the default."""
    names = ("data_parallel", "context_parallel", "context_parallel_degree")
    chosen = {name: setting[name] for name in names if name in setting}
    shared = Parallelism.read({**chosen, **setting.get("parallelism", {})})
    ranks = shared.ranks(mesh, "cpu")
    name = setting.get("optimizer", "adamw")
    shape = SHAPE.model_copy(update=setting.get("model", {}))
    config = shape.config(data.vocab_size, eos=data.eos_token_id)
    if setting.get("tied"):
        config = config.model_copy(update={"tie_embeddings": True})
    if setting.get("shared_kv"):  # every second layer reads the keys of the one before
        config = sharing(config)
    if setting.get("biased"):
        layers = [
            one.model_copy(update={"mixer": one.mixer.model_copy(update={"qkv_bias": True, "out_bias": True})})
            for one in config.layers
        ]
        config = config.model_copy(update={"layers": tuple(layers)})
    in_parts = mesh.world_size > 1  # as the stage does
    model = unmade(config, Drawn(config, "cpu", seed=1)) if in_parts else build(config, seed=1)
    teacher = None
    if "distill" in setting:
        teacher = build(SHAPE.model_copy(update={"num_layers": 1, "num_kv_heads": 4}).config(data.vocab_size), seed=2)
    zeros = None
    if setting.get("masked"):
        drawn = torch.Generator().manual_seed(0)
        zeros = {
            name: torch.rand(part.shape, generator=drawn) < 0.5
            for name, part in model.named_parameters()
            if name.endswith("down.weight")
        }
    if setting.get("compile"):  # traced and differentiated as inductor's graphs are, without its C++
        torch.compile = partial(COMPILE, backend="aot_eager")
    AdamWRule.fuses = FUSES if not setting.get("fused") else lambda *_: True  # type: ignore[method-assign]
    model = shared.decoder(model, ranks, SEQ, setting.get("layers") and [range(*one) for one in setting["layers"]])
    if setting.get("traced"):  # as torch.compile cuts and guards them, without its compiler
        for layer in model.layers:
            layer.compile(dynamic=False, backend="eager")
    return shared.trainer()(
        model,
        steps=setting.get("steps", STEPS),
        schedule=Cosine(warmup=1),
        optimizer=OPTIMIZERS.read({"kind": name, "lr": 1e-3, **OPTIONS[name]}),
        precision=setting.get("precision", "fp32"),
        gradient_accumulation_steps=setting.get("gradient_accumulation_steps", 1),
        max_grad_norm=setting.get("max_grad_norm", 1.0),
        activation_checkpointing=ACTIVATION_CHECKPOINTINGS.read(setting.get("activation_checkpointing", "none")),
        compile=setting.get("compile", False),
        zeros=zeros,
        ranks=ranks,
        objective=OBJECTIVES.read({"kind": "distill", **setting["distill"]}) if teacher else None,
        teacher=shared.teacher(teacher, ranks),
        offload=shared.offload,
    )


def batch(data: PackedTokens, ranks: Ranks, step: int, *, uneven: bool = False) -> Any:
    """This rank's sequences of a step's batch; `uneven`: only the first one of the whole batch has all its targets."""
    index, parts = ranks.data
    each = BATCH // parts
    mine = np.arange(step * BATCH + index * each, step * BATCH + (index + 1) * each)
    found = data.sequences(mine, SEQ, 0)
    if uneven:
        targets = found.targets.copy()
        targets[mine % BATCH != 0, 3:] = -100
        found = found._replace(targets=targets)
    return found


def trained(folder: str, out: str, settings: list[dict[str, Any]]) -> list[list]:
    """Trains with each of `settings`: the losses and norms of its steps. Every rank writes the weights it ends with."""
    torch.set_num_threads(1)
    mesh, data, found = Mesh.from_environment(), PackedTokens(folder), []
    for number, setting in enumerate(settings):
        with mesh.together():
            one = trainer(data, mesh, setting)
            checkpoints = Checkpoints(Path(setting["read"])) if "read" in setting else None
            if checkpoints is not None:
                one.restore(*checkpoints.newest())
            steps = []
            while one.done < setting.get("until", one.steps):
                step = one.step(batch(data, one.ranks, one.done, uneven=setting.get("uneven", False)))
                steps.append([step.loss, step.grad_norm, step.tokens])
            if setting.get("validate"):
                val = PackedTokens(folder, "val")
                steps.append([validate(one.model, val, batch_size=3, seq_len=SEQ, num_sequences=7, ranks=one.ranks)])
            if "write" in setting:
                one.save(Checkpoints(Path(setting["write"]), mesh=mesh))
            weights = {}
            with mesh.transfers():
                for path, part in Parallelism.parts(one, wide=setting.get("widen", False), keep=True):
                    weights |= {f"{path}.{name}": value.detach().clone() for name, value in part.named_parameters()}
            torch.save(weights, Path(out) / f"{number}-{mesh.world_size}-{mesh.rank}.pt")
            held = weakref.ref(one.update.weights)
            del one, part, weights
            gc.collect()
            assert held() is None, "a training that is over keeps its weights in memory"
            found.append(steps)
    return found


def taken_back(folder: str, settings: list[dict[str, Any]]) -> list[list]:
    """Trains with each of `settings`: (losses and norms, a number of the bits of its weights and states, updates taken back)."""
    torch.set_num_threads(1)
    mesh, data, found = Mesh.from_environment(), PackedTokens(folder), []
    for setting in settings:
        with mesh.together():
            one = trainer(data, mesh, setting)
            one.scaler.scale = setting.get("scale", one.scaler.scale)
            steps = [one.step(batch(data, one.ranks, at)) for at in range(one.steps)]
            tensors = one.update.state().items()
            bits = [of_tensor(tensor.contiguous()) for name, tensor in sorted(tensors, key=lambda pair: pair[0])]
            rows = [[step.loss, step.grad_norm, step.skipped] for step in steps]
            found.append([rows, bits, getattr(one, "taken_back", None)])
    return found


def made(
    spec: dict[str, Any], data: str, out: str, kill_at: int = 0, number: int = signal.SIGKILL, **others: str
) -> str:
    """The content of the artifact that all ranks make of `data` and `others`, or the error that they end with; rank 1 gets
    signal `number` when it begins the step after `kill_at`."""
    torch.set_num_threads(1)
    run = Run(quiet=True)
    if kill_at and run.mesh.rank == 1:
        step = Trainer.step

        def dying(self: Trainer, batch: Any) -> Any:
            if self.done == kill_at:
                os.kill(os.getpid(), number)
            return step(self, batch)

        Trainer.step = dying  # type: ignore[method-assign]
    try:
        parents = {role: Artifact.read(folder) for role, folder in {"data": data, **others}.items()}
        return Train.read(spec).make(out, parents, run).content
    except (HoneError, KeyboardInterrupt) as error:
        return str(error)


def made_in_turn(data: str, each: list[tuple[dict[str, Any], str, dict[str, str]]]) -> list[str]:
    """`made` of each (spec, out, other parents), by the same ranks."""
    return [made(spec, data, out, **others) for spec, out, others in each]


def failing(folder: str, setting: dict[str, Any] | None = None, where: str = "backward") -> str:
    """What this rank raises when rank 1 alone fails in the middle of a backward pass, or in the `update`."""
    torch.set_num_threads(1)
    mesh, data = Mesh.from_environment(), PackedTokens(folder)
    try:
        with mesh.together():
            one = trainer(data, mesh, setting or {"data_parallel": "zero2"})
            one.step(batch(data, one.ranks, 0))
            if mesh.rank == 1 and where == "update":
                one.update.apply = _broken  # type: ignore[method-assign]
            elif mesh.rank == 1:
                one.model.layers[3].register_full_backward_pre_hook(_broken)
            one.step(batch(data, one.ranks, 1))
    except (HoneError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"


def _broken(*_: Any) -> None:
    raise ZeroDivisionError("a bug")


def cut_at(spec: dict[str, Any], data: str, out: str, place: int) -> list[int]:
    """How many layers each stage has in the training of `spec`, whose plan on the first rank alone cuts them at layer `place`."""
    found: list[int] = []
    take = Stages.__init__

    def taking(self: Stages, model: Any, layers: Any, *others: Any) -> None:
        found.extend(map(len, layers))
        take(self, model, layers, *others)

    def planned(work: Any, *_: Any, **__: Any) -> Any:
        count = work.model.num_layers
        return replace(work, pipeline=work.pipeline.cut([range(place), range(place, count)], "a test"))

    Stages.__init__ = taking  # type: ignore[method-assign]
    if Mesh.from_environment().leads:
        stage.cut = planned  # type: ignore[assignment]
    made(spec, data, out)
    return found
