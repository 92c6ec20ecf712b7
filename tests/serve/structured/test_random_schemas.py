"""Random JSON schemas, a random model, hot sampling, sixteen at once: every output is valid JSON of its schema.

Three hundred of them; with all thousand (`random_schemas(1000)`) it ran once for benchmarks/ledger/serve.jsonl.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hone.serve.engine import Engine
from hone.serve.request import Request, SamplingParams
from hone.serve.spec import EngineSpec
from hone.serve.structured.spec import StructuredOutputs
from tests.serve.small import assert_all_free, drain, poison_freed_pages

pytest.importorskip("llguidance")

NAMES = ("a", "b c", "é", '"', "key", "ünï", "x-y", "$ref", "0")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname")
PATTERNS = ("^[a-z]{1,4}$", "^(ab|cd)+x?$", "^\\d{2}-\\d{2}$", "[0-9]a?", "^$", "^[^\\n]{0,3}$")
MAX_TOKENS = 480


def leaf(rng: random.Random) -> Any:
    kind = rng.randrange(11)
    low, high = sorted(rng.randint(-2000, 2000) for _ in range(2))
    return (
        {"type": "integer", "minimum": low, "maximum": high},
        {"type": "integer", "exclusiveMinimum": low - 2, "exclusiveMaximum": high + 2},
        {"type": "number", "minimum": low, "maximum": high, "multipleOf": 0.5},
        {"type": "string", "maxLength": rng.randrange(6)},
        {"type": "string", "minLength": 2, "maxLength": 2 + rng.randrange(4)},
        {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12},
        {"type": "string", "format": rng.choice(FORMATS[:5])},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": rng.sample(["x", 'q"', "ü", 1, None, 2.5, True, [1], {"k": "\\"}], rng.randrange(1, 5))},
        {"const": rng.choice(["x\ny", 0, [], {"z": None}, "\u2028", False])},
    )[kind]


def schema_of(rng: random.Random, depth: int = 3) -> Any:
    """A schema whose values are few tokens long."""
    if depth == 0 or rng.random() < 0.3:
        return leaf(rng)
    kind = rng.randrange(5)
    if kind == 0:
        least = rng.randrange(3)
        return {
            "type": "array",
            "items": schema_of(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randrange(3),
        }
    if kind == 1:
        items = [schema_of(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == 2:
        return {"anyOf": [schema_of(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    names = rng.sample(NAMES, rng.randrange(1, 5))
    fields = {name: schema_of(rng, depth - 1) for name in names}
    if kind == 3:  # one part by reference
        return {"type": "object", "properties": fields | {"r": {"$ref": "#/$defs/part"}}, "required": [*names[:1], "r"],
                "additionalProperties": False}  # fmt: skip
    required = rng.sample(names, rng.randrange(len(names) + 1))
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def random_schemas(count: int) -> list[Any]:
    """Different schemas; those with a reference have its target."""
    rng, found = random.Random(12), {}
    while len(found) < count:
        schema = schema_of(rng)
        text = json.dumps(schema)
        if '"#/$defs/part"' in text:
            text = json.dumps({**schema, "$defs": {"part": leaf(rng)}})
        found[text] = None
    return [json.loads(text) for text in found]


def check(folder: Path, schemas: list[Any]) -> Counter[str]:
    """Generates for every schema; counts the outputs by how they ended. Those that ended by themselves are valid."""
    sizes = {"block_size": 8, "num_pages": 400, "max_num_seqs": 16, "max_num_batched_tokens": 256, "num_threads": 1}
    engine = Engine(folder, EngineSpec.read(sizes))
    poison_freed_pages(engine)
    for place, schema in enumerate(schemas):
        blanks = {"disable_any_whitespace": True} if place % 2 else {"whitespace_pattern": "[ \\n]?"}
        form = StructuredOutputs.read({"json_schema": schema, **blanks})
        params = SamplingParams(
            max_tokens=MAX_TOKENS, seed=place, temperature=(0.0, 0.8, 3.0)[place % 3], structured_outputs=form
        )
        engine.add(Request(str(place), [1 + place % 250], params))
    ends: Counter[str] = Counter()
    for name, outputs in drain(engine).items():
        end, text = outputs[-1].finish, "".join(output.text for output in outputs)
        assert end != "error", (schemas[int(name)], outputs[-1].error)
        ends[str(end)] += 1
        if end == "stop":
            jsonschema.validate(json.loads(text), schemas[int(name)])
    assert_all_free(engine)
    return ends


def test_fifty_schemas(tiny_llama: Path):
    ends = check(tiny_llama, random_schemas(50))
    assert ends["stop"] == 50


@pytest.mark.slow
def test_three_hundred_schemas(tiny_llama: Path, capsys):
    ends = check(tiny_llama, random_schemas(300))
    with capsys.disabled():
        print(f"\n300 schemas: {ends['stop']} outputs ended and are valid, {dict(ends)}")
    assert ends["stop"] == 300
