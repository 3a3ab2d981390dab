"""Plug-in of a model of miles-credit, which the installed package miles-credit builds.

`credit-dp import credit CONFIG.yml CHECKPOINT` writes this file beside the experiment. It is an
ordinary plug-in file: set CREDIT_DP_PLUGINS to its path. The model is theirs, unchanged; only the
channels are put in its order.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from credit_dp.config import OwnModelConfig
from credit_dp.errors import UserError


@dataclass
class CreditModelConfig(OwnModelConfig):
    """The config of a model of miles-credit."""

    name: str = "credit"
    residual: bool = False  # their models return the next state, not its tendency
    type: str = "wxformer"  # name of the model in miles-credit
    arguments: dict[str, Any] = field(default_factory=dict)  # keys of the model in miles-credit
    weights: str | None = None  # safetensors beside this file, from which the model starts
    # static channels that the model has before forcings; 0: they come last, as in this package
    static_channels: int = 0
    south_first: bool = False  # the model's first row is the southernmost one

    def build(self, in_channels: int, out_channels: int, grid: tuple[int, int]) -> Any:
        """Return their model on `(B, C, H, W)`, with its weights.

        Raises:
            UserError: the package is missing, or model and weights don't fit.
        """
        import torch
        from torch import Tensor, nn

        try:
            from credit.models import load_model
        except ImportError as error:
            raise UserError(
                f"model: needs the package miles-credit, which can't be imported ({error}). Run "
                "`pip install miles-credit`."
            ) from error
        static = self.static_channels
        south_first = self.south_first

        class CreditModel(nn.Module):
            """Calls their model, which has a dimension of frames after the channels.

            Shapes:
                `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.
            """

            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: Tensor) -> Tensor:
                """Return the next state, normalised."""
                if static:
                    # Forcings follow the states, whose number is what is left of all inputs.
                    states, forcings, statics = torch.split(x, parts, 1)
                    x = torch.cat([states, statics, forcings], 1)
                if south_first:
                    x = x.flip(-2)
                y: Tensor = self.model(x.unsqueeze(2)).squeeze(2)
                return y.flip(-2) if south_first else y

        model = load_model({"model": {"type": self.type, **self.arguments}})
        outputs = self.arguments.get("output_only_channels", 0)
        states = out_channels - outputs
        parts = [states, in_channels - states - static, static]
        if self.weights is not None and not any(p.is_meta for p in model.parameters()):
            self._load(model)
        return CreditModel(model)

    def _load(self, model: Any) -> None:
        """Load the weights, all of them by name."""
        from safetensors.torch import load_file

        path = Path(__file__).with_name(str(self.weights))
        if not path.is_file():
            raise UserError(f"model.weights: there is no file {path}. Import the model again.")
        try:
            model.load_state_dict(load_file(path))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"model.weights: {path} is not of this model ({reason[:300]}). "
                "Change model.arguments."
            ) from error
