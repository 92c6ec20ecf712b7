"""The calibration sequences that a compression plans, from facts alone."""

from __future__ import annotations

from typing import NamedTuple

from hone.base.errors import SpecError
from hone.compress.spec import CompressSpec
from hone.compress.structured import chain
from hone.feed import plain as texts
from hone.feed.facts import DataFacts
from hone.model.facts import CheckpointFacts

DEFAULT_SEQ_LEN = 512
"""Default tokens of a calibration sequence for models with a longer context."""

TEXT_BYTES_PER_TOKEN = 3.5
"""Bytes of text per token, to estimate the number of sequences of a text before it is encoded."""

CALIBRATE = "give calibration inputs: set calibration_text=FILE, or give data that the model was trained on as data (--from.data=FOLDER)"
"""The way out where inputs are missing."""


class Calibrated(NamedTuple):
    """Calibration sequences, their tokens, and other sequences for the check."""

    num_sequences: int
    seq_len: int
    num_spare: int = 0


def calibrated_of(spec: CompressSpec, model: CheckpointFacts, data: DataFacts | None) -> Calibrated | None:
    """Number and length of the sequences; None without calibration. Raises SpecError for an unusable source."""
    if data is not None and spec.calibration_text is not None:
        raise SpecError("both the role data and calibration_text are given", fix="give one of them")
    if data is None and spec.calibration_text is None:
        return None
    borrowing = [index for index, layer in enumerate(model.config.layers) if layer.mixer.reuses_kv]
    if borrowing:
        raise SpecError(
            f"layer {borrowing[0]} uses the keys of another layer, and calibration runs one layer at a time",
            fix="compress without calibration: kind=rtn, no data and no calibration_text",
        )
    longest = chain.reshape(model.config, spec.model_steps).max_seq_len  # a conversion may have extended it
    seq_len = spec.seq_len or min(model.config.max_seq_len, DEFAULT_SEQ_LEN)
    if seq_len > longest:
        raise SpecError(
            f"seq_len {seq_len} is longer than the model's context of {longest}", fix=f"use {longest} or less"
        )
    if data is None:
        size = texts.num_bytes(str(spec.calibration_text), "calibration_text")
        there = max(int(size / TEXT_BYTES_PER_TOKEN / seq_len), 1)
    else:
        if None not in (data.tokenizer, model.tokenizer) and data.tokenizer != model.tokenizer:
            raise SpecError(
                f"the tokens in {data.where} were made with another tokenizer than {model.where}'s",
                fix="give the data the model was trained on, or calibration_text=FILE, which is encoded anew",
            )
        there = max(data.split("train").num_sequences(seq_len), 1)
    count = min(spec.num_sequences, there)
    return Calibrated(count, seq_len, min(spec.check_sequences, there - count))
