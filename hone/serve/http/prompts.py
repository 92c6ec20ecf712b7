"""Turns a client's prompt or messages into token ids that fit the model's context, with the text to echo."""

from __future__ import annotations

from typing import Any

from hone.base.errors import HoneError
from hone.model.tokenizer import Tokenizer
from hone.serve.http.inputs import Prompt, check_ids, message_dicts
from hone.serve.http.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
)
from hone.serve.http.replies import PromptTokens
from hone.serve.http.texts.longest import LengthBound
from hone.serve.http.texts.pool import TextError, TextPool

_SHORT_CHARS = 8_000
"""Longer texts are encoded in another process (about 10 ms here): `tokenizers` holds the interpreter's lock."""
_TEMPLATE_OWN = ("messages", "add_generation_prompt", "self")


class Prompts:
    """Tokenizes for one model. Without a tokenizer only token ids are accepted.

    Long texts and chat templates are the business of `texts`, other processes: neither may stop or end this one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        texts: TextPool | None = None,
        max_output_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_output_tokens = max_output_tokens
        self._texts = texts
        self._bound = None if tokenizer is None else LengthBound(tokenizer)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    async def of_completion(self, body: CompletionBody, prompts: list[Prompt]) -> list[PromptTokens]:
        """The `prompts` of a /v1/completions body as tokens, truncated as it asks. Raises ApiError 400."""
        if body.truncate_prompt_tokens is None:
            self._refuse_too_long(prompts, "prompt")
        ready = await self._encode(prompts, special=body.add_special_tokens)
        for prompt in ready:
            self._truncate(prompt, body.truncate_prompt_tokens)
            if body.echo and not prompt.text and self.tokenizer is not None:
                prompt.text = self.tokenizer.decode(prompt.ids)
        return ready

    async def of_inputs(
        self, inputs: list[Prompt], special: bool, truncate: int | None, param: str
    ) -> list[PromptTokens]:
        """Texts or token ids as tokens, to be embedded. Raises ApiError 400, also for what does not fit the context."""
        ready = []
        if truncate is None:
            self._refuse_too_long(inputs, param)
        try:
            encoded = await self._encode(inputs, special=special)
        except ApiError as error:
            raise ApiError(error.status, error.message, param=param, code=error.code) from None
        for index, prompt in enumerate(encoded):
            self._truncate(prompt, truncate)
            if len(prompt.ids) > self.max_model_len:
                raise ApiError(
                    400,
                    f"this model's maximum context length is {self.max_model_len} tokens, input {index} has "
                    f"{len(prompt.ids)}: shorten it, or send truncate_prompt_tokens",
                    param=param,
                    code="context_length_exceeded",
                )
            ready.append(prompt)
        return ready

    async def of_chat(self, body: ChatBody, tools: list[dict[str, Any]] | None = None) -> PromptTokens:
        """The prompt of a chat body with `tools`, through the model's template. Raises ApiError 400."""
        text = await self.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables={**(body.chat_template_kwargs or {}), **({"tools": tools} if tools else {})},
        )
        if body.truncate_prompt_tokens is None:
            self._refuse_too_long([text], "messages")
        (prompt,) = await self._encode([text], special=body.add_special_tokens)
        self._truncate(prompt, body.truncate_prompt_tokens)
        return prompt

    async def render(
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
            if self._texts is None:
                text = tokenizer.chat(plain, add_generation_prompt=opened, **(variables or {}))
            else:
                text = await self._texts.render(plain, opened, variables or {})
        except TextError as error:
            raise ApiError(
                400,
                f"the chat template fails on these messages: {error}",
                param="messages",
                code="chat_template_failed",
            ) from None
        except HoneError as error:
            raise ApiError(400, error.what, param="messages") from None
        except Exception as error:  # template and variables are not hone's code
            raise ApiError(400, f"the chat template fails: {type(error).__name__}: {error}", param="messages") from None
        if continue_final_message:
            last = plain[-1]["content"].strip()
            index = text.rfind(last)
            if not last or index < 0:
                raise ApiError(
                    400, "continue_final_message needs a last message whose text the template keeps", param="messages"
                )
            text = text[: index + len(last)]
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
        """Token ids of `text`. Raises ApiError 400 without a tokenizer or for a text that takes too long."""
        return (await self._encode_texts([text], special=special, param=param))[0]

    async def _encode_texts(self, texts: list[str], *, special: bool, param: str) -> list[list[int]]:
        tokenizer = self.need_tokenizer(param)
        if self._texts is None or sum(map(len, texts)) <= _SHORT_CHARS:
            return [tokenizer.encode(text, special) for text in texts]
        try:
            return await self._texts.encode(texts, special)
        except TextError as error:
            raise ApiError(
                400, f"this text cannot be tokenized: {error}; send a shorter one", param=param, code="text_too_long"
            ) from None

    async def _encode(self, prompts: list[Prompt], *, special: bool) -> list[PromptTokens]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        found = iter(await self._encode_texts(texts, special=special, param="prompt") if texts else ())
        ready = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = next(found)
                if not ids:
                    raise ApiError(400, "the prompt is empty: there is no token to continue", param="prompt")
                ready.append(PromptTokens(check_ids(ids, self.vocab_size, "prompt"), prompt))
            else:
                ready.append(PromptTokens(prompt))
        return ready

    def _refuse_too_long(self, prompts: list[Prompt], param: str) -> None:
        """Raises ApiError 400 for a text that has too many characters for the context, however it is tokenized."""
        if self._bound is None:
            return
        for prompt in prompts:
            least = self._bound.least_tokens(prompt) if isinstance(prompt, str) else 0
            if least > self.max_model_len:
                raise ApiError(
                    400,
                    f"this model's maximum context length is {self.max_model_len} tokens, and a text of {len(prompt)} "
                    f"characters has at least {least}: shorten it",
                    param=param,
                    code="context_length_exceeded",
                )

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
        most = room if self.max_output_tokens is None else self.max_output_tokens
        if wanted is None:
            return min(room, most) if default is None else min(default, room, most)
        if wanted < 0:
            raise ApiError(400, f"max_tokens must be at least 0, got {wanted}", param="max_tokens")
        if wanted > room:
            raise ApiError(
                400,
                f"{limit}: the prompt has {used} tokens and max_tokens asks for {wanted} more; at most {room} fit",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return min(wanted, most)
