"""What adapters are predicted to take: the bytes of the slots as the engine allocates them, and the time of a step's factors."""

from __future__ import annotations

import pytest

from benchmarks.serve import SHAPES
from hone.cost.serve.schedule import StepKind, Traffic
from hone.model.facts import CheckpointFacts
from hone.serve import planning
from hone.serve.planning import adapter_work, estimates, serving_of
from hone.serve.spec import EngineSpec
from tests.cost.h200 import h200
from tests.serve.small import decoder, engine


def facts(config, dtype: str = "bfloat16") -> CheckpointFacts:
    return CheckpointFacts(config=config, dtype=dtype, where="", tokenizer=None, weights_bytes=2 * config.num_params)


def test_the_slots_take_what_the_engine_allocates() -> None:
    model = decoder()
    spec = EngineSpec.read({"lora": {"max_loras": 3, "max_lora_rank": 20}})
    work = adapter_work(spec, facts(model.config), "float32")
    slots = engine(model, lora={"max_loras": 3, "max_lora_rank": 20}).adapters.slots
    assert work is not None and work.held_bytes == slots.numbers.numel() * 4 and slots.layout.rank == 32
    assert work.linears == 4 * 2 and work.distinct == 0


def test_a_step_of_an_8b_model_reads_each_distinct_adapter_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "triton_version", lambda: (3, 6))
    shape, vocab = SHAPES["llama3-8b"]
    model, machine = facts(shape.config(vocab, None, 0)), h200()
    work = adapter_work(EngineSpec.read({"lora": {"max_loras": 8}}), model, "bfloat16")
    assert work is not None and work.slot_bytes == pytest.approx(84e6, rel=0.01)  # published: 0.5 % of the weights
    took, totals = {}, {}
    for count in (0, 1, 8):
        lora = {"max_loras": 8, "lora_modules": [f"{index}=folder" for index in range(count)]}
        spec = EngineSpec.read({"max_num_seqs": 32, "lora": lora})
        totals[count] = estimates(
            spec, Traffic((128,) * 64, (64,) * 64, shared_prefix=0, concurrency=32), [model], machine
        )
        serving = serving_of(spec.model_copy(update={"block_size": 64}), model, machine)
        work = adapter_work(spec, model, "bfloat16")
        assert work is not None
        took[count] = work.step_seconds(machine, "bfloat16", 32, captured=True).value
        base = serving.step_seconds(StepKind(32, 200, (), 32, 1)).value
    assert took[0] == 0 < took[1] < took[8] < 0.25 * base
    assert took[8] - took[1] == pytest.approx(7 * 84e6 / (0.95 * 4.2e12), rel=0.2)
    rates = [totals[count]["tokens_per_s"].value for count in (0, 1, 8)]
    assert rates[0] > rates[1] > rates[2] > 0.75 * rates[0] and "8 adapters" not in totals[0]["tokens_per_s"].formula
    plain = estimates(
        EngineSpec.read({"max_num_seqs": 32}),
        Traffic((128,) * 64, (64,) * 64, shared_prefix=0, concurrency=32),
        [model],
        machine,
    )
    growth = "memory_growth_bytes"
    assert (
        totals[0][growth].value - plain[growth].value > 0.5 * work.held_bytes
        or totals[0]["kv_cache_bytes"].value < plain["kv_cache_bytes"].value
    )
