"""The linears of a model to compress, and its embedding, from its config alone: their names, shapes and inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hone.base.errors import SpecError, nearest
from hone.model.families import FAMILIES
from hone.model.linear_spec import Input, Norm, Tokens, is_router
from hone.model.weights.tensors import matrices

if TYPE_CHECKING:
    from hone.model.config import ModelConfig
    from hone.model.quantized.scheme import Scheme


HEAD = "lm_head"
"""The head's checkpoint module and its path: it is the one linear of the layer after the last."""
EMBEDDING, EMBEDDED = "model.embed_tokens", "embed_tokens"
"""The embedding's checkpoint module and its path."""
EMBEDDING_CLASS = "Embedding"
"""What compressed-tensors and vLLM call the embedding in `targets`, by its class."""


@dataclass(frozen=True)
class PartOf:
    """Some tokens of an input."""

    reads: Input
    share: float
    """The fraction of the tokens; of experts the mean of all."""
    expert: int | None = None
    """The expert to which a router sends them."""


@dataclass(frozen=True)
class Linear:
    """One matrix of a layer as computed: q, k and v of an attention are one, each expert has one of its own."""

    path: str
    """Its path in the layer: 'mixer.qkv', or 'feed_forward.down.3' of the fourth expert."""
    modules: tuple[tuple[str, int], ...]
    """Its checkpoint modules, each with its number of rows, in stacking order."""
    columns: int
    """Input features."""
    reads: Input | PartOf
    """Its input; linears of a layer with an equal value have the same input."""

    @property
    def expert(self) -> int | None:
        """The number of its expert; None without."""
        return self.reads.expert if isinstance(self.reads, PartOf) else None

    @property
    def share(self) -> float:
        """The fraction of tokens that it reads; of experts the mean of all."""
        return self.reads.share if isinstance(self.reads, PartOf) else 1.0

    @property
    def rows(self) -> int:
        """Output features."""
        return sum(rows for _, rows in self.modules)


def linears(config: ModelConfig, index: int) -> tuple[Linear, ...]:
    """Every linear of layer `index`, in order of execution; of the index after the last layer the head, also where it is tied."""
    if index == config.num_layers:
        return (Linear(HEAD, ((HEAD, config.vocab_size),), config.hidden_size, Norm("norm")),)
    whole, found = config.linears(index), []
    for path, spec, modules in matrices(config, index):
        holder, _, number = path.rpartition(".")
        expert, share = (None, spec.share) if path in whole else (int(number), whole[holder].share)
        reads = spec.reads if expert is None and share == 1.0 else PartOf(spec.reads, share, expert)
        found.append(Linear(path, tuple(modules.items()), spec.in_features, reads))
    return tuple(found)


def select(config: ModelConfig, targets: Sequence[str], ignore: Sequence[str]) -> tuple[tuple[Linear, ...], ...]:
    """Per layer, the linears to compress: matched by one of `targets` and by none of `ignore` (see `matches`). Where the head is,
    it follows the layers. A router of experts is among them only where one of `targets` matches routers alone: what it decides
    is worth more than its bytes.

    Raises SpecError when there is none, when one is matched only in part, and for a pattern that matches nothing of the model.
    """
    chosen: list[tuple[Linear, ...]] = []
    layers = [linears(config, index) for index in range(config.num_layers)]
    routers = [
        {path for path in config.linears(index) if is_router(config.linears(index), path)}
        for index in range(config.num_layers)
    ]
    names = [name for each in layers for linear in each for name, _ in linear.modules]
    others = [
        name for each, left in zip(layers, routers) for one in each if one.path not in left for name, _ in one.modules
    ]
    of_routers = (
        [pattern for pattern in targets if not any(matches(pattern, name) for name in others)] if any(routers) else []
    )
    for each, left in zip(layers, routers, strict=True):
        here = []
        for linear in each:
            wanted = of_routers if linear.path in left else targets
            taken = [name for name, _ in linear.modules if _any(wanted, name) and not _any(ignore, name)]
            if len(taken) == len(linear.modules):
                here.append(linear)
            elif taken:
                apart = [name for name, _ in linear.modules if name not in taken]
                raise SpecError(
                    f"targets and ignore leave out {', '.join(apart)} of {', '.join(name for name, _ in linear.modules)}",
                    fix="these are one matrix: target or ignore them together",
                )
        chosen.append(tuple(here))
    if _any(targets, HEAD) and not _any(ignore, HEAD):
        chosen.append(linears(config, config.num_layers))
    for field, patterns in (("targets", targets), ("ignore", ignore)):
        for pattern in patterns:
            if pattern != EMBEDDING_CLASS and not any(matches(pattern, name) for name in (*names, HEAD, EMBEDDING)):
                raise nothing_matched(f"{field}: '{pattern}'", pattern, names, "the model's linears")
    if not any(chosen) and embedding(config, targets, ignore) is None:
        raise SpecError(
            f"targets {list(targets)} without {list(ignore)} name no linear", fix=f"names look like {names[0]}"
        )
    return tuple(chosen)


def embedding(config: ModelConfig, targets: Sequence[str], ignore: Sequence[str]) -> Linear | None:
    """The embedding as a matrix with a row for each token, if one of `targets` names it and none of `ignore` does.

    A pattern that also matches linears of layers, as 're:.*', does not name it: such patterns are of linears.
    """
    linear = [name for index in range(config.num_layers) for one in linears(config, index) for name, _ in one.modules]

    def named(pattern: str) -> bool:
        return pattern == EMBEDDING_CLASS or matches(pattern, EMBEDDING)

    asked = (one for one in targets if named(one) and not any(matches(one, name) for name in linear))
    if next(asked, None) is None or any(named(pattern) for pattern in ignore):
        return None
    return Linear(EMBEDDED, ((EMBEDDING, config.vocab_size),), config.hidden_size, Tokens())


def matrix_name(index: int, path: str) -> str:
    """Name of the linear at `path` of layer `index`: 'layers.3.mixer.qkv', or 'lm_head' of the head, after the last layer; that of
    the embedding, whatever the index, is 'embed_tokens'."""
    return path if path in (HEAD, EMBEDDED) else f"layers.{index}.{path}"


def readers_of(linears: Iterable[Linear]) -> dict[Input | PartOf, list[str]]:
    """The paths of the linears of a layer that read each of its inputs."""
    found: dict[Input | PartOf, list[str]] = {}
    for linear in linears:
        found.setdefault(linear.reads, []).append(linear.path)
    return found


def has_head(targets: Sequence[Sequence[Linear]]) -> bool:
    """Whether the head is among what `select` chose."""
    return any(linear.path == HEAD for linear in targets[-1])


def matches(pattern: str, name: str) -> bool:
    """Whether a regular expression is found anywhere in `name`; after 're:' it begins with it, as in compressed-tensors and vLLM."""
    whole = pattern.removeprefix("re:")
    return bool(re.search(pattern, name) if whole == pattern else re.match(whole, name))


def nothing_matched(what: str, pattern: str, names: Sequence[str], of: str) -> SpecError:
    """The error for a pattern that matches none of `names`."""
    return SpecError(
        f"{what} matches none of {of}",
        fix=f"names look like {_like(pattern, names)}; a pattern is a regular expression found anywhere in a name, or "
        "from its start as 're:.*down_proj'",
    )


def _any(patterns: Sequence[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def _like(pattern: str, names: Sequence[str]) -> str:
    """The first name whose last part is what a pattern probably misspells, or the first of all."""
    lasts = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = nearest(re.sub(r"[^\w.]", "", pattern.removeprefix("re:")).rpartition(".")[2], lasts)
    return names[0] if near is None else lasts[near]


def check_stacked(config: ModelConfig, targets: Sequence[Sequence[Linear]]) -> None:
    """Raises SpecError unless `targets` are all experts and nothing else, of a family that stores those of a layer as one tensor."""
    fix = r"set targets=['\.experts\.'], or use layout=mxfp4-pack-quantized"
    if not FAMILIES[config.family].stacked:
        raise SpecError(
            f"layout mxfp4 stores the experts of gpt-oss, and this model is of family {config.family}", fix=fix
        )
    for index, chosen in enumerate(targets):
        paths = {linear.path for linear in chosen}
        for linear in linears(config, index):
            name, taken = linear.modules[0][0], linear.path in paths
            if (".experts." in name) != taken:
                raise SpecError(
                    "layout mxfp4 stores all experts of a layer as one tensor and nothing else, and targets and ignore "
                    f"{'would quantize' if taken else 'leave out'} {name}",
                    fix=fix,
                )


def check_modules(matrix: str, linear: Linear, scheme: Scheme, without_blocks: str) -> None:
    """Raises SpecError for a checkpoint module of `matrix` that the layout cannot store, or a block of rows that extends over two, which
    `without_blocks` does not."""
    from hone.model.quantized.layouts import layout_of

    if linear.path == EMBEDDED and layout_of(scheme).method != "compressed-tensors":
        raise SpecError(
            f"layout {scheme.layout} cannot store the embedding: the libraries that read it take that as floats",
            fix="leave it out of targets, or use a layout of compressed-tensors (rtn or gptq with layout=pack-quantized)",
        )
    if linear.path == HEAD and scheme.layout == "awq":
        raise SpecError(
            "layout awq cannot store lm_head: the libraries that read it take the head as floats",
            fix="leave it unchanged, ignore=['lm_head'], or use layout=pack-quantized",
        )
    for name, rows in linear.modules:
        problem = layout_of(scheme).shape_problem(scheme, rows, linear.columns)
        if problem is not None:
            ignored = list(dict.fromkeys((HEAD, name.rpartition(".")[2])))
            raise SpecError(
                f"layout {scheme.layout} cannot store {name}, {rows} x {linear.columns}: {problem}",
                fix=f"leave it unchanged, ignore={ignored}, or choose another layout",
            )
    if scheme.block is None:
        return
    for name, rows in linear.modules[:-1]:
        if rows % scheme.block[0]:
            parts = [(module.rpartition(".")[2], height) for module, height in linear.modules]
            raise SpecError(
                f"blocks of {scheme.block[0]} rows do not divide the {rows} rows of {name}, and {matrix} is one matrix of "
                + ", ".join(f"{part} ({height})" for part, height in parts),
                fix=f"{without_blocks}, or leave it unchanged: ignore={[HEAD, *(part for part, _ in parts)]}",
            )
