"""Every tensor that the checkpoint of a config has, and the modules of its linears, from the declarations alone. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from hone.base.errors import SpecError
from hone.model.linear_spec import each_expert

if TYPE_CHECKING:
    from hone.model.config import ModelConfig
    from hone.model.linear_spec import LinearSpec, Parameter

TABLES = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
"""The checkpoint's modules with a row for each token, by their path in a decoder."""


def table_name(config: ModelConfig, path: str) -> str:
    """The checkpoint's module at `path` of a decoder, 'embed_tokens' or 'lm_head': a reward model's head is called score."""
    return "score" if path == "lm_head" and config.num_labels else TABLES[path]


class Module(NamedTuple):
    """One matrix of a checkpoint, and its place in hone's fused linears."""

    name: str
    """Its checkpoint name: 'model.layers.0.self_attn.q_proj'."""
    path: str
    """The linear that holds it, below the layer ('mixer.qkv'), or below the decoder ('lm_head')."""
    rows: slice
    """Its output rows there; with experts, the rows of all experts in order."""
    linear: LinearSpec
    """That linear."""

    @property
    def num_rows(self) -> int:
        """Its output features."""
        return self.rows.stop - self.rows.start

    @property
    def matrix(self) -> str:
        """The path of its matrix, which is that of its expert where the linear has experts: 'feed_forward.down.3'."""
        return (
            self.path if self.linear.experts is None else f"{self.path}.{self.rows.start // self.linear.out_features}"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [N, K] of its dense weight."""
        return self.num_rows, self.linear.in_features


class DeclaredTensor(NamedTuple):
    """One tensor of a checkpoint that is not quantized: the weight or bias of a module, or a parameter outside the linears."""

    name: str
    """Its checkpoint name: 'model.layers.0.self_attn.q_proj.weight'."""
    path: str
    """hone's path below the layer of the linear ('mixer.qkv') or parameter ('mixer_norm.weight')."""
    shape: tuple[int, ...]
    module: Module | None = None
    """The module of whose linear it is the weight (two axes) or bias (one)."""
    parameter: Parameter | None = None
    """The norm or other parameter that it is; None for that of the final norm."""


def layer_modules(config: ModelConfig, index: int) -> Iterator[Module]:
    """The modules of the linears of layer `index`, in the order in which they run."""
    for path, linear in config.linears(index).items():
        begin = 0
        for name, count in config.modules(index, path).items():
            yield Module(name, path, slice(begin, begin + count), linear)
            begin += count


def expert_modules(config: ModelConfig, index: int, path: str) -> list[dict[str, int]]:
    """The checkpoint modules of each expert of the linear at `path` of layer `index`, with their rows; of a linear without experts
    those of its one matrix.

    Raises SpecError where several experts are stored as one module.
    """
    found, count = list(config.modules(index, path).items()), config.linears(index)[path].experts or 1
    each, left = divmod(len(found), count)
    if left or not each:
        raise SpecError(
            f"{found[0][0]} holds several of {count} experts: matrices are compressed one by one",
            fix=f"use a checkpoint that stores them apart, as experts.0 to experts.{count - 1}, or leave them unchanged with ignore",
        )
    return [dict(found[each * expert : each * (expert + 1)]) for expert in range(count)]


def matrices(config: ModelConfig, index: int) -> Iterator[tuple[str, LinearSpec, dict[str, int]]]:
    """Path, declaration and checkpoint modules of every matrix of layer `index`, in the order in which they run: a linear of experts
    is one for each (`each_expert`), 'feed_forward.down.3' that of the fourth."""
    linears = config.linears(index)
    own = (modules for path in linears for modules in expert_modules(config, index, path))
    for (path, linear), modules in zip(each_expert(linears).items(), own, strict=True):
        yield path, linear, modules


def end_module(config: ModelConfig, path: str) -> Module:
    """The module of the embedding ('embed_tokens') or of the head ('lm_head'), if they are apart."""
    linear = config.ends()[path]
    return Module(table_name(config, path), path, slice(0, linear.out_features), linear)


def modules(config: ModelConfig) -> Iterator[Module]:
    """Every module of a linear, with the embedding as the first and the head, if it has weights of its own, as the last."""
    yield end_module(config, "embed_tokens")
    for index in range(config.num_layers):
        yield from layer_modules(config, index)
    if not config.tie_embeddings:
        yield end_module(config, "lm_head")


def layer_tensors(config: ModelConfig, index: int) -> Iterator[DeclaredTensor]:
    """The tensors of layer `index`: those of its linears, then its norms and other parameters."""
    for module in layer_modules(config, index):
        yield from _tensors_of(module)
    names = config.singles(index)
    for path, parameter in config.parameters(index).items():
        yield DeclaredTensor(names[path], path, tuple(parameter.shape), parameter=parameter)


def end_tensors(config: ModelConfig) -> Iterator[DeclaredTensor]:
    """The tensors outside the layers: the embedding's, the final norm's and, if it has weights of its own, the head's."""
    yield from _tensors_of(end_module(config, "embed_tokens"))
    yield DeclaredTensor("model.norm.weight", "norm.weight", (config.hidden_size,))
    if not config.tie_embeddings:
        yield from _tensors_of(end_module(config, "lm_head"))


def model_tensors(config: ModelConfig) -> Iterator[DeclaredTensor]:
    """Every tensor: the embedding's, those of the layers, the final norm's and the head's."""
    embedding, *others = end_tensors(config)
    yield embedding
    for index in range(config.num_layers):
        yield from layer_tensors(config, index)
    yield from others


def _tensors_of(module: Module) -> Iterator[DeclaredTensor]:
    yield DeclaredTensor(f"{module.name}.weight", module.path, module.shape, module)
    if module.linear.bias:
        yield DeclaredTensor(f"{module.name}.bias", module.path, (module.num_rows,), module)
