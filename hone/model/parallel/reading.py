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

    Raises SpecError when layers, heads or groups of quantized weights cannot be divided among the ranks.
    """

    def __init__(self, folder: Path | str, place: Place, group: Group, pipe: Pipe | None = None) -> None:
        super().__init__(folder)
        check_split(self.config, place.tensor_size)
        whole = self.empty()  # checks names and shapes of the whole
        if place.tensor_size > 1 and hasattr(whole.embed_tokens, "table"):
            raise SpecError(
                f"{self.folder}: the embedding is quantized, and tensor-parallel ranks split one of floats alone",
                fix="set tensor_parallel_size=1 or use pipeline_parallel_size, or compress the model without embed_tokens in targets",
            )
        self.whole, self.place, self.group, self.pipe = self.config, place, group, pipe
        self.stage_layers = stage_layers(self.whole, place.num_stages)[place.stage]
        self.config = self.whole.local(place.tensor_size)

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
            if isinstance(inner, ExpertLinears):
                one, names = replace(linear, experts=None), expert_modules(whole, index, path)
                parts = [(inner[expert], f"{name}.{expert}", one, own) for expert, own in enumerate(names)]
            for part, name, spec, names in parts:
                each = cuts(spec, names, place.tensor_rank, place.tensor_size)
                self._load_cuts(part, name, spec, each, device, dtype)
        parameters = whole.parameters(index)
        for path, name in whole.singles(index).items():
            one = parameters[path]
            own = one.local(place.tensor_rank, place.tensor_size) if isinstance(one, ParameterSpec) else slice(None)
            self._place(layer, path, name, own, device, dtype)
        for path, name in rounding_paths(layer, self.config, index).items():
            heads = self.shape(name)[0]
            keys = Piece("k", heads, heads if heads > 1 else None, replicate=True)
            self._place(layer, path, name, keys.rows(place.tensor_rank, place.tensor_size), device, dtype)

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
) -> LocalDecoder:
    """A rank's model with random weights drawn on its device, for measuring: normal of std 0.02, norms 1, biases 0.

    Embeddings and norms are those that every rank of the stage must share; matrices differ between ranks.
    """
    check_split(config, place.tensor_size)
    layers = stage_layers(config, place.num_stages)[place.stage]
    with torch.device("meta"):
        model = LocalDecoder(config.local(place.tensor_size), place, layers, group, pipe)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(place.rank)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=generator)
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
