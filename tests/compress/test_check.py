"""The check of a compressed model: its figures are those of both models scored whole; what is said where there is none."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress.calibration import from_text
from hone.compress.stage import Compress
from hone.eval.score import score
from hone.model.hf import load


@pytest.mark.parametrize("rest_dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # tied, untied
def test_figures_are_those_of_both_models_scored(
    family: str, rest_dtype: str, family_folder, compress, calibration_text: Path
) -> None:
    folder = family_folder(family)
    step = {"kind": "gptq", "bits": 3, "group_size": 32}
    made = compress(folder, step, check_sequences=5, seed=3, rest_dtype=rest_dtype)
    options = {"num_sequences": 16, "seq_len": 32, "seed": 3}
    samples = from_text(calibration_text, folder, **options, num_spare=5)
    assert not {tuple(row) for row in samples.tokens} >= {tuple(row) for row in samples.spare.tokens}
    tokens = samples.spare.tokens
    starts = np.arange(0, tokens.size + 1, 32)
    found = score(load(made.folder, dtype=torch.float32), tokens.ravel(), starts, window=32, reference=load(folder))
    figures = made.figures
    assert figures["kl_to_dense"].value == pytest.approx(found.mean_kl, rel=1e-3) and found.mean_kl > 1e-3
    assert figures["kl_to_dense"].n == found.num_scored == 5 * 31
    assert figures["top1_agreement"].value == pytest.approx(found.top1_agreement, abs=1e-9)
    dense = score(load(folder), tokens.ravel(), starts, window=32)
    assert figures["perplexity_ratio"].value == pytest.approx(found.perplexity / dense.perplexity, rel=1e-4)
    by_row = found.kl.reshape(5, 32)[:, 1:].mean(1)
    interval = figures["kl_to_dense"].interval
    assert interval.half_width == pytest.approx(
        2.776 * by_row.std(ddof=1) / math.sqrt(5), rel=1e-2
    )  # Student's t, 4 degrees
    assert (interval.level, interval.n) == (0.95, 5)


def test_a_text_without_other_sequences_is_said(family_folder, compress, calibration_text: Path) -> None:
    step = {"kind": "rtn", "bits": 4, "group_size": 32}
    made = compress(family_folder("llama"), step)
    assert made.figures["kl_to_dense"].value is None and "no calibration inputs" in made.figures["kl_to_dense"].note
    with pytest.raises(SpecError, match=r"has \d+ sequences of 32 tokens, num_sequences asks for 100000") as caught:
        compress(
            family_folder("llama"), step, num_sequences=100_000, calibration_text=str(calibration_text), name="many"
        )
    there = int(re.findall(r"set num_sequences=(\d+)", caught.value.fix)[0])
    made = compress(
        family_folder("llama"), step, num_sequences=there, calibration_text=str(calibration_text), name="all"
    )
    assert made.figures["kl_to_dense"].value is None
    made = compress(
        family_folder("llama"), step, check_sequences=0, calibration_text=str(calibration_text), name="none"
    )
    assert made.figures["kl_to_dense"].note.endswith("check_sequences is 0")


def test_text_that_the_model_cannot_predict_is_said(
    family_folder, tmp_path: Path, calibration_text: Path, capsys
) -> None:
    """A random model predicts no text, as a model of one language does not predict another."""
    spec = Compress.read(
        {
            "steps": [{"kind": "rtn", "bits": 8, "group_size": 0}],
            "calibration_text": str(calibration_text),
            "num_sequences": 4,
            "seq_len": 32,
        }
    )
    spec.make(tmp_path / "compress-x", {"model": Artifact.read(family_folder("llama"))}, Run())
    assert "in a language the model does not know" in capsys.readouterr().err
