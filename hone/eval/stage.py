"""The eval stage: scores a model on a text, and its distance from a reference model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.artifact import Artifact, Draft
from hone.base.durable import write_atomic
from hone.base.errors import ArtifactError, SpecError
from hone.base.plan import MEMORY, Facts, Plan, need
from hone.base.run import Run
from hone.base.stage import Stage
from hone.base.table import Choice, Technique
from hone.cost.energy import with_energy
from hone.cost.eval.scoring import Scoring, estimate
from hone.eval.bigram import bigram_perplexity
from hone.eval.windows import LOGITS
from hone.feed import plain
from hone.feed.facts import DataFacts, SplitFacts
from hone.measure.machine import Machine
from hone.measure.warm import warm_up
from hone.measure.window import Window, power_trace, record_energy_per
from hone.model.devices import DEVICES
from hone.model.devices.base import refuse
from hone.model.facts import CheckpointFacts
from hone.model.folder import weights_bytes

DEFAULT_WINDOW = 1024
"""Default window for models with a longer context."""

TEXT_BYTES_PER_TOKEN = 3.5
"""Bytes of text per token, to estimate the tokens of a text before it is encoded."""

_WAYS = {MEMORY: ("score a smaller or quantized model", "free some memory", "score on a machine with more")}


class EvalPlan(Plan):
    """A plan with the window: the spec's, or the model's context."""

    window: int


class Eval(Stage):
    """Perplexity and bits per byte on a text, or on a data artifact's split beside a bigram model's; with a reference, divergence."""

    stage: ClassVar[str] = "eval"
    roles: ClassVar[dict[str, bool]] = {"model": True, "data": False, "reference": False}

    text: str | None = Field(
        None,
        description="Texts to score on, in place of the role data: a text file, JSONL (.gz, .zst, .xz), JSON or Parquet with rows of text or "
        "messages, a folder of them, or hf:owner/name.",
    )
    split: str = Field("val", description="Split of the data artifact to score.")
    window: int = Field(
        0, ge=0, description="Longest context of a prediction, in tokens; 0: the model's context, up to 1024."
    )
    stride: int = Field(0, ge=0, description="Tokens from the begin of one window to that of the next; 0: the window.")
    join: Literal["documents", "stream"] = Field(
        "documents", description="Whether tokens attend to earlier documents (stream) or not (documents)."
    )
    max_tokens: int = Field(0, ge=0, description="Score this many tokens from the front of the split; 0: all.")
    batch_tokens: int = Field(4096, gt=0, description="Tokens computed at once.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Dtype of the computation.")
    simulated_device: Annotated[Technique, Choice(DEVICES)] | None = Field(
        None, description="A device that computes the products of the model's linears, simulated; empty: none."
    )

    @model_validator(mode="after")
    def _stride_fits(self) -> Eval:
        if self.window and self.stride > self.window:
            raise ValueError(
                f"stride {self.stride} is longer than window {self.window}: tokens in between would not be scored"
            )
        if self.text is not None and self.split != "val":
            raise ValueError(f"split {self.split} is of a data set, and text has none: leave one of the two out")
        return self

    def files(self) -> dict[str, Path]:
        return {} if self.text is None else plain.local_files(self.text, "text")

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> EvalPlan:
        """Time and memory of the batches. Raises SpecError when model, reference and data do not match."""
        model = need(facts, "model", CheckpointFacts)
        if ("data" in facts) == (self.text is not None):
            given = (
                "neither text nor the input data is given"
                if self.text is None
                else "both text and the input data are given"
            )
            raise SpecError(f"eval: {given}", fix="give one of them: text=FILE, or a data stage's folder as data")
        models = {"model": model}
        if "reference" in facts:
            models["reference"] = need(facts, "reference", CheckpointFacts)
        if model.tokenizer is None:
            raise ArtifactError(f"{model.where} has no tokenizer.json", fix="copy it from where the model comes from")
        window = self.window or min(model.config.max_seq_len, DEFAULT_WINDOW)
        for role, one in models.items():
            one.config.must_predict_tokens(one.where)
            one.config.must_be_causal("a token's loss would not be that of a prediction")
            _same_tokens(model, one)
            if window > one.config.max_seq_len:
                raise SpecError(
                    f"window {window} is longer than the {role}'s context of {one.config.max_seq_len}",
                    fix=f"use --window={one.config.max_seq_len} or less",
                )
        scored = self._split_of_text() if self.text is not None else need(facts, "data", DataFacts).split(self.split)
        if self.simulated_device is not None:
            refuse(model.config, model.packed, "model")
        scoring = self._scoring([*models.values()], scored, window)
        estimates = estimate(scoring, [one.config.dims() for one in models.values()], machine)
        return EvalPlan(estimates=with_energy(estimates, machine), ways=_WAYS, window=window)

    def remedies(self) -> list[list[tuple[str, str]]]:
        fewer = [self.batch_tokens // part for part in (2, 4, 8, 16) if self.batch_tokens >= part]
        return [[("batch_tokens", str(count)) for count in fewer], [("dtype", "bfloat16")]]

    def run(self, plan: EvalPlan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Scores the text and writes eval.json."""
        from hone.eval.score import loaded, score
        from hone.eval.text import read_text, read_texts
        from hone.model.devices.run import simulate as on_device

        folders = {role: parent.folder for role, parent in parents.items()}
        if self.text is not None:
            text = read_texts(self.text, folders["model"], max_tokens=self.max_tokens)
        else:
            text = read_text(folders["data"], folders["model"], split=self.split, max_tokens=self.max_tokens)
        for note in text.notes:
            run.warn(note)
        warm_up(run.device)
        with draft.measuring(Window(run.device, power_trace(run, draft))):
            model = loaded(folders["model"], run.device, self.dtype)
            counts = None if self.simulated_device is None else on_device(model, self.simulated_device)
            reference = loaded(folders["reference"], run.device, self.dtype) if "reference" in folders else None
            if int(text.tokens.max()) >= model.config.vocab_size:
                raise SpecError(
                    f"the text has token {int(text.tokens.max())}, the model {folders['model']} only {model.config.vocab_size}",
                    fix="use the tokenizer that the model was trained with",
                )
            with run.progress("scoring", len(text.tokens), "tok") as bar:
                scores = score(
                    model,
                    text.tokens,
                    text.starts,
                    window=plan.window,
                    stride=self.stride or None,
                    join=self.join,
                    batch_tokens=self.batch_tokens,
                    reference=reference,
                    watch=bar.advance,
                )
        self._record(draft, scores, text, plan.window, weights_bytes(folders["model"]))
        for name, count in (counts or {}).items():
            note = f"of the layers' linears on {self.simulated_device.kind}, simulated"
            draft.record(f"simulated_{name}_per_token", count / len(text.tokens), "", n=scores.num_scored, note=note)
        bigram, note = None, "there is no train split in the tokens of the model"
        if text.packed:
            bigram, note = bigram_perplexity(folders["data"], self.split, text.tokens, scores.scored)
        draft.record("bigram_perplexity", bigram, "", n=scores.num_scored if bigram else 1, note=note)

    def _split_of_text(self) -> SplitFacts:
        """The size of `text`, by its bytes. Raises SpecError when there is no such text."""
        size = int(plain.num_bytes(str(self.text), "text"))
        return SplitFacts(tokens=round(size / TEXT_BYTES_PER_TOKEN), documents=1, bytes=size)

    def _scoring(self, models: list[CheckpointFacts], split: SplitFacts, window: int) -> Scoring:
        """What is scored, in the numbers that `hone.cost.eval` takes. `models`: the model, then the reference if there is one."""
        tokens = max(min(split.tokens, self.max_tokens or split.tokens), 1)
        batch = min(self.batch_tokens, tokens)
        return Scoring(
            tokens,
            documents=max(round(split.documents * tokens / max(split.tokens, 1)), 1) if self.join == "documents" else 1,
            batch=batch,
            window=window,
            stride=self.stride or window,
            dtype=self.dtype,
            weights_bytes=sum(one.loaded_bytes(self.dtype) for one in models),
            max_rows=min(max(LOGITS // models[0].config.vocab_size, 1), batch),
            simulated=self.simulated_device is not None,
        )

    def _record(self, draft: Draft, scores: Any, text: Any, window: int, own_bytes: int) -> None:
        """Records the figures, and writes eval.json with the loss of every document."""
        how = f"window {window}, stride {self.stride or window}, join {self.join}, {text.how}"
        if self.simulated_device is not None:
            how += f", simulated on {self.simulated_device.kind}"
        count = scores.num_scored
        draft.record("perplexity", scores.perplexity, "", n=count, note=how)
        draft.record("loss", scores.mean_loss, "nats/token", n=count, note=how)
        draft.record("bits_per_byte", scores.bits_per_byte(text.token_bytes), "bits/byte", n=count, note=how)
        if scores.kl is not None:
            intervals, said = scores.intervals(text.starts), f"KL(reference || model), {how}"
            draft.record("kl_to_reference", scores.mean_kl, "nats/token", n=count, interval=intervals["kl"], note=said)
            said = f"loss above the reference's, {how}"
            more = {"n": count, "interval": intervals["loss"], "note": said}
            draft.record("loss_over_reference", scores.mean_difference, "nats/token", **more)
            draft.record("top1_agreement", scores.top1_agreement, "fraction", n=count, note=how)
        draft.record("tokens_evaluated", count, "tokens")
        record_energy_per(draft, "joules_per_token", count, "token")
        draft.record("model_bytes", own_bytes, "B", note="safetensors files")
        rows = []
        for start, end in zip(text.starts[:-1], text.starts[1:], strict=True):
            inside = scores.scored[start:end]
            if inside.any():
                rows.append([int(inside.sum()), round(float(scores.loss[start:end][inside].mean(dtype="float64")), 6)])
        content = {"window": window, "stride": self.stride or window, "join": self.join, "split": self.split}
        content |= {"columns": ["tokens", "loss"], "documents": rows}
        write_atomic(draft.folder / "eval.json", json.dumps(content).encode())


def evaluate(
    out: Path | str,
    model: Path | str,
    data: Path | str | None = None,
    reference: Path | str | None = None,
    run: Run | None = None,
    **fields: Any,
) -> Artifact:
    """Scores model folder `model` on data artifact `data`, or on `text=FILE`, and writes the eval artifact `out`; `fields` are
    `Eval`'s."""
    parents = {"model": Artifact.read(model)}
    if data is not None:
        parents["data"] = Artifact.read(data)
    if reference is not None:
        parents["reference"] = Artifact.read(reference)
    return Eval.read(fields).make(out, parents, run)


def _same_tokens(model: CheckpointFacts, reference: CheckpointFacts) -> None:
    """Raises SpecError unless the reference has the model's tokenizer."""
    sizes = model.config.vocab_size, reference.config.vocab_size
    if sizes[0] != sizes[1]:
        differ = f"{model.where} has {sizes[0]} tokens, reference {reference.where} has {sizes[1]}"
    elif reference.tokenizer not in (None, model.tokenizer):
        differ = f"the tokenizers of {model.where} and reference {reference.where} tokenize differently"
    else:
        return
    raise SpecError(
        f"{differ}: their predictions cannot be compared", fix="give a reference with the same tokenizer, or none"
    )
