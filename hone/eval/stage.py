"""The eval stage: how good a model is on a text, and how far it lies from a reference model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.artifact import Artifact, Draft
from hone.base.durable import write_atomic
from hone.base.errors import SpecError
from hone.base.figure import Estimate
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.base.stage import Stage
from hone.cost.facts import ModelFacts
from hone.cost.memory import BYTES, score_bytes
from hone.cost.steps import forward_seconds, loss_seconds
from hone.measure.machine import Machine, describe
from hone.measure.warm import warm_up
from hone.measure.window import Window
from hone.model.folder import weights_bytes

torch = lazy("torch")

DEFAULT_WINDOW = 1024
"""Window where none is given and the model's context is longer."""


class Eval(Stage):
    """Perplexity and bits per byte on a split of a data artifact; beside a reference model, divergence and agreement."""

    stage: ClassVar[str] = "eval"
    roles: ClassVar[dict[str, bool]] = {"model": True, "data": True, "reference": False}

    split: str = Field("val", description="Split of the data artifact to score.")
    window: int = Field(
        0, ge=0, description="Tokens a prediction may look back on; 0: the model's context, up to 1024."
    )
    stride: int = Field(0, ge=0, description="Tokens from one window's begin to the next; 0: the window.")
    join: Literal["documents", "stream"] = Field(
        "documents", description="Whether documents see each other (stream) or not."
    )
    max_tokens: int = Field(0, ge=0, description="Score this many tokens from the front of the split; 0: all.")
    batch_tokens: int = Field(4096, gt=0, description="Tokens computed at once.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Format the model computes in.")

    @model_validator(mode="after")
    def _stride_fits(self) -> Eval:
        if self.window and self.stride > self.window:
            raise ValueError(f"stride {self.stride} is longer than window {self.window}: tokens between go unscored")
        return self

    def execute(self, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        from hone.eval.score import score
        from hone.eval.text import read_text
        from hone.model.hf import Checkpoint

        folders = {role: parent.folder for role, parent in parents.items()}
        parents["model"].need("config.json", "tokenizer.json")
        config = Checkpoint(folders["model"]).config
        for role in ("model", "reference"):
            if role in folders:
                Checkpoint(folders[role]).config.must_be_causal("a token's loss would be read off, not predicted")
        text = read_text(folders["data"], folders["model"], split=self.split, max_tokens=self.max_tokens)
        window = self.window or min(config.max_seq_len, DEFAULT_WINDOW)
        for role in ("model", "reference"):
            longest = Checkpoint(folders[role]).config.max_seq_len if role in folders else window
            if window > longest:
                raise SpecError(
                    f"window {window} is longer than the {role}'s context of {longest}",
                    fix=f"use --window={longest} or less",
                )
        machine = Machine.model_validate(run.machine) if run.machine else describe(run.device)
        if int(text.tokens.max()) >= config.vocab_size:
            raise SpecError(
                f"the text has token {int(text.tokens.max())}, the model {folders['model']} only {config.vocab_size}",
                fix="use the tokenizer that the model was trained with",
            )
        warm_up(run.device)
        with Window(run.device) as measured:
            models = [folders[role] for role in ("model", "reference") if role in folders]
            draft.predict(self._estimates(models, machine, text.starts, window, measured))
            model = self._load(folders["model"], run.device)
            reference = self._load(folders["reference"], run.device) if "reference" in folders else None
            _comparable(model, reference, folders)
            with run.progress("scoring", len(text.tokens), "tok") as bar:
                scores = score(
                    model,
                    text.tokens,
                    text.starts,
                    window=window,
                    stride=self.stride or None,
                    join=self.join,
                    batch_tokens=self.batch_tokens,
                    reference=reference,
                    watch=bar.advance,
                )
        self._record(draft, scores, text, window, weights_bytes(folders["model"]))
        draft.record_window(measured)

    def _load(self, folder: Path, device: str) -> Any:
        from hone.model.hf import load

        return load(folder, device=device, dtype=getattr(torch, self.dtype)).eval()

    def _weights_bytes(self, folder: Path, facts: ModelFacts) -> float:
        """Bytes of the loaded weights: a quantized folder stays packed, a plain one is converted to `dtype`."""
        config = json.loads((folder / "config.json").read_text(encoding="utf8"))
        return weights_bytes(folder) if config.get("quantization_config") else facts.num_params * BYTES[self.dtype]

    def _estimates(
        self, folders: list[Path], machine: Machine, starts: Any, window: int, measured: Window
    ) -> dict[str, Estimate]:
        """Time and peak memory, from what one batch needs. `folders`: the model's, then the reference's if there is one."""
        from hone.eval.score import LOGITS
        from hone.model.hf import Checkpoint

        facts = [Checkpoint(folder).config.facts() for folder in folders]
        compared, vocab_size = len(facts) > 1, facts[0].vocab_size
        tokens = int(starts[-1])
        documents = len(starts) - 1 if self.join == "documents" else 1
        mean_len = max(min(window, math.ceil(tokens / documents)), 1)
        repeated = window / (self.stride or window)
        batch = max(min(self.batch_tokens, tokens), 1)
        forwards = [forward_seconds(one, machine, tokens=batch, seq_len=mean_len, dtype=self.dtype) for one in facts]
        # Exponentials over every logit: one for the loss; both models' log-softmax and one more for a divergence.
        softmax_s = (4 if compared else 1) * loss_seconds(machine, batch, vocab_size, train=False)
        value = repeated * tokens / batch * (sum(forward.value for forward in forwards) + softmax_s)
        growth = score_bytes(
            facts,
            weights_bytes=sum(self._weights_bytes(folder, one) for folder, one in zip(folders, facts, strict=True)),
            max_tokens=batch,
            max_rows=min(max(LOGITS // vocab_size, 1), batch),
            dtype=self.dtype,
            device=machine.device,
        )
        peak = growth.model_copy(
            update={
                "value": measured.start_memory_bytes + growth.value,
                "formula": f"{growth.formula} + in use before",
            }
        )
        each = " + ".join(f"forward [{forward.formula}]" for forward in forwards)
        formula = f"{tokens * repeated / batch:.1f} batches of {batch} tokens x ({each} + softmax {softmax_s:.3g} s)"
        return {
            "time_s": Estimate(value=value, unit="s", formula=formula, bound=forwards[0].bound),
            "peak_memory_bytes": peak,
            "memory_growth_bytes": growth,
        }

    def _record(self, draft: Draft, scores: Any, text: Any, window: int, own_bytes: int) -> None:
        """The figures, and eval.json with the loss of every document."""
        how = f"window {window}, stride {self.stride or window}, join {self.join}, {text.how}"
        count = scores.num_scored
        draft.record("perplexity", scores.perplexity, "", n=count, note=how)
        draft.record("loss", scores.mean_loss, "nats/token", n=count, note=how)
        draft.record("bits_per_byte", scores.bits_per_byte(text.token_bytes), "bits/byte", n=count, note=how)
        if scores.kl is not None:
            draft.record(
                "kl_to_reference", scores.mean_kl, "nats/token", n=count, note=f"KL(reference || model), {how}"
            )
            draft.record("top1_agreement", scores.top1_agreement, "fraction", n=count, note=how)
        draft.record("tokens_evaluated", count, "tokens")
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
    data: Path | str,
    reference: Path | str | None = None,
    run: Run | None = None,
    **fields: Any,
) -> Artifact:
    """Scores model folder `model` on data artifact `data` and writes the eval artifact `out`; `fields` are `Eval`'s."""
    parents = {"model": Artifact.read(model), "data": Artifact.read(data)}
    if reference is not None:
        parents["reference"] = Artifact.read(reference)
    return Eval.read(fields).make(out, parents, run)


def _comparable(model: Any, reference: Any, folders: dict[str, Path]) -> None:
    """Raises SpecError unless the reference's logits are about the model's tokens."""
    from hone.model.tokenizer import tokenizers_differ

    if reference is None:
        return
    sizes = model.config.vocab_size, reference.config.vocab_size
    if sizes[0] != sizes[1]:
        differ = f"{folders['model']} has {sizes[0]} tokens, reference {folders['reference']} has {sizes[1]}"
    elif tokenizers_differ(folders["model"], folders["reference"]):
        differ = f"the tokenizers of {folders['model']} and reference {folders['reference']} cut texts differently"
    else:
        return
    raise SpecError(
        f"{differ}: their predictions cannot be compared", fix="give a reference with the same tokenizer, or none"
    )
