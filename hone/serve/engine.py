"""The engine: requests in, tokens and text out, one step at a time. In Python: `hone.Engine(folder).generate(...)`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch

from hone.base.errors import SpecError
from hone.base.figure import human_bytes
from hone.base.run import Run
from hone.model.decoder import Decoder
from hone.model.tokenizer import Tokenizer
from hone.serve.adapters.registry import found_adapter
from hone.serve.detokenize import TextStream, prompt_ids
from hone.serve.device.heap import frozen_heap
from hone.serve.kv_policies.compactor import Compactor
from hone.serve.opening import open_parts
from hone.serve.paging.manager import PageManager
from hone.serve.ranks.errors import RankError
from hone.serve.request import BusyError, Completion, Output, Request, SamplingParams, check_request, joined
from hone.serve.runner import Launched, SeqResult
from hone.serve.sampling import RequestSampling, SeqSampling
from hone.serve.scheduler import Scheduler
from hone.serve.sequence import ScheduledSeq, Seq
from hone.serve.sizing import threads_of
from hone.serve.spec import EngineSpec
from hone.serve.step_builder import StepBuilder
from hone.serve.structured.admission import Constraints
from hone.serve.structured.masks import StepMasks

__all__ = ["BusyError", "Engine", "EngineSpec"]

_NAP_S = 1e-3
"""Longest sleep of a step that waits for more requests: others may be added or aborted between steps."""


class Engine:
    """Serves one model. Not thread-safe: one thread calls `add`, `abort` and `step`.

    `model` is a `Decoder` or a Hugging Face folder (quantized ones too), whose tokenizer is read unless one is given.
    Without any tokenizer prompts are token ids and outputs have no text. `device` must hold a given Decoder already.
    """

    def __init__(
        self,
        model: Decoder | Path | str,
        spec: EngineSpec | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        draft: Decoder | Path | str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        parts = open_parts(model, spec or EngineSpec(), tokenizer, draft, self.device)
        self.spec = spec = parts.spec
        self.model, self.tokenizer = parts.model, parts.tokenizer
        self.pool, self.runner, self.proposer = parts.pool, parts.runner, parts.proposer
        self.max_model_len, self._note, self.adapters = parts.max_model_len, parts.note, parts.adapters
        self.max_waiting = spec.max_waiting
        """Requests that may wait; more are rejected."""
        config = self.model.config
        self.eos_ids = frozenset((*config.eos_token_ids, *(self.tokenizer.eos_ids if self.tokenizer else ())))
        assert spec.max_num_seqs is not None and spec.max_num_batched_tokens is not None, "sizes are filled in"
        self.scheduler = Scheduler(
            PageManager(self.pool, max_num_batched_tokens=spec.max_num_batched_tokens, kept=parts.kept),
            max_num_seqs=spec.max_num_seqs,
            batching=spec.batching,
            max_delay_s=spec.max_delay_s,
            lookahead=parts.lookahead,
            depth=parts.drafter.num_tokens if parts.drafter else 0,
            lookahead_seqs=parts.drafter.max_num_seqs if parts.drafter else 0,
            rounds=0 if self.runner.rounds is None else self.runner.rounds.ahead,
            longest=self.max_model_len,
            num_stages=spec.pipeline_parallel_size,
            adapters=self.adapters,
        )
        self._compactor = Compactor(self.runner, self.scheduler) if parts.kept.compaction is not None else None
        self._builder = StepBuilder(spec.block_size)
        self._constraints = Constraints(self.tokenizer, config.vocab_size, self.eos_ids)
        wanted = spec.async_scheduling
        ahead = self.device.type == "cuda" and self.proposer is None if wanted is None else wanted
        self._ahead = spec.pipeline_parallel_size - 1 if spec.pipeline_parallel_size > 1 else int(ahead)
        """Steps that are launched before the results of one are read."""
        self._flying: deque[tuple[list[ScheduledSeq], Launched]] = deque()
        """The launched steps whose results are not read yet, oldest first."""
        self._num_params = config.num_params
        self._seqs: dict[str, Seq] = {}
        self._arrivals = count()
        self._outputs: list[Output] = []
        """Those of aborts, and of other requests during `generate`, for the next step."""
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0
        self._num_drafted = self._num_accepted = self._num_verified = 0

    @property
    def sizes(self) -> str:
        """The engine's sizes in one line, including those derived from the device."""
        spec, pool, dtype = self.spec, self.pool, str(self.runner.cache.dtype).removeprefix("torch.")
        return (
            f"max_num_seqs={spec.max_num_seqs} max_num_batched_tokens={spec.max_num_batched_tokens} "
            f"max_model_len={self.max_model_len}; KV cache of {human_bytes(self.cache_bytes)} in {dtype}: "
            f"{pool.num_pages} pages of {pool.block_size} tokens{self._note and f'; {self._note}'}"
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache, including the draft model's."""
        return self.runner.cache.num_bytes + sum(cache.num_bytes for cache in self.runner.draft_caches)

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished, a step under way or an output undelivered."""
        return bool(self._seqs or self._outputs or self._flying)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises SpecError for impossible parameters or tokens, FitError for a prompt longer than `max_model_len` allows,
        BusyError when `max_waiting` requests wait already.
        """
        if request.id in self._seqs:
            raise SpecError(f"a request with id '{request.id}' is running", fix="give every request its own id")
        check_request(
            request, self.model.config.vocab_size, self.max_model_len, has_tokenizer=self.tokenizer is not None
        )
        if request.retention and not getattr(self.spec.eviction, "reads_retention", False):
            raise SpecError(
                "the request has a retention, which the engine's eviction does not read",
                fix="set engine.eviction=priority_duration, or leave retention out",
            )
        waiting = len(self._seqs) - len(self.scheduler.running)
        if waiting >= self.max_waiting:
            raise BusyError(f"{waiting} requests wait already", fix="try again in a moment")
        seq = self._seq(request)
        held = self._constraints.hold(seq)
        self._seqs[request.id] = seq
        if seq.adapter is not None:
            seq.adapter.num_seqs += 1
        if not held:
            self.scheduler.add(seq)

    def _seq(self, request: Request) -> Seq:
        params = request.params
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids))
        longest = min(len(request.prompt) + params.max_tokens, self.max_model_len)
        adapter = found_adapter(self.adapters, request.adapter)
        seq = Seq(request, next(self._arrivals), longest, frozenset(ends), adapter=adapter)
        constraint = self._constraints.of(params, ends)  # which bans the ends itself
        seq.sampling = SeqSampling(
            RequestSampling(params, () if constraint else ends), seq.tokens, seq.num_prompt, constraint
        )
        seq.speculates = self.proposer is not None and not seq.sampling.request.penalized and constraint is None
        if params.prompt_logprobs is not None:
            seq.prompt_logprobs = [None] * seq.num_prompt
        if self.tokenizer is not None:
            seq.stream = TextStream(
                self.tokenizer,
                request.prompt,
                params.stop,
                include_stop=params.include_stop,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )
        return seq

    def abort(self, request_id: str) -> None:
        """Ends a waiting or running request; the next step returns its last output (finish "abort"). Ignores unknown ids."""
        seq = self._seqs.get(request_id)
        if seq is not None:
            self._constraints.forget(request_id)
            self._outputs.append(self._end(seq, seq.output, "abort"))

    def step(self) -> list[Output]:
        """Runs one step; returns the new outputs, at most one per request.

        With asynchronous scheduling it launches a step and returns the outputs of the one before. They include outputs
        of other requests computed during `generate`: each is returned exactly once.
        """
        if self._compactor is not None:
            for seq, error in self._compactor.run():
                self._outputs.append(self._end(seq, seq.output, "error", error=error))
        for seq, error in self.scheduler.unreadable():
            self._outputs.append(self._end(seq, seq.output, "error", error=error))
        held = bool(self._outputs)
        self._add_compiled()
        launched = self._launch()
        if launched is not None:
            self._flying.append(launched)
        if len(self._flying) > self._ahead or launched is None:
            self._read()
        return self._deliver(held)

    def _read(self) -> None:
        """Applies the results of the oldest step under way, once the device has computed them."""
        if self._flying:
            scheduled, launched = self._flying.popleft()
            tokens = launched.tokens() if self.proposer is None else None
            if tokens is None:
                for item, result in zip(scheduled, launched.results(), strict=True):
                    self._finish_item(item, result)
                return
            for item, token in zip(scheduled, tokens, strict=True):
                if item.seq.goes_on(item, token):
                    self._finish_item(item, token)
                else:
                    self._finish_item(item, SeqResult.of(token))

    def _add_compiled(self) -> None:
        """Schedules the sequences whose grammar is compiled by now, and ends those whose grammar is wrong."""
        busy = self._flying or self.scheduler.running or self.scheduler.num_waiting
        for seq, error in self._constraints.ready(idle=not busy):
            if error is None:
                self.scheduler.add(seq)
            else:
                self._outputs.append(self._end(seq, seq.output, "error", error=error))

    def idle(self) -> bool:
        """Prepares later steps while there is no work (a CUDA graph more); False when nothing is left to prepare."""
        return self.runner.prepare()

    def when_lost(self, say: Callable[[RankError], None]) -> None:
        """For a process that only serves this engine: soon after one of its ranks is lost, `say` is called and the process ends."""
        self.runner.when_lost(say)

    def close(self) -> None:
        """Ends the other ranks' processes, if there are any; the engine runs no step any more."""
        self.runner.close()

    def _launch(self) -> tuple[list[ScheduledSeq], Launched] | None:
        """Starts the next step; None when there is nothing to compute."""
        delay = self.scheduler.delay_s  # before the schedule, which starts a batch once it is over
        output = self.scheduler.schedule()
        if not output.seqs and delay > 0:
            time.sleep(min(delay, _NAP_S))
            return None
        if not output.seqs:
            waiting = len(self._seqs) - self._constraints.num_held
            reads = self.adapters is not None and self.adapters.wait_a_moment(0.0 if self._flying else _NAP_S)
            assert not waiting or self._flying or reads, f"{waiting} requests wait and nothing can run"
            return None
        self._num_steps += 1
        if self.proposer is not None:
            self.proposer.propose(output.seqs)
        step, scheduled, broken = self._builder.build_possible(output)
        masks = StepMasks(scheduled, self._read_before) if step.sampling.masked.any() else None
        with threads_of(self.spec, self.device, self._num_params, len(step.batch.tokens)):
            launched = self.runner.launch(step) if masks is None else self.runner.launch(step, masks)
        if masks is None or not masks.asked:
            self._launched(scheduled)
        for item, error in broken:
            self._finish_item(item, SeqResult(error=error))
        # Before another sequence finds what these left in their pages.
        for index, error in {**launched.errors, **(masks.errors if masks else {})}.items():
            self._finish_item(scheduled[index], SeqResult(error=error))
        return scheduled, launched

    def _launched(self, scheduled: Sequence[ScheduledSeq]) -> None:
        """Notes that the step of these sequences is on its way."""
        if self.proposer is None:
            self.scheduler.launched(scheduled)
            for index, item in enumerate(scheduled):
                item.seq.step_index = index

    def _read_before(self, scheduled: Sequence[ScheduledSeq]) -> None:
        """When the forward pass of a step is on its way: applies the results of the step before, for its masks."""
        self._launched(scheduled)
        while self._flying:
            self._read()

    def _deliver(self, held: bool) -> list[Output]:
        """All undelivered outputs. `held`: some are older than this step, so a request may have several."""
        outputs, self._outputs = self._outputs, []
        return joined(outputs) if held else outputs

    def _finish_item(self, item: ScheduledSeq, result: SeqResult | int) -> None:
        """Applies a step's result, or one more token, to its sequence, if it has not ended since.

        An error here ends this sequence only.
        """
        seq = item.seq
        if seq.state == "done":
            return
        error = None if isinstance(result, int) else result.error
        if error is None:
            try:
                output = self._go_on(seq, result) if isinstance(result, int) else self._advance(item, result)
                if output is not None:
                    self._outputs.append(output)
                return
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
        self.pool.forget(seq.pages)
        self._outputs.append(self._end(seq, seq.output, "error", error=error))

    def _go_on(self, seq: Seq, token: int) -> Output:
        """What `_advance` does for the most common result, in a fraction of its time."""
        seq.num_in_flight -= 1
        seq.tokens.append(token)
        self._num_output_tokens += 1
        output = seq.output
        output.tokens.append(token)
        if len(seq.tokens) >= seq.page_end:
            self._publish(seq, 0)
        if seq.stream is not None:
            output.text = seq.stream.push(token)
            if seq.stream.matched is not None:
                return self._end(seq, output, "stop", seq.stream.matched)
        return output

    def _advance(self, item: ScheduledSeq, result: SeqResult) -> Output | None:
        seq, computed = item.seq, item.start + item.count
        if self.proposer is not None:
            self.proposer.settle(item, result.num_kept)
            seq.guesses = result.guesses
            self._num_drafted += result.num_guessed
            self._num_verified += result.num_verified
            self._num_accepted += result.num_kept
        else:
            seq.num_in_flight -= item.samples
        if item.start < seq.num_prompt:
            self._num_prompt_tokens += max(0, min(computed, seq.num_prompt) - item.start)
        if seq.prompt_logprobs is not None and result.prompt_logprobs:
            first = item.start + 1
            seq.prompt_logprobs[first : first + len(result.prompt_logprobs)] = result.prompt_logprobs
        if result.states is not None:
            seq.pool(item.start, item.count, result.states)
        if not result.chosen:
            self._publish(seq, computed)
            return None
        output = seq.output
        if seq.num_output == 0:
            output.prompt_logprobs = seq.prompt_logprobs
            output.pooled = seq.pooled_bytes
        finish, reason = (None, None) if seq.request.params.max_tokens else ("length", None)
        for chosen in result.chosen:
            if finish:
                break
            finish, reason = seq.take(chosen, output)
            self._num_output_tokens += 1
        self._publish(seq, len(seq.tokens) - 1)
        output.num_output_tokens = seq.num_output
        if finish is None:
            return output
        if seq.stream is not None:
            output.text += seq.stream.finish()
        return self._end(seq, output, finish, reason)

    def _publish(self, seq: Seq, computed: int) -> None:
        """Notes what is computed; without a drafter that happened when the step was launched, but for unknown tokens."""
        if self.proposer is None:
            self.scheduler.pages.advance(seq, seq.num_computed)
        else:
            self.scheduler.pages.advance(seq, computed, seq.drafted if self.proposer.uses_pages else None)

    def _end(
        self,
        seq: Seq,
        output: Output,
        finish: str,
        reason: str | int | None = None,
        error: str | None = None,
    ) -> Output:
        output.finish, output.stop_reason, output.error = finish, reason, error
        del self._seqs[seq.request.id]
        self.scheduler.finish(seq)
        return output

    def stats(self) -> dict[str, float]:
        """Counters since the start and current gauges; names end in their unit."""
        scheduler, pool = self.scheduler, self.pool
        return {
            "running": len(scheduler.running),
            "waiting": len(self._seqs) - len(scheduler.running),  # for their grammar, too
            "pages_total": pool.num_pages,
            "pages_used": pool.num_used,
            "pages_free": pool.num_free,
            "pages_cached": pool.num_cached,
            "steps": self._num_steps,
            "prompt_tokens": self._num_prompt_tokens,
            "output_tokens": self._num_output_tokens,
            "prefix_query_tokens": scheduler.pages.prefix_queries,
            "prefix_hit_tokens": scheduler.pages.prefix_hits,
            "preemptions": scheduler.num_preemptions,
            **scheduler.fill.stats(),
            "draft_tokens": self._num_drafted,
            "accepted_tokens": self._num_accepted,
            "verified_sequences": self._num_verified,
            "kv_cache_bytes": self.cache_bytes,
            **({} if self.adapters is None else self.adapters.stats()),
        }

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapters: Sequence[str] | None = None,
        run: Run | None = None,
    ) -> list[Completion]:
        """Continues every prompt (text or token ids); completions in the order of the prompts.

        One `params` for all, or one each; `adapters`: each one's, by name. A `run` shows progress. Raises the errors of `add`.
        Requests queued by `add` before run together with these prompts; the next `step` returns their outputs.
        """
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise SpecError(f"{len(prompts)} prompts and {len(each)} params", fix="give one params, or one each")
        done, pending = dict[str, Completion](), list[Request]()
        for index, (prompt, one, name) in enumerate(zip(prompts, each, adapters or [""] * len(prompts), strict=True)):
            ids = prompt_ids(prompt, self.tokenizer)
            request = Request(f"generate-{next(self._arrivals)}-{index}", ids, one, adapter=name)
            done[request.id] = Completion(request.prompt, [], "", "abort")
            pending.append(request)
        others: list[Output] = []
        try:
            self._finish_all(pending, done, others, run or Run(quiet=True))
        finally:  # interrupted: unfinished requests must not run in the next call
            for request in pending:
                self.abort(request.id)
            self._outputs = joined(output for output in [*others, *self._outputs] if output.request_id not in done)
        return list(done.values())

    def _finish_all(self, requests: list[Request], done: dict[str, Completion], others: list[Output], run: Run) -> None:
        """Steps until every request of `done` is finished, queueing at most `max_waiting` at a time.

        Outputs of requests that are not in `done` are added to `others`.
        """
        coming, unfinished = iter(requests), len(requests)
        total = sum(request.params.max_tokens for request in requests)
        room = min(self.max_waiting, self.scheduler.max_num_seqs)
        with frozen_heap(), run.progress("generating", total, "tokens") as bar:
            while unfinished:
                while (
                    len(self._seqs) - len(self.scheduler.running) < room and (request := next(coming, None)) is not None
                ):
                    self.add(request)
                for output in self.step():
                    if output.request_id not in done:
                        others.append(output)
                        continue
                    done[output.request_id].take(output)
                    unfinished -= output.finish is not None
                    bar.advance(len(output.tokens))
