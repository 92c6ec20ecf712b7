"""Decontamination by n-grams: finds documents that share thirteen words in a row with an evaluation example."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.data.contamination.base import Decontamination, Found
from hone.data.contamination.evaluation import Example, evaluation_files, read_evaluations
from hone.data.edits.cuts import Cuts, compiled, cut_whole
from hone.data.edits.rows import ranks, save
from hone.text.batch import Texts

if TYPE_CHECKING:
    from hone.data.corpus import Corpus
    from hone.text.contamination.index import Index

_INDEX = ("hone.text.contamination.index", "decontamination")

_SHOWN_CHARS = 300
_SHOWN_DOCUMENTS = 3
_SHOWN_SETS = 5


class NGrams(Decontamination):
    """Finds documents that share a word n-gram with an evaluation example. Brown et al. 2020, arXiv:2005.14165.

    Words are those of hone/text/units.py: runs of lower-cased letters and digits, or one character or cluster in
    scripts without spaces. Punctuation is ignored, and each text of an example is searched for on its own. A text shorter than `words` is searched for as a whole if
    it has at least `shortest` words; examples with shorter texts only are not searched for, and counted. The report lists
    the documents that contain examples, and for each example the number of documents that contain it.
    """

    paper: ClassVar[str] = "arXiv:2005.14165"
    evaluations: tuple[str, ...] = Field(
        (), description="Evaluation sets: files or folders of .jsonl .json .csv .tsv .parquet .txt (each also .gz)."
    )
    fields: tuple[str, ...] = Field(
        (),
        description="Fields whose texts are searched for, column numbers for CSV without a header; none: all strings.",
    )
    words: int = Field(13, ge=1, le=100, description="Words of an n-gram.")
    shortest: int = Field(8, ge=1, description="Least words of a text of an example that is searched for.")
    max_documents: int | None = Field(
        None,
        ge=1,
        description="N-grams in more documents than this are common phrases and ignored; none: no n-gram is ignored.",
    )
    remove: Literal["document", "span"] = Field(
        "document", description="Remove the whole document, or only the shared words."
    )
    min_left_bytes: int = Field(
        100, ge=0, description="With remove: span, a document of which fewer bytes are left is dropped."
    )
    num_samples: int = Field(100, ge=0, description="Examples shown with the documents that hold them.")

    def takes_part(self, corpus: Corpus, kept: np.ndarray) -> np.ndarray:
        """The documents to search: all that are kept so far."""
        return kept

    def prepare(self, corpus: Corpus, chosen: np.ndarray, state: Path) -> None:
        """Finds the hits in each shard of `corpus` among the documents `chosen`, unless they are in `state`."""
        self._search(corpus, chosen, state, self._indexed()[1])

    def contaminated(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
        examples, index, warnings = self._indexed()
        warnings = list(warnings)
        made = compiled(*_INDEX)
        found = np.concatenate(self._search(corpus, kept, state, index))
        hits = made.uncommon(found, self.max_documents)
        pairs = made.pairs_of(index, hits)
        documents = np.unique(hits["document"])
        dropped = np.zeros(len(corpus), bool)
        cuts = [Cuts.none() for _ in corpus.spans()]
        if self.remove == "document":
            dropped[documents] = True
        else:
            cuts = [self._cut(corpus, span, hits, dropped) for span in corpus.spans()]
        figures = _figures(examples, index, pairs)
        figures["documents"] = {"looked_through": int(kept.sum()), "hit": len(documents)}
        if not len(documents):
            warnings.append(
                f"none of {len(examples)} examples was found in any of {int(kept.sum())} documents: check evaluations and "
                f"fields ({', '.join(self.fields) or 'all'}) if that is unexpected"
            )
        return Found(dropped, cuts, figures, self._show(corpus, examples, pairs, hits), warnings)

    def _indexed(self) -> tuple[list[Example], Index, list[str]]:
        """The examples, their n-grams and warnings; read once per process."""
        stamp = self._stamp()
        return _read_and_index(self.evaluations, self.fields, self.words, min(self.shortest, self.words), stamp)

    def _stamp(self) -> tuple[tuple[str, int, int], ...]:
        """(path, size, time) of every evaluation file. Raises SpecError when none is named."""
        if not self.evaluations:
            raise SpecError(
                f"decontamination '{self.kind}' names no evaluation set",
                fix="set evaluations to files or folders of examples",
            )
        return tuple(
            (str(file), file.stat().st_size, file.stat().st_mtime_ns)
            for path in self.evaluations
            for _, file in evaluation_files(path)
        )

    def _search(self, corpus: Corpus, chosen: np.ndarray, state: Path, index: Index) -> list[np.ndarray]:
        """The hits of each shard of `corpus`."""
        # The name depends on the evaluation sets: a resumed run in which they have changed searches again.
        which = hashlib.blake2b(index.keys.tobytes(), digest_size=8).hexdigest()
        return search(corpus, chosen, state, f"hits-{which}", compiled(*_INDEX).finder(index))

    def _cut(self, corpus: Corpus, span: tuple[int, Path, int, int], hits: np.ndarray, dropped: np.ndarray) -> Cuts:
        """The spans of shared words in a shard's documents; documents with too little text left are marked in `dropped` instead."""
        _, shard, first, end = span
        here = hits[(hits["document"] >= first) & (hits["document"] < end)]
        cuts = Cuts.of(here["document"], here["start"], here["end"])
        wanted = np.zeros(len(dropped), bool)
        wanted[cuts.document] = True
        for indices, texts in corpus.batches(shard, first, wanted) if len(here) else ():
            sizes = np.diff(texts.offsets)
            some = np.isin(cuts.document, indices)
            after = cut_whole(Cuts(*(part[some] for part in cuts)), indices, sizes, self.min_left_bytes)
            whole = (after.start == 0) & (after.end == sizes[np.searchsorted(indices, after.document)])
            dropped[after.document[whole]] = True
        keep = ~dropped[cuts.document]
        return Cuts(*(part[keep] for part in cuts))

    def _show(
        self, corpus: Corpus, examples: list[Example], pairs: np.ndarray, hits: np.ndarray
    ) -> list[dict[str, Any]]:
        """A row for every example found; for the first `num_samples`, with excerpts of a few documents that contain it."""
        owners, counts = np.unique(pairs["example"], return_counts=True)
        order = np.lexsort((owners, -counts))
        rank = ranks(corpus.columns["id"])
        pairs = pairs[np.lexsort((rank[pairs["document"]], pairs["example"]))]
        begins = np.searchsorted(pairs["example"], owners)
        rows, wanted = [], np.zeros(len(corpus), bool)
        for place in order.tolist():
            example = examples[owners[place]]
            row = {"evaluation": example.evaluation, "row": example.row, "documents": int(counts[place])}
            if len(rows) < self.num_samples:
                row["text"] = " ".join(example.texts)[:_SHOWN_CHARS]
                some = pairs[begins[place] : begins[place] + min(counts[place], _SHOWN_DOCUMENTS)]
                row["samples"] = [(int(pair["document"]), int(pair["hit"])) for pair in some]
                wanted[some["document"]] = True
            rows.append(row)
        texts = {}
        for _, shard, first, end in corpus.spans():
            if wanted[first:end].any():
                for indices, batch in corpus.batches(shard, first, wanted):
                    texts.update(zip(indices.tolist(), batch.strings()))
        for row in rows[: self.num_samples]:
            row["samples"] = [
                {
                    "id": np.asarray(corpus.columns["id"][document]).astype(str).item(),
                    "source": str(corpus.columns["source"][document]),
                    "text": texts[document].encode()[hits["start"][hit] : hits["end"][hit]].decode(),
                }
                for document, hit in row["samples"]
            ]
        return rows


@functools.lru_cache(maxsize=1)
def _read_and_index(
    evaluations: tuple[str, ...], fields: tuple[str, ...], words: int, shortest: int, stamp: tuple
) -> tuple[list[Example], Index, list[str]]:
    """The examples, their n-grams, and a warning for each set without n-grams. Raises SpecError when no set has any.

    `stamp` identifies the files' state, so that changed files are read again.
    """
    examples = read_evaluations(evaluations, fields)
    owner = np.repeat(np.arange(len(examples)), [len(example.texts) for example in examples])
    texts = Texts.of([text for example in examples for text in example.texts])
    index = compiled(*_INDEX).index_of(texts, owner, len(examples), words, shortest)
    found: dict[str, int] = defaultdict(int)
    for example, count in zip(examples, index.num_grams.tolist()):
        found[example.evaluation] += count
    empty = [name for name, count in found.items() if not count]
    if len(empty) == len(found):
        raise SpecError(
            f"no text of {len(examples)} evaluation examples has {shortest} words",
            fix="lower shortest, or name other fields",
        )
    warnings = [f"evaluation set {name}: every text is too short to search for" for name in empty]
    warnings += too_short(
        [example for example, count in zip(examples, index.num_grams.tolist()) if not count], len(examples), shortest
    )
    return examples, index, warnings


def search(
    corpus: Corpus, chosen: np.ndarray, state: Path, name: str, find: Callable[[np.ndarray, Texts], np.ndarray]
) -> list[np.ndarray]:
    """What `find` finds in each shard of `corpus` among the documents `chosen`, read from `state` where it is there."""
    found = []
    for number, shard, first, _ in corpus.spans():
        path = state / f"{name}-{number:05d}.npy"
        if not path.exists():
            nothing = find(np.empty(0, np.int64), Texts.of([]))
            save(path, np.concatenate([nothing, *(find(*batch) for batch in corpus.batches(shard, first, chosen))]))
        found.append(np.load(path))
    return found


def too_short(short: list[Example], num_examples: int, shortest: int) -> list[str]:
    """One line about the examples `short` of `num_examples`, by evaluation set, the most first; none when there are none."""
    if not short:
        return []
    sets = Counter(example.evaluation for example in short).most_common()
    named = ", ".join(f"{name} {count}" for name, count in sets[:_SHOWN_SETS])
    more = f" and {len(sets) - _SHOWN_SETS} more sets" if len(sets) > _SHOWN_SETS else ""
    told = f"{len(short)} of {num_examples} examples have fewer than {shortest} words and are not searched for"
    return [f"{told}: {named}{more}"]


def _figures(examples: list[Example], index: Index, pairs: np.ndarray) -> dict[str, Any]:
    """Counts per evaluation set: examples, those too short to search for, those found, documents that contain any."""
    names = list(dict.fromkeys(example.evaluation for example in examples))
    numbers = {name: number for number, name in enumerate(names)}
    of = np.array([numbers[example.evaluation] for example in examples])
    rows = {}
    for name, number in numbers.items():
        mine = of[pairs["example"]] == number
        rows[name] = {
            "examples": int((of == number).sum()),
            "too_short": int(((of == number) & (index.num_grams == 0)).sum()),
            "hit": len(np.unique(pairs["example"][mine])),
            "documents": len(np.unique(pairs["document"][mine])),
        }
    return {"ngrams": len(index.keys), "evaluations": rows}
