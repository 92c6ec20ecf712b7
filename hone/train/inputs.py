"""What the inputs of a training must agree on, such as their tokenizers, and the config of the model that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hone.base.errors import SpecError
from hone.base.plan import Facts, need
from hone.feed.facts import DataFacts
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts
from hone.model.growth.base import Growth, grown_config
from hone.model.shape import Shape
from hone.train.growth.figures import need_small


def data_of(facts: Mapping[str, Facts]) -> list[DataFacts]:
    """The facts of the data, the first source's first. Raises SpecError when their tokenizers differ."""
    data = [need(facts, role, DataFacts) for role in facts if role.partition(".")[0] == "data"]
    for other in data[1:]:
        if any(getattr(other, mark) != getattr(data[0], mark) for mark in ("vocab_size", "eos_token_id", "tokenizer")):
            raise SpecError(
                f"{data[0].where} and {other.where} have different tokenizers",
                fix=f"tokenize the second with tokenizer: {{path: {data[0].where}}}",
            )
    return data


def same_tokens(parent: CheckpointFacts, data: DataFacts, role: str) -> None:
    """Raises SpecError unless the parent model has the data's tokenizer and an embedding for each of its tokens."""
    if parent.config.vocab_size < data.vocab_size:
        said = f"{parent.where} knows {parent.config.vocab_size} tokens, the data use {data.vocab_size}"
    elif None not in (parent.tokenizer, data.tokenizer) and parent.tokenizer != data.tokenizer:
        said = f"the tokenizers of {parent.where} and {data.where} tokenize differently"
    else:
        return
    raise SpecError(said, fix=f"tokenize the data with the {role}'s tokenizer, or use another {role}")


def same_vocabulary(config: ModelConfig, teacher: CheckpointFacts, data: DataFacts, parts: int) -> None:
    """Raises SpecError where a student of `config` cannot be compared with `teacher`, token by token: their vocabularies may differ
    in padding, if both are known to be the data's and each of the `parts` of tensor-parallel ranks has the same rows of both."""
    sizes = f"the student has {config.vocab_size} tokens and {teacher.where} {teacher.config.vocab_size}"
    if config.vocab_size == teacher.config.vocab_size:
        return
    if None in (teacher.tokenizer, data.tokenizer):
        raise SpecError(
            f"{sizes}, and without the tokenizers of {teacher.where} and the data none can tell whether that is padding",
            fix="add the tokenizer's files to both, or use a teacher with as many tokens",
        )
    if parts > 1:
        raise SpecError(
            f"{sizes}: tensor-parallel ranks would have different tokens of the two",
            fix="set parallelism.tensor_parallel_degree: 1, or pad both to one size",
        )


def student_config(teacher: ModelConfig, keep_every: int) -> ModelConfig:
    """The teacher's config with layers 0, n, 2n, ... only. Raises SpecError when that removes no layer."""
    if not 1 < keep_every <= teacher.num_layers:
        raise SpecError(
            f"init.keep_every {keep_every} makes no smaller student of a teacher with {teacher.num_layers} layers",
            fix=f"give a value from 2 to {teacher.num_layers}",
        )
    # Validated again: a layer that reuses the keys of a removed layer must be refused.
    return ModelConfig.read({**teacher.model_dump(mode="json"), "layers": teacher.layers[::keep_every]})


def config_of(
    given: Mapping[str, CheckpointFacts],
    data: DataFacts,
    *,
    shape: Shape,
    keep_every: int | None,
    growths: Sequence[Growth],
    objective: str,
    wants_teacher: bool,
    seq_len: int,
    adapted: bool = False,
) -> ModelConfig:
    """The config of the model to train, checked against the data and the parents in their roles.

    `keep_every` is that of a student (None: the weights are not its teacher's), `growths` what makes the model larger than its
    parent, `objective` the kind of loss; `adapted`: an adapter alone is trained, beside weights that may be codes.
    """
    need_small(growths, given)
    if wants_teacher and "teacher" not in given:
        init = "random" if keep_every is None else "teacher"
        raise SpecError(
            f"objective '{objective}' with init '{init}' needs a teacher",
            fix="add teacher: NAME OR FOLDER, or use objective next_token and init random",
        )
    if "model" in given and keep_every is not None:
        raise SpecError("init: teacher and a 'model' parent both give the initial weights", fix="drop one of them")
    starts = "model" if keep_every is None else "teacher"
    if starts in given and given[starts].quantization and not (adapted or given[starts].config.adapters):
        raise SpecError(
            f"{given[starts].where} has quantized weights, which cannot be trained",
            fix="train an adapter beside them (adapter: {kind: lora}), or start from the model it was compressed from",
        )
    for role, one in given.items():
        same_tokens(one, data, role)
    if keep_every is not None:
        config = student_config(given["teacher"].config, keep_every)
    elif "model" in given:
        config = grown_config(given["model"].config, growths)
    else:
        config = shape.config(data.vocab_size, eos=data.eos_token_id)
    config.must_be_causal("the next token would be visible to its own prediction")
    if seq_len > config.max_seq_len:
        raise SpecError(
            f"seq_len {seq_len} is longer than the model's max_seq_len {config.max_seq_len}",
            fix=f"give seq_len at most {config.max_seq_len}, or a longer model.max_seq_len",
        )
    return config
