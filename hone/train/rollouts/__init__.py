"""Rollouts: answers that the model in training writes itself, through the engine of this process, and what they are worth."""

from hone.base.table import Table

REWARDS = Table(
    "reward",
    {
        "exact_match": "hone.train.rollouts.rewards.exact_match:ExactMatch",
        "number_match": "hone.train.rollouts.rewards.number_match:NumberMatch",
        "pattern": "hone.train.rollouts.rewards.pattern:Pattern",
        "reward_model": "hone.train.rollouts.rewards.reward_model:RewardModel",
        "function": "hone.train.rollouts.rewards.function:Function",
    },
)
