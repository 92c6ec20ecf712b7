"""A new source of conversations to calibrate with is one file and one line: a log of what was said, by the model's own template."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.calibration import from_text
from hone.compress.stage import Compress
from hone.feed import ROWS
from hone.model.tokenizer import load_tokenizer

TALK = "visitor: Where is the fox?\nhelper: In its den.\n\n"
MESSAGES = [{"role": "user", "content": "Where is the fox?"}, {"role": "assistant", "content": "In its den."}]


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line."""
    monkeypatch.setitem(ROWS, ".chats", "tests.compress.extensions.chat_log:rows")


@pytest.mark.parametrize("name", ["a.chats", "a.chats.gz"])
def test_its_conversations_are_written_by_the_models_template(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    content = (TALK * 40 + "the weather: fine\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    served = load_tokenizer(tiny_llama)
    wanted = served.encode(served.chat(MESSAGES, add_generation_prompt=False), add_special_tokens=False)
    found = from_text(tmp_path / name, tiny_llama, num_sequences=8, seq_len=len(wanted), seed=0)
    assert found.tokens.tolist() == [wanted] * 8
    assert any("1 rows" in note and "a line of the weather" in note for note in found.notes)


def test_a_compression_is_calibrated_with_it(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.chats").write_text(TALK * 100)
    values = {"steps": [{"kind": "gptq", "group_size": 16}], "num_sequences": 8, "seq_len": 32}
    spec = Compress.read({**values, "calibration_text": str(tmp_path / "a.chats")})
    made = spec.make(tmp_path / "compress-out", {"model": Artifact.read(tiny_llama)}, Run(quiet=True))
    assert made.figures["relative_output_error"].value > 0
