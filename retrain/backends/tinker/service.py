"""The connection to a Tinker service: its key, its address, its time limits, its errors as one
sentence each. It holds the campaign's throttle, and gives the service's adapter as a PEFT folder.

The SDK retries status 429, 5xx and lost connections by itself, for up to 300 s per call, so nothing
here tries a call again. SDK 0.38 has no call for an adapter's archive, and the hosted service hands
out none of sampler weights. SkyRL does, over HTTP: a gzipped tar with adapter_config.json and
adapter_model.safetensors.
"""

import gzip
import io
import json
import logging
import os
import random
import re
import shutil
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from retrain.config.stored import run_command
from retrain.errors import EnvironmentFailure, RetrainError, ServerFailure, first_line

if TYPE_CHECKING:
    import httpx

    from retrain.config import TrainConfig
    from retrain.config.schema import Backend


KEY = "TINKER_API_KEY"
_REACH_S = 10.0
_SESSION_S = 30.0
"""Seconds for opening a session; where another program answers, the SDK tries for 300."""
_CLOSE_S = 10.0
_POLL_S = 0.05


class Service:
    """One session of the SDK, and the campaign's throttle around its calls."""

    def __init__(self, config: "TrainConfig") -> None:
        """Open the session. Raises EnvironmentFailure without the SDK or the key, and where nothing
        answers.
        """
        base_url = config.model.base_url
        self.address = base_url or os.environ.get("TINKER_BASE_URL") or "its default address"
        self.timeout = config.backend.tinker.timeout_s
        throttle = throttle_of(config.backend)
        self.slot: Callable[[], AbstractContextManager[None]]
        self.slot = throttle.slot if throttle else nullcontext
        """A context that holds a place among the campaign's `max_concurrent` places."""
        self._folder = config.folder
        self._broken = ""
        # Read by the SDK, which reports usage by default.
        os.environ.setdefault("TINKER_TELEMETRY", "0")
        import httpx
        import tinker

        key = os.environ.get(KEY, "")
        if not key:
            raise EnvironmentFailure(
                f"{KEY} is not set, and Tinker at {self.address} asks for a key; set the"
                " variable, or add it to .env."
            )
        # They log what they then raise, and announce the end of calls that older services need.
        for name in ("retry_handler", "public_interfaces.training_client"):
            logging.getLogger(f"tinker.lib.{name}").setLevel(logging.CRITICAL)
        try:  # without a listener the SDK would try for minutes
            if base_url:
                httpx.get(base_url, timeout=_REACH_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EnvironmentFailure(
                f"Nothing answers at [model] base_url = {base_url!r} ({first_line(error)}); start"
                " the service there, or correct the address."
            ) from error

        def opened() -> Any:
            client = tinker.ServiceClient(base_url=base_url or None, api_key=key)
            client.holder  # noqa: B018 - opens the session, which the SDK would put off until the first call
            return client

        with self.answering("a session"):
            try:
                self.client: Any = in_thread(opened, _SESSION_S)
                """The SDK's ServiceClient."""
            except TimeoutError as error:
                raise EnvironmentFailure(
                    f"Tinker at {self.address} opened no session within {_SESSION_S:g} s, so"
                    f" another program may answer there. Check [model] base_url, and that {KEY} is"
                    " a key of that service (tml-...)."
                ) from error

    @contextmanager
    def answering(self, what: str, *, of_sampler: bool = False) -> Iterator[None]:
        """Turn the SDK's exceptions into EnvironmentFailure: one sentence that names the request,
        `what`.

        A refusal by the sampler (`of_sampler`) does not touch the learner, so it raises
        ServerFailure and retrain saves the run. After any other failure retrain makes no further
        call: the SDK refuses calls for the same learner, and a dead service would take minutes
        each.
        """
        if self._broken:
            raise EnvironmentFailure(self._broken)
        import tinker

        try:
            yield
        except RetrainError:
            raise
        except (tinker.TinkerError, TimeoutError, ValueError, RuntimeError, OSError) as error:
            problem = f"Tinker at {self.address} {_reason(error, self.timeout)} (asked for {what})"
            if of_sampler and isinstance(error, tinker.APIStatusError):
                raise ServerFailure(f"{problem}.") from error
            stored = (self._folder / "config.toml").is_file()
            advice = f"; continue with `{run_command(self._folder)}`" if stored else ""
            self._broken = f"{problem}{advice}."
            raise EnvironmentFailure(self._broken) from error

    def result(self, what: str, ask: Callable[[], Any]) -> Any:
        """Ask for something, or for the answer under way, an APIFuture of the SDK, and wait for it.
        Raises EnvironmentFailure.
        """
        with self.answering(what):
            return ask().result(timeout=self.timeout)

    def close(self) -> None:
        """End the session, so that the service gives its adapter's place to another."""
        import tinker

        client, self.client = self.client, None
        if client is not None and not self._broken:
            # The session also ends by itself.
            with suppress(tinker.TinkerError, TimeoutError, RuntimeError, OSError):
                client.close("success").result(timeout=_CLOSE_S)


def in_thread(call: Callable[[], Any], seconds: float) -> Any:
    """Make a call that has no limit of its own. Raises TimeoutError after `seconds`, and what the
    call raises.
    """
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised again where the answer is waited for
            answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    end = time.monotonic() + seconds
    # Wait in short steps: a signal's handler runs between them, whichever thread got the signal.
    while not answer.done() and time.monotonic() < end:
        wait([answer], timeout=_POLL_S)
    return answer.result(timeout=0)


def _reason(error: BaseException, seconds: float) -> str:
    """Return the middle of a sentence that begins with the service."""
    import tinker

    status, body = getattr(error, "status_code", 0), getattr(error, "body", None)
    if status in (401, 403):
        return f"refused the key in {KEY} ({status})"
    if 400 <= status < 500 and status != 429:
        refusal = "asks for payment" if status == 402 else "refused the request"
        # the service's own sentence, without the SDK's words around it
        detail = body.get("detail") if isinstance(body, dict) else ""
        return f"{refusal} ({status}: {detail or first_line(error)})"
    if status:
        return f"failed ({status}) and failed again whenever the SDK tried for 300 s"
    if isinstance(error, tinker.APIConnectionError):
        return "does not answer, however often the SDK tried"
    if isinstance(error, TimeoutError):
        return f"gave no answer within {seconds:g} s ([backend.options] timeout_s)"
    return f"failed: {first_line(error)}"


# -- the campaign's throttle -----------------------------------------------------------------------


@dataclass(frozen=True)
class Throttle:
    """At most `limit` calls at a time over every process and thread that names the same folder. Any
    thread may call it.

    A counting semaphore of file locks, one file per slot. The kernel releases a lock when its
    holder dies, so even a killed worker keeps no slot.
    """

    folder: Path
    limit: int

    @contextmanager
    def slot(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        # Each holder begins elsewhere, and waits for a while of its own: else all would ask for the
        # same slot at the same moments.
        numbers = random.sample(range(self.limit), self.limit)
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            for number in numbers:
                file = FileLock(self.folder / f"slot_{number:03d}.lock", thread_local=False)
                try:
                    lock = file.acquire(blocking=False)
                except Timeout:
                    continue
                with lock:
                    yield
                return
            time.sleep(_POLL_S * (0.5 + random.random()))


def throttle_of(backend: "Backend") -> Throttle | None:
    """Return the campaign's throttle, in the folder `[backend] throttle_dir`; None for a run of its
    own.
    """
    folder = backend.throttle_dir
    return Throttle(Path(folder), backend.max_concurrent) if folder else None


# -- adapters handed out ---------------------------------------------------------------------------


_PART = r"(?!\.{1,2}(?:/|$))[^/]+"
_PATH = re.compile(f"tinker://({_PART})/(?:sampler_weights/|weights/)?({_PART})")
_ADAPTED = re.compile(r"(?:.*\.)?([^.]+)\.lora_[AB]\.weight")
_REDIRECTS = 3
_FILES = {"adapter_config.json": 1 << 20, "adapter_model.safetensors": 32 << 30}
"""Name -> most bytes."""
_MAX_BYTES = sum(_FILES.values())
"""Bytes of the archive, packed and unpacked: a service must not fill the disk."""
_MAX_AT_ONCE = 1 << 20
"""Bytes. tarfile reads a file's long name into memory at its declared length, without a limit."""
_MAX_MEMBERS = 1000
"""Maximum number of files in an archive: an archive of empty files could hold millions."""


def download_adapter(base_url: str, path: str, folder: Path, timeout: float) -> None:
    """Write the two files of a PEFT adapter into `folder`. Raises EnvironmentFailure, one sentence,
    if the service offers none.
    """
    found = _PATH.fullmatch(path)
    address = base_url or os.environ.get("TINKER_BASE_URL", "")
    if not found:
        raise EnvironmentFailure(
            f"{path} is not a path of a Tinker service (tinker://RUN/sampler_weights/NAME)."
        )
    if not address:
        raise EnvironmentFailure(
            "the hosted service does not offer adapter files for download; the SDK's `tinker"
            " checkpoint` commands manage them."
        )
    run, name = (quote(part, safe="") for part in found.groups())
    with TemporaryFile() as archive:
        _fetch(
            f"{address.rstrip('/')}/api/v1/training_runs/{run}/checkpoints/{name}/archive",
            timeout,
            archive,
        )
        archive.seek(0)
        _unpack(archive, path, folder)


def _fetch(url: str, timeout: float, into: IO[bytes]) -> None:
    """Download into `into`; `timeout` bounds the whole download."""
    import httpx

    from retrain.web import key_from

    key = {"X-API-Key": key_from("TINKER_API_KEY")}
    ends, service, address = time.monotonic() + timeout, _origin(httpx.URL(url)), httpx.URL(url)
    try:
        with httpx.Client(timeout=timeout) as client:
            for _ in range(1 + _REDIRECTS):
                # The key is for the service alone, and not for the store that it sends us to.
                with client.stream(
                    "GET", address, headers=key if _origin(address) == service else {}
                ) as answer:
                    if answer.next_request is not None:
                        address = answer.next_request.url
                        continue
                    if answer.status_code != 200:
                        raise EnvironmentFailure(
                            "this service offers no archive of the adapter (status"
                            f" {answer.status_code})."
                        )
                    for part in answer.iter_bytes():
                        into.write(part)
                        if into.tell() > _MAX_BYTES:
                            raise EnvironmentFailure(
                                f"its archive is larger than {_MAX_BYTES >> 30} GiB, more than any"
                                " adapter."
                            )
                        if time.monotonic() > ends:
                            raise EnvironmentFailure(
                                f"its archive did not arrive within {timeout:g} s."
                            )
                    return
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EnvironmentFailure(f"its archive did not arrive ({first_line(error)}).") from error
    raise EnvironmentFailure(f"its archive did not arrive (more than {_REDIRECTS} redirections).")


def _origin(url: "httpx.URL") -> tuple[str, bytes]:
    return url.scheme, url.netloc


def _unpack(content: IO[bytes], path: str, folder: Path) -> None:
    """Unpack only the two files, to our own paths. Other entries, links and sparse files stay
    packed.
    """
    from safetensors import SafetensorError

    missing, unpacked = set(_FILES), 0
    try:
        with (
            # Unzipped outside of tarfile, so that `_HeaderReader` sees how long each header is.
            gzip.open(content) as plain,
            tarfile.open(fileobj=_HeaderReader(plain), mode="r:") as archive,
        ):
            for number, member in enumerate(archive):
                if number == _MAX_MEMBERS:
                    raise ValueError(f"more than {_MAX_MEMBERS} files")
                name, unpacked = Path(member.name).name, unpacked + member.size
                if unpacked > _MAX_BYTES or member.size > _FILES.get(name, _MAX_BYTES):
                    raise ValueError(f"{name} has {member.size} bytes")
                whole = name in missing and member.isreg() and not member.issparse()
                if whole and (source := archive.extractfile(member)):
                    with source, (folder / name).open("wb") as file:
                        shutil.copyfileobj(source, file)
                    missing.remove(name)
        if missing:
            raise ValueError(f"no {min(missing)}")
        _name_target_modules(folder)
    except (
        tarfile.TarError,
        zlib.error,
        EOFError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise EnvironmentFailure(
            f"the archive of {path} holds no adapter ({type(error).__name__}: {first_line(error)})."
        ) from error


class _HeaderReader(io.BufferedReader):
    """A file that refuses to read more than a header at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MAX_AT_ONCE:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)


def _name_target_modules(folder: Path) -> None:
    """Name the target modules, as the weights show them. SkyRL leaves target_modules null, for
    which peft would take its own default.
    """
    from safetensors import safe_open

    path = folder / "adapter_config.json"
    settings = json.loads(path.read_bytes())
    if not isinstance(settings, dict):
        raise TypeError("adapter_config.json holds no object")
    if settings.get("target_modules"):
        return
    with safe_open(folder / "adapter_model.safetensors", framework="numpy") as weights:
        names = filter(None, map(_ADAPTED.fullmatch, weights.keys()))
        settings["target_modules"] = sorted({found[1] for found in names})
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
