"""Rewards of texts."""

from __future__ import annotations

import re

import pytest

from hone.base.errors import SpecError
from hone.train.rollouts import REWARDS
from hone.train.rollouts.rewards.number_match import last_number


def lengths(prompts, completions, answers):
    """A user's reward function."""
    return [len(completion) - len(answer) for completion, answer in zip(completions, answers)]


def few(prompts, completions, answers):
    return [1.0]


@pytest.mark.parametrize(
    ("spec", "completion", "answer", "wanted"),
    [
        ({"kind": "exact_match"}, " Paris\n", "Paris", 1),
        ({"kind": "exact_match"}, "paris", "Paris", 0),
        ({"kind": "exact_match", "ignore_case": True}, "paris", "Paris", 1),
        ({"kind": "exact_match", "marker": "####"}, "so 3 #### 4", "because #### 4", 1),
        ({"kind": "exact_match", "marker": "####"}, "4", "#### 4", 0),
        ({"kind": "number_match"}, "It is 1,024.0.", "#### 1024", 1),
        ({"kind": "number_match"}, "10-3=7", "7", 1),
        ({"kind": "number_match"}, "-7", "7", 0),
        ({"kind": "number_match"}, "none", "7", 0),
        ({"kind": "number_match", "tolerance": 0.01}, "3.14", "3.1416", 1),
        ({"kind": "number_match", "marker": "Answer:"}, "7", "7", 0),
        ({"kind": "pattern"}, "<think>\nso</think> <answer>4</answer>\n", "", 1),
        ({"kind": "pattern"}, "<answer>4</answer>", "", 0),
        ({"kind": "pattern", "regex": r"\d+"}, "42", "", 1),
        ({"kind": "pattern", "regex": r"\d+"}, "42!", "", 0),
        ({"kind": "function", "name": f"{__name__}:lengths"}, "four", "4", 3),
    ],
)
def test_a_reward_is_what_its_texts_are_worth(spec, completion, answer, wanted):
    reward = REWARDS.read(spec)
    reward.check()
    assert reward.scores(["q"], [completion], [answer]) == [wanted]


@pytest.mark.parametrize(
    ("text", "number"),
    [("a 3 b -4", -4), ("x-4", 4), ("(2)-4", 4), ("1,234,567", 1234567), ("1,23", 23), (".5", 0.5), ("", None)],
)
def test_the_last_number_of_a_text(text, number):
    found = last_number(text)
    assert (None if found is None else float(found)) == number


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "not module:function"),
        ("no_such_module:f", "cannot be imported"),
        (f"{__name__}:nothing", "cannot be imported"),
    ],
)
def test_a_function_that_is_not_there_is_named(name, said):
    with pytest.raises(SpecError, match=re.escape(said)):
        REWARDS.read({"kind": "function", "name": name}).check()


def test_a_function_must_return_a_number_for_each_answer():
    with pytest.raises(SpecError, match="1 numbers for 2 completions"):
        REWARDS.read({"kind": "function", "name": f"{__name__}:few"}).scores(["", ""], ["", ""], ["", ""])
    with pytest.raises(SpecError, match="no regular expression"):
        REWARDS.read({"kind": "pattern", "regex": "("})
