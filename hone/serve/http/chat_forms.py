"""What a chat request's tools and the server's parsers mean: tools for the template, a grammar, and how replies are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from hone.base.errors import SpecError
from hone.model.tokenizer import Tokenizer
from hone.serve.http.chat import ChatForm
from hone.serve.http.fields import ToolChoice
from hone.serve.http.forms import OutputForms
from hone.serve.http.protocol import ApiError, ChatBody
from hone.serve.http.reasoning import ReasoningForm, ended_by, reasoning_form
from hone.serve.http.tools import tool_parser
from hone.serve.http.tools.forced import NamedParser, RequiredParser
from hone.serve.http.tools.parser import ToolParser
from hone.serve.structured.spec import StructuredOutputs


@dataclass(frozen=True)
class Parsers:
    """The server's parsers, opened by name. Raises SpecError for an unknown name."""

    tools: type[ToolParser] | None = None
    auto: bool = False
    reasoning: ReasoningForm | None = None

    @classmethod
    def open(cls, tool_call_parser: str, enable_auto_tool_choice: bool, reasoning_parser: str) -> Parsers:
        """The parsers under these names, '' for none. Raises SpecError, also where a parser and automatic choice lack each other."""
        if enable_auto_tool_choice and not tool_call_parser:
            raise SpecError(
                "enable_auto_tool_choice needs a tool_call_parser",
                fix="name the form of the model: --tool_call_parser=hermes",
            )
        if tool_call_parser and not enable_auto_tool_choice:
            raise SpecError(
                f"tool_call_parser={tool_call_parser} has no effect without enable_auto_tool_choice",
                fix="add --enable_auto_tool_choice; calls that a request demands need no parser",
            )
        return cls(
            tool_parser(tool_call_parser) if tool_call_parser else None,
            enable_auto_tool_choice,
            reasoning_form(reasoning_parser) if reasoning_parser else None,
        )


@dataclass
class ChatMeaning:
    """The grammar of a chat request's output, how its replies are read, and whether they need special tokens' text."""

    output: StructuredOutputs | None = None
    form: ChatForm | None = None
    keeps_special_tokens: bool = False


class ChatForms:
    """Reads tools, tool_choice and the forms of outputs of chat requests."""

    def __init__(self, parsers: Parsers, forms: OutputForms, tokenizer: Tokenizer | None) -> None:
        self._parsers = parsers
        self._forms = forms
        self._tokenizer = tokenizer

    def shown(self, body: ChatBody) -> list[dict[str, Any]] | None:
        """The tools for the chat template, as the client wrote them; None for none. Raises ApiError 400."""
        choice = body.tool_choice
        if not body.tools:
            if choice == "required" or isinstance(choice, ToolChoice):
                raise ApiError(400, "tool_choice demands a tool, and there are no tools", param="tool_choice")
            return None
        names = [tool.function.name for tool in body.tools]
        for name in names:
            if names.count(name) > 1:
                raise ApiError(400, f"two tools have the name '{name}'", param="tools")
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise ApiError(
                400, f"tool_choice names '{choice.function.name[:100]}', which no tool has", param="tool_choice"
            )
        if choice == "none":
            return None
        if choice in (None, "auto") and not self._parsers.auto:
            raise ApiError(
                400,
                "this server does not find tool calls in replies: send tool_choice required, none or a named tool, or start "
                "it with --enable_auto_tool_choice --tool_call_parser=NAME",
                param="tool_choice" if choice else "tools",
                code="unsupported",
            )
        if body.structured_outputs is not None or (body.response_format and body.response_format.type != "text"):
            raise ApiError(
                400, "an output has one form: send tools, or response_format or structured_outputs", param="tools"
            )
        template = None if self._tokenizer is None else self._tokenizer.chat_template
        if template is not None and "tools" not in template:
            raise ApiError(
                400,
                "this model's chat template does not show tools to it: start the server with --chat_template=FILE",
                param="tools",
                code="unsupported",
            )
        return [tool.model_dump(exclude_unset=True) for tool in body.tools]

    async def of(self, body: ChatBody, prompt: str) -> ChatMeaning:
        """What the request's output must be and how it is read; `prompt` is the text after the template. Raises ApiError."""
        reasoning, choice = self._parsers.reasoning, body.tool_choice
        after = self._end_of(reasoning, prompt)
        tools = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
        if not tools or choice == "none":
            output = await self._forms.of(body, after)
            return ChatMeaning(output, None if reasoning is None else ChatForm(None, reasoning, prompt[-200:]))
        most = None if body.parallel_tool_calls else 1
        form = ChatForm(None, reasoning, prompt[-200:], most)
        if isinstance(choice, ToolChoice):
            name = choice.function.name
            form.tools, form.named = partial(NamedParser, {name: tools[name]}), True
            return ChatMeaning(
                await self._forms.of_tools({name: tools[name]}, named=True, parallel=True, begin_after=after), form
            )
        if choice == "required":
            form.tools = partial(RequiredParser, tools)
            parallel = body.parallel_tool_calls
            return ChatMeaning(
                await self._forms.of_tools(tools, named=False, parallel=parallel, begin_after=after), form
            )
        kind = self._parsers.tools
        assert kind is not None, "automatic choice has a parser"
        form.tools = partial(kind, tools)
        return ChatMeaning(None, form, kind.keeps_special_tokens)

    def _end_of(self, reasoning: ReasoningForm | None, prompt: str) -> tuple[int, ...]:
        """Tokens after which a grammar begins: the end of the reasoning, unless the prompt has it already."""
        if reasoning is None or self._tokenizer is None or ended_by(reasoning, prompt):
            return ()
        return tuple(self._tokenizer.encode(reasoning.end, add_special_tokens=False))
