"""Turns a client's prompt or messages into token ids that fit the model's context, with the text to echo."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from hone.base.errors import ArtifactError, HoneError, SpecError
from hone.model.tokenizer import Tokenizer, load_tokenizer
from hone.serve.http.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    Prompt,
    check_ids,
    message_dicts,
)
from hone.serve.http.replies import PromptTokens

_THREAD_CHARS = 20_000  # longer texts are encoded in a thread, so that the event loop keeps streaming
_TEMPLATE_OWN = ("messages", "add_generation_prompt", "self")


def read_tokenizer(folder: Path, chat_template: str) -> Tokenizer | None:
    """The tokenizer of a model folder, None when it has no tokenizer.json; `chat_template` is a Jinja file or ''.

    Raises SpecError for a template without a tokenizer, ArtifactError for a file that cannot be read.
    """
    if not (folder / "tokenizer.json").exists():
        if chat_template:
            raise SpecError(
                f"chat_template is given, but {folder} has no tokenizer.json", fix="copy the tokenizer into the folder"
            )
        return None
    tokenizer = load_tokenizer(folder)
    if not chat_template:
        return tokenizer
    try:
        return tokenizer.with_chat_template(Path(chat_template).read_text(encoding="utf8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"cannot read the chat template {chat_template}: {error}", fix="give a Jinja text file"
        ) from None


class Prompts:
    """Tokenizes for one model. Without a tokenizer only token ids are accepted."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    async def of_completion(self, body: CompletionBody, prompts: list[Prompt]) -> list[PromptTokens]:
        """The `prompts` of a /v1/completions body as tokens, truncated as it asks. Raises ApiError 400."""
        ready = [await self._encode(prompt, special=body.add_special_tokens) for prompt in prompts]
        for prompt in ready:
            self._truncate(prompt, body.truncate_prompt_tokens)
            if body.echo and not prompt.text and self.tokenizer is not None:
                prompt.text = self.tokenizer.decode(prompt.ids)
        return ready

    async def of_chat(self, body: ChatBody) -> PromptTokens:
        """The prompt of a chat body, through the model's template. Raises ApiError 400."""
        text = self.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        prompt = await self._encode(text, special=body.add_special_tokens)
        self._truncate(prompt, body.truncate_prompt_tokens)
        return prompt

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any] | None,
    ) -> str:
        """The text of `messages` in the chat template. Raises ApiError 400 when the template fails."""
        tokenizer = self.need_tokenizer("messages")
        plain = message_dicts(messages)
        if not tokenizer.has_chat_template:
            raise ApiError(
                400,
                "this model has no chat template: use /v1/completions, or start the server with --chat_template=FILE",
                param="messages",
                code="no_chat_template",
            )
        for name in variables or {}:
            if name in _TEMPLATE_OWN:
                raise ApiError(400, f"chat_template_kwargs must not set '{name}'", param="chat_template_kwargs")
        opened = add_generation_prompt and not continue_final_message  # a turn is continued or a new one opened
        try:
            text = tokenizer.chat(plain, add_generation_prompt=opened, **(variables or {}))
        except HoneError as error:
            raise ApiError(400, error.what, param="messages") from None
        except Exception as error:  # template and variables are not hone's code
            raise ApiError(400, f"the chat template fails: {type(error).__name__}: {error}", param="messages") from None
        if continue_final_message:
            last = plain[-1]["content"].strip()
            place = text.rfind(last)
            if not last or place < 0:
                raise ApiError(
                    400, "continue_final_message needs a last message whose text the template keeps", param="messages"
                )
            text = text[: place + len(last)]
        return text

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer. Raises ApiError 400 when the model folder has none."""
        if self.tokenizer is None:
            raise ApiError(
                400,
                "this model has no tokenizer: send the prompt as token ids (and read token_ids from the reply)",
                param=param,
                code="no_tokenizer",
            )
        return self.tokenizer

    async def encode_text(self, text: str, *, special: bool, param: str = "prompt") -> list[int]:
        """Token ids of `text`. Raises ApiError 400 without a tokenizer or for ids the model does not have."""
        tokenizer = self.need_tokenizer(param)
        if len(text) > _THREAD_CHARS:
            return await asyncio.to_thread(tokenizer.encode, text, special)
        await asyncio.sleep(0)  # many prompts in one body must not block the event loop
        return tokenizer.encode(text, special)

    async def _encode(self, prompt: Prompt, *, special: bool) -> PromptTokens:
        if not isinstance(prompt, str):
            return PromptTokens(prompt)
        ids = await self.encode_text(prompt, special=special)
        if not ids:
            raise ApiError(400, "the prompt is empty: there is no token to continue", param="prompt")
        return PromptTokens(check_ids(ids, self.vocab_size, "prompt"), prompt)

    def _truncate(self, prompt: PromptTokens, limit: int | None) -> None:
        if limit is None:
            return
        if limit == 0:
            raise ApiError(
                400, "truncate_prompt_tokens must be at least 1, or -1 for what fits", param="truncate_prompt_tokens"
            )
        limit = self.max_model_len if limit == -1 else limit
        if len(prompt.ids) > limit:
            prompt.ids = prompt.ids[-limit:]
            prompt.text = ""  # it no longer equals the prompt that was sent

    def max_tokens(self, prompt: PromptTokens, body: GenerationBody, wanted: int | None, default: int | None) -> int:
        """Tokens to generate after `prompt`: `wanted`, else `default` or the rest of the context.

        Raises ApiError 400, stating the maximum context length, when prompt and answer do not fit.
        """
        used = len(prompt.ids)
        room = self.max_model_len - used
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        limit = f"this model's maximum context length is {self.max_model_len} tokens"
        if room < 0 or (room == 0 and wanted != 0):
            raise ApiError(
                400,
                f"{limit}, the prompt alone has {used}: shorten it, or send truncate_prompt_tokens",
                param=param,
                code="context_length_exceeded",
            )
        if wanted is None:
            return room if default is None else min(default, room)
        if wanted < 0:
            raise ApiError(400, f"max_tokens must be at least 0, got {wanted}", param="max_tokens")
        if wanted > room:
            raise ApiError(
                400,
                f"{limit}: the prompt has {used} tokens and max_tokens asks for {wanted} more; at most {room} fit",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return wanted
