"""The LoRA adapter and its dropout: made from the seed, started from a folder if asked, saved as a
PEFT folder with a model card.

Adapter weights are float32 even where the base is bf16: a learning rate of 4e-5 moves them by less
than bf16 can hold.

A dropout mask is a function of (seed, step, row, layer, position, feature) alone. It is therefore
the same in every micro-batch, in a recomputed forward pass, and after a resume. Outside a training
pass the module does nothing: the sampler, the parity gate and `logprobs` never see dropout.
"""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retrain.errors import ConfigurationError, RunFailed, first_line
from retrain.model.packed import in_block
from retrain.model.text import base_name
from retrain.model.weights import Change, TrainedWeights
from retrain.noise import Stream
from retrain.system import read_object

if TYPE_CHECKING:
    from peft import PeftModel

    from retrain.config.schema import Lora, Model
    from retrain.model.load import BaseModel


# -- dropout ---------------------------------------------------------------------------------------


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(
    seed: int, stream: int, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor]
) -> Tensor:
    """Return [..., 4] int64 words in [0, 2**32), one block of four per broadcast element of the
    counter.
    """
    last = counter[3]
    words = [
        torch.as_tensor(word, dtype=torch.int64, device=last.device) & _MASK for word in counter
    ]
    # torch does not annotate broadcast_tensors.
    x0, x1, x2, x3 = torch.broadcast_tensors(*words)  # type: ignore[no-untyped-call]
    key0, key1 = seed & _MASK, int(stream) & _MASK
    for _ in range(10):
        # int64 wraps around, and its shift to the right repeats the sign; the masks leave what
        # unsigned words would give.
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((product1 >> 32) & _MASK) ^ x1 ^ key0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ x3 ^ key1,
            product0 & _MASK,
        )
        key0, key1 = (key0 + _KEY_STEPS[0]) & _MASK, (key1 + _KEY_STEPS[1]) & _MASK
    return torch.stack([x0, x1, x2, x3], dim=-1)


def uniform_words(
    seed: int,
    stream: int,
    a: Tensor | int,
    b: Tensor | int,
    c: Tensor | int,
    count: int,
    device: torch.device,
) -> Tensor:
    """Return [..., count] words: element i is word i % 4 of the block with counter (a, b, c, i //
    4).
    """
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    words = philox(seed, stream, (a, b, c, blocks))
    return words.flatten(-2)[..., :count]


def symmetric_uniforms(seed: int, stream: int, a: int, layer: int, like: Tensor) -> Tensor:
    """Return float64 in (-1, 1) in the shape of `like`, with the counter (a, 0, layer)."""
    words = uniform_words(seed, stream, a, 0, layer, like.numel(), like.device)
    return ((words.double() + 0.5) / 2**31 - 1).view_as(like)


class DropoutKey:
    """The coordinates of the current forward pass's dropout masks, which all layers share."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.rows: Tensor | None = None
        """[batch] row numbers of the micro-batch; None switches dropout off."""
        self.lengths: Sequence[int] | None = None
        """Tokens of each row of a packed sequence; None for rows padded to one length."""

    @property
    def is_active(self) -> bool:
        return self.rows is not None

    @contextmanager
    def active(
        self,
        step: int,
        rows: Sequence[int],
        device: torch.device,
        lengths: Sequence[int] | None = None,
    ) -> Iterator[None]:
        """Switch dropout on, for the forward pass and its backward: gradient checkpointing runs the
        forward again.
        """
        self.step, self.lengths = step, lengths
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        try:
            yield
        finally:
            self.rows = None


class KeyedDropout(nn.Module):
    def __init__(self, rate: float, layer: int, key: DropoutKey) -> None:
        super().__init__()
        self.rate, self.layer, self.key = rate, layer, key
        self.threshold = round(rate * 2**32)

    def forward(self, x: Tensor) -> Tensor:
        """Drop features of x [batch, positions, features], or [1, all positions, features] of
        packed rows. A row starts with its first token. Some layers (OPT's, a shared expert's)
        flatten both to [batch * positions, features].
        """
        if self.key.rows is None:
            return x
        lengths, features = self.key.lengths, x.shape[-1]
        if lengths:
            masks = zip(self.keep_mask(max(lengths), features), lengths, strict=True)
            keep = torch.cat([mask[:length] for mask, length in masks])
        else:
            keep = self.keep_mask(x.numel() // features // len(self.key.rows), features)
        return x * (keep.view_as(x).to(x.dtype) / (1 - self.rate))

    def keep_mask(self, positions: int, features: int) -> Tensor:
        """Return [batch, positions, features] of bool."""
        rows = self.key.rows
        if rows is None:
            raise ValueError("dropout masks exist only inside DropoutKey.active")
        words = uniform_words(
            self.key.seed,
            Stream.DROPOUT,
            self.key.step,
            rows.unsqueeze(-1),
            self.layer,
            positions * features,
            rows.device,
        )
        return words.view(len(rows), positions, features) >= self.threshold


# -- the adapter -----------------------------------------------------------------------------------


WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
CARD_FILE = "README.md"

_ADAPTER = "default"
_ROUTER = "router"
"""The linear layer that chooses experts in Llama 4; servers do not adapt it."""


class Adapter(TrainedWeights):
    """The trainable part of a model: its PEFT module, its parameters by name, its files."""

    file = WEIGHTS_FILE

    def __init__(self, base: "BaseModel", model: "Model", lora: "Lora", seed: int) -> None:
        from peft import get_peft_model
        from peft.tuners.lora import LoraLayer

        self.name = base_name(model.model)
        self.revision = model.revision or None
        self.dropout = DropoutKey(seed)
        self.drops = lora.dropout > 0
        # peft draws initial weights from the global generator, which ours replace, and reads an
        # attribute that transformers deprecates.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            settings = lora_config(base, lora, model.lora_rank)
            try:
                self.peft_model: PeftModel = get_peft_model(
                    base.model, settings, adapter_name=_ADAPTER
                )
            except ValueError as error:
                raise ConfigurationError(
                    "[lora] target_modules: peft does not adapt all of"
                    f" {', '.join(sorted(settings.target_modules))} in"
                    f" {type(base.model).__name__} ({first_line(error)}). Name layers that it"
                    " can adapt, or use another model."
                ) from error
        self.peft_model.eval()
        _initialize(self.peft_model, seed)
        if lora.dropout:
            adapted = [
                module for module in self.peft_model.modules() if isinstance(module, LoraLayer)
            ]
            for number, module in enumerate(adapted):
                module.lora_dropout[_ADAPTER] = KeyedDropout(lora.dropout, number, self.dropout)
        if lora.init_from:
            folder = Path(lora.init_from)
            self.set(self.fitting(folder, f'[lora] init_from = "{folder}"'))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by their names in the file, in the model's order."""
        return {
            name.replace(f".{_ADAPTER}.", "."): parameter
            for name, parameter in self.peft_model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def model(self) -> nn.Module:  # type: ignore[override]  # an attribute elsewhere
        return self.peft_model  # type: ignore[no-any-return]  # peft has no types

    @property
    def beside(self) -> Sequence[nn.Parameter]:
        return list(self.parameters.values())

    @property
    def is_dropping(self) -> bool:
        return self.dropout.is_active

    def dropping(
        self,
        step: int,
        rows: Sequence[int],
        device: torch.device,
        lengths: Sequence[int] | None,
    ) -> AbstractContextManager[None]:
        return self.dropout.active(step, rows, device, lengths) if self.drops else nullcontext()

    def disabled(self) -> AbstractContextManager[None]:
        """Switch the adapter off."""
        return self.peft_model.disable_adapter()  # type: ignore[no-any-return]  # peft has no types

    @contextmanager
    def computing(self, base: "BaseModel") -> Iterator[None]:
        """Let the adapter's fp32 weights take part in bf16 products, so that autograd keeps no
        activation in fp32.
        """
        from peft.helpers import disable_input_dtype_casting

        if base.dtype == torch.float32:
            yield
            return
        with (
            torch.autocast(base.device.type, base.dtype),
            disable_input_dtype_casting(self.peft_model),
        ):
            yield

    def trial_changes(self, seed: int) -> list[Change]:
        adapted = [module for module in self.peft_model.modules() if hasattr(module, "lora_B")]
        return [
            Change(*_trial_change(module, seed, number)) for number, module in enumerate(adapted)
        ]

    # -- files -------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write adapter_model.safetensors, adapter_config.json and the model card; loads in peft
        and vLLM as it is.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder / self.file)
        settings = {key: _plain(value) for key, value in self._settings().items()}
        (folder / CONFIG_FILE).write_text(
            json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        (folder / CARD_FILE).write_text(self._card(), encoding="utf-8")

    @contextmanager
    def holding(self, weights: dict[str, Tensor]) -> Iterator[None]:
        before = {name: own.detach().clone() for name, own in self.parameters.items()}
        self.set(weights)
        try:
            yield
        finally:
            self.set(before)

    def fitting(self, folder: Path, where: str) -> dict[str, Tensor]:
        """Read the weights of a folder. The adapter there must be of this rank, scale and set of
        layers; a ConfigurationError begins with `where`.
        """
        with _refused(where):
            _check_settings(folder, where, self._settings())
            return self.read(folder / self.file)

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self.peft_model.peft_config[_ADAPTER].to_dict()
        return settings | {
            "base_model_name_or_path": self.name,
            "revision": self.revision,
            "inference_mode": True,
        }

    def _card(self) -> str:
        settings = self._settings()
        return (
            f"---\nbase_model: {json.dumps(self.name)}\nlibrary_name: peft\npipeline_tag:"
            " text-generation\ntags:\n- lora\n- reinforcement-learning\n- retrain\n---\n\n# LoRA"
            f" adapter for {self.name}\n\nTrained with reinforcement learning from verifiable"
            " rewards by retrain. The run's folder holds its configuration (`config.toml`) and its"
            f" metrics.\n\n- rank {settings['r']}, alpha"
            f" {settings['lora_alpha']}{', rank-stabilized' if settings['use_rslora'] else ''}\n-"
            f" layers: {', '.join(sorted(settings['target_modules']))}\n- weights: float32,"
            " unmerged\n\n```python\nfrom peft import PeftModel\nfrom transformers import"
            " AutoModelForCausalLM\n\nbase ="
            f" AutoModelForCausalLM.from_pretrained({json.dumps(self.name)})\nmodel ="
            ' PeftModel.from_pretrained(base, ".")  # this folder\n```\n'
        )


def check_initial(model: "Model", lora: "Lora") -> None:
    """Raise ConfigurationError, before loading a model, for an adapter of [lora] init_from with
    which this run cannot begin.
    """
    where, rank = f'[lora] init_from = "{lora.init_from}"', model.lora_rank
    ours = {"r": rank, "lora_alpha": _alpha(lora, rank), "use_rslora": lora.use_rslora}
    with _refused(where):
        _check_settings(Path(lora.init_from), where, ours)


def _check_settings(folder: Path, where: str, ours: Mapping[str, Any]) -> None:
    settings = read_object(folder / CONFIG_FILE)
    for key in ("r", "lora_alpha", "use_rslora"):
        if settings.get(key, False) != ours[key]:
            raise ConfigurationError(
                f"{where} has {key} = {settings.get(key)}, but [model] lora_rank and [lora] give"
                f" {ours[key]}; make them the same."
            )
    if settings.get("alpha_pattern"):
        raise ConfigurationError(
            f"{where} has alpha_pattern = {settings['alpha_pattern']}, and an adapter has one scale"
            " for all layers here; name an adapter without it."
        )


@contextmanager
def _refused(where: str) -> Iterator[None]:
    """Raise ConfigurationError, which begins with `where`, for an unreadable folder."""
    try:
        yield
    # It is a ValueError too, but already says which key to change.
    except ConfigurationError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(
            f"{where} holds no {Path(str(error.filename)).name}; name a PEFT adapter folder."
        ) from error
    except RunFailed as error:
        raise ConfigurationError(f"{where}: {error}") from error
    except ValueError as error:
        raise ConfigurationError(
            f"{where} does not fit this run ({error}); make [model] lora_rank and [lora] the same."
        ) from error


def _plain(value: Any) -> Any:
    """Make the settings plain JSON with a fixed order: a set has none of its own."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    return value


# --- construction ---------------------------------------------------------------------------------


def lora_config(base: "BaseModel", lora: "Lora", rank: int) -> Any:
    """Return the peft.LoraConfig of an adapter of this rank."""
    from peft import LoraConfig, TaskType
    from transformers.pytorch_utils import Conv1D

    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=rank,
        lora_alpha=_alpha(lora, rank),
        lora_dropout=lora.dropout,
        target_modules=target_modules(base, lora.target_modules),
        use_rslora=lora.use_rslora,
        bias="none",
        # GPT-2's Conv1D stores [in, out].
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.model.modules()),
        exclude_modules=_inside(towers(base)),
    )


def _alpha(lora: "Lora", rank: int) -> int:
    return lora.alpha or 2 * rank


def towers(base: "BaseModel") -> list[str]:
    """Return the parts of a model of text and images or sound that are not its language model."""
    config = base.model.config
    if config.get_text_config() is config:
        return []
    text = base.model.get_decoder()
    if text is base.decoder:
        return []
    parts = base.decoder.named_children()
    return [name for name, part in parts if not any(one is text for one in part.modules())]


def _inside(parts: list[str]) -> str | None:
    """Return the pattern of every module in these parts."""
    if not parts:
        return None
    return rf"(.*\.)?({'|'.join(map(re.escape, parts))})\..*"


def target_modules(base: "BaseModel", wanted: list[str]) -> list[str]:
    """Return the names to adapt: `wanted`, checked, or all linear layers of the blocks but a router
    of experts, which servers do not adapt (D26). The head and the embeddings stay frozen.
    """
    from transformers.pytorch_utils import Conv1D

    names, others = set(), towers(base)
    for path, module in base.decoder.named_modules():
        name = path.rpartition(".")[2]
        if path.partition(".")[0] in others:
            continue
        # A layer that is itself an element of a list has the name of a block, and peft would adapt
        # the block. bitsandbytes' layers are nn.Linear too.
        if in_block(path) and not name.isdigit() and isinstance(module, nn.Linear | Conv1D):
            names.add(name)
    found = sorted(names)
    if not wanted:
        if not found:
            raise ConfigurationError(
                "[lora] target_modules = [] finds no linear layers in this model's blocks;"
                " name the layers to adapt."
            )
        return [name for name in found if name != _ROUTER]
    unknown = [name for name in wanted if name.rsplit(".", 1)[-1] not in found]
    if unknown:
        raise ConfigurationError(
            f"[lora] target_modules names {', '.join(map(repr, unknown))}, but this model's"
            f" blocks have no such linear layer. Allowed: {', '.join(found)}."
        )
    return sorted(wanted)


def _initialize(model: nn.Module, seed: int) -> None:
    """Draw A uniformly in +-1/sqrt(fan in), as peft does, but from the counter noise; B is zero.

    The weights depend on the seed alone, and an untrained adapter leaves the base model as it is.
    """
    layer = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                unit = symmetric_uniforms(seed, Stream.ADAPTER, 0, layer, parameter)
                parameter.copy_(unit / math.sqrt(parameter.shape[1]))
                layer += 1
            elif ".lora_B." in name:
                parameter.zero_()


def _trial_change(module: Any, seed: int, number: int) -> tuple[nn.Parameter, Tensor]:
    """Return a layer's lora_B [O, r], and the values that strength 1 adds to it. They are uniform
    between -w and w, w = sqrt(3) / (s |A|).

    s is the adapter's scale and |A| the Frobenius norm of lora_A [r, I]. Such values have the
    standard deviation 1 / (s |A|). With a B of that deviation, each component of s B A x has the
    root mean square of x.
    """
    (adapter,) = module.lora_A
    up: nn.Parameter = module.lora_B[adapter].weight
    size = module.scaling[adapter] * float(module.lora_A[adapter].weight.detach().norm())
    width = 3**0.5 / size if size else 0.0
    unit = symmetric_uniforms(seed, Stream.PARITY, 1, number, up)
    return up, (width * unit).to(up)
