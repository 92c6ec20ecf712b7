"""`hone cost WORD`: a calculator by its word; each prints its formulas with the numbers in them, and the result."""

from __future__ import annotations

WORDS: dict[str, str] = {}
"""The function of each word, `(words, options) -> exit code`, imported on use. Its module's first line says what it computes."""


def cost(words: list[str], options: dict[str, str]) -> int:
    """Runs the calculator that the first word names; returns its exit code."""
    from hone.base.errors import SpecError, did_you_mean
    from hone.base.lazy import resolve

    if len(words) < 2:
        if unknown := [name for name in options if name != "help"]:
            raise SpecError(f"hone cost has no option --{unknown[0]} without a word", fix="hone cost --help lists them")
        print(f"usage: hone cost WORD [--option=value ...]\n\n{_lines()}")
        print("\nhone cost WORD --help lists a word's options; --json prints the result for a program.")
        return 0
    word = words[1]
    if word not in WORDS:
        raise SpecError(
            f"hone cost has no word '{word}'", fix=f"{did_you_mean(word, WORDS, 'hone cost {}')}hone cost lists them"
        )
    return resolve(WORDS[word])(words[1:], options)


def _lines() -> str:
    """Every word with the first line of its module."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    found = []
    for word, row in WORDS.items():
        spec = find_spec(row.partition(":")[0])
        text = Path(spec.origin).read_text(encoding="utf8") if spec is not None and spec.origin else ""
        about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        found.append(f"  {word:10} {about.partition('`: ')[2] or about}")
    return "\n".join(found)
