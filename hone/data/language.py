"""Language identification with py3langid, as two columns: the code and how sure the identifier is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hone.base.errors import MissingExtra, SpecError
from hone.data.text.batch import Texts

NO_LANGUAGE = "code"
"""What stands in the language column of program text."""
_SAMPLE_CHARS = 3000


class Identifier:
    """Identifies the language of texts among `candidates` (ISO 639 codes; empty: all the library knows).

    Raises MissingExtra without py3langid, SpecError for a language that it does not know.
    """

    def __init__(self, candidates: Sequence[str] = ()) -> None:
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError:
            raise MissingExtra.of("identifying languages", "py3langid", "data") from None
        self._model = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        unknown = sorted(set(candidates) - set(self._model.nb_classes))
        if unknown:
            raise SpecError(
                f"unknown languages {', '.join(unknown)}", fix=f"choose among: {', '.join(self._model.labels)}"
            )
        if candidates:
            self._model.set_languages(list(candidates))

    def identify(self, text: str) -> tuple[str, float]:
        """(ISO 639 code, probability); looks at the start and the middle of a long text."""
        if len(text) > 2 * _SAMPLE_CHARS:
            middle = len(text) // 2
            text = text[:_SAMPLE_CHARS] + " " + text[middle : middle + _SAMPLE_CHARS]
        code, score = self._model.classify(text)
        return str(code), float(score)

    def identify_all(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """(codes object [n], probabilities float64 [n]) of a batch."""
        found = [self.identify(text) for text in texts.strings()]
        return np.array([code for code, _ in found], object), np.array([score for _, score in found], np.float64)
