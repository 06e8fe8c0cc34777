"""What a CUDA device reads of this process, and what its kernels cannot do, as far as a processor
shows it.
"""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retrain.backends.local.backend import LocalBackend
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.kv_cache import KVArena, PromptPass
from retrain.model.attention import FusedAttention
from tests.decoding import prompts, tiny
from tests.learner_models import config_for


def test_products_in_half_precision_are_summed_in_float32() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (
        matmul.allow_fp16_reduced_precision_reduction
    ) = True
    LocalBackend(config_for(), eos_ids=[3])
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None)],
    ids=["unset", "the user's own"],
)
def test_the_command_line_sets_the_allocator_before_torch_is_imported(
    given: dict[str, str], expected: str | None
) -> None:
    script = (
        "import os, sys\n"
        "from retrain.cli.main import main\n"
        "main(['--version'])\n"
        "print(os.environ.get('PYTORCH_ALLOC_CONF'), 'torch' in sys.modules)"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")
    } | given
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment
    )
    assert done.stdout.splitlines()[-1] == f"{expected} False"


class NoIndexingOfFloat8(TorchDispatchMode):
    """Raises where CUDA has no kernel: `index` of 8-bit floats."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index" in func.__name__:
            found = [tensor.dtype for tensor in args if isinstance(tensor, torch.Tensor)]
            assert torch.float8_e4m3fn not in found, func
        return func(*args, **(kwargs or {}))


def test_an_8_bit_float_cache_is_copied_as_bytes() -> None:
    decoder = Decoder(tiny(), False)
    with decoder.sampling(0):
        short, long = decoder.prefill(prompts(2))
        with NoIndexingOfFloat8():
            arena = KVArena(3, 12, long, torch.float8_e4m3fn)
            arena.write_prompt([0, 1], short)
            arena.write_prompt([2], long)
            decoder.decode(arena, torch.tensor([5, 6, 7]), np.array([3, 3, 8]))
            arena.move([2], [0], 9)
            arena.reserve(20, 40, 2, 9)
    moved = arena.keys[0].read(1, 8)[0]
    torch.testing.assert_close(moved, long.keys[0], atol=0.3, rtol=0.1)


def test_a_prompt_pass_keeps_keys_and_values_and_nothing_that_they_are_views_of() -> None:
    batch = PromptPass([3, 5], FusedAttention())
    turned = torch.randn(1, 8, 6, 4)  # [B, T, Hq + Hk, D]: four query heads lie before the keys
    keys = turned.transpose(1, 2)[:, 4:]
    seen, _ = batch.update(keys, keys, 0)
    assert seen is keys
    held = batch.keys[0] + batch.values[0]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 2 * 8 * 2 * 4 * 4
    assert torch.equal(torch.cat(batch.keys[0], dim=1), keys[0])
