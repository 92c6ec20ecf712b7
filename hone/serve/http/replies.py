"""OpenAI response objects, whole or as server-sent events, with logprobs and usage."""

from __future__ import annotations

import codecs
import json
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.serve.http.protocol import ApiError, ChatBody, CompletionBody, GenerationBody
from hone.serve.request import Output, TokenLogprob

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; clients expect this minimum


class TokenNames(Protocol):
    """The part of a tokenizer that replies use."""

    def token_bytes(self, token: int) -> bytes: ...


@dataclass
class PromptTokens:
    """One prompt, ready for the engine: its ids, and the text to echo."""

    ids: list[int]
    text: str = ""


@dataclass
class ReplyChoice:
    """The tokens and text received so far for one choice of a reply."""

    index: int
    prompt: PromptTokens
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: str | None = None
    stop_reason: str | int | None = None
    num_cached: int = 0
    begun: bool = False
    first_s: float = 0.0
    last_s: float = 0.0
    """Times of its first and its latest token; 0 before."""

    def take(self, output: Output) -> None:
        """Adds one engine output."""
        self.text.append(output.text)
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish = output.finish
        self.stop_reason = output.stop_reason
        self.num_cached = output.num_cached_tokens or self.num_cached


def dump(value: Any) -> bytes:
    """`value` as compact UTF-8 JSON."""
    return _ENCODER.encode(value).encode("utf8", "replace")


def event(value: Any) -> bytes:
    """`value` as one server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


def floor(logprob: float) -> float:
    """`logprob`, finite."""
    return max(logprob, _LOWEST_LOGPROB) if not math.isnan(logprob) else _LOWEST_LOGPROB


class TokenLabels:
    """Labels of tokens: their text, or `bytes:\\xNN` where a token is only a part of a character. Caches every label."""

    def __init__(self, tokenizer: TokenNames | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._names: dict[int, tuple[bytes, str]] = {}  # at most one per token of the vocabulary

    def bytes(self, token: int) -> bytes:
        return self._name(token)[0]

    def text(self, token: int) -> str:
        return self._name(token)[1]

    def _name(self, token: int) -> tuple[bytes, str]:
        found = self._names.get(token)
        if found is None:
            raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
            try:
                text = f"token_id:{token}" if self._as_ids else raw.decode("utf8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            found = self._names[token] = raw, text
        return found


class CompletionLogprobs:
    """The four lists of /v1/completions; keeps the text offset between two chunks of a stream."""

    def __init__(self, labels: TokenLabels, special: frozenset[int]) -> None:
        self._labels = labels
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf8")("replace")
        self._chars = 0
        self._drop_space = False

    def start(self, prompt: PromptTokens) -> None:
        """Starts with the prompt's tokens (echo); its text may lack the space that SentencePiece puts in front."""
        first = next((raw for token in prompt.ids if (raw := self._bytes(token))), b"")
        self._drop_space = first.startswith(b" ") and not prompt.text.startswith(" ")

    def lists(self, tokens: list[int], scored: list[TokenLogprob | None]) -> dict[str, list[Any]]:
        """JSON for `tokens` with their `scored` (None: the first token of a prompt, which has no logprob)."""
        out: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, one in zip(tokens, scored, strict=True):
            raw = self._bytes(token)
            if self._drop_space and raw:
                raw, self._drop_space = raw[1:], False
            if raw and not 0x80 <= raw[0] < 0xC0:  # not a continuation byte: the character before stays incomplete
                self._chars += len(self._decoder.decode(b"", final=True))
            out["text_offset"].append(self._chars)
            self._chars += len(self._decoder.decode(raw))
            out["tokens"].append(self._labels.text(token))
            out["token_logprobs"].append(None if one is None else floor(one.logprob))
            out["top_logprobs"].append(None if one is None else self._top(one))
        return out

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in [*one.top, (one.token, one.logprob)]:
            top.setdefault(self._labels.text(token), floor(logprob))  # best first: of equal labels the higher stays
        return top

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._special else self._labels.bytes(token)


def chat_logprobs(labels: TokenLabels, scored: list[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": labels.text(token), "logprob": floor(logprob), "bytes": list(labels.bytes(token))}

    return {
        "content": [
            {**entry(one.token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]} for one in scored
        ]
    }


def prompt_scores(labels: TokenLabels, scored: list[TokenLogprob | None], count: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for every token but the first its `count` most likely ones and itself, by id."""
    found: list[dict[str, Any] | None] = [None] * len(scored)
    for place, one in enumerate(scored):
        if one is None:
            continue
        entries = found[place] = {}
        for rank, (token, logprob) in [*enumerate(one.top[:count], 1), (None, (one.token, one.logprob))]:
            entry = {"logprob": floor(logprob), "rank": rank, "decoded_token": labels.text(token)}
            entries.setdefault(str(token), entry)  # its own is ranked where it is among the most likely
    return found


class Reply:
    """One reply in progress: takes engine outputs, returns a whole object or a stream of events."""

    stream_object: str
    whole_object: str

    def __init__(
        self, body: GenerationBody, *, reply_id: str, created: int, model: str, prompts: list[PromptTokens], n: int
    ) -> None:
        self._body = body
        self._head = {"id": reply_id, "created": created, "model": model}
        self._begin = b"data: " + dump({"object": self.stream_object, **self._head})[:-1] + b',"choices":['
        self.choices = [
            ReplyChoice(place * n + copy, prompt) for place, prompt in enumerate(prompts) for copy in range(n)
        ]
        self._prompts = prompts
        self._n = n
        options = body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._usage_each = self._include_usage and options is not None and options.continuous_usage_stats

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once for all its choices."""
        prompt = sum(len(prompt.ids) for prompt in self._prompts)
        completion = sum(len(choice.tokens) for choice in self.choices)
        cached = sum(choice.num_cached for choice in self.choices[:: self._n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities, which dominate the size of the reply."""
        return sum(len(choice.logprobs) + len(choice.prompt_logprobs or ()) for choice in self.choices)

    def whole(self) -> dict[str, Any]:
        """The finished response object."""
        head = {"object": self.whole_object, **self._head}
        return {**head, "choices": [self._whole_choice(choice) for choice in self.choices], "usage": self.usage()}

    def events(self, choice: ReplyChoice, output: Output) -> bytes:
        """The events for one new output of `choice` (already added to it); b"" when there is nothing to send yet."""
        first = not choice.begun
        shown = output.text or output.finish or output.logprobs or self._wants_ids
        if not (shown or first):
            return b""
        choice.begun = True
        return b"".join(self._chunk(part) for part in self._parts(choice, output, first))

    def around(self, choice: ReplyChoice) -> tuple[bytes, bytes, bytes] | None:
        """What is around the text, and around the token's id after it (if that is shown), in events of ordinary tokens.

        None where such an event depends on more: on earlier ones, or on log-probabilities.
        """
        if self._usage_each or not self._is_regular:
            return None
        text, token = "\ufdd0", -1  # a noncharacter, and no token
        (part,) = self._parts(choice, Output("", [token], text), False)
        before, _, after = self._chunk(part).rpartition(f'"{text}"'.encode())
        if not self._wants_ids:
            return before, after, b""
        between, _, after = after.rpartition(b"[%d]" % token)
        return before, between + b"[", b"]" + after

    @property
    def _is_regular(self) -> bool:
        """Whether events of tokens without log-probabilities differ in text and token only."""
        return False

    def closing(self) -> bytes:
        """The end of a stream: usage if requested, then [DONE]."""
        if not self._include_usage:
            return DONE
        return event({"object": self.stream_object, **self._head, "choices": [], "usage": self.usage()}) + DONE

    @property
    def _wants_ids(self) -> bool:
        return bool(self._body.return_token_ids)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = b""
        if self._include_usage:
            usage = b',"usage":' + (dump(self.usage()) if self._usage_each else b"null")
        return self._begin + dump(choice) + b"]" + usage + b"}\n\n"

    def _whole_choice(self, choice: ReplyChoice) -> dict[str, Any]:
        raise NotImplementedError

    def _parts(self, choice: ReplyChoice, output: Output, first: bool) -> list[dict[str, Any]]:
        raise NotImplementedError


class CompletionReply(Reply):
    """/v1/completions."""

    stream_object = whole_object = "text_completion"

    def __init__(self, body: CompletionBody, labels: TokenLabels, special: frozenset[int], **more: Any) -> None:
        super().__init__(body, **more)
        self._echo = body.echo
        self._labels = labels
        self._logprobs = None if body.logprobs is None else [CompletionLogprobs(labels, special) for _ in self.choices]

    def _whole_choice(self, choice: ReplyChoice) -> dict[str, Any]:
        value = self._json(choice, "".join(choice.text), choice.tokens, choice.logprobs, with_prompt=True)
        if self._body.prompt_logprobs is not None:
            value["prompt_logprobs"] = prompt_scores(
                self._labels, choice.prompt_logprobs or [], self._body.prompt_logprobs
            )
        return value

    def _parts(self, choice: ReplyChoice, output: Output, first: bool) -> list[dict[str, Any]]:
        return [self._json(choice, output.text, output.tokens, output.logprobs, with_prompt=first)]

    @property
    def _is_regular(self) -> bool:
        return self._logprobs is None

    def _json(
        self, choice: ReplyChoice, text: str, tokens: list[int], scored: list[TokenLogprob], *, with_prompt: bool
    ) -> dict[str, Any]:
        echo = self._echo and with_prompt
        value: dict[str, Any] = {
            "index": choice.index,
            "text": choice.prompt.text + text if echo else text,
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self._logprobs is not None:
            writer = self._logprobs[choice.index]
            if echo:
                assert choice.prompt_logprobs is not None, "the engine returned no prompt logprobs for an echo"
                writer.start(choice.prompt)
                value["logprobs"] = writer.lists(choice.prompt.ids + tokens, [*choice.prompt_logprobs, *scored])
            else:
                value["logprobs"] = writer.lists(tokens, list(scored))
        if self._wants_ids:
            value["token_ids"] = tokens
            if with_prompt:
                value["prompt_token_ids"] = choice.prompt.ids
        return value


class ChatReply(Reply):
    """/v1/chat/completions."""

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, body: ChatBody, labels: TokenLabels, **more: Any) -> None:
        super().__init__(body, **more)
        self._all_labels = labels
        self._labels = labels if body.logprobs else None

    def whole(self) -> dict[str, Any]:
        value = super().whole()
        if self._body.prompt_logprobs is not None:
            first = self.choices[0]
            value["prompt_logprobs"] = prompt_scores(
                self._all_labels, first.prompt_logprobs or [], self._body.prompt_logprobs
            )
        if self._wants_ids:
            value["prompt_token_ids"] = self._prompts[0].ids
        return value

    def _whole_choice(self, choice: ReplyChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return self._json(choice, {"message": message}, choice.tokens, choice.logprobs, choice.finish)

    @property
    def _is_regular(self) -> bool:
        return type(self) is ChatReply and self._labels is None

    def _parts(self, choice: ReplyChoice, output: Output, first: bool) -> list[dict[str, Any]]:
        parts = []
        if first:
            parts.append(self._json(choice, {"delta": {"role": "assistant", "content": ""}}, [], [], None))
        delta = {"content": output.text} if output.text or output.tokens else {}
        if output.text or output.finish or output.logprobs or self._wants_ids:
            parts.append(self._json(choice, {"delta": delta}, output.tokens, output.logprobs, output.finish))
        return parts

    def _json(
        self,
        choice: ReplyChoice,
        what: dict[str, Any],
        tokens: list[int],
        scored: list[TokenLogprob],
        finish: str | None,
    ) -> dict[str, Any]:
        value: dict[str, Any] = {"index": choice.index, **what, "logprobs": None, "finish_reason": finish}
        if self._labels is not None and scored:
            value["logprobs"] = chat_logprobs(self._labels, scored)
        if finish is not None:
            value["stop_reason"] = choice.stop_reason
        if self._wants_ids:
            value["token_ids"] = tokens
        return value


def error_events(error: ApiError) -> bytes:
    """An error after the headers have been sent: one event, then [DONE]."""
    return event(error.body) + DONE
