"""Code among the rows of tables, which no file name tells apart from prose: columns choose candidates, the shapes of lines decide."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import islice

import numpy as np

from hone.text.batch import Texts

ROW = "row"
"""The `kind` of a table's row until it is known to be 'prose' or 'code'."""
MIN_SYMBOLS = 0.06
"""Least share of characters that are neither letters, digits nor white space."""
MAX_PUNCTUATED = 0.5
"""Largest share of lines that end as sentences do."""
MIN_LINES = 3
MIN_CODE_LINES = 0.35
"""Least share of lines that have a shape of `_LINE`."""
_BYTES = 2000
"""Bytes of a text that are looked at."""

_LINE = re.compile(
    rb"""(?x) [ \t]* (?! [ \t] ) (?:                       # all of the indentation: linear in a line's length
      .* [;{}\[(=\\] $                                    # a statement, the begin of a block, a line that goes on
    | [\])}]+ [;,)]* $                                    # the end of one
    | (?<= [ \t] ) .* , $                                 # an entry; verses that end so are not indented
    | (?: def|class|if|elif|else|for|while|with|try|except|finally|fn|pub|impl|match|case|switch|async|lambda ) \b .* : $
    | (?: import|from|use|include|package|using|namespace|return|raise|assert|yield|let|const|var|static|public|private|export
        |func|function|struct|enum|typedef|extern|void|int|elif|fi|done|esac|then|local|echo|end ) \b (?! .* [.?!] $ )
    | \# [ \t]* (?: include|define|ifdef|ifndef|endif|if|else|pragma|undef ) \b
    | // | /\* | \*/ | --[ ] | @\w | \#!
    | [\w.\[\]"'*&$-]+ [ \t]* (?: [-+*/|&:%]?= | -> | => | \+\+ | -- ) [ \t]* \S    # an assignment
    | [\w.:]+ \( .* \) [;:,]? $                          # a call
    )"""
).match
"""Shapes of lines that code has and prose hardly ever."""


def looks_like_code(texts: Texts, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which texts are code (bool [num_texts]); `columns` are their signals.

    How often this is right is in docs/data.md; `python -m benchmarks.data code_rows` measures it.
    """
    symbols = columns["non_alnum_ratio"] - columns["whitespace_ratio"]
    found = (symbols >= MIN_SYMBOLS) & (columns["punctuated_lines"] <= MAX_PUNCTUATED) & (columns["lines"] >= MIN_LINES)
    for place in np.flatnonzero(found).tolist():
        begin, end = texts.offsets[place], texts.offsets[place + 1]
        shown = texts.data[begin : min(end, begin + _BYTES)].tobytes()
        lines = [line for line in shown.split(b"\n") if line]
        enough = max(math.ceil(MIN_CODE_LINES * len(lines)), 1)
        found[place] = next(islice(filter(_LINE, lines), enough - 1, None), None) is not None
    return found
