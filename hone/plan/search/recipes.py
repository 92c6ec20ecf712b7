"""The exact recipe of a configuration: the stages that `hone run` makes it with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.base.spec import dump_yaml
from hone.plan.search.goal import Goal
from hone.plan.search.shapes import VOCABULARY, Candidate

SOURCE = "python"
"""The text of a recipe whose goal names no data: the Python library of the machine, to be replaced."""

MODEL = "MODEL_FOLDER"
"""The input of a recipe whose goal compresses or serves a model given by its sizes alone, to be replaced."""

Config = Mapping[str, Any]


def train_spec(goal: Goal, candidate: Candidate, at: Config, *, ranks: int) -> dict[str, Any]:
    """The fields of the train stage of configuration `at` (`Product.at` with `passes`) on `ranks` ranks."""
    spec: dict[str, Any] = {} if candidate.shape is None else {"model": candidate.shape}
    spec |= {
        "seq_len": goal.seq_len,
        "batch_size": at["batch_size"],
        "gradient_accumulation_steps": at["passes"],
        "precision": at["precision"],
        "activation_checkpointing": recomputation(at["recomputation"]),
        "tokens": int(at["tokens"]),
    }
    if ranks > 1:
        spec["parallelism"] = parallelism(at)
    return spec


def parallelism(at: Config) -> dict[str, Any]:
    """The fields of `parallelism`, those that differ from one rank's."""
    found: dict[str, Any] = {"data_parallel": {"kind": at["sharding"]}}
    degrees = {"tensor": at["tensor"], "pipeline": at["stages"], "context": at["context"], "expert": at["experts"]}
    found |= {f"{axis}_parallel_degree": degree for axis, degree in degrees.items() if degree > 1}
    if at["stages"] > 1:
        kind, chunks = at["schedule"]
        more = {"stages_per_rank": chunks} if kind == "interleaved" else {}
        found["pipeline_parallel_schedule"] = {"kind": kind, **more}
    return found


def recomputation(text: str) -> dict[str, Any]:
    """The technique that 'every_nth 2' or 'layers 0-3,7' names."""
    kind, _, n = text.partition(" ")
    if kind == "layers":
        runs = [[int(end) for end in run.split("-")] for run in n.split(",")]
        return {"kind": kind, "layers": [layer for run in runs for layer in range(run[0], run[-1] + 1)]}
    return {"kind": kind, **({"n": int(n)} if n else {})}


def data_stage(goal: Goal, vocab_size: int) -> dict[str, Any] | None:
    """The data stage of a recipe; None where the goal names a folder that one made."""
    if goal.data is not None and (Path(goal.data) / "tokens" / "meta.json").is_file():
        return None
    return {
        "stage": "data", "name": "text", "source": goal.data or SOURCE, "tokenizer": {"vocab_size": vocab_size}
    }  # fmt: skip


def recipe_of(
    goal: Goal,
    candidate: Candidate,
    name: str,
    train: dict[str, Any] | None,
    compress: dict[str, Any] | None,
    serve: dict[str, Any] | None,
) -> dict[str, Any]:
    """The recipe of a row: its stages in order, each from those before."""
    vocab = candidate.dims.vocab_size if candidate.folder is None else goal.vocab_size or VOCABULARY
    first = data_stage(goal, min(vocab, candidate.dims.vocab_size))
    data = "data-text" if first is not None else str(goal.data)
    if first is not None and train is None and candidate.folder is not None:
        first["tokenizer"] = {"path": candidate.folder}
    stages = [first] if first is not None else []
    model = candidate.folder or MODEL
    if train is not None:
        starts = {"model": candidate.folder} if candidate.shape is None else {}
        stages.append({"stage": "train", "name": "base", "from": {"data": data, **starts}, **train})
        model = "train-base"
    if compress is not None:
        stages.append({"stage": "compress", "name": "small", "from": {"model": model, "data": data}, **compress})
        model = "compress-small"
    if serve is not None:
        stages.append({"stage": "serve", "name": "bench", "from": {"model": model, "data": data}, **serve})
    return {"line": name, "stages": stages}


def yaml_of(recipe: dict[str, Any], goal: Goal) -> str:
    """The recipe as YAML, with a line that says what is to be replaced."""
    said = ""
    if goal.data is None:
        said = f"# The goal names no data: replace `source: {SOURCE}` by your text, or the input `data` by a data folder.\n"
    if any(MODEL in (stage.get("from") or {}).values() for stage in recipe["stages"]):
        said += f"# The goal has the sizes of a model: replace {MODEL} by its folder.\n"
    return said + dump_yaml(recipe)
