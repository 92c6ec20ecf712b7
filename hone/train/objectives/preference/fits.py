"""What preferences need of their data and of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hone.base.errors import SpecError
from hone.feed.facts import DataFacts
from hone.train.objectives.preference.base import Preference

if TYPE_CHECKING:
    from hone.model.config import ModelConfig
    from hone.model.facts import CheckpointFacts
    from hone.train.objectives.base import Objective
    from hone.train.parallelism import Parallelism


_NOUNS = {"pairs": "pairs of a chosen and a rejected answer", "labels": "answers labelled as desirable or not"}
"""What data with these targets have."""


def with_score(spec: Any, config: ModelConfig, given: Mapping[str, CheckpointFacts]) -> ModelConfig:
    """`config` with the head that the objective of the train stage `spec` trains: for scores or for tokens. Raises SpecError where a
    reward model is given to train a language model, and for what the training of a reward model cannot do."""
    objective = spec.objective
    if not objective.scores_text:
        for role, one in given.items():
            if one.config.num_labels:
                raise SpecError(
                    f"{one.where}, the {role}, is a reward model, and objective '{objective.kind}' needs a head of tokens",
                    fix="give the language model that it was made from, or train it with objective: reward",
                )
        return config
    wrong = {
        "adapter": bool(config.adapters),
        "init": spec.init != "random",
        "mask": "mask" in given,
        "teacher": "teacher" in given,
        "optimizer.quantize_embedding": getattr(spec.optimizer, "quantize_embedding", False),
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            raise SpecError(
                f"objective '{objective.kind}' trains all weights of a model and a new head, without {field}",
                fix=f"leave {field} out",
            )
    if spec.seq_len >= config.max_seq_len:
        raise SpecError(
            f"seq_len {spec.seq_len} leaves no place for the token at which an answer's score is read: the model has {config.max_seq_len}",
            fix=f"give seq_len at most {config.max_seq_len - 1}",
        )
    return config.scoring()


def check_pairs(objective: Objective, data: Sequence[DataFacts], parallelism: Parallelism, *, rerun: int = 0) -> None:
    """Raises SpecError when pairs meet another objective, or an objective on pairs other data or a layout that divides sequences;
    and where steps are to be computed by two ranks, every `rerun`, of which each has the values of its own batch."""
    wants = isinstance(objective, Preference)
    for one in data:
        if isinstance(objective, Preference) and one.targets not in objective.reads:
            way = "make data of rows with prompt, chosen and rejected: hone data ROWS --tokenizer.chat=preference"
            if "labels" in objective.reads:
                way += "; or of rows with prompt, completion and label: --tokenizer.chat=unpaired"
            raise SpecError(
                f"objective '{objective.kind}' compares answers, and {one.where} has no {_NOUNS[objective.reads[0]]}",
                fix=way,
            )
        if not wants and one.targets in _NOUNS:
            raise SpecError(
                f"{one.where} has {_NOUNS[one.targets]}, and objective '{objective.kind}' would learn both",
                fix="give an objective that compares answers, such as dpo (of pairs) or kto, or data of conversations",
            )
    if objective.prepares and rerun:
        raise SpecError(
            f"objective '{objective.kind}' prepares each rank's batch with its own passes, which no other rank can compute again",
            fix="leave checkpoint.check.rerun_interval out",
        )
    if not isinstance(objective, Preference):
        return
    if parallelism.data_parallel.alone and objective.measures_kl:
        raise SpecError(
            f"objective '{objective.kind}' measures a mean over all ranks before each step, and those of data_parallel "
            f"{parallelism.data_parallel.kind} take steps of their own",
            fix="set parallelism.data_parallel: ddp, or objective.loss: apo_zero_unpaired",
        )
    for name in ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"):
        if getattr(parallelism, name) != 1:
            raise SpecError(
                f"objective '{objective.kind}' needs whole sequences and the whole vocabulary on each rank, not {name} above 1",
                fix=f"leave parallelism.{name} at 1; data-parallel ranks may share the work",
            )
