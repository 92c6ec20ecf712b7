"""What a serving run is predicted to take, against the steps that the ledger measured on an H200."""

from __future__ import annotations

import pytest

from hone.cost.cache import keys_and_values
from hone.ops import dispatch
from hone.serve import forecast
from hone.serve.spec import EngineSpec
from tests.cost.h200 import LLAMA_8B, h200, row

TENSORS = [keys_and_values(8, 128)] * 32


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    monkeypatch.setattr(forecast, "triton_version", lambda: (3, 6))


def setting(machine, dtype="bfloat16", weights=None, **spec):
    in_place = forecast.reads_in_place_on(machine, TENSORS, dtype)
    return forecast._Setting(EngineSpec.read(spec), LLAMA_8B, machine, dtype, in_place, weights)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_engine_steps_take_what_the_ledger_measured(rows):
    measured = row("serve", f"llama3-8b: decode, batch {rows}")
    step_s, bound = forecast._decode_step(setting(h200()), rows, 548)
    assert not bound and step_s == pytest.approx(1e-3 * measured["ms"], rel=0.25)
    assert rows / step_s == pytest.approx(measured["value"], rel=0.25)


def test_who_guesses_or_has_too_many_rows_launches_kernel_by_kernel():
    replayed, _ = forecast._decode_step(setting(h200()), 1, 548)
    launched, _ = forecast._decode_step(setting(h200(), drafter={"kind": "prompt_lookup"}), 1, 548)
    assert launched > 3 * replayed
    few, many = (
        forecast._decode_step(setting(h200(), max_num_seqs=600), rows, 1)[0] for rows in (512, forecast.MOST_SEQS + 1)
    )
    assert many > 1.5 * few


def test_a_short_prompt_takes_its_launches_a_long_one_its_products():
    one = setting(h200())
    short, shorter = (forecast._prefill(one, tokens, tokens) for tokens in (100, 10))
    assert short == shorter == forecast._launched_s(one)
    assert forecast._prefill(one, 8192, 8192) > 4 * short


def test_pages_are_read_in_place_where_the_dispatch_says_so(monkeypatch):
    machine = h200()
    assert forecast.reads_in_place_on(machine, TENSORS, "bfloat16")
    assert not forecast.reads_in_place_on(machine, TENSORS, "float32")
    assert not forecast.reads_in_place_on(machine, [*TENSORS, keys_and_values(8, 512)], "bfloat16")
    assert not forecast.reads_in_place_on(machine.model_copy(update={"device": "cpu"}), TENSORS, "bfloat16")
    monkeypatch.setattr(forecast, "triton_version", lambda: (0, 0))
    assert not forecast.reads_in_place_on(machine, TENSORS, "bfloat16")
    assert dispatch.Where("cuda", (9, 0), 132, (3, 6)).runs_triton


def test_quantized_weights_are_what_is_stored_of_them():
    dense = 2 * LLAMA_8B.num_params
    assert forecast._read_weights(LLAMA_8B, "bfloat16", dense) is None
    embedding = 2 * 128256 * 4096
    assert forecast._read_weights(LLAMA_8B, "bfloat16", 5e9) == 5e9 - embedding
    plain, _ = forecast._decode_step(setting(h200()), 1, 548)
    quantized, _ = forecast._decode_step(setting(h200(), weights=4e9), 1, 548)
    assert quantized < 0.7 * plain
