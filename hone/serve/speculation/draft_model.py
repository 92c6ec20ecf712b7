"""Drafter: a small model of the same vocabulary guesses, with its own cache under the target model's page numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.base.errors import SpecError
from hone.serve.speculation.drafter import Drafter, DraftSetting

if TYPE_CHECKING:
    from hone.serve.speculation.draft_runner import DraftProposer, DraftRunner


class DraftModel(Drafter):
    """Guess with a smaller model, verify with the target model. Leviathan et al. 2023, arXiv:2211.17192."""

    paper: ClassVar[str] = "arXiv:2211.17192"
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def open(self, setting: DraftSetting) -> tuple[DraftProposer, DraftRunner]:
        from hone.serve.speculation.draft_runner import DraftProposer, DraftRunner

        draft = setting.draft
        assert draft is not None, "a draft model is needed"
        if draft.config.vocab_size != setting.model.config.vocab_size:
            raise SpecError(
                f"the draft model has {draft.config.vocab_size} tokens, the model has {setting.model.config.vocab_size}",
                fix="use a draft model with the same tokenizer",
            )
        return DraftProposer(setting.max_num_batched_tokens), DraftRunner(setting)
