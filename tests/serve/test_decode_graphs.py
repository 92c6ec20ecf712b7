"""Decode steps as CUDA graphs: how rows are padded; on a GPU, the same tokens as without graphs, whatever comes and goes."""

from __future__ import annotations

import pytest
import torch

from hone.serve.engine import Engine, EngineSpec
from hone.serve.paged import reads_in_place
from hone.serve.runner import padded
from tests.serve.small import VOCAB, decoder, drain, engine, greedy, request, tokens_of


def test_padding_wastes_little():
    sizes = [padded(rows) for rows in range(1, 513)]
    assert sizes == sorted(sizes) and sizes[-1] == 512
    assert all(rows <= size for rows, size in enumerate(sizes, 1))
    assert all(size - rows < max(8, rows / 8) for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 45


def test_a_cpu_captures_nothing():
    one = engine(decoder())
    assert not reads_in_place(one.runner.cache, "cpu")
    assert one.runner.graphs is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_graphs_give_the_same_tokens(page_size, drafter):
    model = decoder(head_dim=64, max_seq_len=512).to("cuda", torch.float16)
    spec = EngineSpec.read({"page_size": page_size, "num_pages": 60, "max_rows": 8, "token_budget": 40,
                            "drafter": drafter and {"kind": drafter}})  # fmt: skip
    found = []
    for graphs in (True, False):
        one = Engine(model, spec, device="cuda")
        assert one.runner.graphs is not None
        if not graphs:
            one.runner.graphs = None
        generator = torch.Generator().manual_seed(1)
        for name in range(12):  # more than fit at once, of unlike lengths
            prompt = torch.randint(0, VOCAB, (5 + 7 * name,), generator=generator).tolist()
            one.add(request(str(name), prompt, greedy(8 + 3 * name)))
        outputs = drain(one)
        assert not any(output.error for each in outputs.values() for output in each)
        assert not graphs or drafter or one.runner.graphs._captured
        found.append({name: tokens_of(each) for name, each in outputs.items()})
    assert found[0] == found[1]
