"""The config of a model that another package brings: strange layers in a strange order."""

from dataclasses import dataclass

from credit_dp.config import OwnModelConfig


@dataclass
class OperatorZooConfig(OwnModelConfig):
    channels: int = 8

    def build(self, in_channels, out_channels, grid):
        from operator_zoo_model import OperatorZoo  # torch: not for --help

        return OperatorZoo(self.channels, in_channels, out_channels, grid)
