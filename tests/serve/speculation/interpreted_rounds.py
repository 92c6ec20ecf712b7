"""The kernels of rounds in the interpreter: the same loops are their oracle, on tensors of the CPU."""

from tests.serve.speculation.test_rounds import (
    test_a_round_keeps_the_path_that_was_foretold,
    test_what_is_kept_of_a_path_moves_to_its_slots,
)

__all__ = ["test_a_round_keeps_the_path_that_was_foretold", "test_what_is_kept_of_a_path_moves_to_its_slots"]
