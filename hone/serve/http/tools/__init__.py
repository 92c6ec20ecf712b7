"""Parsers of tool calls: one file for each form in which models write them, under vLLM's names."""

from __future__ import annotations

from importlib import import_module

from hone.base.errors import SpecError, did_you_mean
from hone.serve.http.tools.parser import ToolParser

TOOL_PARSERS: dict[str, str] = {
    "hermes": "hone.serve.http.tools.hermes:HermesParser",
    "llama3_json": "hone.serve.http.tools.llama3_json:Llama3JsonParser",
    "mistral": "hone.serve.http.tools.mistral:MistralParser",
    "pythonic": "hone.serve.http.tools.pythonic:PythonicParser",
    "qwen3_coder": "hone.serve.http.tools.qwen3_coder:Qwen3CoderParser",
    "qwen3_xml": "hone.serve.http.tools.qwen3_coder:Qwen3CoderParser",
}
"""Name to class; Qwen 2.5 and Qwen 3 write Hermes' form, Qwen3-Coder its own."""


def tool_parser(name: str) -> type[ToolParser]:
    """The class of a parser. Raises SpecError for an unknown name."""
    if name not in TOOL_PARSERS:
        raise SpecError(
            f"tool_call_parser is '{name}'; there are {', '.join(TOOL_PARSERS)}",
            fix=f"{did_you_mean(name, TOOL_PARSERS)}use hermes for Qwen 2.5, Qwen 3 and Hermes models",
        )
    module, _, attribute = TOOL_PARSERS[name].partition(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
