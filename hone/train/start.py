"""The models with which a training starts: the one that it trains, and the teacher."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hone.base.artifact import Artifact
from hone.base.lazy import lazy
from hone.train.growth.init import growths_of, kept_layers
from hone.train.objectives.base import Setting
from hone.train.precision import TORCH_NAMES, Precision

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module

    from hone.base.run import Run
    from hone.feed.load import PackedTokens
    from hone.model.decoder import Decoder
    from hone.model.shape import Shape
    from hone.model.weights.model import ModelSource
    from hone.train.continuation.plan import TrainPlan
    from hone.train.loop import Trainer
    from hone.train.objectives.base import Objective

torch = lazy("torch")


class Training(Protocol):
    """The fields of a train spec that say with which models it starts."""

    @property
    def model(self) -> Shape: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def adapter(self) -> Any: ...
    @property
    def init(self) -> Any: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def seed(self) -> int: ...


class Read:
    """Makes the weights of a decoder, in `dtype` on `device`, from the files of `checkpoint`, a part at a time.

    Files are mapped: the ranks of a machine read them from its disk once, and no rank has more of them than a part.
    """

    def __init__(self, checkpoint: ModelSource, device: str, dtype: Any) -> None:
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype

    def make(self, part: Module, path: str) -> None:
        """As `hone.model.decoder.Maker.make`. Raises ArtifactError as `Checkpoint` does."""
        self._checkpoint.load_part(part, path, self._device, self._dtype)
        self._checkpoint.close()


def starting_models(
    spec: Training,
    parents: dict[str, Artifact],
    data: PackedTokens | None,
    run: Run,
    *,
    state: Path,
    in_parts: bool = False,
) -> tuple[Decoder, Decoder | None]:
    """(model in float32, teacher in the compute dtype or None) on the device of `run`. Of a model with adapters these alone are float32 and are
    trained; its weights are in the compute dtype.

    With init: teacher the model has every `init.keep_every`-th layer of the teacher; else it is the parent 'model', grown as init says,
    or a random one for the tokens of `data`. There is a teacher where the objective needs one and
    it is not the model itself as it was at the start. `in_parts`: the model is on the meta
    device with a maker of its parts, for ranks that have not all of it; a student made of a teacher's layers is whole, as its
    teacher is. A new adapter's first values that take long to find are kept in the folder `state`, which rank 0 writes.
    """
    from hone.model.adapters.trainable import Trainable
    from hone.model.decoder import Drawn, build, unmade
    from hone.model.growth.base import grown_checkpoint
    from hone.model.hf import Checkpoint, load
    from hone.model.weights.score import WithScore
    from hone.train.objectives.draft_heads.fits import with_heads
    from hone.train.student import from_teacher

    device, computed = run.device, getattr(torch, TORCH_NAMES[spec.precision])
    kept, reads = kept_layers(spec.init), spec.objective.from_teacher
    reads = reads and "teacher" in parents
    teacher = load(parents["teacher"].folder, device, torch.float32) if reads or kept is not None else None
    if "model" in parents:
        checkpoint = Checkpoint(parents["model"].folder, scores=spec.objective.scores_text)
        if growths := growths_of(spec.init):  # tensors of the larger model are made one at a time of those in the files
            checkpoint = grown_checkpoint(checkpoint, growths, spec.seed)
        if spec.objective.scores_text and not checkpoint.config.num_labels:
            checkpoint = WithScore(checkpoint, spec.seed)
        dtype = computed if spec.objective.trains_heads else torch.float32
        if spec.adapter is not None or checkpoint.config.adapters:
            checkpoint, dtype = Trainable(checkpoint, spec.adapter, spec.seed, state / "first_values"), computed
            run.mesh.from_leader(partial(checkpoint.keep, device, dtype))
        if in_parts:
            model = checkpoint.empty()
            model.maker = Read(checkpoint, device, dtype)
        else:
            model = checkpoint.build(device, dtype)
        if spec.objective.trains_heads:
            model = with_heads(spec.objective, model, data, spec.seed)
    elif kept is not None:
        assert teacher is not None, "planned without a teacher"
        model = from_teacher(teacher, kept)
    else:
        assert data is not None, "a new model is one for the tokens of some data"
        config = spec.model.config(data.vocab_size, eos=data.eos_token_id)
        config = config.scoring() if spec.objective.scores_text else config
        drawn = Drawn(config, device, spec.seed)
        model = unmade(config, drawn) if in_parts else build(config, device=device, seed=spec.seed)
    if spec.objective.from_cache:
        from hone.train.cached_logits.shards import CachedLogits

        return model, CachedLogits(parents["logits"].folder)  # type: ignore[return-value]
    return model, teacher.to(computed) if teacher is not None and reads else None


def trainer_of(
    spec: Any,
    model: Decoder,
    teacher: Decoder | None,
    plan: TrainPlan,
    zeros: dict[str, Tensor],
    run: Run,
    offload: Any,
    tokenizer: Path,
) -> Trainer:
    """What runs the steps of `plan` on this rank's part of `model`."""
    # Dropout draws from torch's own generator, which whatever ran in this process before has moved.
    torch.manual_seed(spec.seed)
    ranks = spec.parallelism.ranks(run.mesh, run.device)
    return spec.parallelism.trainer()(
        spec.parallelism.decoder(model, ranks, spec.seq_len, plan.pipeline and plan.pipeline[0]),
        steps=plan.steps,
        schedule=plan.schedule,
        optimizer=spec.optimizer,
        objective=spec.objective,
        activation_checkpointing=plan.segments,
        precision=spec.precision,
        max_grad_norm=spec.max_grad_norm,
        gradient_accumulation_steps=spec.gradient_accumulation_steps,
        teacher=spec.parallelism.teacher(teacher, ranks),
        compile=spec.compile,
        zeros=zeros,
        ranks=ranks,
        offload=offload,
        setting=Setting(tokenizer, spec.seed),
    )
