"""AdamW over the trained weights: learning rate as a pure function of the step, gradient norm, and
state in safetensors and JSON.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from retrain.backends.rows import learning_rate
from retrain.types import Float32Array

if TYPE_CHECKING:
    from retrain.config.schema import Optimizer, Training

STATE_FILE = "optimizer.safetensors"
COUNT_FILE = "optimizer.json"


class AdapterOptimizer:
    """Every parameter takes part in every step, with a zero gradient where nothing reached it, so
    one count serves all.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: "Optimizer",
        training: "Training",
        max_grad_norm: float,
        undecayed: Collection[str] = (),
    ) -> None:
        """`undecayed`: names of parameters without weight decay."""
        self.parameters = parameters
        self.steps = 0
        """Optimizer steps taken."""
        self.training = training
        """Its learning rate may differ from step to step."""
        self.max_grad_norm = max_grad_norm
        kinds: tuple[list[str], list[str]] = ([], [])
        for name in parameters:
            kinds[name in undecayed].append(name)
        self._order: list[str] = [*kinds[0], *kinds[1]]
        """The order of torch's state: those with weight decay first."""
        rates = zip(kinds, (training.weight_decay, 0.0), strict=True)
        self._adamw = torch.optim.AdamW(
            [
                {"params": [parameters[name] for name in names], "weight_decay": rate}
                for names, rate in rates
                if names
            ],
            lr=training.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            fused=next(iter(parameters.values())).device.type in ("cpu", "cuda"),
        )
        self.zero_gradients()

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def add(self, gradients: Sequence[Float32Array]) -> None:
        """Add a part of the gradient that another process computed, of every parameter in order.
        The process has already added an empty part in place.
        """
        for own, part in zip(self.gradients() if gradients else (), gradients, strict=True):
            own.add_(torch.from_numpy(part))

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm over all parameters, not yet read back from the device."""
        return torch.nn.utils.get_total_norm(self.gradients())

    def nonfinite_gradient(self) -> str:
        """Return the name of the first parameter whose gradient is not finite; empty if there is
        none.
        """
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return ""

    def step(self, training_step: int, norm: Tensor) -> None:
        """Make one update at the rate of `training_step`, the gradient clipped to max_grad_norm if
        that is on.
        """
        if self.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(
                list(self.parameters.values()), self.max_grad_norm, norm
            )
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self.training, training_step)
        self._adamw.step()
        # The fused kernel does not, and copies of the weights follow by it.
        torch.autograd.graph.increment_version(self.parameters.values())
        self.steps += 1

    def gradients(self) -> list[Tensor]:
        return [
            parameter.grad for parameter in self.parameters.values() if parameter.grad is not None
        ]

    # -- files -------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write first and second moments by parameter name, and the number of steps."""
        from safetensors.torch import save_file

        moments = {
            f"{kind}.{name}": self._adamw.state[parameter][key].detach().cpu().contiguous()
            for name, parameter in self.parameters.items()
            for kind, key in (("m", "exp_avg"), ("v", "exp_avg_sq"))
            if self.steps
        }
        save_file(moments, folder / STATE_FILE)
        counted = json.dumps({"steps": self.steps}) + "\n"
        (folder / COUNT_FILE).write_text(counted, encoding="utf-8")

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        moments = load_file(folder / STATE_FILE)
        self.steps = int(json.loads((folder / COUNT_FILE).read_text(encoding="utf-8"))["steps"])
        state = {
            index: {
                "step": torch.tensor(float(self.steps)),
                "exp_avg": moments[f"m.{name}"],
                "exp_avg_sq": moments[f"v.{name}"],
            }
            for index, name in enumerate(self._order)
            if self.steps
        }
        self._adamw.load_state_dict(self._adamw.state_dict() | {"state": state})
