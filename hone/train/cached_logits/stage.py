"""The teach stage: a model reads data once and leaves a few log-probabilities of each token for distillations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.artifact import Artifact, Draft
from hone.base.errors import ArtifactError, SpecError
from hone.base.figure import Estimate
from hone.base.plan import DISK, Facts, Plan, need
from hone.base.run import Run
from hone.base.stage import Stage
from hone.cost.energy import with_energy
from hone.cost.eval.scoring import Scoring, estimate
from hone.feed.facts import DataFacts
from hone.measure.machine import Machine
from hone.measure.warm import warm_up
from hone.measure.window import Window, power_trace, record_energy_per
from hone.model.facts import CheckpointFacts
from hone.train.cached_logits.facts import LogitsFacts, bytes_of_token
from hone.train.inputs import same_tokens

if TYPE_CHECKING:
    from hone.feed.load import Batch, PackedTokens
    from hone.model.decoder import Decoder
    from hone.train.cached_logits.shards import Cached

SHARD_BYTES = 1 << 27
"""Bytes of a shard, about: what a stage that is killed does again."""


class Teach(Stage):
    """Writes a model's log-probabilities of the next token for all training sequences of data, for objective.teacher: cached."""

    stage: ClassVar[str] = "teach"
    roles: ClassVar[dict[str, bool]] = {"model": True, "data": True}

    keep: Literal["top_k", "sampled"] = Field(
        "top_k",
        description="Which ids of a token: the most likely ones, or some drawn from the distribution, whose loss is unbiased "
        "(arXiv:2503.16870).",
    )
    k: int = Field(64, gt=0, description="Ids of each token.")
    temperature: float = Field(1.0, gt=0, description="Temperature of the distribution; that of the objective, too.")
    seq_len: int = Field(256, gt=1, description="Tokens of a sequence; that of the training, too.")
    batch_size: int = Field(16, gt=0, description="Sequences computed at once.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Dtype of the computation.")
    seed: int = Field(0, ge=0, description="Seed of the ids that are drawn.")

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> Plan:
        """Time, memory and disk. Raises SpecError when model and data do not match."""
        model, data = need(facts, "model", CheckpointFacts), need(facts, "data", DataFacts)
        same_tokens(model, data, "model")
        model.config.must_predict_tokens(model.where)
        model.config.must_be_causal("the next token would be visible to its own prediction")
        if self.seq_len > model.config.max_seq_len:
            raise SpecError(
                f"seq_len {self.seq_len} is longer than the model's max_seq_len {model.config.max_seq_len}",
                fix=f"give at most {model.config.max_seq_len}, here and in the training",
            )
        if self.k >= data.vocab_size:
            raise SpecError(f"k {self.k} is not below the data's {data.vocab_size} tokens", fix="give a smaller k")
        packing = data.packed("train", self.seq_len)
        sampled, batch = self.keep == "sampled", min(self.batch_size * self.seq_len, packing.positions)
        scoring = Scoring(
            packing.positions,
            documents=max(packing.num_sequences, 1),
            batch=max(batch, 1),
            window=self.seq_len,
            stride=self.seq_len,
            dtype=self.dtype,
            weights_bytes=model.loaded_bytes(self.dtype),
            max_rows=max(self._rows(model.config.vocab_size), 1),
        )
        each = bytes_of_token(self.k, data.vocab_size, sampled=sampled)
        kept = each * packing.positions + 16 * packing.num_sequences
        formula = f"{packing.positions} tokens x {each} bytes + {packing.num_sequences} digests of 16"
        made = LogitsFacts(
            where=self.stage,
            k=self.k,
            sampled=sampled,
            temperature=self.temperature,
            seq_len=self.seq_len,
            num_sequences=packing.num_sequences,
            vocab_size=data.vocab_size,
            tokenizer=data.tokenizer,
            data=data.same_as,
        )
        estimates = with_energy(estimate(scoring, [model.config.dims()], machine), machine)
        estimates |= {DISK: Estimate(value=float(kept), unit="B", formula=formula)}
        return Plan(estimates=estimates, facts=made)

    def remedies(self) -> list[list[tuple[str, str]]]:
        fewer = [self.batch_size // part for part in (2, 4, 8, 16) if self.batch_size >= part]
        return [[("batch_size", str(count)) for count in fewer], [("dtype", "bfloat16")]]

    def run(self, plan: Plan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Writes the shards that are not there yet, then meta.json."""
        import torch

        from hone.feed.load import PackedTokens
        from hone.model.hf import load
        from hone.train.cached_logits.facts import FOLDER
        from hone.train.cached_logits.shards import digests, shard_path, write_meta, write_shard

        facts = plan.facts
        assert isinstance(facts, LogitsFacts), "a plan of another stage"
        data = PackedTokens(parents["data"].folder, "train")
        count = data.need_sequences(self.seq_len)
        (draft.folder / FOLDER).mkdir(exist_ok=True)
        each = max(SHARD_BYTES // (facts.token_bytes * self.seq_len), 1)
        warm_up(run.device)
        covered, seen = 0.0, 0
        with draft.measuring(Window(run.device, power_trace(run, draft))):
            model = load(parents["model"].folder, run.device, getattr(torch, self.dtype)).eval().requires_grad_(False)
            with run.progress("teaching", count, "seq") as bar:
                for number, first in enumerate(range(0, count, each)):
                    path, last = shard_path(draft.folder, number), min(first + each, count)
                    if not path.exists():
                        keys: list[bytes] = []
                        parts = []
                        for batch in _batches(data, first, last, self.batch_size, self.seq_len):
                            parts.append(self._kept(model, batch, data.vocab_size, int(first + len(keys))))
                            keys += digests(batch)
                            covered += float(_mass(parts[-1]).sum())
                            seen += batch.tokens.size
                        write_shard(path, keys, _joined(parts), data.vocab_size)
                        draft.keep_time()
                    bar.advance(last - first)
        write_meta(draft.folder, facts.model_copy(update={"num_sequences": count}))
        written = sum(one.stat().st_size for one in (draft.folder / FOLDER).iterdir())
        draft.record("logits_bytes_per_token", written / (count * self.seq_len), "B", n=count * self.seq_len)
        note = "probability of the ids that are kept" if seen else "all shards were there already"
        if self.keep == "top_k":
            draft.record("kept_probability", covered / seen if seen else None, "fraction", n=max(seen, 1), note=note)
        record_energy_per(draft, "joules_per_token", count * self.seq_len, "token")

    def _rows(self, vocab_size: int) -> int:
        """Tokens whose logits exist at once."""
        from hone.eval.windows import LOGITS

        return max(min(LOGITS // vocab_size, self.batch_size * self.seq_len), 1)

    def _kept(self, model: Decoder, batch: Batch, vocab_size: int, first: int) -> Cached:
        """What is kept of a batch, whose first sequence has number `first`."""
        import numpy as np
        import torch

        from hone.train.cached_logits.keep import drawn, most_likely
        from hone.train.cached_logits.shards import Cached
        from hone.train.passes import to_device

        device = model.device
        generator = torch.Generator(device)
        generator.manual_seed(int(np.random.PCG64([self.seed, first]).random_raw()) >> 1)
        found: list[tuple[Any, ...]] = []
        with torch.no_grad():
            tokens, _, context = to_device(batch, device)
            hidden = model.hidden(tokens, context).flatten(0, 1)
            for part in hidden.split(self._rows(model.config.vocab_size)):
                logits = model.head(part)[:, :vocab_size]
                if self.keep == "sampled":
                    found.append(drawn(logits, self.k, self.temperature, generator))
                else:
                    found.append(most_likely(logits, self.k, self.temperature))
        shape = batch.tokens.shape
        joined = [torch.cat(one).cpu().numpy() for one in zip(*found, strict=True)]
        ids, log_probs, *tails = [one.reshape(*shape, *one.shape[1:]) for one in joined]
        return Cached(ids, log_probs, tails[0] if tails else None)


def _batches(data: PackedTokens, first: int, last: int, batch_size: int, seq_len: int) -> Any:
    """Batches of the sequences `first` .. `last` in stored order."""
    import numpy as np

    for begin in range(first, last, batch_size):
        yield data.cut(np.arange(begin, min(begin + batch_size, last), dtype=np.int64), seq_len)


def _mass(cached: Cached) -> Any:
    """Probability of the kept ids of each token."""
    import numpy as np

    return np.exp(cached.log_probs.astype(np.float64)).sum(-1)


def _joined(parts: list[Cached]) -> Cached:
    import numpy as np

    from hone.train.cached_logits.shards import Cached

    tails = None if parts[0].tails is None else np.concatenate([one.tails for one in parts if one.tails is not None])
    return Cached(np.concatenate([one.ids for one in parts]), np.concatenate([one.log_probs for one in parts]), tails)


def teach(out: Path | str, model: Path | str, data: Path | str, run: Run | None = None, **fields: Any) -> Artifact:
    """Writes the logits of model folder `model` for data artifact `data` into the artifact `out`; `fields` are `Teach`'s."""
    return Teach.read(fields).make(out, {"model": Artifact.read(model), "data": Artifact.read(data)}, run)


def check_cache(logits: LogitsFacts, data: list[DataFacts], seq_len: int, temperature: float) -> None:
    """Raises SpecError or ArtifactError unless the cache `logits` is of the sequences that a training on `data` reads."""
    again = "write it again: hone teach MODEL --from.data=DATA"
    if len(data) != 1 or data[0].same_as != logits.data:
        names = " and ".join(one.where for one in data)
        raise ArtifactError(f"the logits of {logits.where} are of other data than {names}", fix=again)
    if None not in (logits.tokenizer, data[0].tokenizer) and logits.tokenizer != data[0].tokenizer:
        raise ArtifactError(f"{logits.where} and {data[0].where} have different tokenizers", fix=again)
    for name, own, wanted in (("seq_len", logits.seq_len, seq_len), ("temperature", logits.temperature, temperature)):
        if own != wanted:
            raise SpecError(
                f"the logits of {logits.where} are of {name} {own}, the training has {wanted}",
                fix=f"set {name} {own}, or {again} --{name}={wanted}",
            )
