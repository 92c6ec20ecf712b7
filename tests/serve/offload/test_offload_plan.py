"""What streaming layers from host memory is predicted to take, and the line that says so."""

from __future__ import annotations

import pytest

from hone.cost.serve.offload import PCIE_BYTES_PER_S, link_rate
from hone.cost.serve.schedule import StepKind, Traffic
from hone.measure.machine import describe
from hone.model.facts import CheckpointFacts
from hone.model.shape import Shape
from hone.serve import planning
from hone.serve.engine import EngineSpec
from hone.serve.offload.opening import said_of
from hone.serve.planning import budget_on, estimates, pages_bytes, serving_of
from tests.cost.h200 import h200


class TestEstimates:
    """Llama-3-8B's shape on an H200 with half of its layers' bytes."""

    def machine(self, rate: float | None = 5e10):
        found = h200()
        return found.model_copy(
            update={"calibration": found.calibration.model_copy(update={"pinned_bytes_per_s": rate})}
        )

    def facts(self) -> CheckpointFacts:
        shape = Shape(
            hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate_size=14336, max_seq_len=8192, tie_embeddings=False,
        )  # fmt: skip
        config = shape.config(128256)
        return CheckpointFacts(
            where="x", config=config, dtype="bfloat16", weights_bytes=2 * config.num_params, tokenizer=None
        )

    def opened(self, memory: str, rate: float | None = 5e10, **more):
        sizes = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "block_size": 64}
        spec = EngineSpec.read({"gpu_memory": memory, **sizes, **more})
        machine, facts = self.machine(rate), self.facts()
        found = budget_on(spec, facts, machine, pages_bytes(spec, [facts]))
        return spec, found, serving_of(spec, facts, machine, found.offload)

    @pytest.fixture(autouse=True)
    def with_triton(self, monkeypatch):
        monkeypatch.setattr(planning, "triton_version", lambda: (3, 6))

    def test_a_step_takes_the_longer_of_computing_and_copying(self):
        _, found, serving = self.opened("15GiB")
        assert 10 < len(found.offload.streamed) < 32
        layer = 2 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336 + 2 * 4096)
        assert found.offload.streamed_bytes == layer * len(found.offload.streamed)
        copied = found.offload.streamed_bytes / 5e10
        one = serving.step_seconds(StepKind(1, 500, (), 1, 1))
        assert one.value == pytest.approx(copied) and not one.bound and "copies" in one.formula
        prompt = StepKind(0, 0, ((0, 8192),), 1, 1)
        fast = serving_of(*self.fast(found)).step_seconds(prompt)
        assert fast.value == serving.computed_seconds(prompt).value > found.offload.streamed_bytes / 4.5e11

    def fast(self, found):
        return (
            EngineSpec(max_num_seqs=512, max_num_batched_tokens=8192),
            self.facts(),
            self.machine(4.5e11),
            found.offload,
        )

    def test_the_line_says_what_hides_the_copies(self):
        spec, found, serving = self.opened("15GiB")
        line = said_of(found, serving, spec, 500)
        assert f"{32 - len(found.offload.streamed)} of 32 layers stay on cuda" in line and "at 50.0 GB/s;" in line
        assert "too few sequences to hide the copies" in line
        spec, found, serving = self.opened("60GiB")
        assert said_of(found, serving, spec, 500) == "gpu_memory 60.0 GiB: all 32 layers stay on cuda"
        spec, found, serving = self.opened("15GiB", rate=None)
        assert "63.0 GB/s (data sheet, not calibrated)" in said_of(found, serving, spec, 500)

    def test_links(self):
        assert link_rate(self.machine()) == (5e10, False) and link_rate(self.machine(None)) == (PCIE_BYTES_PER_S, True)
        fused = self.machine(None)
        gpu = fused.gpus[0].model_copy(update={"name": "NVIDIA GH200 480GB"})
        assert link_rate(fused.model_copy(update={"gpus": (gpu,)})) == (450e9, True)
        rows = dict(self.machine().calibration.table())
        assert rows["copy from pinned host memory"] == "50.0 GB/s"
        assert describe().calibration is None or describe().calibration.pinned_bytes_per_s is None

    def test_a_measured_run_is_estimated_with_its_copies(self):
        traffic = Traffic(prompts=(256,) * 8, outputs=(64,) * 8, shared_prefix=0, concurrency=8)
        some, every = (
            estimates(
                EngineSpec.read({"gpu_memory": memory, "max_num_seqs": 8}), traffic, [self.facts()], self.machine()
            )
            for memory in ("14GiB", "60GiB")
        )
        assert some["time_s"].value > 63 * 0.08 + every["time_s"].value * 0.5
        assert some["memory_growth_bytes"].value < 14.5 * 2**30 < every["memory_growth_bytes"].value
