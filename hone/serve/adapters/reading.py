"""An adapter's folder read and checked: its factors as one row of numbers in host memory, as a slot on the device holds them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from hone.base.errors import ArtifactError, FitError, HoneError, SpecError
from hone.model.adapters import peft
from hone.model.adapters.lora import LoRA
from hone.model.config import ModelConfig
from hone.model.folder import ADAPTER_CONFIG
from hone.serve.adapters.layout import SlotLayout, SlotLinear


class NoAdapterError(ArtifactError):
    """A path holds no adapter."""


@dataclass(frozen=True, eq=False)
class HostAdapter:
    """The factors of one adapter in host memory, pinned where the device is a GPU."""

    name: str
    path: str
    content: str
    """Hash of its files: what the prefix cache tells adapters apart by."""
    numbers: Tensor
    """[layout.size] in the model's dtype; zero where the adapter has nothing."""
    ranks: Tensor
    """int32 [linears, most_pieces]."""

    @property
    def num_bytes(self) -> int:
        """Bytes in host memory, and of a slot."""
        return self.numbers.numel() * self.numbers.element_size()


def read_adapter(
    name: str, path: str, config: ModelConfig, layout: SlotLayout, dtype: torch.dtype, *, max_lora_rank: int, pin: bool
) -> HostAdapter:
    """The adapter in folder `path` for the model of `config`; may run in any thread.

    Raises NoAdapterError where there is none, ArtifactError for one that does not fit the model or that hone does not serve, and
    FitError for a rank above `max_lora_rank`.
    """
    folder = Path(path)
    weights, described = folder / peft.WEIGHTS, folder / ADAPTER_CONFIG
    for file in (described, weights):
        if not _is_file(file):
            raise NoAdapterError(
                f"no adapter in {path}: there is no {file.name}",
                fix="give a folder that PEFT or hone train has written",
            )
    data, text = weights.read_bytes(), described.read_bytes()  # at once: what is checked is what is used
    content = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(data).digest()).hexdigest()[:32]
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ArtifactError(f"{weights}: {error}", fix="write the adapter again") from None
    del data
    adapter = peft.read(folder)
    try:
        adapted = peft.adapted(config.model_copy(update={"adapters": ()}), adapter)
    except HoneError as error:
        raise ArtifactError(f"{folder}: {error.what}", fix="give an adapter of the model that is served") from None
    numbers = torch.zeros(layout.size, dtype=dtype, pin_memory=pin)
    ranks = torch.zeros(len(layout.linears), layout.most_pieces, dtype=torch.int32)
    for layer in range(adapted.num_layers):
        for where, linear in adapted.linears(layer).items():
            modules = list(adapted.modules(layer, where))
            for own, pieces in adapted.wrappers(layer, where, linear):
                place = layout.find(layer, where)
                names = dict(zip((one.name for one in linear.pieces), modules)) if len(modules) > 1 else {}
                if place is None or type(own) is not LoRA:
                    what = f"adapters of {modules[0]}" if place is None else f"'{own.kind}' beside other adapters"
                    raise ArtifactError(
                        f"{folder}: {what} cannot be served", fix="hone merge it into its model, and serve that"
                    )
                for piece in pieces:
                    module = names.get(piece.name, modules[0])
                    lora = own.of_piece(piece.name)
                    if lora.rank > max_lora_rank:
                        raise FitError(
                            f"{folder}: rank {lora.rank} of {module} is above engine.lora.max_lora_rank {max_lora_rank}",
                            fix=f"start the engine with engine.lora.max_lora_rank={lora.rank}",
                        )
                    _fill(numbers, ranks, layout, place, module, lora, tensors, weights)
    if tensors:
        raise ArtifactError(
            f"{weights} holds {next(iter(tensors))}, which adapter_config.json does not lead to",
            fix="give the adapter as PEFT wrote it, without other weights in it",
        )
    return HostAdapter(name, path, content, numbers, ranks)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file system takes
        return False


def _fill(
    numbers: Tensor,
    ranks: Tensor,
    layout: SlotLayout,
    place: SlotLinear,
    module: str,
    lora: LoRA,
    tensors: dict[str, Tensor],
    file: Path,
) -> None:
    """Moves the factors of a module out of `tensors` to their place, B times its scale."""
    piece, begin = place.begin(module)
    columns, rows, most = place.in_features, place.modules[module], layout.rank
    found = []
    for part, shape in (("lora_A", (lora.rank, columns)), ("lora_B", (rows, lora.rank))):
        key = peft.key(module, part)
        tensor = tensors.pop(key, None)
        if tensor is None or tuple(tensor.shape) != shape:
            said = "is not there" if tensor is None else f"is {tuple(tensor.shape)}"
            raise ArtifactError(f"{file}: {key} {said}, the model needs {shape}", fix="give an adapter of this model")
        if not tensor.isfinite().all():
            raise ArtifactError(f"{file}: {key} has values that are not finite", fix="train or download it again")
        found.append(tensor.float())
    start = place.down + piece * most * columns
    numbers[start : start + lora.rank * columns].view(lora.rank, columns).copy_(found[0])
    start = place.up + begin * most
    numbers[start : start + rows * most].view(rows, most)[:, : lora.rank].copy_(found[1] * lora.scale)
    ranks[place.index, piece] = lora.rank


def check_base(config: ModelConfig) -> None:
    """Raises SpecError for a model to which adapters cannot be added at run time."""
    if config.adapters:
        raise SpecError(
            "engine.lora.max_loras is set and the model folder has an adapter of its own",
            fix="serve the model without it and load the adapter beside the others, or merge it (hone merge)",
        )
