"""What holds for every op: a forced backend is one that the op has, and the example of docs/ops.md runs."""

from __future__ import annotations

import doctest
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops import dispatch, linear, rms_norm, sample
from hone.ops.dispatch import BACKENDS, RULES, Where, backend_of

DOCS = Path(__file__).parents[2] / "docs" / "ops.md"


def test_every_op_names_its_backends() -> None:
    assert BACKENDS.keys() == RULES.keys()


@pytest.mark.parametrize("op", RULES)
def test_a_backend_that_an_op_has_not_is_an_error(op: str) -> None:
    with pytest.raises(SpecError, match=f"backend is 'tritno'; that of {op} may be"):
        backend_of(op, torch.device("cpu"), "tritno")


def test_a_misspelt_backend_never_runs_something_else() -> None:
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with pytest.raises(SpecError, match="that of linear may be reference, compiled, cublas, triton"):
        linear(x, weight, backend="torch")
    with pytest.raises(SpecError, match="that of rms_norm"):
        rms_norm(x, weight[0], 1e-5, backend="gluon")
    with pytest.raises(SpecError, match="that of sample"):
        sample(x, 1.0, keys=torch.zeros(2, dtype=torch.int64), backend="cpu")


def test_the_example_of_the_docs_runs() -> None:
    unfenced = DOCS.read_text().replace("```", "")
    example = doctest.DocTestParser().get_doctest(unfenced, {}, "ops.md", str(DOCS), 0)
    tried = doctest.DocTestRunner().run(example)
    assert tried.attempted and not tried.failed


F64 = torch.float64


H200 = Where("cuda", (9, 0), 132, (3, 6))


def test_a_graph_may_choose_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_locate", lambda kind, index: H200)

    def run(x: Tensor) -> Tensor:
        found = dispatch.backend_of("linear_cross_entropy", x.device, dtype=torch.bfloat16)
        plain = dispatch.backend_of("linear_cross_entropy", x.device, dtype=x.dtype)
        return x * (found == "triton") + (plain == "reference")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the tracer warns of what it cannot trace
        warnings.filterwarnings("ignore", "linear_cross_entropy runs its plain torch reference")
        compiled = torch.compile(run, fullgraph=True, backend="eager")
        assert compiled(torch.full((2,), 3.0, dtype=F64)).tolist() == [4.0, 4.0]


MOVED = re.compile(r"\b(gl\.(thread_barrier|barrier)|tma\.async_\w+|gluon\.aggregate|tl_core\._aggregate)\b")
"""Names that are others in another release of Triton."""


def test_names_that_differ_among_releases_of_triton_are_read_in_one_file() -> None:
    folder = Path(dispatch.__file__).parent
    found = {
        path.relative_to(folder).as_posix(): sorted(
            {name[0] for name in MOVED.findall(path.read_text(encoding="utf8"))}
        )
        for path in sorted(folder.rglob("*.py"))
    }
    assert [name for name, moved in found.items() if moved] == ["compat.py"], found
