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
from hone.model.adapters.base import Adapter
from hone.model.adapters.dora import DoRA
from hone.model.adapters.ia3 import IA3
from hone.model.adapters.lora import LoRA
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
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
    scales: Tensor | None = None
    """float32 [num_rows, 2]: what each output feature of the base is multiplied by, and what is then added; None: 1 and 0."""
    inputs: Tensor | None = None
    """float32 [num_columns]: what each input feature is multiplied by; None: 1."""

    @property
    def num_bytes(self) -> int:
        """Bytes in host memory, and of a slot."""
        return self.numbers.numel() * self.numbers.element_size()


def read_adapter(
    name: str, path: str, base: Decoder, layout: SlotLayout, *, max_lora_rank: int, pin: bool
) -> HostAdapter:
    """The adapter in folder `path` for the model `base`; may run in any thread.

    Raises NoAdapterError where there is none, ArtifactError for one that does not fit the model or that hone does not serve, and
    FitError for a rank above `max_lora_rank`.
    """
    folder = Path(path)
    weights, described = folder / peft.WEIGHTS, folder / ADAPTER_CONFIG
    _must_be_there(described)
    adapter = peft.read(folder)
    if not isinstance(adapter, LoRA | IA3):
        raise ArtifactError(
            f"{folder}: an adapter of kind '{adapter.kind}' cannot be served beside others, only LoRA, DoRA and (IA)3",
            fix="write with `hone generate` or `hone chat` from a model folder that has it",
        )
    _must_be_there(weights)
    data, text = weights.read_bytes(), described.read_bytes()  # at once: what is checked is what is used
    content = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(data).digest()).hexdigest()[:32]
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ArtifactError(f"{weights}: {error}", fix="write the adapter again") from None
    del data
    try:
        adapted = peft.adapted(base.config, adapter)
        own = [one.path for one in adapter.own_weights(adapted)]
        own += ["rows of embed_tokens"] if adapter.token_rows(adapted) else []
    except HoneError as error:
        raise ArtifactError(f"{folder}: {error.what}", fix="give an adapter of the model that is served") from None
    if own:
        raise ArtifactError(
            f"{folder} changes {own[0]} itself (modules_to_save, bias or trainable_token_indices), which all adapters share",
            fix="hone merge it into its model, and serve that",
        )
    filling = _Filling(base, layout, tensors, weights, max_lora_rank, pin)
    for layer in range(adapted.num_layers):
        for where, linear in adapted.linears(layer).items():
            modules = list(adapted.modules(layer, where))
            for wrapper, pieces in adapted.wrappers(layer, where, linear):
                place = layout.find(layer, where)
                names = dict(zip((one.name for one in linear.pieces), modules)) if len(modules) > 1 else {}
                if place is None:
                    raise ArtifactError(
                        f"{folder}: adapters of {modules[0]} cannot be served",
                        fix="hone merge it into its model, and serve that",
                    )
                for piece in pieces:
                    filling.fill(place, names.get(piece.name, modules[0]), piece.name, wrapper)
    if tensors:
        raise ArtifactError(
            f"{weights} holds {next(iter(tensors))}, which adapter_config.json does not lead to",
            fix="give the adapter as PEFT wrote it, without other weights in it",
        )
    return HostAdapter(name, path, content, filling.numbers, filling.ranks, filling.scales, filling.inputs)


def _must_be_there(file: Path) -> None:
    if not _is_file(file):
        raise NoAdapterError(
            f"no adapter in {file.parent}: there is no {file.name}",
            fix="give a folder that PEFT or hone train has written",
        )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file system takes
        return False


class _Filling:
    """The tables of one adapter while its modules are moved into them, out of `tensors`."""

    def __init__(
        self, base: Decoder, layout: SlotLayout, tensors: dict[str, Tensor], file: Path, most: int, pin: bool
    ) -> None:
        self._base, self._layout, self._tensors, self._file, self._most, self._pin = (
            base,
            layout,
            tensors,
            file,
            most,
            pin,
        )
        self.numbers = torch.zeros(layout.size, dtype=base.dtype, pin_memory=pin)
        self.ranks = torch.zeros(len(layout.linears), layout.most_pieces, dtype=torch.int32)
        self.scales: Tensor | None = None
        self.inputs: Tensor | None = None

    def fill(self, place: SlotLinear, module: str, piece: str, adapter: Adapter) -> None:
        """One module: LoRA, DoRA or (IA)3. Raises ArtifactError and FitError as `read_adapter`."""
        if isinstance(adapter, IA3):
            self._factors(place, module, of_inputs=piece in adapter.feedforward_modules)
            return
        assert isinstance(adapter, LoRA), "read_adapter takes no other kinds"
        lora = adapter.of_piece(piece)
        if lora.rank > self._most:
            raise FitError(
                f"{self._file.parent}: rank {lora.rank} of {module} is above engine.lora.max_lora_rank {self._most}",
                fix=f"start the engine with engine.lora.max_lora_rank={lora.rank}",
            )
        down = self._taken(f"{module}.lora_A.weight", (lora.rank, place.in_features))
        up = self._taken(f"{module}.lora_B.weight", (place.modules[module], lora.rank)) * lora.scale
        if isinstance(lora, DoRA):
            up = up * self._stretch(place, module, down, up)[:, None]
        index, begin = place.begin(module)
        most, columns, rows = self._layout.rank, place.in_features, place.modules[module]
        start = place.down + index * most * columns
        narrow = self.numbers[start : start + lora.rank * columns].view(lora.rank, columns).copy_(down)
        start = place.up + begin * most
        wide = self.numbers[start : start + rows * most].view(rows, most)[:, : lora.rank].copy_(up)
        # Zero times infinity would reach the rows of other adapters.
        if not (narrow.isfinite().all() and wide.isfinite().all()):
            dtype = str(self._base.dtype).removeprefix("torch.")
            raise ArtifactError(
                f"{self._file}: the factors of {module} times their scale {lora.scale:g} are beyond the largest number in {dtype}",
                fix="set engine.dtype: bfloat16, or train the adapter with a smaller alpha",
            )
        self.ranks[place.index, index] = lora.rank

    def _taken(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, float32, taken out of those that are left."""
        key = f"{peft.PREFIX}{name}"
        tensor = self._tensors.pop(key, None)
        if tensor is None or tuple(tensor.shape) != shape:
            said = "is not there" if tensor is None else f"is {tuple(tensor.shape)}"
            raise ArtifactError(
                f"{self._file}: {key} {said}, the model needs {shape}", fix="give an adapter of this model"
            )
        if not tensor.isfinite().all():
            raise ArtifactError(f"{self._file}: {key} has values that are not finite", fix="train or download it again")
        return tensor.float()

    def _rows(self, place: SlotLinear, module: str) -> Tensor:
        """The scale and shift of a module's output features, [N, 2]."""
        if self.scales is None:
            self.scales = torch.tensor([1.0, 0.0]).repeat(self._layout.num_rows, 1)
        begin = place.row + place.begin(module)[1]
        return self.scales[begin : begin + place.modules[module]]

    def _stretch(self, place: SlotLinear, module: str, down: Tensor, up: Tensor) -> Tensor:
        """DoRA's m / |W + s B A| of each row [N], by which the base's output is multiplied, too, but for its bias."""
        magnitude = self._taken(f"{module}.lora_magnitude_vector", (place.modules[module],))
        linear = self._base.layers[place.layer].get_submodule(place.path)
        begin = place.begin(module)[1]
        rows = slice(begin, begin + place.modules[module])
        with torch.inference_mode():
            weight = linear.dequantize(self._base.dtype)[rows].float()
            length = (weight + up.to(weight.device) @ down.to(weight.device)).norm(dim=1).cpu()
        found = magnitude / length
        scales = self._rows(place, module)
        scales[:, 0] = found
        if linear.bias is not None:
            scales[:, 1] = (1 - found) * linear.bias[rows].detach().float().cpu()
        return found

    def _factors(self, place: SlotLinear, module: str, *, of_inputs: bool) -> None:
        """(IA)3's factors of a module's inputs or outputs."""
        if not of_inputs:
            self._rows(place, module)[:, 0] = self._taken(f"{module}.ia3_l", (place.modules[module], 1))[:, 0]
            return
        if self.inputs is None:
            self.inputs = torch.ones(self._layout.num_columns)
        end = place.column + place.in_features
        self.inputs[place.column : end] = self._taken(f"{module}.ia3_l", (1, place.in_features))[0]


def check_base(config: ModelConfig) -> None:
    """Raises SpecError for a model to which adapters cannot be added at run time."""
    if config.adapters:
        raise SpecError(
            "engine.lora.max_loras is set and the model folder has an adapter of its own",
            fix="serve the model without it and load the adapter beside the others, or merge it (hone merge)",
        )
