"""What guessing ahead saves: tokens of a step from acceptance rates, and the speed-up from those and the costs of the steps."""

from __future__ import annotations

from collections.abc import Sequence

from hone.base.errors import SpecError
from hone.base.figure import Estimate
from hone.cost.memory import BYTES
from hone.cost.roofline import seconds
from hone.cost.serve.schedule import StepKind
from hone.cost.serve.serving import Serving
from hone.measure.machine import Machine


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens that a step which verifies len(acceptance) guesses brings on average, the model's own one included.

    acceptance[k]: the chance that guess k is right where those before it are. With one rate a for all it is
    (1 - a^(K + 1)) / (1 - a): Leviathan et al. 2023, arXiv:2211.17192, equation 1. Raises SpecError for what is no chance.
    """
    total, still = 1.0, 1.0
    for rate in acceptance:
        if not 0 <= rate <= 1:
            raise SpecError(f"an acceptance rate of {rate:g} is no chance", fix="give numbers from 0 to 1")
        still *= rate
        total += still
    return total


def break_even(num_guesses: int, verify_s: float, guess_s: float, plain_s: float) -> float | None:
    """The chance of each of `num_guesses` at which steps of `verify_s` and `guess_s` decode as fast as plain ones of `plain_s`.

    None: guesses that are always right would not make up for it.
    """
    wanted, low, high = (verify_s + guess_s) / plain_s, 0.0, 1.0
    if wanted > num_guesses + 1:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens([middle] * num_guesses) >= wanted else (middle, high)
    return high


def guess_seconds(machine: Machine, num_params: int, passes: int, dtype: str) -> Estimate:
    """Seconds in which `passes` passes of a drafter of `num_params` guess for one sequence: each reads its weights."""
    width = BYTES[dtype]
    work = {"flops": 2.0 * num_params * passes, "num_bytes": float(width * num_params * passes)}
    return seconds(machine, dtype=dtype, op_bytes=float(width * num_params), **work)


def expected_speedup(
    serving: Serving, context: float, num_tokens: int, tokens_per_step: float, guess: Estimate
) -> Estimate:
    """`speedup` of one sequence of `context` tokens, whose steps verify `num_tokens` guesses and bring `tokens_per_step`.

    Both kinds of step are estimated by `serving`; a bound where it has no calibration.
    """
    plain = serving.step_seconds(StepKind(1, context, (), 1, 1))
    verify = serving.step_seconds(StepKind(0, 0.0, ((int(context), num_tokens + 1),), num_tokens + 1, 1), again=True)
    found = speedup(tokens_per_step, plain.value, verify.value, guess.value)
    return found.model_copy(update={"bound": plain.bound or verify.bound or guess.bound})


def speedup(tokens_per_step: float, plain_s: float, verify_s: float, guess_s: float) -> Estimate:
    """How many times faster decoding is: `tokens_per_step` in a step of `verify_s` and guesses of `guess_s`, beside one in `plain_s`.

    The times may be estimated or measured; what a step takes beside them (the host's part) must be in all or in none.
    """
    value = tokens_per_step * plain_s / (verify_s + guess_s)
    formula = f"{tokens_per_step:.3g} tokens x {plain_s:.3g} s / (verify {verify_s:.3g} s + guess {guess_s:.3g} s)"
    return Estimate(value=value, unit="x", formula=formula)
