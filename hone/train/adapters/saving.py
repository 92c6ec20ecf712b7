"""Writes the adapter of a training as a PEFT folder, which names the model that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.artifact import Artifact
from hone.base.lazy import lazy
from hone.cost.memory import BYTES
from hone.model.adapters import peft
from hone.model.adapters.lora import ROWS
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts
from hone.model.folder import base_of, copy_tokenizer, is_adapter

torch = lazy("torch")

if TYPE_CHECKING:
    from hone.train.loop import Trainer


def save_adapter(trainer: Trainer, model: Path, tokenizer_from: Path, dtype: str, folder: Path) -> ModelConfig:
    """Writes the adapter of `trainer` in the torch `dtype`, from its float32 masters; its base is the model folder `model`, or that
    of an adapter with which the training went on. All ranks call it, rank 0 writes. Returns the model's config."""
    from hone.train.parallelism import Parallelism

    config, weights = Parallelism.config(trainer.model), trainer.update.weights
    joined = getattr(trainer.model, "joined", lambda _, value: value.detach())
    keys, factors, stored = peft.keys(config), {}, getattr(torch, dtype)
    with trainer.ranks.mesh.transfers():
        for index, layer in enumerate(trainer.model.layers):
            names = config.singles(index)
            with torch.no_grad(), weights.whole(f"layers.{index}", wide=True):
                for path in config.adapter_parameters(index):
                    one = joined(f"layers.{index}.{path}", layer.get_parameter(path))
                    factors[keys[names[path]]] = one.to("cpu", stored, copy=True)
        for own in config.own_weights():
            with torch.no_grad(), weights.whole(own.part, wide=True):
                whole = trainer.model.get_parameter(own.path).detach().to("cpu", stored, copy=True)
            pieces = whole.split([rows for _, rows in own.tensors.values()])
            factors |= {key: one for (key, _), one in zip(own.tensors.values(), pieces, strict=True)}
        if config.token_rows():
            with torch.no_grad(), weights.whole("embed_tokens", wide=True):
                factors[keys[ROWS]] = trainer.model.embed_tokens.rows.detach().to("cpu", stored, copy=True)
        if config.prompt:
            with torch.no_grad(), weights.whole("prompt", wide=True):
                for path in config.prompt_parameters():
                    one = trainer.model.prompt.get_parameter(path).detach()
                    factors[keys[f"prompt.{path}"]] = one.to("cpu", stored, copy=True)
    if trainer.ranks.mesh.leads:
        folder.mkdir(parents=True, exist_ok=True)
        base = base_of(model) if is_adapter(model) else model
        adapter, tensors = config.adapters[0].exported(factors)  # type: ignore[attr-defined]
        peft.write(folder, config.model_copy(update={"adapters": (adapter,)}), tensors, str(base.resolve()))
        copy_tokenizer(tokenizer_from, folder)
    return config


def exported(config: ModelConfig) -> ModelConfig:
    """The model that is read from the folder of a training of the adapter of `config`."""
    adapter, _ = config.adapters[0].exported({})  # type: ignore[attr-defined]
    return config.model_copy(update={"adapters": (adapter,)})


def saver(
    trainer: Trainer, parents: Mapping[str, Artifact], tokenizer_from: Path, dtype: str
) -> Callable[[Path], ModelConfig]:
    """What writes the model of `trainer`, or the adapter where it trains one, into a folder; all ranks call it. It returns the config."""
    from hone.train.objectives.draft_heads.fits import heads_saver
    from hone.train.parallelism import Parallelism

    if trainer.objective.trains_heads:
        return heads_saver(trainer, parents, tokenizer_from, dtype)
    if trainer.model.config.adapters:
        return partial(save_adapter, trainer, parents["model"].folder, tokenizer_from, dtype)
    return trainer.tutor.saving(partial(Parallelism.save, trainer, tokenizer_from, dtype))


def saved_facts(config: ModelConfig, dtype: str, model: CheckpointFacts | None) -> dict[str, Any]:
    """The facts of a trained model of `config` saved in `dtype`, and its weights': those of an adapter lie beside the frozen `model`'s."""
    size = BYTES[dtype] * config.trained_params
    if config.adapters and model is not None:
        config = exported(config)
        size = BYTES[dtype] * config.trained_params
        return {
            "config": config,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "weights_bytes": model.weights_bytes + size,
        }
    return {"config": config, "dtype": dtype, "weights_bytes": size}
