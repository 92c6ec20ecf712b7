"""Programs that different processes compiled do not lend each other their functions when a third process loads them."""

from __future__ import annotations

import pytest
import torch

from hone.ops.cpu.isa import cpu_isa
from hone.ops.cpu.program import Program
from tests.forking import begin


def widened(cache: str, names: list[str]) -> list[bool]:
    """Whether programs of these dtypes, kept in the folder `cache`, copy a row as it is."""
    import numba

    numba.config.CACHE_DIR = cache
    torch.set_num_threads(1)
    right = []
    for name in names:
        x = torch.arange(32.0).to(getattr(torch, name))[None]
        program = Program(x.dtype, 1)
        out = program.floats(32)
        program.widen(x, out)
        program.run(1)
        right.append(torch.equal(out, x.float()))
    return right


@pytest.mark.skipif(not cpu_isa(), reason="no vector instructions that there are compiled kernels for")
def test_a_program_calls_its_own_functions(tmp_path):
    """Forked processes count numba's functions from the same number, so that all names but the digests are equal."""
    for names in (["float32"], ["bfloat16"], ["float32", "bfloat16"], ["bfloat16", "float32"]):
        ended = begin(widened, (str(tmp_path), names))()
        assert ended.returncode == 0, ended.stderr
        assert ended.result == [True] * len(names), names
