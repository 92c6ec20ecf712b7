"""The compress stage: a model folder in, a smaller one out, by an ordered list of steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hone.base.artifact import Artifact, Draft
from hone.base.durable import write_atomic, write_jsonl
from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.base.stage import Stage
from hone.base.table import Choice, Technique
from hone.compress import STEPS
from hone.measure.machine import Machine, describe
from hone.measure.window import Window
from hone.model.folder import weights_bytes

torch = lazy("torch")
calibration = lazy("hone.compress.calibration")
estimate = lazy("hone.compress.estimate")
shards = lazy("hone.compress.shards")
stream = lazy("hone.compress.stream")
quantized = lazy("hone.model.quantized.config")
hf = lazy("hone.model.hf")

DEFAULT_SEQ_LEN = 512
"""Calibration sequence where none is given and the model's context is longer."""


class Compress(Stage):
    """Prunes and quantizes a model layer by layer; the folder it writes loads in transformers and stays packed in hone."""

    stage: ClassVar[str] = "compress"
    roles: ClassVar[dict[str, bool]] = {"model": True, "data": False}

    steps: tuple[Annotated[Technique, Choice(STEPS)], ...] = Field(
        min_length=1, description="What is done to every matrix, in order: pruners first, at most one quantizer, last."
    )
    targets: tuple[str, ...] = Field(
        (r"\.layers\.",),
        description="Regular expressions; a linear whose checkpoint name one of them finds is worked on.",
    )
    ignore: tuple[str, ...] = Field(
        ("lm_head",), description="Regular expressions; a linear whose name one of them finds is left as it is."
    )
    num_sequences: int = Field(128, gt=0, description="Calibration sequences.")
    seq_len: int = Field(0, ge=0, description="Tokens of one sequence; 0: the model's context, up to 512.")
    batch_size: int = Field(8, gt=0, description="Sequences computed at once.")
    seed: int = Field(0, ge=0, description="Which sequences are drawn.")
    calibration_text: str | None = Field(None, description="Text file to calibrate with, in place of the role data.")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Format of the forward passes; auto is float32 on a CPU, bfloat16 on a GPU."
    )

    rest_dtype: Literal["keep", "bfloat16", "float16"] = Field(
        "keep", description="Format the embedding and the head are stored in; most of a small model's bytes are there."
    )

    @model_validator(mode="after")
    def _steps_follow(self) -> Compress:
        given: set[str] = set()
        for step in self.steps:
            if "weights:quantized" in given:
                raise ValueError(
                    f"{step.kind} comes after a quantizer: weights on a grid stay as they are, put it first"
                )
            given |= step.gives
        for pattern in (*self.targets, *self.ignore):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{pattern}' is no regular expression: {error}") from None
        return self

    def files(self) -> dict[str, Path]:
        """The calibration text: another text at the same path is another artifact."""
        path = None if self.calibration_text is None else Path(self.calibration_text)
        return {"calibration_text": path} if path is not None and path.is_file() else {}

    def execute(self, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        folder = parents["model"].folder
        parents["model"].need("config.json")
        checkpoint = hf.Checkpoint(folder)
        if checkpoint.quantization is not None:
            raise SpecError(
                f"{folder} is quantized already ({checkpoint.quantization.get('quant_method')})",
                fix="compress the checkpoint it was made from",
            )
        if checkpoint.config.adapters:
            raise SpecError(f"{folder} has adapters around its linears", fix="compress the model without them")
        selected = self._select(checkpoint)
        samples = self._calibrate(checkpoint, parents)
        rest = None if self.rest_dtype == "keep" else getattr(torch, self.rest_dtype)
        job = stream.Job(checkpoint, self.steps, selected, run.device, self._compute_dtype(run.device), rest)
        machine = Machine.model_validate(run.machine) if run.machine else describe(run.device)
        with Window(run.device) as measured:
            plan = estimate.Plan(job, samples, self.batch_size)
            plan.need_disk(draft.folder)
            draft.predict(plan.estimates(machine, measured.start_memory_bytes))
            flow = stream.Flow(samples, self.batch_size, job.device, job.dtype) if samples is not None else None
            with shards.full_disk_said(draft.folder):
                rows = stream.run_job(job, flow, draft, run)
                self._describe(draft, checkpoint, job)
                write_jsonl(draft.folder / "layers.jsonl", rows)
        for step in self.steps:
            source = {"calibration": samples.source} if samples is not None and "hessian" in step.needs else {}
            draft.did({"slot": STEPS.slot_of(step.kind), **step.model_dump(mode="json"), **source})
        self._record(draft, folder, checkpoint, rows)
        draft.record_window(measured)

    def _compute_dtype(self, device: str) -> Any:
        if self.compute_dtype == "auto":
            return torch.bfloat16 if device.startswith("cuda") else torch.float32
        return getattr(torch, self.compute_dtype)

    def _select(self, checkpoint: Any) -> tuple[tuple[str, ...], ...]:
        """Per layer, the fused linears to work on. Raises SpecError when there is none, or one is chosen only in part."""
        selected, shapes = [], []
        for index in range(checkpoint.config.num_layers):
            chosen: dict[str, dict[str, bool]] = {}
            for module in checkpoint.layer_modules(index):
                named = any(re.search(pattern, module.name) for pattern in self.targets)
                left = any(re.search(pattern, module.name) for pattern in self.ignore)
                chosen.setdefault(module.attribute, {})[module.name] = named and not left
            for modules in chosen.values():
                if len(set(modules.values())) > 1:
                    apart = [name for name, taken in modules.items() if not taken]
                    raise SpecError(
                        f"targets and ignore leave out {', '.join(apart)} of {', '.join(modules)}",
                        fix="these run as one matrix: target or ignore them together",
                    )
            here = tuple(name for name, modules in chosen.items() if all(modules.values()))
            selected.append(here)
            linears = checkpoint.config.linears(index)
            if experts := [name for name in here if linears[name].experts is not None]:
                raise SpecError(
                    f"layer {index}: {', '.join(experts)} hold a matrix for each expert, which no step takes yet",
                    fix=r"leave them as they are: ignore=['lm_head', '\.experts\.']",
                )
            shapes += [
                (f"layers.{index}.{name}", linears[name].out_features, linears[name].in_features) for name in here
            ]
        if not shapes:
            raise SpecError(
                f"targets {list(self.targets)} without {list(self.ignore)} name no linear",
                fix=f"names look like {checkpoint.layer_modules(0)[0].name}",
            )
        for step in self.steps:
            for name, rows, columns in shapes:
                step.check(name, rows, columns)
        return tuple(selected)

    def _calibrate(self, checkpoint: Any, parents: dict[str, Artifact]) -> Any:
        """Calibration sequences, None when there is no data and no step needs any."""
        needing = [step.kind for step in self.steps if "hessian" in step.needs]
        if "data" in parents and self.calibration_text is not None:
            raise SpecError("both the role data and calibration_text are given", fix="give one of them")
        if "data" not in parents and self.calibration_text is None:
            if needing:
                raise SpecError(
                    f"{needing[0]} needs calibration data", fix="add data: NAME OR FOLDER, or set calibration_text=FILE"
                )
            return None
        longest = checkpoint.config.max_seq_len
        seq_len = self.seq_len or min(longest, DEFAULT_SEQ_LEN)
        if seq_len > longest:
            raise SpecError(
                f"seq_len {seq_len} is longer than the model's context of {longest}", fix=f"use {longest} or less"
            )
        options = {"num_sequences": self.num_sequences, "seq_len": seq_len, "seed": self.seed}
        if self.calibration_text is not None:
            samples = calibration.from_text(Path(self.calibration_text), checkpoint.folder, **options)
        else:
            samples = calibration.from_data(parents["data"].folder, checkpoint.folder, **options)
        calibration.check(samples, checkpoint.config.vocab_size)
        return samples

    def _describe(self, draft: Draft, checkpoint: Any, job: Any) -> None:
        """config.json with the quantization, generation_config.json and the tokenizer beside it."""
        values = dict(checkpoint.values)
        if job.quantizer is not None:
            values["quantization_config"] = _quantization(checkpoint, job).to_json()
        write_atomic(draft.folder / "config.json", (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())
        generation = checkpoint.folder / "generation_config.json"
        if generation.exists():
            write_atomic(draft.folder / generation.name, generation.read_bytes())
        if (checkpoint.folder / "tokenizer.json").exists():
            hf.copy_tokenizer(checkpoint.folder, draft.folder)

    def _record(self, draft: Draft, folder: Path, checkpoint: Any, rows: list[dict[str, Any]]) -> None:
        size = weights_bytes(draft.folder)
        weights = sum(row["weights"] for row in rows)
        draft.record("model_bytes", size, "B")
        draft.record(
            "bits_per_weight", 8 * size / checkpoint.config.num_params, "bits", note="whole folder, scales too"
        )
        draft.record(
            "compression_ratio",
            weights_bytes(folder) / size,
            "times",
            note=f"against the checkpoint as it is stored, in {str(checkpoint.dtype).removeprefix('torch.')}",
        )
        draft.record(
            "sparsity",
            sum(row["zeros"] for row in rows) / weights,
            "fraction",
            note="zeros among the matrices worked on",
        )
        outputs = [row["error"] for row in rows if row["error"] is not None]
        draft.record(
            "relative_output_error",
            sum(outputs) / len(outputs) if outputs else None,
            "fraction",
            n=max(len(outputs), 1),
            note="|(W' - W) X| / |W X| over the calibration inputs X, mean over matrices"
            if outputs
            else "not measured: no calibration inputs (give the role data, or calibration_text)",
        )
        errors = [row["weight_error"] for row in rows]
        draft.record(
            "relative_weight_error",
            sum(errors) / len(errors),
            "fraction",
            n=len(errors),
            note="|W' - W| / |W|, mean over matrices; methods that fit the outputs accept a larger one",
        )


def _quantization(checkpoint: Any, job: Any) -> Any:
    """The config's groups: the scheme of most modules by their class, any other by module names, which readers prefer."""
    ignored = ["lm_head"]
    modules: dict[Any, list[str]] = {}
    for index in range(checkpoint.config.num_layers):
        linears = checkpoint.config.linears(index)
        for module in checkpoint.layer_modules(index):
            if module.attribute in job.targets[index]:
                scheme = job.quantizer.scheme(linears[module.attribute].in_features)
                modules.setdefault(scheme, []).append(module.name)
            else:
                ignored.append(module.name)
    by_count = sorted(modules, key=lambda scheme: len(modules[scheme]))
    groups = [(tuple(modules[scheme]), scheme) for scheme in by_count[:-1]]
    return quantized.QuantizationConfig((*groups, (("Linear",), by_count[-1])), tuple(ignored))
