"""Penalties for tokens that a sequence has had, from a table of counts that stays on the device.

Legend: E entries (one per token to draw), V vocabulary, R rows of the table (one a sequence), N tokens to count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of

IN_PROMPT = -(1 << 31)
"""The bit of a count that says that the token stands in the prompt."""

GENERATED = (1 << 31) - 1
"""The bits of a count that say how often the token was generated."""


def penalize(
    logits: Tensor,
    counts: Tensor,
    rows: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """Penalized logits float32 [E, V] of logits [E, V]; entry e's tokens so far are in row rows[e] (int64 [E]) of the table.

    `counts` int32 [R, V] is what `count_tokens` fills: the low 31 bits are how often a token was generated, bit 31 is set
    for tokens of the prompt. Logits of tokens in either are divided by `repetition` if above 0, else multiplied by it
    (arXiv:1909.05858); then those of generated tokens lose frequency * count + presence. The three are float32 [E]. A
    negative row has no tokens. Reads nothing on the host, so a graph can hold it. Raises SpecError for what does not fit.
    """
    _check_table(counts, rows, len(logits))
    if logits.dim() != 2 or not logits.is_floating_point() or logits.shape[1] != counts.shape[1]:
        raise SpecError(
            f"logits {tuple(logits.shape)} {logits.dtype} and counts {tuple(counts.shape)} do not fit together",
            fix="give floating logits [E, V] and counts of the same V",
        )
    for name, one in (("presence", presence), ("frequency", frequency), ("repetition", repetition)):
        if one.shape != rows.shape or one.dtype != torch.float32:
            raise SpecError(f"{name} is {one.dtype} {tuple(one.shape)}", fix=f"give float32 [{len(logits)}]")
    if backend_of("penalize", logits.device, backend, dtype=logits.dtype) == "triton":
        from hone.ops.sample.triton_tables import launch_penalize

        return launch_penalize(logits, counts, rows, presence, frequency, repetition)
    values = logits.float()
    known = torch.where((rows >= 0)[:, None], counts[rows.clamp(min=0)], 0)
    turned = torch.where(values > 0, values / repetition[:, None], values * repetition[:, None])
    values = torch.where(known != 0, turned, values)
    times = known & GENERATED
    return torch.where(times > 0, values - (frequency[:, None] * times + presence[:, None]), values)


def count_tokens(
    counts: Tensor, rows: Tensor, tokens: Tensor, *, prompt: bool = False, backend: str | None = None
) -> None:
    """Counts tokens int64 [N] in rows int64 [N] of `counts` int32 [R, V], in place: as generated, or as in the prompt.

    A pair may occur several times; pairs with a negative row or token are left out. Raises SpecError for what does not
    fit.
    """
    _check_table(counts, rows, len(tokens))
    if tokens.shape != rows.shape or tokens.dtype != torch.int64:
        raise SpecError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}", fix=f"give int64 [{len(rows)}]")
    if backend_of("count_tokens", counts.device, backend, dtype=counts.dtype) == "triton":
        from hone.ops.sample.triton_tables import launch_count

        launch_count(counts, rows, tokens, prompt)
        return
    real = (rows >= 0) & (tokens >= 0)
    flat = (rows * counts.shape[1] + tokens)[real]
    if prompt:
        counts.view(-1)[flat] |= IN_PROMPT
    else:
        counts.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


def _check_table(counts: Tensor, rows: Tensor, num_entries: int) -> None:
    if counts.dim() != 2 or counts.dtype != torch.int32 or not counts.is_contiguous():
        raise SpecError(f"counts are {counts.dtype} {tuple(counts.shape)}", fix="give contiguous int32 [rows, V]")
    if rows.dtype != torch.int64 or rows.shape != (num_entries,):
        raise SpecError(f"rows are {rows.dtype} {tuple(rows.shape)}", fix=f"give int64 [{num_entries}]")
