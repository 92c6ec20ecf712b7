"""The code in docs/model.md runs, top to bottom."""

from __future__ import annotations

import re

from tests.conftest import ROOT


def test_every_block_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "model.md").read_text(encoding="utf8"), re.DOTALL)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), "docs/model.md", "exec"), {})
