"""An engine that samples on servers: requests in a server's dialect, completions as they come back,
one adapter per version.

Every adapter gets a new folder and a new name. A server that reloads weights under a known name and
path keeps serving old keys and values from its prefix cache. With vLLM the log-probs then differ by
0.2 nats (docs/inference-engines.md). Once every server lists the new adapter, the engine unloads
the old adapter and removes its folder.
"""

import asyncio
import json
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_hex
from tempfile import gettempdir, mkdtemp
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import psutil

from retrain.errors import ConfigurationError, EnvironmentFailure, ServerFailure
from retrain.inference_engine.base import (
    BASE_MODEL,
    InferenceEngine,
    RequestFeed,
    RequestList,
    SampleRequest,
)
from retrain.inference_engine.http import (
    AnswerFormError,
    Json,
    Patience,
    Refusal,
    RequestTimeout,
    Server,
    ServerMismatch,
    ServerPool,
    TransientFailure,
)
from retrain.model.budget import context_length
from retrain.types import Completion, FinishReason

if TYPE_CHECKING:
    from retrain.config import TrainConfig

_FOLDER = f".served-{socket.gethostname().replace('-', '_')}-"
"""The name of a folder for adapters goes on with the process that made it."""
_UNSEEN = (
    "No adapter found",
    "No such file",
    "Permission denied",
    "does not exist",
    "Can't find",
    "Repo id must",
)
"""Words of vLLM and SGLang (through peft and the hub's client) about an adapter's folder that they
cannot read."""
T = TypeVar("T")
_LOOK_S = 0.05
"""Seconds between two looks, while servers are at work, at whether an environment has answered or a
signal asked the run to stop."""
_ROUNDING = 1e-3
"""Nats by which a log-prob may lie above 0: the server's own rounding."""
_SMALLEST = float(np.finfo(np.float32).min)
_BROKEN_OFF = ("abort", "error")
"""Finish reasons of vLLM and SGLang while they shut down, or after a failure of their own."""
_LEAVE_S = 30.0
"""Seconds that a server has to wake and to forget the adapter when a run ends."""


@dataclass(frozen=True)
class ServedAdapter:
    """One version of the adapter, as servers know it."""

    name: str
    folder: Path
    """A PEFT folder; servers read it, so it must lie where they see it under the same path."""

    @property
    def fields(self) -> Json:
        """The body of a request to load it."""
        return {"lora_name": self.name, "lora_path": str(self.folder)}


@dataclass(frozen=True)
class ServedSample:
    """One completion, as a server tells it."""

    token_ids: Sequence[int]
    """[T], the sampled EOS included."""
    logprobs: Sequence[float]
    """[T]"""
    stopped: bool
    """True if it ended at an EOS; False at the limit."""
    kept: Sequence[int] | None = None
    """[T] sizes of the kept sets of a truncated request."""
    text: str | None = None
    """See `Completion.text`."""


class Dialect(ABC):
    """The protocol of one kind of server. It holds no state of a run; what it learns about a server
    goes to `Server.facts`.
    """

    title: ClassVar[str]
    """Names the server in sentences: "The vllm server"."""
    health: ClassVar[str] = "/health"
    concurrency: ClassVar[int] = 256
    """Maximum number of requests under way per server, which queues the requests that it cannot
    run.
    """
    spacing_s: ClassVar[float] = 0.0
    """Seconds between two requests, for a server that breaks connections which arrive at once."""

    def __init__(self, config: "TrainConfig", eos_ids: Sequence[int]) -> None:
        """`eos_ids`: the tokens that end a completion."""
        self.config = config
        self.eos_ids = list(eos_ids)

    def lost(self, status: int, text: str) -> str:
        """Return why an answer means that the server has died, or has restarted without the
        adapter; "" if it does not.
        """
        return ""

    @abstractmethod
    async def look(self, server: Server) -> None:
        """Learn at the start what the server is: `facts["context"]`, the most tokens of a prompt
        and completion together, if it says so.

        `facts["text_alone"]` is the sentence why retrain cannot train on its completions. Raises
        ServerFailure or ConfigurationError in a sentence if it cannot do what the configuration
        asks for.
        """

    @abstractmethod
    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        """Return the path and the body that ask for `request.count` completions; `adapter` None is
        the base model.
        """

    @abstractmethod
    def read(self, answer: Any, request: SampleRequest) -> list[ServedSample]:
        """Read the completions of an answer, in any order. A LookupError, TypeError, ValueError or
        AttributeError means that it has another form, as in `look` and `load`. The engine then asks
        again. ServerMismatch means that no repetition would help.
        """

    @abstractmethod
    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        """Make the server serve the adapter; return once it does."""

    async def unload(self, server: Server, adapter: ServedAdapter) -> None:
        """Forget an adapter that nothing asks for any more."""

    async def adapters(self, server: Server) -> Mapping[str, str] | None:
        """Return names of the adapters that the server lists, with their folders; None if it has no
        such list.
        """
        return None

    async def sleep(self, server: Server) -> bool:
        """Give the GPU's memory back if the server offers it; True if it sleeps now."""
        return False

    async def wake(self, server: Server) -> None:
        """Undo `sleep`."""

    async def why_it_differs(self, server: Server) -> str:
        """See `InferenceEngine.why_it_differs`."""
        return ""


class ServedEngine(InferenceEngine):
    """Samples on the servers of `[inference] url`."""

    dialect_class: ClassVar[type[Dialect]]
    patience: ClassVar[Patience] = Patience()
    needs_address = True

    @classmethod
    def decides(cls, config: "TrainConfig") -> Mapping[str, str]:  # noqa: ARG003 - shared
        reason = "the running server has its own setting"
        if cls.default_port:
            reason += ", and `retrain serve` prints the command that starts it so"
        return {"kernels": reason}

    def __init__(
        self, config: "TrainConfig", *, model: Any, eos_ids: Sequence[int], device: Any
    ) -> None:
        """Connect. `model` gives only the size of its vocabulary and its context; `device` shows
        whether a server shares it.
        """
        text = model.config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        self._context = context_length(model.config)
        self._dialect = self.dialect_class(config, eos_ids)
        self._lines: deque[str] = deque()
        self._pool = ServerPool(
            self._dialect,
            prepare=self._prepare,
            log=self._lines.append,
            patience=self.patience,
        )
        self._turn = asyncio.Lock()
        self._room = asyncio.Semaphore(self._dialect.concurrency * len(self._pool.servers))
        self._run = f"retrain-{token_hex(4)}"
        self._folder = _own_folder(config)
        make_readable(self._folder)
        self._version = 0
        self._adapter: ServedAdapter | None = None
        self._may_sleep = getattr(device, "type", device) == "cuda"
        self.replicas = len(self._pool.servers)
        try:
            self._pool.run(self._pool.connect(self._look))
        # A signal too: no caller holds this engine yet, so none could close it.
        except BaseException:
            self.close()
            raise

    @classmethod
    def preflight(cls, config: "TrainConfig") -> str:
        dialect, ignored = cls.dialect_class(config, ()), list[str]()  # the engine itself says it
        pool = ServerPool(dialect, log=ignored.append, patience=cls.patience)
        try:
            pool.run(pool.connect(dialect.look))
            sentences = (server.facts.get("text_alone") for server in pool.alive)
            return next(filter(None, sentences), "")
        finally:
            pool.close()

    # -- sampling ----------------------------------------------------------------------------------

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        return self.sample_feed(RequestList(requests))

    def sample_feed(self, feed: RequestFeed) -> Iterator[Completion]:
        """Send every request to a server as soon as it exists: the servers batch the requests that
        they have.
        """
        given = 0
        under_way: set[Future[list[Completion]]] = set()
        done: SimpleQueue[Future[list[Completion]]] = SimpleQueue()
        try:
            while True:
                for request in feed.more(idle=not under_way):
                    for part in self._parts(request):
                        future = self._pool.start(self._complete(given, part))
                        under_way.add(future)
                        future.add_done_callback(done.put)
                    given += 1
                if not under_way:
                    return
                self._speak()
                self.check()
                with suppress(Empty):
                    future = done.get(timeout=_LOOK_S)
                    under_way.remove(future)
                    yield from future.result()
        finally:
            self._speak()
            self._heed_return()
            for future in under_way:
                future.cancel()  # the connection closes, and the server aborts

    def _parts(self, request: SampleRequest) -> list[SampleRequest]:
        """Return the request within the model's context, and one for each completion where a call
        samples one.
        """
        if request.adapter_slot not in (0, BASE_MODEL):
            raise ConfigurationError(
                f"{self._dialect.title} serves one adapter of a run, slot 0, and got"
                f" {request.adapter_slot}."
            )
        limited = replace(
            request, max_tokens=min(request.max_tokens, self._context - len(request.prompt_ids))
        )
        if self.capabilities.n:
            return [limited]
        return [
            replace(limited, count=1, first_sample=request.first_sample + number)
            for number in range(request.count)
        ]

    async def _complete(self, index: int, request: SampleRequest) -> list[Completion]:
        adapter = None if request.adapter_slot == BASE_MODEL else self._adapter
        assert request.adapter_slot == BASE_MODEL or adapter is not None, "sync comes before sample"

        async def one_try(server: Server) -> list[Completion]:
            context, prompt = server.facts.get("context"), len(request.prompt_ids)
            if context is not None and prompt + request.max_tokens > context:
                raise ServerFailure(
                    f"{self._dialect.title} {server.url} takes {context} tokens, and [training]"
                    f" max_tokens = {request.max_tokens} after a prompt of {prompt} needs"
                    f" {prompt + request.max_tokens}, so it would cut completions short. Start"
                    " it with more, or lower max_tokens."
                )
            path, body = self._dialect.call(request, adapter, server)
            return self._completions(index, request, server, await server.post(path, body))

        async with self._room:
            if self._dialect.spacing_s:
                async with self._turn:
                    await asyncio.sleep(self._dialect.spacing_s)
            return await self._pool.ask(one_try)

    def _completions(
        self, index: int, request: SampleRequest, server: Server, answer: Any
    ) -> list[Completion]:
        sampled = self._dialect.read(answer, request)
        if len(sampled) != request.count:
            raise AnswerFormError(
                f"returned {len(sampled)} completions for a request of {request.count}"
            )
        for one in sampled:
            # Text alone comes without ids and log-probs to check.
            if one.text is not None:
                continue
            damage = _damage(one)
            if damage:
                raise AnswerFormError(damage)
            problem = self._problem(one, request)
            if problem:
                raise ServerMismatch(problem)
        return [
            Completion(
                request=index,
                sample=request.first_sample + number,
                token_ids=np.array(one.token_ids, np.int32),
                logprobs=np.array(one.logprobs, np.float32),
                entropies=None,
                finish_reason=FinishReason.STOP if one.stopped else FinishReason.LENGTH,
                kept=None if one.kept is None else np.array(one.kept, np.int32),
                text=one.text,
                server=server.url,
            )
            for number, one in enumerate(sampled)
        ]

    def _problem(self, one: ServedSample, request: SampleRequest) -> str:
        """Return why the policy cannot have sampled this whole completion; "" if it can."""
        ids, eos = one.token_ids, set(self._dialect.eos_ids)
        truncated = request.truncation.active and request.temperature > 0
        outside = [token for token in ids if not 0 <= token < self._vocabulary]
        if outside:
            return (
                f"sampled token {outside[0]}, and the model has {self._vocabulary} tokens: it"
                " serves another model"
            )
        if eos.intersection(ids[:-1]) or (ids[-1] in eos) is not one.stopped:
            return (
                f"does not end completions at the model's end-of-sequence tokens {sorted(eos)}: it"
                " serves another model or tokenizer"
            )
        if len(ids) != request.max_tokens and (len(ids) > request.max_tokens or not one.stopped):
            if len(ids) > request.max_tokens:
                return (
                    f"returned {len(ids):,} tokens for a request of at most"
                    f" {request.max_tokens:,}: it ignores max_tokens"
                )
            return (
                f"cut a completion after {len(ids)} of {request.max_tokens} tokens; raise its"
                " longest sequence, or lower max_tokens"
            )
        if truncated and (one.kept is None or len(one.kept) != len(ids)):
            return "does not say how many tokens top_k, top_p and min_p kept; leave the three off"
        return ""

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for requests; pass on log lines and heed signals meanwhile."""
        future = self._pool.start(work)
        try:
            while True:
                self._speak()
                self.check()
                wait([future], timeout=_LOOK_S)
                if future.done():
                    return future.result()
        finally:
            future.cancel()

    def _heed_return(self) -> None:
        """Have the gate look at servers that woke up or came back."""
        self.unchecked |= self._pool.came_back
        self._pool.came_back = False

    def _speak(self) -> None:
        """Pass on the lines of the other thread."""
        while self._lines:
            self.log(self._lines.popleft())

    # -- the adapter -------------------------------------------------------------------------------

    def sync(self, save_adapter: Callable[[Path], None], step: int) -> None:
        self._version += 1
        fresh = ServedAdapter(
            f"{self._run}-{self._version}", self._folder / f"version-{self._version}"
        )
        save_adapter(fresh.folder)
        make_readable(fresh.folder)
        old, self._adapter = self._adapter, fresh
        self._await(self._pool.on_each(self._prepare))
        self._heed_return()
        if old is not None:
            self._await(self._pool.on_each(partial(self._unload, old)))
            shutil.rmtree(old.folder, ignore_errors=True)
        self._speak()

    async def _unload(self, adapter: ServedAdapter, server: Server) -> None:
        """Unload an adapter. A restarted server, or a server that another run asked first, does not
        know it.
        """
        with suppress(Refusal):
            await self._dialect.unload(server, adapter)

    async def _look(self, server: Server) -> None:
        """Look at the server, and unload adapters that a killed run left in it: it has few places,
        and nothing else would.
        """
        await self._dialect.look(server)
        refused = ", ".join(server.facts.get("refused_fields", ()))
        if refused and refused != server.facts.get("told_fields"):
            server.facts["told_fields"] = refused
            self._lines.append(
                f"{self._dialect.title} {server.url} does not take {refused}, so its own values"
                " of these apply. They must leave the distribution as it is."
            )
        for name, folder in (await self._dialect.adapters(server) or {}).items():
            if _owner_is_dead(Path(folder).parent):
                self._lines.append(
                    f"{self._dialect.title} {server.url} still had the adapter {name} of a"
                    " killed run; unloaded it."
                )
                await self._unload(ServedAdapter(name, Path(folder)), server)
        # Set it last: after a failure in between, the engine looks at the server again before it
        # serves.
        server.facts["looked"] = True

    async def _prepare(self, server: Server) -> None:
        """Wake a server and give it the current adapter, which its own list confirms."""
        if server.facts.pop("asleep", False):
            await self._dialect.wake(server)
            self._pool.came_back = True
        # A returning server may be another server.
        if "looked" not in server.facts:
            await self._look(server)
        given: ServedAdapter | None = None
        # The next version may come while a returning server loads this version.
        while (adapter := self._adapter) is not None and adapter is not given:
            await self._give(server, adapter)
            if given is not None:
                await self._unload(given, server)
            given = adapter

    async def _give(self, server: Server, adapter: ServedAdapter) -> None:
        try:
            await self._dialect.load(server, adapter)
        except Refusal as error:
            if any(words in str(error) for words in _UNSEEN):
                raise self._unseen(server, adapter, str(error)) from error
            raise
        listed = await self._dialect.adapters(server)
        # MAX's list has names alone.
        if listed is not None and listed.get(adapter.name) not in (str(adapter.folder), ""):
            raise ServerFailure(
                f"{self._dialect.title} {server.url} does not list the new adapter"
                f" {adapter.name} ({', '.join(listed)}); it would sample from another policy."
            )

    def _unseen(self, server: Server, adapter: ServedAdapter, said: str) -> ServerFailure:
        inference = self._dialect.config.inference
        key = "[inference] adapter_dir" if inference.adapter_dir else "[logging] log_dir"
        return ServerFailure(
            f"{self._dialect.title} {server.url} cannot read the adapter in {adapter.folder}"
            f" ({said}). Server and learner must both see {key} under this one path, and the"
            " server must have the right to read it. Mount it there, or name a folder that"
            " both see in [inference] adapter_dir."
        )

    # -- around the learning pass ------------------------------------------------------------------

    def sleep(self) -> None:
        async def one(server: Server) -> None:
            if not server.facts.get("asleep"):
                server.facts["asleep"] = await self._dialect.sleep(server)

        if self._may_sleep:
            self._pool.run(self._pool.on_each(one))

    def why_it_differs(self) -> str:
        return next(
            filter(None, self._pool.run(self._pool.on_each(self._dialect.why_it_differs)).values()),
            "",
        )

    def close(self) -> None:
        with suppress(ServerFailure):
            self._leave()
        self._pool.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _leave(self) -> None:
        """Leave the servers awake and without our adapter. No retries: the run may be ending
        because they are gone.
        """
        adapter, self._adapter = self._adapter, None

        async def one(server: Server) -> None:
            with suppress(TransientFailure, Refusal, RequestTimeout, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    if server.facts.pop("asleep", False):
                        await self._dialect.wake(server)
                    if adapter is not None:
                        await self._dialect.unload(server, adapter)

        if adapter is not None and self._pool.alive:
            self._pool.run(self._pool.on_each(one))


def _damage(one: ServedSample) -> str:
    """Name a defect that no model's completion can have; "" if there is none."""
    ids, values = one.token_ids, one.logprobs
    if not len(ids) == len(values) > 0:
        return f"returned {len(ids)} tokens with {len(values)} log-probs"
    others = [token for token in ids if type(token) is not int]
    if others:
        return f"returned {json.dumps(others[0])} as the id of a token, which is not an integer"
    wrong = [
        value
        for value in values
        if type(value) not in (float, int) or not _SMALLEST <= value <= _ROUNDING
    ]
    if wrong:
        return (
            f"returned a log-prob of {json.dumps(wrong[0])}, which no sampled token has; check"
            " its weights and its settings"
        )
    return ""


def has_stopped(reason: Any) -> bool:
    """Return True for a completion that ended at an EOS, False at the limit. Raises AnswerFormError
    for a completion that the server broke off. Raises ServerMismatch for any other reason: the
    cause may lie in the sampled text, and a repetition would bias the sample.
    """
    ended = f"ended a completion with finish_reason = {json.dumps(reason)}"
    if reason in _BROKEN_OFF:
        raise AnswerFormError(ended)
    if reason not in ("stop", "length"):
        raise ServerMismatch(
            f"{ended}, and not at its end-of-sequence token or at max_tokens. Switch off what"
            " ends completions by their content, such as a filter or a repetition check"
        )
    return bool(reason == "stop")


def check_prompt(seen: int, sent: int) -> None:
    """Raise ServerMismatch if the model received more or fewer prompt tokens than retrain sent, for
    example because a server added its own.
    """
    if seen != sent:
        raise ServerMismatch(f"got a prompt of {sent} tokens, which reached the model as {seen}")


def make_readable(folder: Path) -> None:
    """Make the folder readable by a server that runs as another user. The umask and mkdtemp's 0700
    would forbid it.
    """
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _own_folder(config: "TrainConfig") -> Path:
    """Make a folder for adapters in `[inference] adapter_dir`, or in the folder of the run, which
    servers on other machines are likely to see too. Also remove the folders there that a killed run
    left behind.

    Raises EnvironmentFailure if it cannot make the folder.
    """
    named, place = config.inference.adapter_dir, config.folder
    if named:
        place = Path(named)
    elif not os.access(place, os.W_OK):
        place = Path(gettempdir())
    try:
        place.mkdir(parents=True, exist_ok=True)
        folder = mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=place)
    except OSError as error:
        raise EnvironmentFailure(
            f"[inference] adapter_dir = {named!r} is not a usable folder ({error.strerror});"
            " name another one."
        ) from error
    for old in place.glob(f"{_FOLDER}*"):
        if _owner_is_dead(old):
            shutil.rmtree(old, ignore_errors=True)
    return Path(folder).resolve()


def _owner_is_dead(folder: Path) -> bool:
    """Return True if a process of this machine made this folder for its adapters and has ended."""
    made, _, rest = folder.name.partition(_FOLDER)
    owner = rest.partition("-")[0]
    return not made and owner.isdigit() and not psutil.pid_exists(int(owner))
