"""An adapter that a Tinker service hands out, as a PEFT folder.

SDK 0.38 has no call for it, and the hosted service hands out no archives of sampler weights. SkyRL does, over HTTP: a gzipped tar with
adapter_config.json and adapter_model.safetensors.
"""

import io
import os
import re
import tarfile
from pathlib import Path

from retrain.errors import EnvironmentFailure, first_line

_PATH = re.compile(r"tinker://(?P<run>[^/]+)/(?:sampler_weights/|weights/)?(?P<name>[^/]+)")
_REDIRECTS = 3
_FILES = ("adapter_config.json", "adapter_model.safetensors")


def download_adapter(base_url: str, path: str, folder: Path, timeout: float) -> None:
    """Write the two files of a PEFT adapter into `folder`. Raises EnvironmentFailure, one sentence, where the service offers none."""
    found = _PATH.fullmatch(path)
    address = base_url or os.environ.get("TINKER_BASE_URL", "")
    if not found:
        raise EnvironmentFailure(f"{path} is no path of a Tinker service (tinker://RUN/sampler_weights/NAME).")
    if not address:
        raise EnvironmentFailure("the hosted service hands out no adapter files; the SDK's `tinker checkpoint` commands manage them.")
    content = _fetch(f"{address.rstrip('/')}/api/v1/training_runs/{found['run']}/checkpoints/{found['name']}/archive", timeout)
    _unpack(content, path, folder)


def _fetch(url: str, timeout: float) -> bytes:
    import httpx

    key = {"X-API-Key": os.environ.get("TINKER_API_KEY", "")}
    try:
        answer = httpx.get(url, timeout=timeout, headers=key)
        for _ in range(_REDIRECTS):
            if answer.next_request is None:
                break
            target = answer.next_request.url  # the key is for the service alone, and not for the store that it sends us to
            answer = httpx.get(target, timeout=timeout, headers=key if target.host == httpx.URL(url).host else {})
    except httpx.HTTPError as error:
        raise EnvironmentFailure(f"its archive could not be fetched ({first_line(error)}).") from error
    if answer.status_code != 200:
        raise EnvironmentFailure(f"this service offers no archive of it (status {answer.status_code}).")
    return answer.content


def _unpack(content: bytes, path: str, folder: Path) -> None:
    """Only the two files, whatever else the archive holds and wherever it wants to put it."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            members = {Path(member.name).name: member for member in archive.getmembers() if member.isfile()}
            for name in _FILES:
                source = archive.extractfile(members[name])
                assert source is not None  # it is a file
                (folder / name).write_bytes(source.read())
    except (tarfile.TarError, EOFError, KeyError, OSError) as error:
        raise EnvironmentFailure(f"the archive of {path} holds no adapter ({type(error).__name__}: {first_line(error)}).") from error
