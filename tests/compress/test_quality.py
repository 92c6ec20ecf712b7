"""On a real model: GPTQ beats round to nearest, and bits cost what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compress.conftest import perplexity

# The model's feed-forward is 172 wide, which no power of two above 4 divides.
SHARED = {"bits": 4, "group_size": 32, "uneven": "nearest"}


def test_gptq_beats_round_to_nearest_on_a_real_model(stories: tuple, compress) -> None:
    model, calibration, rows = stories
    options = {"num_sequences": 40, "seq_len": 128, "calibration_text": str(calibration)}
    found = {"dense": perplexity(model, rows)}
    for name, step in {
        "rtn": {"kind": "rtn", **SHARED},
        "rtn on gptq's grid": {"kind": "rtn", "scale": "search", **SHARED},
        "gptq": {"kind": "gptq", **SHARED},
        "gptq on rtn's grid": {"kind": "gptq", "scale": "absmax", **SHARED},
        "int8": {"kind": "rtn", "bits": 8, "group_size": 0},
    }.items():
        made = compress(model, step, name=name.replace(" ", "-"), **options)
        found[name] = perplexity(made.folder, rows)
    assert found["gptq"] < 0.95 * found["rtn"], found
    assert found["gptq"] < found["rtn on gptq's grid"] and found["gptq on rtn's grid"] < found["rtn"], found
    assert found["gptq"] < 1.08 * found["dense"], found
    assert abs(found["int8"] - found["dense"]) < 0.01 * found["dense"], found


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3])
def test_the_gap_grows_with_fewer_bits(bits: int, stories: tuple, compress) -> None:
    model, calibration, rows = stories
    options = {"num_sequences": 40, "seq_len": 128, "calibration_text": str(calibration)}
    found = {}
    for kind in ("rtn", "gptq"):
        step = {"kind": kind, "scale": "search", **SHARED, "bits": bits}
        found[kind] = perplexity(compress(model, step, name=kind, **options).folder, rows)
    assert found["gptq"] < 0.9 * found["rtn"], found


def test_the_export_of_a_real_model_loads_in_transformers(stories: tuple, compress) -> None:
    pytest.importorskip("compressed_tensors")
    import torch
    import transformers

    from hone.model.hf import load

    model, calibration, rows = stories
    made = compress(model, {"kind": "gptq", **SHARED}, calibration_text=str(calibration))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    tokens = rows[:2]
    with torch.no_grad():
        narrow = load(made.folder)(tokens), theirs(tokens).logits
        theirs(tokens)  # unpacks the weights, so that the next line widens them
        wide = load(made.folder, dtype=torch.float64)(tokens), theirs.double()(tokens).logits
    assert (wide[0] - wide[1]).abs().max() <= 1e-5
    # In float32 both lie 2e-5 from the float64 result, the uncompressed model as well: its logits reach 23.
    assert (narrow[0] - narrow[1]).abs().max() <= 1e-5 * narrow[0].abs().max()
    assert (Path(made.folder) / "tokenizer.json").exists()
