"""The pretended device refuses what a GPU would refuse, and a replayed graph reads its buffers anew."""

from collections.abc import Iterator

import pytest
import torch
from pretended_cuda import Graph, pretended


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended(monkeypatch, devices=2):
        yield


def test_tensors_are_on_the_device_and_so_are_their_gradients() -> None:
    weight, factor = torch.ones(2, 3, device="cuda:0", requires_grad=True), torch.arange(3.0).to("cuda:0")
    (weight * factor).sum().backward()
    assert weight.grad is not None and weight.grad.device.type == "cuda" and weight.grad.tolist() == [[0, 1, 2]] * 2
    assert factor.to("cuda:0") is factor and factor.cpu().numpy().tolist() == [0, 1, 2]


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_two_devices_in_one_operator_are_refused_and_copies_are_not(other: str) -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.zeros(3, device=other)
    with pytest.raises(RuntimeError, match="two devices"):
        here + there
    assert there.copy_(here).device == torch.device(other) and there.tolist() == [1, 1, 1] and there.to("cuda:0").device == here.device


@pytest.mark.parametrize(
    "reads", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.add_(torch.ones(3).to("cuda:0")), lambda x: x[torch.tensor([0])]]
)
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
