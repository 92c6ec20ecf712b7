"""Hadamard matrices: their construction, products with them, and linears that multiply their inputs by one.

A Hadamard matrix H [n, n] has entries of 1 and -1 and H H^T = n I, so that H / sqrt(n) is a rotation that spreads each
coordinate over all others. A Kronecker product of two is one again, and a product with it costs the sum of both sizes.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

LARGEST = 128
"""Largest factor that is a power of two; products with a factor are dense."""
LARGEST_PALEY = 512
"""Largest other factor."""


def power_of_two(number: int) -> int:
    """The largest power of two that divides `number` > 0."""
    return number & -number


@cache
def factors(size: int) -> tuple[int, ...]:
    """Orders of Hadamard matrices whose Kronecker product has `size` rows; () when `hadamard` constructs none.

    A power of two is split into equal factors of at most 128, by Sylvester's construction without a change of order.
    """
    two = power_of_two(size)
    odd = size // two
    first, left = 1, two
    if odd > 1:
        orders = (odd * 2**exponent for exponent in range(2, two.bit_length()))
        first = next((order for order in orders if order <= LARGEST_PALEY and _paley_prime(order) is not None), 0)
        if not first:
            return ()
        left = size // first
    exponent, count = left.bit_length() - 1, 1
    while exponent > count * (LARGEST.bit_length() - 1):
        count += 1
    parts = [2 ** (exponent * (place + 1) // count - exponent * place // count) for place in range(count)]
    return tuple(part for part in (first, *parts) if part > 1) or (1,)


@cache
def hadamard(order: int) -> Tensor:
    """A Hadamard matrix [order, order] of 1 and -1, float64: Sylvester's for a power of two, else Paley's I or II.

    Paley 1933, 'On orthogonal matrices': order q + 1 for a prime q = 3 mod 4, order 2 (q + 1) for a prime q = 1 mod 4.
    """
    if power_of_two(order) == order:
        made = torch.ones(1, 1, dtype=torch.float64)
        while len(made) < order:
            made = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), made)
        return made
    prime = _paley_prime(order)
    assert prime is not None, f"no Hadamard matrix of order {order} is constructed"
    conference = _conference(prime)
    one = torch.eye(prime + 1, dtype=torch.float64)
    if prime % 4 == 3:
        return one + conference
    plus, minus = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), torch.tensor([[1.0, -1.0], [-1.0, -1.0]]).double()
    return torch.kron(conference, plus) + torch.kron(one, minus)


def multiply(x: Tensor, size: int) -> Tensor:
    """x [..., n * size] with every `size` columns multiplied by H / sqrt(size), H of `factors(size)`; x's shape and dtype.

    Computed in float32, or float64 for float64 x. For a power of two H is symmetric: a second product restores x.
    """
    wide, after = x.to(torch.promote_types(x.dtype, torch.float32)), size
    matrices = _scaled(size, wide.dtype, wide.device)
    assert matrices and x.shape[-1] % size == 0, f"{x.shape[-1]} columns in blocks of {size}"
    for matrix in matrices:
        order = len(matrix)
        after //= order
        wide = matrix.T @ wide.reshape(-1, order, after) if after > 1 else wide.reshape(-1, order) @ matrix
    return wide.reshape(x.shape).to(x.dtype)


class Multiplied:
    """A forward pre-hook of a linear that multiplies its inputs by blocks of Hadamard matrices; hooks after it see the products."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (multiply(args[0], self.size), *args[1:])


def multiply_inputs(linear: nn.Module, size: int) -> nn.Module:
    """`linear`, which from now on multiplies its inputs by blocks of H / sqrt(size) before all else; unchanged for size 0."""
    if size:
        linear.register_forward_pre_hook(Multiplied(size))
        linear.input_hadamard = size
    return linear


def input_hadamard(linear: nn.Module) -> int:
    """The size that `multiply_inputs` gave a linear; 0 for others."""
    return getattr(linear, "input_hadamard", 0)


@torch.compiler.assume_constant_result  # else torch.compile would trace their construction
def _scaled(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return _made(size, dtype, device)


@cache
def _made(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """The factors of `size`, each divided by the square root of its order."""
    return tuple((hadamard(order) / order**0.5).to(device, dtype) for order in factors(size))


def _paley_prime(order: int) -> int | None:
    """The prime from which Paley's constructions make a matrix of `order`; None when there is none."""
    if order % 4 == 0 and _prime(order - 1):
        return order - 1
    half = order // 2 - 1
    return half if order % 4 == 0 and half % 4 == 1 and _prime(half) else None


def _conference(prime: int) -> Tensor:
    """Paley's matrix C [q + 1, q + 1] of 0, 1 and -1 with C C^T = q I: antisymmetric for q = 3 mod 4, symmetric for 1 mod 4."""
    squares = {number * number % prime for number in range(1, prime)}
    character = torch.tensor([0.0] + [1.0 if number in squares else -1.0 for number in range(1, prime)]).double()
    places = torch.arange(prime)
    made = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    made[0, 0] = 0
    made[1:, 0] = -1 if prime % 4 == 3 else 1
    made[1:, 1:] = character[(places[:, None] - places) % prime]
    return made


def _prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
