"""Reward by a function of the user's."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from hone.base.errors import SpecError
from hone.train.rollouts.rewards.base import Reward


class Function(Reward):
    """What a Python function returns: called with lists `prompts`, `completions` and `answers` of texts, it gives a list of numbers."""

    name: str = Field("", description="module:function, importable where the training runs.")

    def check(self) -> None:
        self._function()

    def scores(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        """Raises SpecError where the function does not return a finite number for each completion."""
        found = self._function()(prompts=list(prompts), completions=list(completions), answers=list(answers))
        try:
            numbers = [float(one) for one in found]
        except (TypeError, ValueError):
            raise self._wrong(f"returned {type(found).__name__} {found!r:.60}") from None
        if len(numbers) != len(completions) or not all(map(math.isfinite, numbers)):
            raise self._wrong(f"returned {len(numbers)} numbers for {len(completions)} completions, or not finite ones")
        return numbers

    def _wrong(self, said: str) -> SpecError:
        return SpecError(
            f"reward function {self.name} {said}", fix="return a list with a finite number for each completion"
        )

    def _function(self) -> Callable[..., Any]:
        module, _, attribute = self.name.partition(":")
        if not module or not attribute:
            raise SpecError(
                f"reward function.name is '{self.name}', not module:function", fix="write name: my_rewards:score, say"
            )
        try:
            return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
        except (ImportError, AttributeError) as error:
            raise SpecError(
                f"reward function {self.name} cannot be imported: {error}",
                fix="correct the name, and put its folder on PYTHONPATH",
            ) from None
