"""Groups of answers to the prompts of a batch, their rewards and advantages, and the batch that they make for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.base.errors import SpecError
from hone.feed.load import IGNORE, Batch
from hone.serve.request import SamplingParams
from hone.train.objectives.scoring import score
from hone.train.passes import Prepared, Trained
from hone.train.rollouts.generation import Answer, Generation, seed_of

if TYPE_CHECKING:
    from hone.model.tokenizer import Tokenizer
    from hone.train.rollouts.rewards.base import Reward

ADVANTAGE, OLD, REFERENCE, SHARE = range(4)
"""The values of a position: its answer's advantage, the log-probabilities of its target under the weights that wrote it and under the
reference, and 1 / the number of the answer's targets."""
_LEAST = 1e-4
"""Added to the deviation of a group's rewards, as TRL does."""


class Settings(Protocol):
    """What is read of the objective."""

    rewards: tuple[Any, ...]
    num_generations: int
    max_completion_length: int
    temperature: float
    top_p: float
    beta: float
    num_iterations: int
    mask_truncated_completions: bool
    max_num_seqs: int

    def chosen(self, rewards: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]: ...


class Prompt(NamedTuple):
    """A prompt and the data's own answer to it, token ids."""

    tokens: NDArray[np.int64]
    answer: NDArray[np.int64]


class Rollouts:
    """Prepares batches: reads prompts from a batch of conversations, writes a group of answers to each, and makes a batch of these.

    Every random number follows from `seed`, the step, the prompt and the answer's place in its group, so that a resumed training writes the same
    answers. With `num_iterations` above 1 a batch is trained on for so many steps; `state` then has it for a checkpoint, with which as many
    ranks go on; others write answers to the batch that they read.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer, seed: int) -> None:
        self.settings, self.tokenizer, self.seed = settings, tokenizer, seed
        self.parts: int | None = None
        """Micro-batches of the newest batch."""
        self.row: dict[str, float] = {}
        """What a step's line of steps.jsonl says of its rewards."""
        self.newest: list[tuple[str, str, float]] = []
        """(prompt, completion, reward) of the newest batch, the first of each group."""
        self._kept: Prepared | None = None
        self._kept_of = 0
        """The number of data-parallel ranks that share the kept batch."""
        self._generation: Generation | None = None

    def prepare(self, trained: Trained, batch: Batch) -> Batch | Prepared:
        """The batch of answers, in rows as long as those of `batch`; as many more rows as they need, in micro-batches of as many as its."""
        kept, again = self._kept, trained.done % self.settings.num_iterations
        _, ranks = trained.ranks.data
        if kept is not None and again and self._kept_of == ranks:
            return kept  # on all ranks alike
        found = self._prepared(trained, batch)
        self._kept, self._kept_of = (found if self.settings.num_iterations > 1 else None), ranks
        return found

    def state(self) -> dict[str, Tensor]:
        """The batch that later steps are trained on, its micro-batches and what is said of it; empty without one."""
        if self._kept is None or self.parts is None:
            return {}
        named = {name: torch.from_numpy(array) for name, array in self._kept._asdict().items()}
        said = {f"row.{name}": torch.tensor(value, dtype=torch.float64) for name, value in self.row.items()}
        return {**named, **said, "parts": torch.tensor(self.parts), "ranks": torch.tensor(self._kept_of)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restores `state`."""
        if state:
            self._kept = Prepared(*(state[name].numpy() for name in Prepared._fields))
            self.parts, self._kept_of = int(state["parts"]), int(state["ranks"])
            said = sorted(name for name in state if name.startswith("row."))
            self.row = {name.removeprefix("row."): state[name].item() for name in said}

    def _prepared(self, trained: Trained, batch: Batch) -> Prepared:
        settings, length = self.settings, batch.tokens.shape[1]
        prompts = prompts_of(batch, length)
        answers = self.written(trained, prompts, length, settings.num_generations, settings.temperature)
        rewards, each = self.rewarded(prompts, answers, trained.device)
        advantages, kept = (one.reshape(-1) for one in settings.chosen(rewards.reshape(-1, settings.num_generations)))
        owners = np.repeat(np.arange(len(prompts)), settings.num_generations)
        documents = [
            (prompts[owner].tokens, answer, advantage)
            for owner, answer, advantage, is_kept in zip(owners.tolist(), answers, advantages.tolist(), kept.tolist())
            if is_kept
        ]
        micro = max(len(batch.tokens) // trained.gradient_accumulation_steps, 1)
        made = in_rows(documents, length, micro, mask_truncated=settings.mask_truncated_completions)
        most = int(trained.ranks.mesh.every(torch.tensor([float(len(made.tokens))], dtype=torch.float64)).max())
        made = _padded(made, most)  # every rank has as many micro-batches, because they wait for each other
        self.parts = most // micro
        if settings.num_iterations > 1:
            made.values[..., OLD] = score(trained.model, made, trained.device, micro, settings.temperature)  # type: ignore[arg-type]
        if settings.beta:
            assert trained.teacher is not None, "grpo with beta without its reference"
            made.values[..., REFERENCE] = score(trained.teacher, made, trained.device, micro, settings.temperature)  # type: ignore[arg-type]
        self._say(trained, answers, rewards, each)
        self.row["positions"] = trained.ranks.mesh.sum(
            torch.tensor([float(made.tokens.size)], dtype=torch.float64) * trained.ranks.counts_tokens
        ).item()
        self.row = dict(sorted(self.row.items()))  # in the order in which a checkpoint gives it back
        texts = self._texts(prompts, answers[:: settings.num_generations], 1)
        self.newest = [(*row, value) for row, value in zip(texts, rewards[:: settings.num_generations].tolist())]
        return made

    def written(
        self,
        trained: Trained,
        prompts: Sequence[Prompt],
        length: int,
        number: int,
        temperature: float,
        *,
        step: int | None = None,
    ) -> list[Answer]:
        """`number` answers to each of `prompts`, those of a prompt side by side; prompt and answer together fit into `length` positions."""
        settings = self.settings
        if self._generation is None:
            self._generation = Generation(
                trained.model, self.tokenizer, max_model_len=length + 1, max_num_seqs=settings.max_num_seqs
            )
        given, params, seeds = [], [], []
        seen: dict[bytes, int] = {}
        at = trained.done if step is None else step
        for prompt in prompts:
            again = seen[prompt.tokens.tobytes()] = seen.get(prompt.tokens.tobytes(), -1) + 1
            most = min(settings.max_completion_length, length + 1 - len(prompt.tokens))
            one = SamplingParams(max_tokens=most, temperature=temperature, top_p=settings.top_p)
            for place in range(number):
                given.append(prompt.tokens.tolist())
                params.append(one)
                seeds.append(seed_of(self.seed, at, prompt.tokens.tolist(), again, place))
        return self._generation.answers(given, params, seeds)

    def rewarded(
        self, prompts: Sequence[Prompt], answers: Sequence[Answer], device: torch.device | str = "cpu"
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """(the weighted sum of the rewards of each answer, each reward alone by its name); as many answers a prompt. A reward that
        is a model computes on `device`."""
        number = len(answers) // max(len(prompts), 1)
        asked, said = zip(*self._texts(prompts, answers, number)) if answers else ((), ())
        whole = [[*prompts[at // number].tokens.tolist(), *one.tokens] for at, one in enumerate(answers)]
        wanted = [text for prompt in prompts for text in [self._text(prompt.answer)] * number]
        total, each = np.zeros(len(answers)), {}
        for place, reward in enumerate(self.settings.rewards):
            one: Reward = reward
            scores = one.token_scores(whole, device) if one.reads_tokens else one.scores(asked, said, wanted)
            found = np.array(scores, np.float64)
            total += one.weight * found
            each[f"{place}_{one.kind}"] = found
        return total, each

    def _texts(self, prompts: Sequence[Prompt], answers: Sequence[Answer], number: int) -> list[tuple[str, str]]:
        asked = [text for prompt in prompts for text in [self._text(prompt.tokens)] * number]
        return list(zip(asked, (self._text(answer.tokens) for answer in answers)))

    def _text(self, tokens: Sequence[int] | NDArray[np.int64]) -> str:
        return self.tokenizer.decode([int(one) for one in tokens])

    def _say(
        self,
        trained: Trained,
        answers: Sequence[Answer],
        rewards: NDArray[np.float64],
        each: dict[str, NDArray[np.float64]],
    ) -> None:
        groups = rewards.reshape(-1, self.settings.num_generations)
        spread = groups.std(1)
        sums = [
            len(answers),
            rewards.sum(),
            sum(len(one.tokens) for one in answers),
            sum(not one.ended for one in answers),
        ]
        sums += [len(groups), spread.sum(), (spread == 0).sum(), *(one.sum() for one in each.values())]
        own = torch.tensor([float(one) for one in sums], dtype=torch.float64) * trained.ranks.counts_loss
        count, reward, tokens, cut, number, deviation, alike, *parts = trained.ranks.mesh.sum(own).tolist()
        self.row = {
            "reward": reward / count,
            "reward_std": deviation / number,
            "frac_reward_zero_std": alike / number,
            "completion_length": tokens / count,
            "clipped_ratio": cut / count,
        }
        if len(each) > 1:
            self.row |= {f"reward_{name}": value / count for name, value in zip(each, parts)}


def prompts_of(batch: Batch, length: int) -> list[Prompt]:
    """The prompt of the last answer in each document of `batch`, with the answer. Raises SpecError where none leaves room for an answer
    in `length` positions."""
    found, long = [], 0
    for tokens, targets, ids in zip(*batch[:3]):
        borders = np.flatnonzero(np.diff(ids, prepend=-2, append=-2))
        for first, last in zip(borders[:-1].tolist(), borders[1:].tolist()):
            marked = np.flatnonzero(targets[first:last] != IGNORE)
            if not len(marked):
                continue
            begin = int(marked[np.flatnonzero(np.diff(marked, prepend=-2) > 1)[-1]])  # of the last run
            if begin + 1 >= length:
                long += 1
                continue
            answer = targets[first:last][begin : int(marked[-1]) + 1]
            found.append(Prompt(tokens[first : first + begin + 1], answer))
    if not found:
        raise SpecError(
            f"no prompt of a step leaves room for an answer in seq_len {length}: {long} are too long",
            fix="raise seq_len, or batch_size where steps have no conversation at all",
        )
    return found


def advantages_of(rewards: NDArray[np.float64], scale: str) -> NDArray[np.float64]:
    """How much better each answer [P, G] is than its group: its reward less the group's mean, divided by the group's deviation if `scale` is
    'group' (Shao et al. 2024, arXiv:2402.03300); 'none': not divided (Liu et al. 2025, arXiv:2503.20783)."""
    centred = rewards - rewards.mean(1, keepdims=True)
    return centred / (rewards.std(1, ddof=1, keepdims=True) + _LEAST) if scale == "group" else centred


def in_rows(
    documents: Sequence[tuple[NDArray[np.int64], Answer, float]],
    length: int,
    micro: int,
    *,
    mask_truncated: bool = False,
) -> Prepared:
    """(prompt, answer, advantage) as documents side by side in rows of `length` positions, in their order; rows in multiples of `micro`."""
    rows: list[list[tuple[NDArray[np.int64], Answer, float]]] = []
    room = 0
    for one in documents:
        needed = len(one[0]) + len(one[1].tokens) - 1
        if needed > room:
            rows.append([])
            room = length
        rows[-1].append(one)
        room -= needed
    shape = (-(-max(len(rows), 1) // micro) * micro, length)
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
    ids, values = np.full(shape, -1, np.int32), np.zeros((*shape, 4), np.float32)
    for row, held in enumerate(rows):
        place = 0
        for number, (prompt, answer, advantage) in enumerate(held):
            whole = np.concatenate([prompt, np.asarray(answer.tokens, np.int64)])
            end = place + len(whole) - 1
            tokens[row, place:end], ids[row, place:end] = whole[:-1], number
            values[row, place:end, ADVANTAGE] = advantage
            if answer.ended or not mask_truncated:
                first = place + len(prompt) - 1
                targets[row, first:end] = answer.tokens
                values[row, first:end, SHARE] = 1 / len(answer.tokens)
            place = end
    return Prepared(tokens, targets, ids, values)


def _padded(batch: Prepared, rows: int) -> Prepared:
    """`batch` with rows of padding up to `rows`."""
    more = rows - len(batch.tokens)
    if not more:
        return batch
    fills = (0, IGNORE, -1, 0)
    widths = [(0, more)]
    return Prepared(
        *(
            np.pad(array, widths + [(0, 0)] * (array.ndim - 1), constant_values=fill)
            for array, fill in zip(batch, fills)
        )
    )
