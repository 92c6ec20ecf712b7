"""What a training of draft heads asks of its spec, and what it begins with: a frozen model with new heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.model.config import ModelConfig
from hone.model.folder import copy_tokenizer
from hone.train.precision import FP8_RECIPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hone.feed.load import PackedTokens
    from hone.model.decoder import Decoder
    from hone.train.loop import Trainer

torch = lazy("torch")


_FIXES = {
    "several ranks": "run it as one process",
    "an adapter in the model's folder": "merge it first (hone merge FOLDER), and give what that writes",
}


def check_heads(spec: Any, config: ModelConfig, given: Mapping[str, Any], num_ranks: int) -> None:
    """Raises SpecError for what a training of draft heads cannot do."""
    objective = spec.objective
    if not objective.trains_heads:
        return
    if "model" not in given:
        raise SpecError(
            f"objective '{objective.kind}' trains heads beside a model that stays as it is",
            fix="give the model: --from.model=FOLDER, or model: NAME in a recipe's from",
        )
    layout = spec.parallelism
    wrong = {
        "adapter": spec.adapter is not None,
        "an adapter in the model's folder": bool(config.adapters),
        "init": spec.init != "random",
        "mask": "mask" in given,
        "teacher": "teacher" in given,
        "precision": spec.precision in FP8_RECIPES,
        "activation_checkpointing": spec.activation_checkpointing.kind != "none",
        "objective.simulated_device": objective.simulated_device is not None,
        "objective.quantization_aware": objective.quantization_aware is not None,
        "early_stopping.val_loss": spec.early_stopping.val_loss is not None,  # the model's, which stays as it is
        "parallelism.offload": layout.offload.kind != "none",
        "several ranks": num_ranks > 1,
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            raise SpecError(
                f"objective '{objective.kind}' trains draft heads beside a frozen model on one device, without {field}",
                fix=_FIXES.get(field, f"leave {field} out"),
            )
    objective.check(config, spec.seq_len)


def with_heads(objective: Any, model: Decoder, data: PackedTokens | None, seed: int) -> Decoder:
    """`model`, frozen, with new heads as its submodule `drafter`, which alone is trained."""
    model.requires_grad_(False)
    heads = objective.begin(model, token_counts(data, model.config.vocab_size), seed)
    model.add_module("drafter", heads.requires_grad_(True))
    return model


_COUNTED = 50_000_000
"""Most tokens that are counted, from the start: enough to rank those that matter."""


def token_counts(data: PackedTokens | None, vocab_size: int) -> NDArray[np.int64]:
    """How often each token comes in the first tokens of `data`; all 0 without data."""
    import numpy as np

    if data is None:
        return np.zeros(vocab_size, dtype=np.int64)
    return np.bincount(data.tokens[:_COUNTED], minlength=vocab_size)[:vocab_size]


def heads_saver(
    trainer: Trainer, parents: Mapping[str, Artifact], tokenizer_from: Path, dtype: str
) -> Callable[[Path], ModelConfig]:
    """What writes the heads of `trainer` into a folder; it returns the config of their model."""
    return partial(_save, trainer, parents["model"].folder, tokenizer_from, dtype)


def _save(trainer: Trainer, model: Path, tokenizer_from: Path, dtype: str, folder: Path) -> ModelConfig:
    weights, config = trainer.update.weights, trainer.model.config
    with trainer.ranks.mesh.transfers(), torch.no_grad(), weights.whole("drafter", wide=True):
        trainer.objective.save(trainer.model.drafter, config, folder, str(model.resolve()), getattr(torch, dtype))  # type: ignore[attr-defined]
        copy_tokenizer(tokenizer_from, folder)
    return config
