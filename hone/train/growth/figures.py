"""The figures of a training that grows a smaller model: the loss before and after growth, and the FLOPs of all phases."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hone.base.artifact import Artifact, Draft
from hone.base.durable import write_atomic
from hone.base.errors import SpecError
from hone.base.figure import Estimate
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.model.facts import CheckpointFacts, Trained
from hone.model.growth.base import Growth

if TYPE_CHECKING:
    from hone.model.config import ModelConfig
    from hone.train.loop import Trainer

hf = lazy("hone.model.hf")

FLOPS, BEFORE, TOTAL, SAVED = "train_flops", "flops_before_growth", "total_flops", "flops_saved"
_FILE = "growth.json"
"""The losses before and after growth, in the folder: a run that is resumed does not measure them again."""


class Grown(NamedTuple):
    """What a plan says of growth; empty for a training without."""

    growths: Sequence[Growth] = ()
    estimates: Mapping[str, Estimate] = {}
    notes: tuple[str, ...] = ()
    each: float = 0.0
    """FLOPs of the larger model a token, forward and backward."""
    before: float | None = None
    """FLOPs of the trainings of the smaller model; None: hone did not train it, or there is none."""
    said: str = ""
    """How they are counted."""

    def trained(self, trained: Trained) -> Trained:
        """`trained` with the FLOPs before growth, for a plan that grows its model again."""
        return trained if self.before is None else trained.model_copy(update={"flops_before": self.before})


def check(growths: Sequence[Growth], load: str) -> None:
    """Raises ValueError where a training that grows its model would read the optimizer's state of the smaller one."""
    if growths and load in ("optimizer", "schedule"):
        raise ValueError(
            f"checkpoint.load: {load} reads an optimizer's state, which is one of the smaller model's weights: a grown model "
            "begins without one, with a schedule of its own; take checkpoint.load: data_position or weights"
        )


def need_small(growths: Sequence[Growth], given: Mapping[str, CheckpointFacts]) -> None:
    """Raises SpecError when there is nothing to grow."""
    if growths and "model" not in given:
        raise SpecError(
            f"init: {growths[0].kind} makes a larger model of a smaller one, and none is given",
            fix="give the smaller model's folder, --from.model=FOLDER (in a recipe from: {model: NAME}), or use init: random",
        )


def planned(
    growths: Sequence[Growth], small: CheckpointFacts | None, large: ModelConfig, seq_len: int, tokens: float
) -> Grown:
    """What a training of `large` on `tokens` costs beside that of `small`, of which `growths` make it."""
    if not growths or small is None:
        return Grown()
    kinds, exact = " and ".join(one.kind for one in growths), all(one.exact for one in growths)
    kept = "its logits stay" if exact else "its logits change, and its loss may begin higher"
    said = (
        f"grown by {kinds} from {small.where}, {small.config.num_params:,} to {large.num_params:,} parameters: {kept}; "
        "the optimizer begins without state"
    )
    each = 3 * large.flops_per_token(seq_len)
    now = f"{tokens:,.0f} tokens x {each:.4g} FLOPs, forward and backward"
    found = {FLOPS: Estimate(value=each * tokens, unit="FLOP", formula=now)}
    trained = small.trained
    if trained is None or trained.ended is None or not trained.ended.tokens:
        return Grown(growths, found, (said,), each)
    read, small_each = trained.ended.tokens, 3 * small.config.flops_per_token(int(trained.spec["seq_len"]))
    count, earlier = read * small_each, f"{read:,} tokens x {small_each:.4g} FLOPs, forward and backward"
    if trained.flops_before:
        count, earlier = (
            count + trained.flops_before,
            f"{earlier} + {trained.flops_before:.4g} before it was grown itself",
        )
    found[BEFORE] = Estimate(value=count, unit="FLOP", formula=earlier)
    found[TOTAL] = Estimate(value=each * tokens + count, unit="FLOP", formula=f"{earlier}; then {now}")
    less = f"{read:,} tokens before growth x {each:.4g}, had the larger model read them, - {count:.4g}"
    found[SAVED] = Estimate(value=each * read - count, unit="FLOP", formula=less)
    share = count / (count + each * tokens)
    said += f"; {count:.3g} FLOPs before, {share:.0%} of all; the larger model would have taken {each * read:.3g} for those tokens"
    return Grown(growths, found, (said,), each, count, earlier)


class Growing:
    """Measures and records what growth did to one training; does nothing for a training without."""

    def __init__(self, grown: Grown, draft: Draft, run: Run) -> None:
        self._grown, self._growths, self._draft, self._run = grown, grown.growths, draft, run

    def measure(self, trainer: Trainer, parents: Mapping[str, Artifact], loss: Callable[[Any], float] | None) -> None:
        """Computes the loss of the smaller model and of the larger one before its first step, once.

        `loss` gives that of a decoder on the val split; None: there is none. All ranks call it. Several ranks, of which none has a
        whole model, compute that of the larger one alone.
        """
        path, mesh = self._draft.folder / _FILE, self._run.mesh
        if not self._growths or mesh.from_leader(path.exists):
            return
        before = after = None
        if loss is not None:
            if mesh.world_size == 1:
                like = next(trainer.model.parameters())
                before = loss(hf.load(parents["model"].folder, like.device, like.dtype))  # freed before the first step
            after = loss(trainer.model)
            told = "" if before is None else f", the smaller model's is {before:.4f}"
            self._run.say(f"validation loss after growth {after:.4f}{told}")
        if mesh.leads:
            write_atomic(path, json.dumps({"before": before, "after": after}).encode())

    def record(self) -> None:
        """Records the losses, and the FLOPs of the tokens that were read."""
        if not self._growths:
            return
        draft, grown = self._draft, self._grown
        losses = json.loads((draft.folder / _FILE).read_text())
        exact = "the same logits" if all(one.exact for one in self._growths) else "not exact"
        why = "of the smaller model, on the sequences of val_loss"
        if losses["before"] is None:
            why = "not measured by several ranks, of which none has a whole model: the smaller model's folder has its val_loss"
        empty = losses["after"] is None
        draft.record("loss_before_growth", losses["before"], "nats/token", note="val is empty" if empty else why)
        why = f"before the first step; {' and '.join(one.kind for one in self._growths)}: {exact}"
        draft.record("loss_after_growth", losses["after"], "nats/token", note="val is empty" if empty else why)
        flops = grown.each * (draft.figures["train_tokens"].value or 0.0)
        note = "tokens without padding; 6 a weight, head included, plus causal-halved attention"
        draft.record(FLOPS, flops, "FLOP", how="modelled", note=note)
        if grown.before is None:
            draft.record(BEFORE, None, "FLOP", note="hone did not train the smaller model")
            return
        draft.record(BEFORE, grown.before, "FLOP", how="modelled", note=grown.said)
        draft.record(TOTAL, flops + grown.before, "FLOP", how="modelled", note="of all phases")
        saved = grown.estimates[SAVED]
        draft.record(SAVED, saved.value, "FLOP", how="modelled", note=saved.formula)
