"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 and 3, Qwen 2.5, Qwen 3."""

from __future__ import annotations

from hone.serve.http.tools.parser import MarkedParser, Nesting, ToolCall, loads

_END = "</tool_call>"


class HermesParser(MarkedParser):
    """Calls in marks, each a JSON object; blanks and line ends around it are no text."""

    marker = "<tool_call>"

    def _begin(self) -> None:
        self._nesting = Nesting()

    def _body(self, text: str, *, final: bool) -> tuple[int, list[ToolCall]] | None:
        begin = len(text) - len(text.lstrip())
        if begin == len(text):
            return None
        if text[begin] != "{":
            return 0, []
        length = self._nesting.end(text[begin:])
        if length is None:
            return None
        end = begin + length
        after = text[end:].lstrip()
        if not final and len(after) < len(_END) and _END.startswith(after):
            return None  # the mark may still come
        calls = self._calls_of(loads(text[begin:end]))
        if calls is None:
            return end, []
        return (len(text) - len(after) + len(_END) if after.startswith(_END) else end), calls
