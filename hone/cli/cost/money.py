"""`hone cost money`: prices of training and serving, what an optimization earns, checkpoints against failures, and spot machines."""

from __future__ import annotations

SHEETS = {
    "train": "hone.cost.money.training:TrainingMoney",
    "serve": "hone.cost.money.serving:ServingMoney",
    "roi": "hone.cost.money.roi:Return",
    "checkpoints": "hone.cost.money.checkpoints:Checkpoints",
    "spot": "hone.cost.money.spot_sheet:SpotMoney",
}
"""The calculator of each word after `money`, imported on use."""
_USAGE = """usage: hone cost money train|serve|roi|checkpoints|spot [--field=value ...] [--json]

  train        hardware, people and infrastructure of a training
  serve        the price of a million tokens, at the load that there is
  roi          return and payback of an investment, and which input they hang on
  checkpoints  how often to save, by Young and Daly, and what failures cost
  spot         a job with a deadline on machines that may be taken away

hone cost money WORD --help lists the fields of a word."""


def money(words: list[str], options: dict[str, str]) -> int:
    """Prints the calculation that the next word names."""
    from hone.base.errors import SpecError, did_you_mean
    from hone.base.lazy import resolve
    from hone.cli.cost.verb import _calculate

    if len(words) < 2:
        if unknown := [name for name in options if name != "help"]:
            raise SpecError(
                f"hone cost money has no option --{unknown[0]} without a word", fix=f"words: {', '.join(SHEETS)}"
            )
        print(_USAGE)
        return 0
    word = words[1]
    if word not in SHEETS:
        near = did_you_mean(word, SHEETS, "hone cost money {}")
        raise SpecError(f"hone cost money has no word '{word}'", fix=f"{near}words: {', '.join(SHEETS)}")
    return _calculate(resolve(SHEETS[word]), [f"cost money {word}", *words[2:]], options)
