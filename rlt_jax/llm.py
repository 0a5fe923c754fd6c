"""LLM: a loaded model that answers prompts; generate(): the same in one call.

Both drive one LLMEngine in the caller's thread. JAX is imported with the first model.
"""

import atexit
import contextlib
import dataclasses
import inspect
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.inputs import Prompt, check_prompts, check_request_ids, check_sampling_params
from rlt_jax.outputs import RequestOutput
from rlt_jax.packaged_model import NAME as PACKAGED_MODEL
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import fail

if TYPE_CHECKING:
    from rlt_jax.llm_engine import LLMEngine
    from rlt_jax.tokenizer import Tokenizer


class GenerationError(RuntimeError):
    """Some requests failed. `outputs` holds every request's output, failed and finished."""

    def __init__(self, message: str, outputs: list[RequestOutput]):
        super().__init__(message)
        self.outputs = outputs


@dataclasses.dataclass(frozen=True)
class StreamIncrement:
    """What is new about one request; joined, a request's increments are its RequestOutput.

    `output` is the request so far, this increment included.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finished: bool
    finish_reason: str | None
    output: RequestOutput
    error: str | None = None


class LLM:
    """A model that is loaded and ready; close() it, or use it as a context manager.

    Args:
      model: a checkpoint's folder, its id on the Hugging Face hub, or "ouro-tiny", the small
        trained model that is installed with the package.
      tokenizer: another one than the checkpoint's own: a folder, a hub id or a Tokenizer.
      dtype: "float32" or "bfloat16" (None: bfloat16 on a GPU, float32 on a CPU).
      device: "cpu", "gpu" or "gpu:1", say (None: JAX's first).
      total_ut_steps: run fewer loops than the model has, for prompts and outputs alike.
      cache_config, scheduler_config, exit_config, execution_config: see rlt_jax.config.
    """

    _engine: "LLMEngine | None"

    def __init__(
        self,
        model: str | os.PathLike = PACKAGED_MODEL,
        *,
        tokenizer: "Tokenizer | str | os.PathLike | None" = None,
        dtype: str | None = None,
        device: str | None = None,
        total_ut_steps: int | None = None,
        cache_config: CacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        exit_config: ExitConfig | None = None,
        execution_config: ExecutionConfig | None = None,
        speculative_config: None = None,
    ):
        self._engine = None
        if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
            fail("LLM.model", model, "must be a checkpoint's folder or its hub id")
        if speculative_config is not None:
            rule = "must be None: speculative decoding is not supported"
            fail("LLM.speculative_config", speculative_config, rule)
        start = time.perf_counter()
        from rlt_jax import llm_engine

        imported = time.perf_counter() - start
        self._engine = llm_engine.LLMEngine(
            model,
            tokenizer=tokenizer,
            dtype=dtype,
            device=device,
            total_ut_steps=total_ut_steps,
            cache_config=cache_config,
            scheduler_config=scheduler_config,
            exit_config=exit_config,
            execution_config=execution_config,
        )
        self.startup_times = {"import": imported, **self._engine.startup_times}
        self._busy = threading.Lock()  # held from a call's start to its end, streams included
        self._unfinished: list[str] = []  # of the running call, or left by one cut short

    def __enter__(self) -> "LLM":
        self._open_engine()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model's memory; doing it again is harmless."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    @property
    def engine(self) -> "LLMEngine":
        return self._open_engine()

    @property
    def tokenizer(self) -> "Tokenizer | None":
        return self._open_engine().tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answers one prompt or many, each a string or token ids, in the order given.

        `sampling_params` is for all, or one for each. Raises ValueError before anything runs
        when any of them is bad, and GenerationError when requests failed on the way.
        """
        engine = self._open_engine()
        requests = self._check_requests(prompts, sampling_params, request_ids)
        with self._running(engine, requests):
            ids = [request_id for request_id, _, _ in requests]
            finished = {
                output.request_id: output for output in _run(engine, ids, only_finished=True)
            }
        outputs = [finished[request_id] for request_id, _, _ in requests]
        _raise_errors(outputs)
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> Iterator[StreamIncrement]:
        """Like generate(), but an iterator over what each step adds, of all the requests.

        The requests are checked and queued by this call. Closing the iterator, or dropping it,
        aborts those that have not finished.
        """
        engine = self._open_engine()
        requests = self._check_requests(prompts, sampling_params, request_ids)
        increments = self._increments(engine, requests)
        next(increments)  # up to the point where the requests are queued
        return increments

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, through the checkpoint's chat template.

        `enable_thinking` reaches the template, which may know it; None does not.
        """
        prompts = self._chat_prompts(messages, enable_thinking, add_generation_prompt)
        return self.generate(prompts, sampling_params, request_ids=request_ids)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        request_ids: Sequence[str] | None = None,
    ) -> Iterator[StreamIncrement]:
        """Like chat(), but an iterator over what each step adds, as stream() gives it."""
        prompts = self._chat_prompts(messages, enable_thinking, add_generation_prompt)
        return self.stream(prompts, sampling_params, request_ids=request_ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids that chat() makes of one conversation."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            fail("LLM.tokenizer", None, "chat() needs a tokenizer with a chat template")
        variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        text = tokenizer.render_chat(messages, add_generation_prompt, **variables)
        return tokenizer.encode(text, add_special_tokens=False)

    def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return self._open_engine().stats()

    def start_trace(self, path: str | os.PathLike) -> None:
        """Records what every batch does from now on, a line of JSON each (docs/tracing.md)."""
        self._open_engine().start_trace(path)

    def stop_trace(self) -> None:
        """Closes the file; close() does so too."""
        self._open_engine().stop_trace()

    def start_profile(self, directory: str | os.PathLike) -> None:
        """Lets jax.profiler record from now on, each batch under a name of its own."""
        self._open_engine().start_profile(directory)

    def stop_profile(self) -> None:
        """Writes the profile under its folder; close() does so too."""
        self._open_engine().stop_profile()

    def _open_engine(self) -> "LLMEngine":
        if self._engine is None:
            raise RuntimeError("LLM: it is closed; make a new one")
        return self._engine

    def _chat_prompts(
        self, messages: object, enable_thinking: bool | None, add_generation_prompt: bool
    ) -> list[list[int]]:
        if not isinstance(messages, (list, tuple)) or not messages:
            fail("messages", messages, "must be a non-empty list of messages or conversations")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        return [
            self.encode_chat(
                conversation,
                enable_thinking=enable_thinking,
                add_generation_prompt=add_generation_prompt,
            )
            for conversation in conversations
        ]

    def _check_requests(
        self, prompts: object, sampling_params: object, request_ids: object
    ) -> list[tuple[str, Prompt, SamplingParams]]:
        prompts = check_prompts(prompts)
        params = check_sampling_params(sampling_params, len(prompts))
        if request_ids is None:
            ids = [str(i) for i in range(len(prompts))]
        else:
            ids = check_request_ids(request_ids, len(prompts))
        return list(zip(ids, prompts, params, strict=True))

    @contextlib.contextmanager
    def _running(
        self, engine: "LLMEngine", requests: list[tuple[str, Prompt, SamplingParams]]
    ) -> Iterator[None]:
        """Queues the requests, all or none; leaving early, for whatever reason, aborts them."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "LLM: another generate(), chat() or stream() of it is still running; finish it "
                "or close its iterator first"
            )
        try:
            self._abort_unfinished(engine)
            if engine.has_unfinished_requests():
                raise RuntimeError("LLM: its engine has unfinished requests added by add_request()")
            for i, (request_id, prompt, params) in enumerate(requests):
                self._unfinished.append(request_id)
                try:
                    engine.add_request(request_id, prompt, params)
                except ValueError as error:
                    which = f"prompts[{i}]: " if len(requests) > 1 else ""
                    raise ValueError(f"{which}{error}") from error
            yield
            self._abort_unfinished(engine)  # none is left, but a batch may still be in flight
        except BaseException:
            # The first error is the one to report, not one that it (or close()) causes here.
            with contextlib.suppress(Exception):
                self._abort_unfinished(engine)
            raise
        finally:
            self._busy.release()

    def _abort_unfinished(self, engine: "LLMEngine") -> None:
        """Cut short itself (a second Ctrl-C), it is done again by the next call."""
        for request_id in self._unfinished:
            engine.abort_request(request_id)
        while self._unfinished and engine.has_unfinished_requests():
            engine.step()  # what they hold returns with their last results
        self._unfinished.clear()

    def _increments(
        self, engine: "LLMEngine", requests: list[tuple[str, Prompt, SamplingParams]]
    ) -> Iterator[StreamIncrement]:
        latest: dict[str, RequestOutput] = {}
        with self._running(engine, requests):
            yield  # stream() stops here: queued, nothing run
            self._open_engine()
            for output in _run(engine, [request_id for request_id, _, _ in requests]):
                increment = _increment(latest.get(output.request_id), output)
                latest[output.request_id] = output
                yield increment
                self._open_engine()
        _raise_errors([latest[request_id] for request_id, _, _ in requests])


_last: tuple[tuple[str | os.PathLike, dict[str, Any]], LLM] | None = None
_last_lock = threading.RLock()


def generate(
    prompts: Prompt | Sequence[Prompt],
    model: str | os.PathLike = PACKAGED_MODEL,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    request_ids: Sequence[str] | None = None,
    **options: Any,
) -> list[RequestOutput]:
    """LLM(model, **options).generate(...) in one call.

    The model stays loaded: the next call with the same model and options uses it again, a call
    with others closes it first.
    """
    global _last
    inspect.signature(LLM).bind(model, **options)  # a wrong name must not cost the loaded model
    with _last_lock:
        if _last is None or _last[0] != (model, options):
            _close_last()
            _last = ((model, options), LLM(model, **options))
        return _last[1].generate(prompts, sampling_params, request_ids=request_ids)


@atexit.register
def _close_last() -> None:
    global _last
    last, _last = _last, None
    if last is not None:
        last[1].close()


def _run(
    engine: "LLMEngine", request_ids: Iterable[str], only_finished: bool = False
) -> Iterator[RequestOutput]:
    """Steps the engine until these requests have finished; yields their outputs as they grow."""
    pending = set(request_ids)
    while pending:
        if not engine.has_unfinished_requests():
            raise RuntimeError(f"LLM: the engine lost the requests {sorted(pending)}")
        for output in engine.step(only_finished):
            if output.request_id in pending:
                if output.finished:
                    pending.discard(output.request_id)
                yield output


def _increment(before: RequestOutput | None, output: RequestOutput) -> StreamIncrement:
    text, count = ("", 0) if before is None else (before.text, len(before.token_ids))
    return StreamIncrement(
        request_id=output.request_id,
        text=output.text[len(text) :],
        token_ids=output.token_ids[count:],
        exit_depths=output.exit_depths[count:],
        logprobs=None if output.logprobs is None else output.logprobs[count:],
        finished=output.finished,
        finish_reason=output.finish_reason,
        output=output,
        error=output.error,
    )


def _raise_errors(outputs: list[RequestOutput]) -> None:
    failed = [output for output in outputs if output.finish_reason == "error"]
    if failed:
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        message = f"request {failed[0].request_id!r}: {failed[0].error}{others}"
        raise GenerationError(message, outputs)
