"""Reads from a Hugging Face folder what one rank holds: its layers, and of their matrices its rows and columns alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder, DecoderLayer
from hone.model.hf import Checkpoint
from hone.model.linear import ExpertLinears
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece
from hone.model.parallel.cut import Cut, Shapes, cuts, pieces_of, row_axis
from hone.model.parallel.experts import Slots, expert_cuts, place_experts
from hone.model.parallel.local import (
    LocalDecoder,
    SummedLinear,
    check_split,
    stage_layers,
    vocabulary_rows,
)
from hone.model.quantized.kv_cache import rounding_paths
from hone.model.weights.tensors import expert_modules
from hone.parallel.group import Group, Pipe
from hone.parallel.place import Place


class LocalCheckpoint(Checkpoint):
    """A `Checkpoint` whose `build` makes the model of one rank. The whole folder is checked, the rank's part is read.

    With `slots` experts are divided whole (`hone.model.parallel.experts`), and a rank reads its own.
    Raises SpecError when layers, heads or groups of quantized weights cannot be divided among the ranks.
    """

    def __init__(
        self, folder: Path | str, place: Place, group: Group, pipe: Pipe | None = None, slots: Slots | None = None
    ) -> None:
        super().__init__(folder)
        self._slots: Slots = {}
        check_split(self.config, place.tensor_size, whole_experts=slots is not None)
        whole = self.empty()  # checks names and shapes of the whole
        if place.tensor_size > 1 and hasattr(whole.embed_tokens, "table"):
            raise SpecError(
                f"{self.folder}: the embedding is quantized, and tensor-parallel ranks split one of floats alone",
                fix="set tensor_parallel_size=1 or use pipeline_parallel_size, or compress the model without embed_tokens in targets",
            )
        self.whole, self.place, self.group, self.pipe = self.config, place, group, pipe
        self.stage_layers = stage_layers(self.whole, place.num_stages)[place.stage]
        self._slots = slots or {}
        self.config = self.whole.local(place.tensor_size) if slots is None else place_experts(self.whole, place, slots)

    def build(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> LocalDecoder:
        """The rank's model."""
        dtype = dtype or self.dtype
        with torch.device("meta"):
            decoder = LocalDecoder(self.config, self.place, self.stage_layers, self.group, self.pipe, self._maker())
            self._round_caches(decoder.layers)
        self.load_ends(decoder, device, dtype)
        for index, layer in zip(self.stage_layers, decoder.layers, strict=True):
            self.load_layer(layer, index, device, dtype)
            self.close()
        decoder.quantization = self.quantization
        return decoder

    def load_layer(self, layer: DecoderLayer, index: int, device: torch.device | str, dtype: torch.dtype) -> None:
        whole, place = self.whole, self.place
        for path, linear in whole.linears(index).items():
            module = layer.get_submodule(path)
            inner, name = module.inner if isinstance(module, SummedLinear) else module, f"layers.{index}.{path}"
            parts = [(inner, name, linear, whole.modules(index, path))]
            held = self._held(index) if linear.experts is not None else None
            if isinstance(inner, ExpertLinears):
                inner.load_apart(torch.device(device))
                one, names = replace(linear, experts=None), expert_modules(whole, index, path)
                experts = range(len(names)) if held is None else held
                parts = [(inner[slot], f"{name}.{slot}", one, names[expert]) for slot, expert in enumerate(experts)]
            elif held is not None:
                each = expert_cuts(linear, whole.modules(index, path), held)
                self._load_cuts(inner, name, linear, each, device, dtype)
                continue
            for part, name, spec, names in parts:
                rank, size = (place.tensor_rank, place.tensor_size) if held is None else (0, 1)
                each = cuts(spec, names, rank, size)
                self._load_cuts(part, name, spec, each, device, dtype)
            if isinstance(inner, ExpertLinears) and inner.stacks_on(torch.device(device)):
                inner.stack()
        if index in self._slots:
            layer.feed_forward.arrange(self._slots[index], device)
        parameters = whole.parameters(index)
        for path, name in whole.singles(index).items():
            one = parameters[path]
            own = one.local(place.tensor_rank, place.tensor_size) if isinstance(one, ParameterSpec) else slice(None)
            self._place(layer, path, name, own, device, dtype)
        for path, name in rounding_paths(layer, self.config, index).items():
            heads = self.shape(name)[0]
            keys = Piece("k", heads, heads if heads > 1 else None, replicate=True)
            self._place(layer, path, name, keys.rows(place.tensor_rank, place.tensor_size), device, dtype)

    def _held(self, index: int) -> tuple[int, ...] | None:
        """The experts of this rank's slots in layer `index`; None where experts are not divided whole."""
        if index not in self._slots:
            return None
        each = len(self._slots[index]) // self.place.tensor_size
        return tuple(self._slots[index][self.place.tensor_rank * each : (self.place.tensor_rank + 1) * each])

    def _make_experts(self, name: str, spec: LinearSpec) -> ExpertLinears:
        _, index, path = name.split(".", 2)
        held = self._held(int(index))
        if held is None:
            return super()._make_experts(name, spec)
        one, names = replace(spec, experts=None), expert_modules(self.whole, int(index), path)
        made = (self._make_linear(f"{name}.{slot}", one, list(names[expert])) for slot, expert in enumerate(held))
        return ExpertLinears(made)

    def _modules_of(self, name: str) -> list[str]:
        holder, _, slot = name.rpartition(".")
        if slot.isdigit():
            _, index, path = holder.split(".", 2)
            held = self._held(int(index))
            if held is not None:
                return list(expert_modules(self.whole, int(index), path)[held[int(slot)]])
        return super()._modules_of(name)

    def load_ends(self, decoder: Decoder, device: torch.device | str, dtype: torch.dtype) -> None:
        place, vocab_size = self.place, self.whole.vocab_size
        rows = vocabulary_rows(vocab_size, place.tensor_size)
        own = slice(min(vocab_size, rows * place.tensor_rank), min(vocab_size, rows * (place.tensor_rank + 1)))
        if place.first or (place.last and self.whole.tie_embeddings):
            if hasattr(decoder.embed_tokens, "table"):  # quantized
                self.load_part(decoder.embed_tokens, "embed_tokens", device, dtype)
            else:
                self._place(decoder, "embed_tokens.weight", "model.embed_tokens.weight", own, device, dtype, rows=rows)
        else:
            decoder.embed_tokens.weight = nn.Parameter(torch.empty(0, dtype=dtype, device=device))
        if not place.last:
            return
        self._place(decoder, "norm.weight", "model.norm.weight", slice(None), device, dtype)
        if decoder.lm_head is not None:
            spec = self.whole.ends()["lm_head"]
            cut = Cut("lm_head", vocab_size, (own,), spec.in_features, slice(0, spec.in_features))
            self._load_cuts(decoder.lm_head, "lm_head", spec, [cut], device, dtype, padded=rows)

    def _load_cuts(
        self,
        module: nn.Module,
        name: str,
        linear: LinearSpec,
        each: list[Cut],
        device: torch.device | str,
        dtype: torch.dtype,
        padded: int | None = None,
    ) -> None:
        """Loads the rank's part of the checkpoint modules of one linear; `padded`: rows of zeros are added up to so many."""
        shapes_of = _Shapes(self, name, linear)
        self._check_inputs(module, name, linear, each)
        parts = []
        for cut in each:
            local = module.part_shapes([cut.local_rows])[0]
            part = {
                suffix: self._take_pieces(
                    f"{cut.module}.{suffix}",
                    pieces_of(cut, shapes_of, suffix, self.place.tensor_size),
                    row_axis(cut, shapes_of, suffix),
                    device,
                    dtype,
                    integers=suffix in module.integers,
                )
                for suffix in local
            }
            if "g_idx" in part and cut.local_columns != cut.num_columns:
                part["g_idx"] = self._shifted(cut, part["g_idx"])
            missing = (padded or 0) - cut.local_rows
            if missing > 0:
                part = self._padded(cut, part, missing)
            parts.append(part)
        module.load(parts)

    def _take_pieces(
        self,
        name: str,
        pieces: list[tuple[slice, ...]] | None,
        axis: int,
        device: torch.device | str,
        dtype: torch.dtype,
        integers: bool = False,
    ) -> Tensor:
        if pieces is None:
            return self.take(name, self.shape(name), device, dtype, integers=integers)
        parts = [self.weights.part(name, piece) for piece in pieces]
        stored = parts[0] if len(parts) == 1 else torch.cat(parts, axis)
        return self.kept(name, stored, device, dtype, integers=integers)

    def _place(
        self,
        owner: nn.Module,
        path: str,
        name: str,
        own: slice,
        device: torch.device | str,
        dtype: torch.dtype,
        rows: int | None = None,
    ) -> None:
        """Sets a parameter or buffer to `own` entries of tensor `name`, with zeros up to `rows`."""
        where, _, attribute = path.rpartition(".")
        module = owner.get_submodule(where)
        stored = self.weights.part(name, (own,))
        taken = self.kept(name, stored, device, dtype)
        if rows is not None and len(taken) < rows:
            taken = torch.cat((taken, taken.new_zeros(rows - len(taken), *taken.shape[1:])))
        old = getattr(module, attribute)
        setattr(module, attribute, nn.Parameter(taken) if isinstance(old, nn.Parameter) else taken)

    def _check_inputs(self, module: nn.Module, name: str, linear: LinearSpec, each: list[Cut]) -> None:
        """Raises SpecError where inputs are multiplied by Hadamard matrices that reach beyond the rank's columns."""
        size, columns = getattr(module, "input_hadamard", 0), each[0].local_columns
        if self.quantization is None or columns == linear.in_features:
            return
        from hone.model.quantized.config import input_hadamard

        wanted = {input_hadamard(self.quantization, cut.module, linear.in_features) for cut in each}
        if wanted != {size}:
            raise SpecError(
                f"the inputs of {each[0].module} are multiplied by Hadamard matrices of {max(wanted)}, and a tensor-parallel "
                f"rank has {columns} of them",
                fix="set tensor_parallel_size=1 or use pipeline_parallel_size, or a folder without transform_config",
            )

    @staticmethod
    def _shifted(cut: Cut, index: Tensor) -> Tensor:
        """GPTQ's group of each column, counted from the rank's first one."""
        if bool((index.diff() < 0).any()):
            raise SpecError(
                f"{cut.module}.g_idx permutes the columns (desc_act), so that a tensor-parallel rank's columns have groups of all",
                fix="set tensor_parallel_size=1 or use pipeline_parallel_size, or a folder quantized with desc_act=false",
            )
        return index - index[0]

    @staticmethod
    def _padded(cut: Cut, part: dict[str, Tensor], missing: int) -> dict[str, Tensor]:
        if set(part) - {"weight", "bias"}:
            raise SpecError(
                f"{cut.module} is quantized and its {cut.num_rows} rows are no multiple of the tensor-parallel ranks",
                fix="set tensor_parallel_size to a divisor of the vocabulary, or leave lm_head dense (the list `ignore`)",
            )
        return {suffix: torch.cat((one, one.new_zeros(missing, *one.shape[1:]))) for suffix, one in part.items()}


def random_model(
    config: ModelConfig,
    place: Place,
    group: Group,
    pipe: Pipe | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    slots: Slots | None = None,
) -> LocalDecoder:
    """A rank's model with random weights drawn on its device, for measuring: normal of std 0.02, norms 1, biases 0.

    Norms, routers and other linears that every rank holds whole are alike on all; matrices differ between ranks. `slots` as in
    `LocalCheckpoint`.
    """
    check_split(config, place.tensor_size, whole_experts=slots is not None)
    layers = stage_layers(config, place.num_stages)[place.stage]
    local = config.local(place.tensor_size) if slots is None else place_experts(config, place, slots)
    with torch.device("meta"):
        model = LocalDecoder(local, place, layers, group, pipe)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    for index, layer in zip(layers, model.layers):
        if index in (slots or {}):
            layer.feed_forward.arrange(slots[index], device)
    alike = {
        f"layers.{at}.{path}.weight"
        for at, index in enumerate(layers)
        for path, linear in config.linears(index).items()
        if linear.shard == "none"
    }
    generator, same = (torch.Generator(device).manual_seed(seed) for seed in (place.rank, 0))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=same if name in alike else generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0 - config.norm_offset)
    return model


class _Shapes:
    """`ShapesOf` of the checkpoint modules of one linear, from linears without memory."""

    def __init__(self, checkpoint: LocalCheckpoint, name: str, linear: LinearSpec) -> None:
        self._make, self._name, self._linear = checkpoint._maker(), name, linear
        self._made: dict[int, nn.Module] = {}

    def __call__(self, rows: int, columns: int) -> Shapes:
        if columns not in self._made:
            with torch.device("meta"):
                self._made[columns] = self._make(self._name, replace(self._linear, in_features=columns))
        return self._made[columns].part_shapes([rows])[0]
