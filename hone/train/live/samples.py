"""Texts that the model in training writes after prompts from the held-out data, at each evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.errors import SpecError
from hone.feed.load import IGNORE, Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hone.feed.load import PackedTokens
    from hone.feed.mix.sources import Joined
    from hone.model.decoder import Decoder

PROMPT_TOKENS = 16
"""Tokens of a prompt; of conversations all before the first answer."""


def check_samples(spec: Any, num_ranks: int) -> None:
    """Raises SpecError where the train stage `spec` asks for samples, and no rank has a whole model of tokens that could write them."""
    if not spec.validation.samples:
        return
    layout, objective = spec.parallelism, spec.objective
    wrong = {
        f"objective {objective.kind}": objective.scores_text or objective.trains_heads,
        "compile": spec.compile,
        f"parallelism.offload {layout.offload.kind}": layout.offload.kind != "none",
        f"parallelism.data_parallel {layout.data_parallel.kind}": num_ranks > 1 and layout.data_parallel.kind != "ddp",
    }
    for name in ("tensor", "context", "pipeline", "expert"):
        field = f"{name}_parallel_degree"
        wrong[f"parallelism.{field}"] = getattr(layout, field) > 1
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise SpecError(
                f"validation.samples needs a whole language model on rank 0, which writes them, and not {name}",
                fix="leave validation.samples out, and ask the trained model with hone generate",
            )


class Sampler:
    """Continues the beginnings of the first `number` held-out sequences by `num_tokens`, the most likely tokens, so that the texts of
    two steps, or of a resumed training, differ by the weights alone."""

    def __init__(self, number: int, num_tokens: int, tokenizer: Path) -> None:
        self._number, self._num_tokens, self._folder = number, num_tokens, tokenizer

    def rows(self, model: Decoder, val: PackedTokens | Joined, seq_len: int) -> list[dict[str, str]]:
        """The prompt and the continuation of each, as texts."""
        import torch

        from hone.model.incremental import generate
        from hone.model.tokenizer import load_tokenizer

        tokenizer, training, found = load_tokenizer(self._folder), model.training, []
        ends = model.config.eos_token_ids
        model.eval()
        try:
            with torch.no_grad():
                for prompt in prompts_of(next(iter(val.in_order(self._number, seq_len))))[: self._number]:
                    given = torch.from_numpy(prompt)[None].to(model.device)
                    written = generate(model, given, self._num_tokens, stop_tokens=ends)[0, len(prompt) :].tolist()
                    texts = (tokenizer.decode([int(one) for one in part]) for part in (prompt, written))
                    found.append(dict(zip(("prompt", "text"), texts)))
        finally:
            model.train(training)
        return found


def prompts_of(batch: Batch) -> list[NDArray[np.int64]]:
    """How the first document of each sequence of `batch` begins: all before its first answer, or PROMPT_TOKENS of plain text."""
    found = []
    for tokens, targets, ids in zip(*batch[:3]):
        own = int((ids == ids[0]).sum())
        answer = (
            int((targets[:own] != IGNORE).argmax()) + 1
        )  # 1 of plain text, whose every token but the first is a target
        found.append(tokens[: max(min(answer if answer > 1 else PROMPT_TOKENS, own), 1)].astype("int64"))
    return found
