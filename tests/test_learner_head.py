"""The chunked head: the full head's values and gradients, without [tokens, vocabulary]."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from retrain.errors import ConfigurationError
from retrain.model.head import Head, score_tokens
from retrain.model.load import find_head


def full_head(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything at once, through autograd, in float64."""
    logits = hidden @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    distribution = torch.log_softmax(logits / temperature, -1)
    return distribution[torch.arange(len(targets)), targets], -(
        distribution.exp() * distribution
    ).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 23),
    rows_per_chunk=st.integers(1, 9),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_chunked_head_equals_the_full_head(
    tokens: int,
    rows_per_chunk: int,
    temperature: float,
    scale: float,
    softcap: float | None,
    bias: bool,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight, hidden = torch.randn(37, 8, generator=draw), torch.randn(tokens, 8, generator=draw)
    head = Head(weight, torch.randn(37, generator=draw) if bias else None, scale, softcap)
    targets = torch.randint(0, 37, (tokens,), generator=draw)
    factors = torch.randn(2, tokens, generator=draw)

    ours = hidden.clone().requires_grad_()
    scores = score_tokens(
        head, ours, targets, temperature, entropy=True, chunk_bytes=4 * 37 * rows_per_chunk
    )
    assert scores.entropies is not None
    (factors[0] * scores.logprobs + factors[1] * scores.entropies).sum().backward()

    theirs = hidden.double().requires_grad_()
    logprobs, entropies = full_head(head, theirs, targets, temperature)
    (factors[0] * logprobs + factors[1] * entropies).sum().backward()

    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(scores.logprobs.double(), logprobs, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(scores.entropies.double(), entropies, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        ours.grad.double(), theirs.grad, atol=2e-3 * float(theirs.grad.abs().max() + 1), rtol=1e-3
    )


class LargestLogits(TorchDispatchMode):
    """Rows of the largest tensor whose last dimension is the vocabulary, over everything that runs
    inside.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and result.dim()
            and result.shape[-1] == self.vocabulary
        ):
            self.rows = max(self.rows, result.numel() // self.vocabulary)
        return result


def test_no_tensor_of_logits_is_larger_than_a_chunk_in_either_direction() -> None:
    vocabulary, tokens = 101, 64
    head = Head(torch.randn(vocabulary, 3))
    hidden = torch.randn(tokens, 3, requires_grad=True)
    with LargestLogits(vocabulary) as seen:
        scores = score_tokens(
            head,
            hidden,
            torch.zeros(tokens, dtype=torch.int64),
            0.7,
            entropy=True,
            chunk_bytes=4 * vocabulary * 5,
        )
        assert scores.entropies is not None
        (scores.logprobs + scores.entropies).sum().backward()
    assert seen.rows == 5


def test_nothing_as_wide_as_the_vocabulary_is_kept_for_backward() -> None:
    kept: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    hidden = torch.randn(16, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        score_tokens(
            Head(torch.randn(101, 8)), hidden, torch.zeros(16, dtype=torch.int64), 1.0, entropy=True
        )
    assert kept and all(101 not in shape for shape in kept)


@pytest.mark.parametrize("trained", [False, True])
def test_a_head_gets_a_gradient_where_it_is_trained(trained: bool) -> None:
    weight = torch.randn(11, 4, requires_grad=trained)
    hidden = torch.randn(3, 4, requires_grad=True)
    targets = torch.tensor([1, 2, 3])
    score_tokens(Head(weight), hidden, targets, 1.0, chunk_bytes=88).logprobs.sum().backward()
    assert hidden.grad is not None and (weight.grad is not None) == trained
    if weight.grad is not None:
        own = weight.detach().double().requires_grad_()
        logprobs = torch.log_softmax(hidden.detach().double() @ own.T, -1)
        logprobs.gather(1, targets[:, None]).sum().backward()
        torch.testing.assert_close(weight.grad.double(), own.grad, rtol=1e-5, atol=1e-6)


def test_entropy_of_a_certain_token_is_zero_and_its_gradient_finite() -> None:
    weight = torch.zeros(5, 2)
    weight[3] = 1e4
    hidden = torch.ones(1, 2, requires_grad=True)
    scores = score_tokens(Head(weight), hidden, torch.tensor([3]), 0.5, entropy=True)
    assert scores.entropies is not None
    (scores.entropies + scores.logprobs).sum().backward()
    assert scores.entropies.item() == 0
    assert hidden.grad is not None and bool(torch.isfinite(hidden.grad).all())


def test_greedy_has_no_log_probs_to_train() -> None:
    with pytest.raises(ValueError, match="above 0"):
        score_tokens(Head(torch.randn(5, 2)), torch.randn(1, 2), torch.tensor([0]), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cap_is_found_by_its_name_and_an_unnamed_change_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RecurrentGemma's cap moves these logits by less than 2% of the largest one, as rounding to 8
    bits does.
    """
    config = CONFIG_MAPPING["recurrent_gemma"](
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        lru_width=16,
        logits_soft_cap=30.0,
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    forward = model.forward
    assert find_head(model, model.model, "capped").softcap == 30.0

    def moved(**asked: Any) -> Any:
        found = forward(**asked)
        found.logits = 1.005 * found.logits
        return found

    monkeypatch.setattr(model, "forward", moved)
    with pytest.raises(ConfigurationError, match="changes its logits"):
        find_head(model, model.model, "unnamed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_zeros_is_a_head(dtype: torch.dtype) -> None:
    """As a model that was just initialized may have."""
    config = CONFIG_MAPPING["llama"](
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    assert find_head(model, model.model, "zeros").scale == 1.0


def test_a_layer_between_hidden_states_and_head_is_said() -> None:
    config = CONFIG_MAPPING["electra"](
        vocab_size=61, embedding_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigurationError, match="changes its logits"):
        find_head(model, model.base_model, "electra")
