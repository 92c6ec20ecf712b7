"""Rounds that verify and guess with places computed on the device: the tokens of the model alone, whatever is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.serve.engine import Engine, EngineSpec
from hone.serve.paging.paged import BlockTable
from hone.serve.request import SamplingParams
from hone.serve.sequence import Seq
from hone.serve.speculation.drafter import Drafter
from hone.serve.speculation.prompt_lookup import LookupProposer
from hone.serve.speculation.round_state import RoundState
from hone.serve.speculation.rounds import Rounds
from hone.serve.speculation.tree import Tree
from tests.ops.interpreter import run_interpreted
from tests.serve.small import (
    assert_all_free,
    decoder,
    dense_greedy,
    drain,
    engine,
    greedy,
    poison_freed_pages,
    request,
    tokens_of,
)
from tests.serve.speculation.heads import KINDS, OPTIONS, PROMPTS, taught


def with_rounds(one: Engine, num_rounds: int) -> Engine:
    """On a CPU an engine has no rounds, which are there for graphs: this one runs them, launch by launch."""
    runner, drafter = one.runner, one.spec.drafter
    assert isinstance(drafter, Drafter) and runner._table is None
    longest = one.max_model_len
    table = runner._table = BlockTable(8, -(-longest // runner.cache.block_size), torch.device("cpu"))
    given = drafter if runner.hidden_guesser is None else drafter.model_copy(update={"num_rounds": num_rounds})
    runner.rounds = Rounds(runner.model, runner.cache, table.tensor, longest, given, runner.hidden_guesser)
    runner.cache.wipe(range(runner.cache.num_pages + 1))  # the reference of paged attention reads whole pages
    for cache in runner.draft_caches:
        cache.wipe(range(cache.num_pages + 1))
    one.scheduler.rounds, one.scheduler.longest = runner.rounds.ahead, longest
    one.scheduler.lookahead = len(runner.rounds.tree) - 1
    return one


def served(kind: str, folder: Path | None, num_rounds: int, tree_size: int | None = 15, **spec: object) -> Engine:
    drafter = {"kind": kind, **({"tree_size": tree_size} if folder is not None else {})}
    return with_rounds(engine(decoder(), folder, drafter=drafter, **spec), num_rounds)


@pytest.mark.parametrize(("num_rounds", "tree_size"), [(1, 15), (5, 7), (5, None)])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_identical(kind: str, num_rounds: int, tree_size: int | None, heads: dict[str, Path]) -> None:
    one = served(kind, heads[kind], num_rounds, tree_size)
    assert one.runner.rounds is not None and len(one.runner.rounds.tree) - 1 == (tree_size or 3)
    poison_freed_pages(one)
    for prompt, completion in zip(PROMPTS, one.generate(PROMPTS, greedy(24))):
        assert completion.tokens == dense_greedy(decoder(), prompt, 24)
    counts = one.stats()
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]
    assert counts["verified_sequences"] > 0
    assert_all_free(one)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_follow_one_another_in_a_step(kind: str, heads: dict[str, Path]) -> None:
    one = served(kind, heads[kind], 6)
    tokens = one.generate([PROMPTS[1]], greedy(25))[0].tokens
    counts = one.stats()
    assert tokens == dense_greedy(decoder(), PROMPTS[1], 25)
    assert counts["steps"] < 9, "a prompt, then up to six rounds a step"
    assert 1 + counts["accepted_tokens"] / counts["verified_sequences"] > 1.3


def test_as_many_rounds_follow_as_were_asked_for(heads: dict[str, Path]) -> None:
    """A text of one token a round: 60 tokens are a prompt's step, and rounds of 20."""
    one = served("medusa", heads["medusa"], 20, max_model_len=128)
    assert one.runner.rounds is not None
    counts, real = [], one.runner.rounds.launch
    one.runner.rounds.launch = lambda step, batch, count: counts.append(count) or real(step, batch, count)
    one.generate([PROMPTS[1]], greedy(60))
    assert counts[0] == 20


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_is_what_it_is_without_guesses(kind: str, heads: dict[str, Path]) -> None:
    """Guesses and tokens are draws of the same noise: a seeded request gives the same text, in rounds, without, and with no drafter."""
    params = [
        SamplingParams(max_tokens=20, temperature=0.8, seed=seed, top_k=top_k, ignore_eos=True)
        for seed, top_k in ((1, 0), (2, 0), (3, 5), (4, 0))
    ]
    plain = [one.tokens for one in engine(decoder()).generate(PROMPTS, params)]
    for one in (served(kind, heads[kind], 4), engine(decoder(), heads[kind])):
        assert [each.tokens for each in one.generate(PROMPTS, params)] == plain
        assert one.stats()["accepted_tokens"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_amid_rounds_ends_the_text(kind: str, heads: dict[str, Path]) -> None:
    whole = dense_greedy(decoder(), PROMPTS[1], 20)
    stop = whole[7]
    one = served(kind, heads[kind], 8)
    found = one.generate([PROMPTS[1]], greedy(20, stop_token_ids=[stop]))[0]
    assert found.tokens == whole[: whole.index(stop) + 1] and found.finish == "stop"
    assert_all_free(one)


def test_requests_that_come_and_go_and_do_not_guess(heads: dict[str, Path]) -> None:
    one = served("eagle3", heads["eagle3"], 4, num_pages=40)
    poison_freed_pages(one)
    for name, prompt in enumerate(PROMPTS * 3):
        one.add(request(str(name), prompt, greedy(4 + 3 * name)))
    one.add(request("penalized", PROMPTS[3], greedy(12, repetition_penalty=1.2, logprobs=1)))
    found = drain(one)
    for name, prompt in enumerate(PROMPTS * 3):
        assert tokens_of(found[str(name)]) == dense_greedy(decoder(), prompt, 4 + 3 * name)
    plain = engine(decoder()).generate([PROMPTS[3]], greedy(12, repetition_penalty=1.2))[0]
    assert tokens_of(found["penalized"]) == plain.tokens
    assert_all_free(one)


def test_rounds_verify_what_the_host_guesses() -> None:
    prompt = [1, 2, 3, 4, 5] * 4
    one = served("prompt_lookup", None, 1)
    assert one.generate([prompt], greedy(40))[0].tokens == dense_greedy(decoder(), prompt, 40)
    assert one.stats()["verified_sequences"] > 0 and one.runner.rounds is not None and one.runner.rounds._made


@pytest.mark.parametrize("num_prompt", range(30, 35))
def test_guesses_that_all_come_true_never_look_behind_the_table(
    num_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host's drafter that knows the text: a round that keeps four guesses near the longest text would look up pages behind its last."""
    text = [1, *dense_greedy(decoder(), [1], 63)]

    def told(proposer: LookupProposer, seq: Seq, most: int) -> list[int]:
        return text[len(seq.tokens) : len(seq.tokens) + most]

    monkeypatch.setattr(LookupProposer, "_look", told)
    one = with_rounds(engine(decoder(), None, drafter={"kind": "prompt_lookup"}, max_model_len=64), 1)
    assert one.runner.rounds is not None
    counts, real = [], one.runner.rounds.launch
    one.runner.rounds.launch = lambda step, batch, count: counts.append(count) or real(step, batch, count)
    found = one.generate([text[:num_prompt]], greedy(100))[0]
    assert found.error is None and found.tokens == text[num_prompt:]
    assert len(counts) >= 4 and one.stats()["accepted_tokens"] >= 4 * len(counts)


def test_text_up_to_the_longest_is_whole(heads: dict[str, Path]) -> None:
    one = served("medusa", heads["medusa"], 8, max_model_len=32)
    found = one.generate([PROMPTS[1]], greedy(100))[0]
    assert found.tokens == dense_greedy(decoder(), PROMPTS[1], 32 - len(PROMPTS[1]))


TREES = {
    **{f"chain of {k}": Tree.chain(k) for k in (1, 3, 4)},
    "branches": Tree.grown([[0.5, 0.3, 0.1]] * 3, 12, branches=True),
    "leaves": Tree.grown([[0.5, 0.3]] * 4, 8, branches=False),
}


def drawn_state(seqs: int, tree: Tree, seed: int) -> tuple[RoundState, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A state of sequences of which the last pads, tokens of which many were foretold, largest logits, guesses that follow."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    tokens, chosen = drawn(3, seqs, len(tree)), drawn(3, seqs, len(tree))
    numbers = torch.stack((drawn(40, seqs), drawn(len(tree), seqs), torch.ones(seqs, dtype=torch.int64)))
    numbers[:, -1] = 0
    peaks = torch.rand(seqs * len(tree), generator=generator)
    peaks[drawn(len(peaks), 2)] = torch.tensor([torch.nan, torch.inf])
    state = RoundState.of(tokens, numbers, drawn(99, seqs, 16).int(), 4, tree)
    return state, chosen.flatten(), peaks, drawn(50, tree.depth, seqs, tree.width)


def moved(state: RoundState, chosen: torch.Tensor, peaks: torch.Tensor, guesses: torch.Tensor) -> RoundState:
    state.place()
    state.settle(chosen, peaks)
    state.leave(guesses)
    return state


@pytest.mark.parametrize("name", TREES)
def test_a_round_keeps_the_path_that_was_foretold(name: str) -> None:
    """Against loops over sequences and tokens."""
    tree = TREES[name]
    before, chosen, peaks, guesses = drawn_state(9, tree, 5)
    tokens, starts, limits = before.tokens.tolist(), before.starts.tolist(), before.limits.tolist()
    state, table = moved(before, chosen, peaks, guesses), before.table.tolist()
    k, depths, most = tree.depth, tree.depths, 0
    for seq in range(9):
        own = chosen.view(9, -1)[seq].tolist()
        finite = [abs(one) < float("inf") for one in peaks.view(9, -1)[seq].tolist()]
        told = [token if sure else -1 for token, sure in zip(own, finite)]
        path = [0]
        while fitting := [
            node
            for node in range(1, limits[seq] + 1)
            if tree.parents[node] == path[-1] and tokens[seq][node] == own[path[-1]]
        ]:
            path.append(fitting[0])
        kept, most = len(path) - 1, max(most, len(path) - 1)
        follow = [int(guesses[depths[node] - 1, seq, tree.ranks[node]]) for node in range(1, len(tree))]
        behind = [told[node] for node in path]
        assert state.packed[seq].tolist() == [kept, *behind, *behind[-1:] * (k - kept), *follow]
        assert state.tokens[seq].tolist() == [own[path[-1]], *follow]
        assert state.path[seq].tolist() == [seq * len(tree) + node for node in path + list(range(kept + 1, k + 1))]
        assert state.rows[:, seq].tolist() == [seq * len(tree) + path[-1], seq * (k + 1) + kept]
        assert state.limits[seq] == len(tree) - 1
        last = seq == 8
        start = starts[seq] + (0 if last else kept + 1)
        assert state.starts[seq] == start
        for node in range(len(tree)):
            place, slot = starts[seq] + depths[node], starts[seq] + node
            page = 0 if last else table[seq][slot // 4]
            assert state.placed[:, seq, node].tolist() == [place, place + 1, page, slot % 4]
        for ahead in range(k):
            page = 0 if last else table[seq][(start + ahead) // 4]
            assert state.draft[:, ahead, seq].tolist() == [start + ahead, page, (start + ahead) % 4]
            assert state.after[ahead, seq] == start + ahead + 1
            assert state.draft_ends[ahead, seq] == (0 if last else start + ahead + 1)
        assert state.ends[:, seq].tolist() == [0, 0] if last else [starts[seq] + len(tree), starts[seq] + k + 1]
    assert most > 0


@pytest.mark.parametrize("name", ["branches", "leaves"])
def test_what_is_kept_of_a_path_moves_to_its_slots(name: str) -> None:
    tree = TREES[name]
    state, chosen, peaks, _ = drawn_state(9, tree, 5)
    state.table.copy_(torch.arange(1, 1 + 9 * 16).view(9, 16))  # no page of two sequences
    state.place()
    state.settle(chosen, peaks)
    store = torch.randn(3, 1 + 9 * 16, 2, 4, 5)
    before = store.clone()
    state.keep([store])
    for seq in range(8):
        pages, offsets = state.placed[2, seq].tolist(), state.placed[3, seq].tolist()
        for place, row in enumerate(state.path[seq].tolist()):
            node, found = row - seq * len(tree), store[:, pages[place], :, offsets[place]]
            assert torch.equal(found, before[:, pages[node], :, offsets[node]])
    assert not torch.equal(store, before)


@pytest.mark.slow(seconds=20)
def test_the_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(Path(__file__).with_name("interpreted_rounds.py"))


def test_a_grown_tree_is_a_chain_and_what_is_worth_most_beside_it() -> None:
    """With chances 0.5, 0.3, 0.1 of a place: the second choice of the first (0.3), its first child (0.15), the chain's second place's (0.15)."""
    tree = Tree.grown([[0.5, 0.3, 0.1]] * 3, 12, branches=True)
    worth = [1.0]
    for node in range(1, len(tree)):
        worth.append(worth[tree.parents[node]] * [0.5, 0.3, 0.1][tree.ranks[node]])
        assert tree.parents[node] < node
    assert tree.parents[:4] == (-1, 0, 1, 2) and tree.ranks[:4] == (0,) * 4 and tree.depth == 3
    assert worth[4:] == sorted(worth[4:], reverse=True) and worth[4] == 0.3
    leaves = Tree.grown([[0.5, 0.3]] * 4, 8, branches=False)
    assert set(leaves.parents[5:]) <= set(range(5)) and set(leaves.ranks[5:]) == {1}
    assert tree.first(6) == Tree(tree.parents[:6], tree.ranks[:6]) and tree.first(1) == Tree.chain(3)
    for node, bits in enumerate(tree.seen()):
        on_path = {node}
        while node > 0:
            node = tree.parents[node]
            on_path.add(node)
        assert bits == sum(1 << one for one in on_path)


@pytest.mark.parametrize("size", [1, 40])
def test_a_tree_that_cannot_be_is_refused(size: int, heads: dict[str, Path]) -> None:
    wanted = {1: "less than num_tokens 3", 40: "at most 31 guesses at once"}[size]
    with pytest.raises(SpecError, match=wanted):
        with_rounds(engine(decoder(), heads["medusa"], drafter={"kind": "medusa", "tree_size": size}), 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGPU:
    """A float16 model whose rounds are CUDA graphs."""

    @pytest.mark.parametrize("name", TREES)
    @pytest.mark.parametrize("seqs", [1, 9, 33])
    def test_the_kernels_move_a_state_as_torch_does(self, seqs: int, name: str) -> None:
        state, *rest = drawn_state(seqs, TREES[name], seqs)
        on_gpu = RoundState(**{name: one.cuda() if torch.is_tensor(one) else one for name, one in vars(state).items()})
        found = moved(on_gpu, *(one.cuda() for one in rest))
        for field, one in vars(moved(state, *rest)).items():
            if torch.is_tensor(one):
                assert torch.equal(vars(found)[field].cpu(), one), field
        store = torch.randn(3, 100, 2, 4, 24)
        on_both = [store, store.cuda()]
        for one, own in zip((state, found), on_both):
            one.placed[2] = (
                torch.arange(one.placed[2].numel(), device=one.placed.device).view_as(one.placed[2]) % 99 + 1
            )
            one.keep([own])
        if seqs * len(TREES[name]) < 100:  # no slot of two sequences
            assert torch.equal(on_both[0], on_both[1].cpu())

    @pytest.fixture(scope="class")
    def folders(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        where, model = tmp_path_factory.mktemp("heads"), decoder(head_dim=64, max_seq_len=512)
        return {kind: taught(where / kind, kind, model, 61, **OPTIONS[kind]) for kind in KINDS}

    @pytest.mark.parametrize("seqs", [1, 8])
    @pytest.mark.parametrize(
        ("kind", "tree"),
        [("prompt_lookup", {}), *((one, {}) for one in KINDS), *((one, {"tree_size": 15}) for one in KINDS)],
    )
    def test_the_same_tokens_as_without_a_drafter(
        self, kind: str, tree: dict[str, int], seqs: int, folders: dict[str, Path]
    ) -> None:
        model = decoder(head_dim=64, max_seq_len=512).to("cuda", torch.float16)
        fields = {"block_size": 16, "num_pages": 80, "max_num_seqs": seqs, "max_num_batched_tokens": 40}
        for draw in (dict[str, float](temperature=0), {"temperature": 0.8}, {"temperature": 0.8, "top_k": 9}):
            found = []
            for spec in (fields, {**fields, "drafter": {"kind": kind, **tree}}):
                one = Engine(
                    model, EngineSpec.read(spec), draft=folders.get(kind) if spec is not fields else None, device="cuda"
                )
                for name in range(10):
                    params = SamplingParams(max_tokens=9 + 4 * name, seed=name, ignore_eos=True, **draw)
                    one.add(request(str(name), PROMPTS[name % 4] + [name] * (name > 3), params))
                outputs = drain(one)
                assert not any(output.error for each in outputs.values() for output in each)
                found.append({name: tokens_of(each) for name, each in outputs.items()})
                assert_all_free(one)
            assert found[0] == found[1]
            assert one.runner.rounds is not None and not one.runner.rounds._broken
            if kind != "prompt_lookup":
                assert one.runner.rounds._made and one.stats()["accepted_tokens"] > 0
