"""Servers that several files share: each start of vLLM takes half a minute on two quiet cores."""

from collections.abc import Iterator

import pytest
from real_servers import Printed, RealServer, ended, started


@pytest.fixture(scope="session")
def vllm() -> Iterator[RealServer]:
    """The lab model, as scripts/servers/vllm-start.sh starts it. No test ends it or leaves an
    adapter in it.
    """
    with started("vllm") as (one,):
        yield one


@pytest.fixture(scope="session")
def printed_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Printed]:
    """One test ends it, the last one."""
    with ended(Printed("vllm", tmp_path_factory.mktemp("printed"))) as one:
        yield one
