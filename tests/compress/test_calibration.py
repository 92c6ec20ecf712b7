"""Calibration sequences are what the model sees when it is served."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers

from hone.base.errors import SpecError
from hone.compress.calibration import from_text, text_bytes
from hone.model.tokenizer import load_tokenizer
from tests.conftest import byte_tokenizer


@pytest.mark.parametrize("begins", [True, False])
def test_every_sequence_begins_as_a_served_text_does(begins, tmp_path):
    tokenizer = byte_tokenizer()
    if begins:
        template = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
        )
        tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(tmp_path)
    text = " ".join(f"{number} the fox" for number in range(300))
    (tmp_path / "text").write_text(text)
    served = load_tokenizer(tmp_path)
    assert served.start_ids == ((tokenizer.eos_token_id,) if begins else ())
    found = from_text(tmp_path / "text", tmp_path, num_sequences=1000, seq_len=16, seed=0)
    assert found.tokens.shape[1] == 16 and len(found.tokens) > 50
    if begins:
        assert (found.tokens[:, 0] == tokenizer.eos_token_id).all()
        assert found.tokens[0, :9].tolist() == served.encode(text)[:9]
    own = found.tokens[:, int(begins) :]
    assert np.array_equal(own.ravel(), served.encode(text, add_special_tokens=False)[: own.size])


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.jsonl.gz", "table.parquet", "page.html", "notes.txt.zst", "rows.csv"]
)
def test_what_is_no_plain_text_is_not_read_as_one(name, tmp_path):
    """A model calibrated with the braces and quotation marks of JSON is worse than one rounded without text."""
    (tmp_path / name).write_text('{"text": "a story"}\n' * 900)
    for read in (text_bytes, lambda path: from_text(path, tmp_path, num_sequences=1, seq_len=8, seed=0)):
        with pytest.raises(SpecError, match="plain text alone") as caught:
            read(tmp_path / name)
        assert "hone data" in caught.value.fix and "--from.data" in caught.value.fix


@pytest.mark.parametrize("name", ["notes.txt", "README.md", "code.py", "paper.tex", "LICENSE", "server.log"])
def test_plain_text_is_read_whatever_it_is_called(name, tmp_path):
    (tmp_path / name).write_text("a story")
    assert text_bytes(tmp_path / name) == 7
