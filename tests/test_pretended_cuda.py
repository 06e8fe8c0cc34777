"""The pretended device refuses what a GPU would refuse, and a replayed graph reads its buffers
anew.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from pretended_cuda import Graph, pretended
from torch import Tensor

from retrain.backends.local.backend import _deterministic


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended(monkeypatch, devices=2):
        yield


def test_tensors_are_on_the_device_and_so_are_their_gradients() -> None:
    weight, factor = (
        torch.ones(2, 3, device="cuda:0", requires_grad=True),
        torch.arange(3.0).to("cuda:0"),
    )
    (weight * factor).sum().backward()
    assert weight.grad is not None
    assert weight.grad.device.type == "cuda"
    assert weight.grad.tolist() == [[0, 1, 2]] * 2
    assert factor.to("cuda:0") is factor and factor.cpu().numpy().tolist() == [0, 1, 2]


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_two_devices_in_one_operator_are_refused_and_copies_are_not(other: str) -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.zeros(3, device=other)
    with pytest.raises(RuntimeError, match="two devices"):
        here + there
    assert there.copy_(here).device == torch.device(other)
    assert there.tolist() == [1, 1, 1]
    assert there.to("cuda:0").device == here.device


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.add_(torch.ones(3).to("cuda:0")),
        lambda x: x[torch.tensor([0])],
        lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
    ],
)  # fmt: skip
def test_a_captured_step_may_not_touch_the_host(reads: object) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="captured"), Graph().captured():
        reads(x)  # type: ignore[operator]


def test_a_graph_runs_when_it_is_replayed_and_on_what_its_buffers_hold_then() -> None:
    buffer, total, graph = torch.ones(3, device="cuda"), torch.zeros(1, device="cuda"), Graph()
    with graph.captured():
        doubled = buffer * 2
        total.add_(doubled.sum())
    assert total.item() == 0 and doubled.isnan().all().item()
    for value, expected in ((1.0, 6.0), (10.0, 66.0)):
        buffer.fill_(value)
        graph.replay()
        assert total.item() == expected


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.cumsum(0), lambda x: x.histc(3), lambda x: x.kthvalue(1), lambda x: x.median(0),
        lambda x: x.long().bincount(x), lambda x: x.put_(x.long(), x.clone()),
        lambda x: x.scatter_reduce(0, x.long(), x, "prod"),
    ],
)  # fmt: skip
def test_what_has_no_deterministic_form_on_a_gpu_is_refused_while_it_is_asked_for(
    compute: Callable[[Tensor], object],
) -> None:
    compute(torch.ones(3, device="cuda"))
    with (
        _deterministic(torch.device("cuda")),
        pytest.raises(RuntimeError, match="no deterministic implementation"),
    ):
        compute(torch.ones(3, device="cuda"))


def test_deterministic_forms_are_not_refused() -> None:
    x = torch.ones(3, device="cuda")
    with _deterministic(torch.device("cuda")):
        assert x.long().cumsum(0).tolist() == [1, 2, 3]
        assert (
            x.median().item(),
            x.long().bincount().tolist(),
            x.scatter_reduce(0, x.long(), x, "sum").tolist(),
        ) == (1, [0, 3], [1, 4, 1])
