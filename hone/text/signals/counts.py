"""The records that the kernels fill: the counts of a document, and what is known of the line being read."""

from __future__ import annotations

import numpy as np

from hone.text.signals.words import NUM_COUNTS

WORD_COUNTS = (
    "chars", "hashes", "ellipses", "lettered", "sentences", "digits", "uppers", "alnums", "parens", "braces", "urls", "url_chars",
    "numbers", "syllables", "capitals", "ats",
)  # fmt: skip
"""The counts of a word in the order of their bytes (words.CHARS to words.ATS)."""
_TOTALS = (
    "words", "gaps", "lines", "newlines", "max_word", "max_line", "bullet_lines", "ellipsis_lines", "punctuated_lines",
    "short_lines", "javascript_lines", "policy_lines", "lorem_ipsum", "stops", "upper_lines", "boilerplate_words",
    "c4_lines", "c4_sentences", "c4_loose_sentences", "long_lines", "paragraphs", "unspaced",
)  # fmt: skip
_REPEATS = ("dup_lines", "dup_line_chars", "dup_paragraphs", "dup_paragraph_chars", "different")
COUNTS = np.dtype(
    [
        ("word_counts", np.int64, (NUM_COUNTS,)),
        *((name, np.int64) for name in _TOTALS),
        ("text_hash", np.uint64),
        *((name, np.int64) for name in _REPEATS),
        ("ngrams", np.int64, (9,)),
        ("emails", np.int64),
        ("personal_numbers", np.int64, (3,)),
        ("toxic", np.int64),
        ("own_stops", np.int64),
    ],
    align=True,
)
"""The counts of a document. `word_counts` are the sums of its words' counts (words.py), `unspaced` its words that follow another without
a space, `stops` a bit for each of Gopher's stop words, `ngrams` characters of repeated n-grams of 2 to 10 words, `personal_numbers` public IPv4
addresses, telephone and card numbers, `own_stops` different stop words of its language, -1 where there is no such list."""
LINE = np.dtype(
    [
        *(
            (name, np.int64)
            for name in (
                "words", "chars", "capitals", "sentences", "gaps", "unspaced", "first", "last", "any", "before", "adjacent",
                "long", "policy", "cart", "paragraph_chars", "paragraph_filled",
            )
        ),
        *((name, np.uint64) for name in ("line_hash", "paragraph_hash", "text_hash")),
    ],
    align=True,
)  # fmt: skip
"""The line so far: its counts; flags of its `first`, `last` and `any` word and of the one `before` the last; whether a single plain space
is before the last (`adjacent`); whether a word is too long, and a policy notice or a cart was found. Then its paragraph, which the end of
a line does not reset, and the hashes of line, paragraph and text."""
