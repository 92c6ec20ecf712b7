"""The data of a training: its sources, their shares in the mixture, and the order of the curriculum."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from hone.base.artifact import Artifact, Draft
from hone.base.durable import write_atomic
from hone.base.figure import Estimate
from hone.base.run import Run
from hone.feed.load import PackedTokens
from hone.feed.mix.base import Chosen, Mixture
from hone.feed.mix.sources import Sources
from hone.feed.order.base import Curriculum

MIXTURE_FILE = "mixture.json"
MANY = 48
"""From this many sources on, a note says that there are many."""
_SHOWN = 8


class Reading:
    """The sources of a train stage and the feed of them; `prepare` computes the shares, `record` records what was read."""

    def __init__(self, parents: dict[str, Artifact], mixture: Mixture | None, curriculum: Curriculum) -> None:
        data = data_parents(parents)
        for artifact in data.values():
            artifact.need("tokens/meta.json", "tokenizer.json")
        folders = {name: artifact.folder for name, artifact in data.items()}
        self.sources = Sources(folders, None if mixture is None else mixture.by)
        self.mixture, self.curriculum = mixture, curriculum
        self.chosen: Chosen | None = None
        (by, alone), *others = [(mixture and mixture.by, artifact.fingerprint) for artifact in data.values()]
        self._marks = {
            name: data[name].fingerprint if others or by is None else f"{alone} {by}={name}"
            for name in self.sources.parts
        }
        """What each source is called in the positions of trainings."""
        self._begins: dict[str, int] = {}

    def prepare(
        self,
        total: int,
        seq_len: int,
        seed: int,
        draft: Draft,
        run: Run,
        read: Mapping[str, int] | None = None,
        done: int = 0,
    ) -> None:
        """Computes the shares for `total` sequences, or reads those of an interrupted run; sets `feed`.

        Of the sequences `done` are read already, and `read` of each source, also by earlier trainings (`position`): the next
        ones follow those. mixture.json holds the shares with their reasons. Raises SpecError for caps that cannot be met, or a
        curriculum that does not fit the data.
        """
        self.total, self.done, self.seq_len, self.seed = total, done, seq_len, seed
        path = draft.folder / MIXTURE_FILE
        if path.exists():
            self.chosen = Chosen.read(json.loads(path.read_text(encoding="utf8")))
            # The training may have become longer since, with the same weights.
            sizes = {name: part.num_sequences(seq_len) * seq_len for name, part in self.sources.parts.items()}
            shares = [
                one._replace(epochs=one.weight * (total * seq_len) / sizes[one.source]) for one in self.chosen.shares
            ]
            again = self.chosen._replace(shares=shares)
            if again != self.chosen and run.mesh.leads:
                write_atomic(path, json.dumps(again.row(), indent=1, ensure_ascii=False).encode())
            self.chosen = again
        else:
            self.chosen = self.sources.choose(self.mixture, total, seq_len)
            if self.chosen is not None:
                write_atomic(path, json.dumps(self.chosen.row(), indent=1, ensure_ascii=False).encode())
        if self.chosen is not None:
            shares = sorted(self.chosen.shares, key=lambda share: -share.weight)
            if len(shares) > MANY:
                by = f"mixture.by = '{self.mixture.by}' makes" if self.mixture else "the training reads"
                run.warn(
                    f"{by} {len(shares)} sources of {self.sources.num_tokens // len(shares)} tokens on average: every file outside "
                    "a subfolder is one. Put files that belong together into one folder, or set mixture.by to a "
                    f"column of few values, such as language or kind. These are the {_SHOWN} largest; {MIXTURE_FILE} lists all"
                )
            for share in shares[: _SHOWN if len(shares) > MANY else None]:
                run.say(
                    f"{share.source}: {share.weight:.1%} of the sequences, {share.epochs:.2f} epochs; {share.reason}"
                )
        before = self.sources.totals(self.chosen, done, seed)
        self._begins = {name: (read or {}).get(self._marks[name], 0) - count for name, count in before.items()}
        self.feed = self.sources.feed(self.chosen, self.curriculum, total, seq_len, seed, self._begins)

    def position(self, done: int) -> dict[str, int]:
        """Sequences read of each source when `done` of this training are, by its data's fingerprint and its value of `by`."""
        totals = self.sources.totals(self.chosen, done, self.seed)
        return {self._marks[name]: self._begins[name] + count for name, count in totals.items()}

    def estimates(self, end: int | None = None) -> dict[str, Estimate]:
        """Planned epochs of each source, from the sequences that are read already up to `end` (None: all)."""
        if self.chosen is None:
            return {}
        part = ((self.total if end is None else end) - self.done) / self.total
        shares = [one._replace(epochs=one.epochs * part) for one in self.chosen.shares]
        return (self.mixture or Mixture()).estimates(shares)

    def eval_sequences(self, num_sequences: int) -> int:
        """Sequences that `evaluate` reads."""
        if self.chosen is None:
            return 0
        counts = [part.num_sequences(self.seq_len) for part in self.sources.val_parts.values()]
        return sum(min(count, num_sequences or count) for count in counts)

    def evaluate(self, loss_on: Callable[[PackedTokens], float], num_sequences: int, draft: Draft) -> None:
        """Of a mixture, records the loss on each source's first `num_sequences` sequences of val (0: all), from which utilities are computed."""
        if self.chosen is None:
            return
        for name, part in self.sources.val_parts.items():
            count = part.num_sequences(self.seq_len)
            loss = loss_on(part) if count else None
            note = (
                f"{min(count, num_sequences or count)} sequences of val of source '{name}'"
                if count
                else "val has no such text"
            )
            draft.record(f"val_loss_{name}", loss, "nats/token", note=note)

    def record(self, draft: Draft, end: int) -> None:
        """Records the figures and techniques of what was read: the sequences after those that were read already, up to `end`."""
        count = self.sources.num_sequences(self.seq_len)
        note = f"{end - self.done} sequences read, {count} in the data"
        draft.record("epochs", (end - self.done) / count, "epochs", note=note)
        if self.chosen is not None:
            before, read = (self.sources.epochs(self.chosen, one, self.seq_len, self.seed) for one in (self.done, end))
            for share in self.chosen.shares:
                draft.record(f"weight_{share.source}", share.weight, "fraction", how="modelled", note=share.reason)
                if share.weight > 0:
                    epochs = read[share.source] - before.get(share.source, 0)
                    draft.record(f"epochs_{share.source}", epochs, "epochs", note=f"{share.tokens} tokens")
        if self.mixture is not None:
            draft.did({"slot": "mixture", **self.mixture.model_dump(mode="json")})
        if self.curriculum.kind != "random":
            draft.did({"slot": "curriculum", **self.curriculum.model_dump(mode="json")})


def data_parents(parents: dict[str, Artifact]) -> dict[str, Artifact]:
    """Artifacts by source name: 'data.NAME' is called NAME; a plain 'data' among others is called like its artifact."""
    found = {}
    for role, artifact in parents.items():
        if role == "data" or role.startswith("data."):
            found[role.partition(".")[2] or artifact.name] = artifact
    return found
