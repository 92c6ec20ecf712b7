"""The settings of conversations: the form of their rows, their template, and which of their tokens are trained on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from hone.base.spec import Spec

CONVERSATION = "conversation"
"""The field of a document's metadata that holds its conversation."""
TrainOn = Literal["assistant", "last", "all"]


class Chat(Spec):
    """Rows are conversations, written with a chat template; `chat: auto` is short for `{kind: auto}`."""

    kind: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "unpaired"] = Field(
        "auto",
        description="Form of the rows: messages (OpenAI, with tools), sharegpt (conversations of from and value), alpaca (instruction, "
        "input, output), prompt_completion, preference (prompt, chosen, rejected), unpaired (prompt, completion, and label: whether it is "
        "desirable); auto: by the fields of each row.",
    )
    template: str = Field(
        "", description="Jinja file of the chat template, or 'zephyr' for a short one; empty: the tokenizer's own."
    )
    train_on: TrainOn = Field(
        "assistant",
        description="Tokens with a target: assistant: those of all assistant messages, but of messages with weight 0; last: of the last "
        "one; all: every token.",
    )
    max_tokens: int | None = Field(
        None, gt=1, description="Longer conversations are cut off after so many tokens; empty: none."
    )

    @property
    def targets(self) -> Literal["trained", "pairs", "labels"]:
        """What the marks beside the tokens tell: which are trained on, or that and which answer is the rejected, or an undesirable, one."""
        named: dict[str, Literal["pairs", "labels"]] = {"preference": "pairs", "unpaired": "labels"}
        return named.get(self.kind, "trained")

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_the_form(cls, values: Any) -> Any:
        return {"kind": values} if isinstance(values, str) else values
