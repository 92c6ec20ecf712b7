"""What the inputs of a training must agree on: the tokenizers of several sources of data, of data and of parent models."""

from __future__ import annotations

from collections.abc import Mapping

from hone.base.errors import SpecError
from hone.base.plan import Facts, need
from hone.data.facts import DataFacts
from hone.model.facts import CheckpointFacts


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
