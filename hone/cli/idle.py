"""Options that another choice leaves without effect: given on the command line they are mistakes, not silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CALIBRATION = ("num_sequences", "seq_len", "batch_size", "seed", "check_sequences")
_TRAINED = ("vocab_size", "max_train_bytes", "max_token_chars")
_SAMPLING = ("top_k", "top_p", "min_p", "seed")


def need_effect(verb: str, spec: Any, inputs: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raises SpecError for the first option in `given` (fields as typed) that changes nothing with this `spec` and these `inputs`."""
    from hone.base.errors import SpecError

    for names, why, fix in _idle(verb, spec, inputs):
        for name in given:
            if any(name == one or name.startswith(f"{one}.") for one in names):
                raise SpecError(f"--{name} has no effect: {why}", fix=f"leave it out, or {fix}")


def _idle(verb: str, spec: Any, inputs: Mapping[str, str]) -> list[tuple[tuple[str, ...], str, str]]:
    """(names of options, why they have no effect, what would give them one)."""
    rows = []
    if verb == "compress" and spec.calibration_text is None and "data" not in inputs:
        rows.append((_CALIBRATION, "nothing is calibrated", "give texts: --calibration_text=FILE"))
    if verb == "train" and "model" in inputs:
        more = ", grown as --init says" if isinstance(spec.init, tuple) else ""
        rows.append((("model",), f"the model's shape is that of --from.model{more}", "leave --from.model out"))
    if verb == "train" and getattr(spec.init, "kind", None) == "teacher":
        rows.append((("model",), "the model's shape is that of the teacher", "leave init=teacher out"))
    if verb == "train" and not spec.checkpoint.interval:
        names = ("checkpoint.keep_latest_k", "checkpoint.async_mode")
        rows.append((names, "checkpoint.interval is 0, so that there are no checkpoints", "set --checkpoint.interval"))
    if verb == "data" and spec.tokenizer.path is not None:
        names = tuple(f"tokenizer.{name}" for name in _TRAINED)
        rows.append(
            (names, f"no tokenizer is trained, that of {spec.tokenizer.path} is used", "leave tokenizer.path out")
        )
    if verb == "generate":
        rows.append((("logprobs", "prompt_logprobs"), "the text alone is printed", "use hone serve, or hone.Engine"))
        if spec.temperature == 0:
            rows.append((_SAMPLING, "with temperature 0 the most likely token is taken", "add --temperature=1"))
    return rows
