"""A decoding step can be captured as a graph: it reads nothing back, its shapes and addresses never
change, and torch traces it whole.
"""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrain.backends.local.backend import _deterministic
from retrain.inference_engine.base import BASE_MODEL
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.fixed_step import Variant
from retrain.inference_engine.paged_run import PagedEngine, PagedRun
from retrain.inference_engine.rows import SampleJob
from retrain.model import functions, truncation
from retrain.model.budget import DecodeLimits
from retrain.model.varlen import PagedRows, Spans, plain_paged
from tests.decoding import EOS, requests, tiny, with_adapter
from tests.plain_attention import plain

PLAIN = Variant(greedy=False, truncated=False, adapted=True)
VARIANTS = {
    "plain": PLAIN,
    "greedy": PLAIN._replace(greedy=True),
    "truncated": PLAIN._replace(truncated=True),
    "base model": Variant(greedy=True, truncated=True, adapted=False),
}
HOST_READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "is_nonzero",
    "equal",
}


def started(rows: int = 5) -> tuple[PagedRun, PagedEngine, Decoder]:
    """An engine whose rows have drawn their first tokens."""
    decoder = Decoder(with_adapter(tiny()), False)
    engine = PagedEngine(decoder, DecodeLimits(8, 2000), np.array(EOS), 200, 8, keeps_prompts=True)
    jobs = [
        SampleJob(0, request, sample, 150)
        for request in requests(count=2, many=3)
        for sample in range(2)
    ][:rows]
    run = PagedRun(decoder, jobs, engine)
    with decoder.sampling(0):
        run.admit()
        run.grow()
        for row in run.running:
            row.pages += engine.pool.take(16 - len(row.pages))
        run.buffers.put(run.running, block_table=run.buffers.pages_of(run.running))
    return run, engine, decoder


class Lint(TorchDispatchMode):
    """Fails where the host would wait or a tensor would change its device, and notes every
    operator's shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self.sums_of_floats = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        assert name not in HOST_READS, f"{name} makes the host wait"
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, (tuple, list)) else [result]
        outputs = [tensor for tensor in several if isinstance(tensor, Tensor)]
        if name in ("_to_copy", "copy_"):
            touched = (*outputs, args[0], *args[1:2])
            assert len({one.device for one in touched if isinstance(one, Tensor)}) == 1
        self.sums_of_floats |= name == "cumsum" and outputs[0].is_floating_point()
        self.calls.append((name, tuple(tuple(tensor.shape) for tensor in outputs)))
        return result


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_waits_for_nothing_and_has_the_same_shapes_at_every_length(variant: str) -> None:
    run, engine, decoder = started()
    with decoder.sampling(0 if VARIANTS[variant].adapted else BASE_MODEL):
        seen = []
        for _ in range(20):  # past a page's end
            with Lint() as lint:
                engine.step.step(8, VARIANTS[variant])
            seen.append(lint.calls)
    assert all(calls == seen[0] for calls in seen)
    assert int(run.buffers.position.max()) > 20


def test_no_buffer_moves_while_rows_come_and_go() -> None:
    decoder = Decoder(tiny(), False)
    engine = PagedEngine(decoder, DecodeLimits(4, 2000), np.array(EOS), 200, 8, keeps_prompts=True)
    held = [
        *engine.buffers.of_rows.values(),
        engine.step.drawn,
        *engine.pool.keys,
        *engine.pool.values,
    ]
    before = [tensor.data_ptr() for tensor in held]
    run = PagedRun(
        decoder,
        [SampleJob(0, request, sample, 60) for request in requests(count=4) for sample in range(4)],
        engine,
    )
    with decoder.sampling(0):
        while run.unfinished:
            run.advance()
    after = [
        *engine.buffers.of_rows.values(),
        engine.step.drawn,
        *engine.pool.keys,
        *engine.pool.values,
    ]
    assert [tensor.data_ptr() for tensor in after] == before


@pytest.mark.slow
def test_torch_traces_a_step_without_a_break() -> None:
    run, engine, decoder = started()
    with decoder.sampling(0), torch.no_grad():
        state = {name: buffer.clone() for name, buffer in run.buffers.of_rows.items()}
        engine.step.step(8, VARIANTS["greedy"])
        expected = engine.step.drawn.clone()
        for name, values in state.items():
            getattr(run.buffers, name).copy_(values)
        torch.compile(engine.step.step, fullgraph=True, backend="eager")(8, VARIANTS["greedy"])
    assert torch.equal(engine.step.drawn[:, 0], expected[:, 0])
    torch.testing.assert_close(engine.step.drawn.float(), expected.float())


def test_a_row_computes_the_same_bits_whatever_its_neighbors() -> None:
    """On a processor, in one bucket; and a row that is done changes nothing of its own state."""
    run, engine, decoder = started(rows=5)
    with decoder.sampling(0):
        state = {name: buffer.clone() for name, buffer in run.buffers.of_rows.items()}
        engine.step.step(8, PLAIN)
        together = engine.step.drawn.clone()
        for name, values in state.items():
            getattr(run.buffers, name).copy_(values)
        run.buffers.stop(np.array([0, 2, 3, 4]))
        engine.step.step(8, PLAIN)
    assert torch.equal(engine.step.drawn[1], together[1])
    for name in ("token", "position", "sampled"):
        assert torch.equal(getattr(run.buffers, name)[2], state[name][2])


def test_a_step_in_split_mode_has_no_operator_that_the_learner_makes_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learner's flag is the process's. torch says which operators raise under it on CUDA; on a
    processor they do not.
    """
    monkeypatch.setattr(truncation, "BY_PRODUCT", {"cpu"})
    manual = " ".join((torch.use_deterministic_algorithms.__doc__ or "").split())
    refused = set(
        re.findall(
            r"torch\.(?:Tensor\.)?(\w+)`",
            manual.partition("operations will throw a :class:`RuntimeError`")[2],
        )
    )
    assert {"put_", "histc", "cumsum"} <= refused
    _, engine, decoder = started()
    with decoder.sampling(0), _deterministic(torch.device("cuda")), Lint() as lint:
        engine.step.step(8, PLAIN._replace(greedy=True, truncated=True))
    called = {name for name, shapes in lint.calls} & refused
    assert called <= {"cumsum"}
    assert not lint.sums_of_floats, "torch has a deterministic cumsum of integers only"


def test_operators_of_a_step_are_counted() -> None:
    """What a GPU launches at least: operators that compute, views left out."""
    _, engine, decoder = started()
    views = {
        "view",
        "_unsafe_view",
        "slice",
        "select",
        "transpose",
        "t",
        "expand",
        "unsqueeze",
        "squeeze",
        "permute",
        "alias",
        "detach",
    }
    views |= {
        "as_strided",
        "split",
        "split_with_sizes",
        "chunk",
        "reshape",
        "_reshape_alias",
        "unbind",
    }
    with decoder.sampling(0), Lint() as lint:
        engine.step.step(8, PLAIN)
    computing = Counter(name for name, _ in lint.calls if name not in views)
    layers = 3
    assert sum(computing.values()) < 75 * layers + 80, computing


def test_the_norm_of_a_sampler_in_one_kernel_is_the_learners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same two roundings: of x times its scale, and of that times the weight."""
    norm, x = functions.Norm(torch.randn(576).bfloat16(), 1e-6), torch.randn(400, 576).bfloat16()
    with torch.no_grad():
        expected = functions.normed(x, norm)
        monkeypatch.setattr(functions, "_FUSED_NORM", {"cpu"})
        found = functions.normed(x, norm)
    assert (found != expected).float().mean() < 0.02, "the scale itself may differ in its last bit"
    assert torch.equal(functions.normed(x.requires_grad_(), norm), found), "old log-probs differ"
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


def test_pages_of_a_window_are_those_of_the_kernels_definition() -> None:
    """The oracle of decoding over pages is the oracle of packed rows, row by row."""
    keys, values = torch.randn(9, 4, 2, 8), torch.randn(9, 4, 2, 8)
    table, lengths = (
        torch.tensor([[3, 7, 1], [2, 5, 0]], dtype=torch.int32),
        torch.tensor([10, 5], dtype=torch.int32),
    )
    query = torch.randn(2, 6, 8)
    for window in (None, 3):
        found = plain_paged(query, keys, values, PagedRows.of(table, lengths, 4), 0.3, window)
        for row, length in enumerate(lengths.tolist()):
            k, v = (stored[table[row].long()].flatten(0, 1)[:length] for stored in (keys, values))
            alone = plain(
                query[row : row + 1],
                k,
                v,
                Spans.of([1], [length], torch.device("cpu")),
                0.3,
                window,
            )
            torch.testing.assert_close(found[row], alone[0])
