"""An adapter that a Tinker service hands out, as a PEFT folder.

SDK 0.38 has no call for it, and the hosted service hands out no archives of sampler weights. SkyRL
does, over HTTP: a gzipped tar with adapter_config.json and adapter_model.safetensors.
"""

import gzip
import io
import json
import os
import re
import shutil
import tarfile
import time
import zlib
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from retrain.errors import EnvironmentFailure, first_line

if TYPE_CHECKING:
    import httpx

_PATH = re.compile(r"tinker://(?P<run>[^/]+)/(?:sampler_weights/|weights/)?(?P<name>[^/]+)")
_ADAPTED = re.compile(r"(?:.*\.)?([^.]+)\.lora_[AB]\.weight")
_REDIRECTS = 3
_FILES = {"adapter_config.json": 1 << 20, "adapter_model.safetensors": 32 << 30}
"""Name -> most bytes."""
_MAX_BYTES = sum(_FILES.values())
"""Bytes of the archive, packed and unpacked: a service must not fill the disk."""
_MAX_AT_ONCE = 1 << 20
"""Bytes. tarfile reads a file's long name into memory at its declared length, without a limit."""
_MAX_MEMBERS = 1000
"""Files in an archive: one of nothing but empty files would have millions."""


def download_adapter(base_url: str, path: str, folder: Path, timeout: float) -> None:
    """Write the two files of a PEFT adapter into `folder`. Raises EnvironmentFailure, one sentence,
    where the service offers none.
    """
    found = _PATH.fullmatch(path)
    address = base_url or os.environ.get("TINKER_BASE_URL", "")
    if not found or {found["run"], found["name"]} & {".", ".."}:
        raise EnvironmentFailure(
            f"{path} is not a path of a Tinker service (tinker://RUN/sampler_weights/NAME)."
        )
    if not address:
        raise EnvironmentFailure(
            "the hosted service does not offer adapter files for download; the SDK's `tinker"
            " checkpoint` commands manage them."
        )
    run, name = (quote(found[part], safe="") for part in ("run", "name"))
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
        raise EnvironmentFailure(
            f"its archive could not be fetched ({first_line(error)})."
        ) from error
    raise EnvironmentFailure(
        f"its archive could not be fetched (more than {_REDIRECTS} redirections)."
    )


def _origin(url: "httpx.URL") -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _unpack(content: IO[bytes], path: str, folder: Path) -> None:
    """Unpack only the two files, to our own paths; other entries, links and sparse files are
    skipped.
    """
    from safetensors import SafetensorError

    missing, unpacked = set(_FILES), 0
    try:
        with (
            gzip.open(content) as plain,
            tarfile.open(fileobj=_Bounded(plain), mode="r:") as archive,
        ):
            for number, member in enumerate(archive):
                if number == _MAX_MEMBERS:
                    raise ValueError(f"more than {_MAX_MEMBERS} files")
                name, unpacked = Path(member.name).name, unpacked + member.size
                if unpacked > _MAX_BYTES or member.size > _FILES.get(name, _MAX_BYTES):
                    raise ValueError(f"{name} has {member.size} bytes")
                source = None
                if member.isreg() and not member.issparse() and name in missing:
                    source = archive.extractfile(member)
                if source is not None:
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


class _Bounded(io.BufferedReader):
    """A file of which little is read at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MAX_AT_ONCE:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)


def _name_target_modules(folder: Path) -> None:
    """Name the target modules: SkyRL leaves target_modules null, for which peft would take its own
    default; the weights say which modules are adapted.
    """
    from safetensors import safe_open

    path = folder / "adapter_config.json"
    settings = json.loads(path.read_bytes())
    if not isinstance(settings, dict):
        raise TypeError("adapter_config.json holds no object")
    if settings.get("target_modules"):
        return
    with safe_open(folder / "adapter_model.safetensors", framework="numpy") as weights:
        names = {_ADAPTED.fullmatch(name) for name in weights.keys()}  # noqa: SIM118 - no mapping
    settings["target_modules"] = sorted({found[1] for found in names if found})
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
