"""Models with experts behind the engine: greedy text is that of dense passes, alone or in company."""

from __future__ import annotations

from typing import Any

import pytest

from hone.base.errors import SpecError
from tests.serve.small import VOCAB, assert_all_free, decoder, dense_greedy, engine, greedy

PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(1, 4 + 5 * i)] for i in range(3)]


def experts(**options: Any) -> Any:
    return decoder(feed_forward=({"kind": "moe", "num_experts": 4, "intermediate_size": 24, **options},))


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "hash"])
def test_text_does_not_depend_on_company(router: str) -> None:
    model = experts(router=router, capacity_factor=1.0, num_shared_experts=1)  # a capacity drops nothing in serving
    one = engine(model)
    for prompt, completion in zip(PROMPTS, one.generate(PROMPTS, greedy(12))):
        assert completion.tokens == dense_greedy(model, prompt, 12)
    assert_all_free(one)


@pytest.mark.parametrize("router", ["soft", "expert_choice"])
def test_routers_that_see_later_tokens_are_refused(router: str) -> None:
    with pytest.raises(SpecError, match=f"layer 0 routes by '{router}'"):
        engine(experts(router=router))
