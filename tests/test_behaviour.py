"""Every technique of every slot has a test of what it does, in the default tier: a new row of a table fails here until it has one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hone.base.table import all_tables

FOLDER = Path(__file__).resolve().parent
MIXER_TESTS = (
    "bigbird", "compressive", "incremental", "linear_family", "linformer", "longformer", "longnet", "mla", "reformer",
    "shared_kv", "sliding_window", "transformer_xl",
)  # fmt: skip
TESTS: dict[str, tuple[str, ...]] = {
    "clock": ("measure/clocks/policies/test_policies.py",),
    "linear": (
        "model/test_linear.py",
        "model/quantized/test_quantized.py",
        "model/quantized/test_dequantizing.py",
        "model/quantized/test_nf4.py",
        "model/test_activations.py",
        "model/quantized/test_low_rank.py",
        "model/sparse/test_semi_structured.py",
    ),
    "mixer": tuple(f"model/mixers/test_{name}.py" for name in MIXER_TESTS),
    "feed-forward": ("model/feed_forwards/test_feed_forwards.py", "model/test_moe.py"),
    "router": ("model/test_routers.py",),
    "balance": ("model/test_balance.py",),
    "growth": ("model/growth/test_growth.py", "model/growth/test_upcycle.py"),
    "simulated device": ("model/devices/test_devices.py",),
    "adapter": (
        "model/adapters/test_adapters.py",
        "model/adapters/test_techniques.py",
        "model/adapters/test_prompts.py",
        "model/adapters/test_bottlenecks.py",
        "model/adapters/test_own_weights.py",
    ),
    "extractor": ("readers/test_extractors.py",),
    "identifier": ("data/test_identifiers.py",),
    "filter": ("data/test_filters.py", "data/test_predicates.py"),
    "scorer": ("data/quality/test_scorers.py", "data/quality/test_neural.py", "data/test_groups.py"),
    "dedup": tuple(f"data/dedup/test_{name}.py" for name in ("exact", "minhash", "simhash", "semantic")),
    "annotation": ("data/llm/test_annotation.py",),
    "edit": tuple(f"data/edits/test_{name}.py" for name in ("lines", "substrings", "page_lines", "mask")),
    "decontamination": ("data/contamination/test_ngrams.py", "data/contamination/test_items.py"),
    "mixture": tuple(f"feed/mix/test_{name}.py" for name in ("weights", "utilimax", "regmix", "medu")),
    "curriculum": ("feed/order/test_curricula.py",),
    "executor": tuple(f"data/executors/test_{name}.py" for name in ("same_bytes", "deaths", "slurm")),
    "schedule": ("train/schedules/test_schedule.py",),
    "objective": (
        "train/objectives/test_objectives.py",
        "train/objectives/test_layers.py",
        "train/objectives/test_r_drop.py",
        "train/objectives/test_heads.py",
        "train/objectives/preference/test_preference.py",
        "train/objectives/preference/test_reward.py",
        "train/objectives/draft_heads/test_medusa.py",
        "train/objectives/draft_heads/test_eagle3.py",
        "train/objectives/preference/test_kto.py",
        "train/rollouts/test_grpo.py",
        "train/rollouts/test_best_of_n.py",
    ),
    "reward": ("train/rollouts/test_rewards.py", "train/rollouts/test_best_of_n.py"),
    "divergence": ("train/objectives/test_divergences.py",),
    "teacher": (
        "train/teachers/test_teachers.py",
        "train/teachers/test_theseus.py",
        "train/teachers/test_temporal_ensemble.py",
        "train/cached_logits/test_cached_logits.py",
    ),
    "text": ("train/texts/test_texts.py",),
    "fake quantizer": (
        "train/quantization_aware/test_quantization_aware.py",
        "train/quantization_aware/test_lsq.py",
        "train/quantization_aware/test_adapters.py",
    ),
    "optimizer": (
        "train/optimizers/test_optimizers.py",
        "train/optimizers/test_optimizers_more.py",
        "train/optimizers/test_soap.py",
        "train/data_parallel/test_data_parallel.py",
    ),
    "activation_checkpointing": ("train/activation_checkpointing/test_activation_checkpointing.py",),
    "fp8 precision": ("train/fp8/test_fp8.py",),
    "offload": (
        "train/offload/test_offload.py",
        "train/offload/test_offload_places.py",
        "train/offload/test_offload_delayed.py",
    ),
    "data parallelism": (
        "train/data_parallel/test_data_parallel.py",
        "train/data_parallel/test_lossy.py",
        "train/data_parallel/test_volumes.py",
        "train/data_parallel/test_async_ranks.py",
        "train/data_parallel/test_ad_psgd.py",
    ),
    "context parallelism": ("train/context_parallel/test_context_parallel.py", "parallel/test_context.py"),
    "pipeline schedule": ("train/pipeline/test_pipeline.py", "parallel/test_pipeline_schedules.py"),
    "transform": ("compress/transforms/test_transforms.py", "compress/transforms/test_rotation.py"),
    "bit allocation": ("compress/allocations/test_allocation.py",),
    "observer": ("compress/observers/test_observers.py",),
    "quantizer": (
        "compress/test_stage.py",
        *(
            f"compress/quantizers/test_{name}.py"
            for name in ("gptq", "hqq", "gptaq", "sorted_groups", "autoround", "block_int8", "fp8", "nf4", "formats")
        ),
    ),
    "pruner": ("compress/test_stage.py", "compress/pruners/test_pruning.py", "compress/pruners/test_sparsegpt.py"),
    "low rank": ("compress/low_rank/test_low_rank.py",),
    "KV cache quantizer": ("compress/caches/test_kv_cache.py",),
    "structured pruner": tuple(f"compress/structured/test_{name}.py" for name in ("cuts", "experts", "expert_merging")),
    "conversion": tuple(
        f"compress/conversions/test_{name}.py" for name in ("gqa", "transmla", "linearize", "extend_context")
    ),
    "export format": ("exports/gguf/test_export.py",),
    "drafter": ("serve/speculation/test_speculation.py", "serve/speculation/test_heads.py"),
    "eviction": ("serve/eviction/test_eviction.py",),
    "autoscaler": ("serve/replicas/autoscale/test_policies.py",),
    "KV policy": ("serve/kv_policies/test_kv_policies.py",),
}
"""Slot to the files that test what its techniques do. Tests that go through a whole table without naming a row do not count."""


def is_slow(node: ast.AST) -> bool:
    """Whether `pytest.mark.slow` stands in `node`."""
    return any(isinstance(part, ast.Attribute) and part.attr == "slow" for part in ast.walk(node))


def words(node: ast.AST) -> set[str]:
    """Identifiers and strings in `node`, less docstrings and parameters of the slow tier."""
    found, left = set(), [node]
    while left:
        part = left.pop()
        if isinstance(part, ast.Call) and any(word.arg == "marks" and is_slow(word.value) for word in part.keywords):
            continue
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
            continue
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.arg):
            found.add(part.arg)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value)
        left.extend(ast.iter_child_nodes(part))
    return found


def named_by_tests(source: str) -> set[str]:
    """What the default tier's tests of a file name: themselves, in their parameters, and in the file's functions, classes
    and constants that they use."""
    tree = ast.parse(source)
    defined: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = set() if any(map(is_slow, node.decorator_list)) else words(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}:
                if name == "pytestmark" and is_slow(node):
                    return set()
                defined[name] = words(node)
    found, left = set(), [name for name in defined if name.lower().startswith("test")]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left.extend(defined.get(name, ()))
    return found


@pytest.mark.parametrize("slot", [*all_tables()])
def test_every_technique_is_tested(slot: str) -> None:
    named = set().union(*(named_by_tests((FOLDER / name).read_text(encoding="utf8")) for name in TESTS[slot]))
    table = all_tables()[slot]
    missing = [name for name in table if not {name, table[name].__name__} & named]
    assert not missing, (
        f"no test in {TESTS[slot]} names {missing}: test what they do, and list the file above if it is new"
    )


def test_the_check_can_fail() -> None:
    source = '''
"""About gptq."""
import pytest
from x import AWQ, GPTQ, RTN
CASES = [("rtn", 4), pytest.param("awq", 3, marks=pytest.mark.slow)]
UNUSED = ["hqq"]

@pytest.fixture
def made(kind):
    return GPTQ(kind)

@pytest.mark.parametrize("case", CASES)
def test_rounding(case, made):
    """Not of spqr."""

@pytest.mark.slow
def test_slow():
    assert Slow("quip")
'''
    found = named_by_tests(source)
    assert {"rtn", "GPTQ"} <= found
    assert not {"awq", "hqq", "spqr", "gptq", "quip", "Slow", "AWQ", "RTN"} & found
    assert named_by_tests("import pytest\npytestmark = pytest.mark.slow\ndef test_a():\n    GPTQ\n") == set()
