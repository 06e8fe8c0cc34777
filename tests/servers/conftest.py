"""Servers that several files share: each start of vLLM takes half a minute on two quiet cores.

`make test-servers` runs two groups of files at the same time, so that no server starts twice.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_servers import Printed, RealServer, ended, started

_HERE = Path(__file__).parent
_BESIDE_VLLM = {"test_installs.py", "test_mlx.py", "test_tinker.py"}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE:
            item.add_marker(pytest.mark.xdist_group("others" if item.path.name in _BESIDE_VLLM else "vllm"))


@pytest.fixture(scope="session")
def vllm() -> Iterator[RealServer]:
    """The lab model, as scripts/servers/vllm-start.sh starts it. No test ends it or leaves an adapter in it."""
    with started("vllm") as (one,):
        yield one


@pytest.fixture(scope="session")
def printed_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Printed]:
    """One test ends it, the last one."""
    with ended(Printed("vllm", tmp_path_factory.mktemp("printed"))) as one:
        yield one
