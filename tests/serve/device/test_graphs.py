"""Steps as CUDA graphs: how they are padded; on a GPU, the same tokens as without graphs, whatever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.serve.device.graphs import padded, padded_shared, padded_tokens
from hone.serve.engine import Engine, EngineSpec
from hone.serve.paging.paged import Paged, reads_in_place
from hone.serve.request import SamplingParams
from hone.serve.runner import Runner
from hone.serve.sampler import Sampler
from hone.serve.sampling import RequestSampling, SeqSampling, sampling_of
from hone.serve.step import NULL_PAGE, ForwardBatch
from tests.serve.small import VOCAB, decoder, drain, engine, greedy, request, tokens_of

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_padding_wastes_little():
    sizes = [padded(rows) for rows in range(1, 513)]
    assert sizes == sorted(sizes) and sizes[-1] == 512
    assert all(rows <= size for rows, size in enumerate(sizes, 1))
    assert all(size - rows < max(8, rows / 8) for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 45


def test_few_sizes_where_pages_are_shared():
    sizes = [padded_shared(rows) for rows in range(8, 513)]
    assert sorted(set(sizes)) == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(rows <= size < 1.5 * rows for rows, size in enumerate(sizes, 8))


def test_mixed_steps_are_padded_by_little():
    sizes = [padded_tokens(tokens) for tokens in range(1, 8193)]
    assert sizes == sorted(sizes) and sizes[-1] == 8192
    assert all(tokens <= size < tokens + max(64, tokens / 8) for tokens, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 64


def test_a_cpu_captures_nothing():
    one = engine(decoder())
    assert not reads_in_place(one.runner.cache, "cpu")
    assert one.runner.graphs is None


class TestOnGPU:
    """A float16 model whose engine decodes with graphs and without."""

    pytestmark = on_gpu

    def model(self, **shape):
        return decoder(head_dim=64, max_seq_len=512, **shape).to("cuda", torch.float16)

    def both(self, model, params, **spec) -> list[dict[str, list[int]]]:
        """Tokens of 12 requests (more than fit at once, of unlike lengths), with graphs and without; nobody may fail."""
        fields = {"block_size": 16, "num_pages": 60, "max_num_seqs": 8, "max_num_batched_tokens": 40, **spec}
        found = []
        for graphs in (True, False):
            one = Engine(model, EngineSpec.read(fields), device="cuda")
            assert one.runner.graphs is not None
            if graphs:
                one.runner.cache.wipe([NULL_PAGE], float("nan"))  # padding is filed there: nobody may read it
            else:
                one.runner.graphs = None
            generator = torch.Generator().manual_seed(1)
            for name in range(12):
                prompt = torch.randint(0, VOCAB, (5 + 7 * name,), generator=generator).tolist()
                one.add(request(str(name), prompt, params(name)))
            outputs = drain(one)
            assert not any(output.error for each in outputs.values() for output in each)
            assert not graphs or one.runner.graphs.num_captured or "drafter" in spec
            if graphs and "drafter" not in spec:
                assert {key[1] is None for key in one.runner.graphs._captured} == {True, False}, (
                    "decode and mixed steps"
                )
            found.append({name: tokens_of(each) for name, each in outputs.items()})
            self.stats = one.stats()
        return found

    @pytest.mark.parametrize(
        "options", [{}, {"block_size": 64}, {"enable_prefix_caching": False}, {"drafter": {"kind": "prompt_lookup"}}]
    )
    def test_the_same_tokens(self, options):
        with_graphs, without = self.both(self.model(), lambda name: greedy(8 + 3 * name), **options)
        assert with_graphs == without

    def test_preempted_sequences_start_again(self):
        with_graphs, without = self.both(self.model(), lambda name: greedy(60), num_pages=24)
        assert self.stats["preemptions"] > 0
        assert with_graphs == without

    def test_drawn_tokens(self):
        def seeded(name):
            return SamplingParams(
                max_tokens=20, temperature=1.0, top_k=20, top_p=0.9, seed=name, ignore_eos=True, presence_penalty=0.5
            )

        with_graphs, without = self.both(self.model(), seeded)
        assert with_graphs == without and len(set(map(tuple, with_graphs.values()))) == 12

    @pytest.mark.parametrize("shape", [{"family": "mistral", "window": 20}, {"family": "qwen3"}])
    def test_a_window_or_norms_of_heads(self, shape):
        with_graphs, without = self.both(self.model(**shape), lambda name: greedy(30))
        assert with_graphs == without

    def test_pages_that_all_share_are_read_once(self):
        model, prefix = self.model(), [(7 * place) % VOCAB for place in range(200)]
        fields = {"block_size": 16, "num_pages": 300, "max_num_seqs": 16, "max_num_batched_tokens": 512}
        found = []
        for graphs in (True, False):
            one = Engine(model, EngineSpec.read(fields), device="cuda")
            assert one.runner.graphs is not None
            captured = one.runner.graphs._captured
            if not graphs:
                one.runner.graphs = None
            for name in range(12):
                one.add(request(str(name), [*prefix, name, 5 + name], greedy(20 + name)))
            found.append({name: tokens_of(each) for name, each in drain(one).items()})
            assert not graphs or any(key.shared for key in captured)
        alike = [sum(map(int.__eq__, found[0][name], tokens)) / len(tokens) for name, tokens in found[1].items()]
        assert sorted(alike)[2] == 1, "sums in another order may part two equal tokens once or twice"

    def test_replays_are_alike_bit_by_bit_and_near_a_plain_pass(self):
        """5 rows in a graph of 8: other rows may change, and what the table held before does not matter."""
        model = self.model()
        one = Engine(model, EngineSpec.read({"block_size": 16, "num_pages": 60, "max_num_seqs": 8}), device="cuda")
        cache = one.runner.cache
        with torch.inference_mode():
            for store in cache.stores:
                store.normal_(std=0.5)
            runner = Runner(model, cache, one.runner.sampler, "cuda", max_num_seqs=8)
            pages = [list(range(1 + 8 * row, 9 + 8 * row)) for row in range(5)]
            spare = list(range(41, 49))

            def batch(tokens, starts, pages):
                return ForwardBatch.of(tokens, starts, [1] * len(tokens), np.array(pages, dtype=np.int32), 16)

            tokens, starts = [3, 1, 4, 1, 5], [100, 0, 31, 127, 64]
            first = runner._forward(batch(tokens, starts, pages), {})[0].clone()
            runner._forward(batch([7] * 8, [90] * 8, [spare] * 8), {})
            cache.wipe([NULL_PAGE], float("nan"))
            again = runner._forward(batch(tokens, starts, pages), {})[0].clone()
            company = batch(tokens[:1] + [9] * 6, starts[:1] + [9] * 6, pages[:1] + [spare] * 6)
            other = runner._forward(company, {})[0][0].clone()
            assert runner.graphs.num_captured == 1
            assert torch.equal(first, again)
            context = Paged(cache, batch(tokens, starts, pages), "cuda")
            plain = model.hidden(context.tokens, context)
            torch.testing.assert_close(again, plain, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(other, plain[0], atol=2e-2, rtol=2e-2)

    def test_steps_ahead_give_the_tokens_of_steps_in_turn(self):
        def params(name):
            return SamplingParams(max_tokens=40, temperature=0.9, seed=name, stop_token_ids=tuple(range(0, 60, 7)))

        ahead, _ = self.both(self.model(), params, async_scheduling=True)
        in_turn, _ = self.both(self.model(), params, async_scheduling=False)
        assert ahead == in_turn and len({len(tokens) for tokens in ahead.values()}) > 3

    def test_sampled_tokens_do_not_depend_on_the_batch(self):
        sampler = Sampler(1000, "cuda")
        logits = torch.randn(9, 1000, device="cuda", dtype=torch.float16)
        params = [SamplingParams(temperature=0.3 * n, top_k=50 * (n % 2), top_p=0.9, seed=n) for n in range(9)]
        entries = [SeqSampling(RequestSampling(one), list(range(5 + n)), 5) for n, one in enumerate(params)]
        together = [chosen.token for chosen in sampler.choose(logits, sampling_of(entries))]
        alone = [sampler.choose(logits[n : n + 1], sampling_of(entries[n : n + 1]))[0].token for n in range(9)]
        order = [4, 8, 1, 0]
        some = [chosen.token for chosen in sampler.choose(logits[order], sampling_of([entries[n] for n in order]))]
        assert together == alone and some == [together[n] for n in order]
