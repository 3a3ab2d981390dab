"""What `--machine` doesn't model is refused, so that no number stands for another run."""

from credit_dp.command.machine import Machine
from credit_dp.config import Config
from credit_dp.errors import UserError


def check_predictable(config: Config, machine: Machine) -> None:
    """Refuse a config whose steps are not modelled.

    Raises:
        UserError: it has a pipeline, say.
    """
    parallel, trainer = config.parallel, config.trainer
    plain = {
        "parallel.pipeline": (parallel.pipeline, 1),
        "parallel.data_mode": (parallel.data_mode, "ddp"),
        "parallel.layout": (dict(parallel.layout), {}),
        "trainer.checkpoint_activations": (trainer.checkpoint_activations, False),
        "trainer.rollout": (trainer.longest_rollout, 1),
        "compile": (config.compile, False),
    }
    for key, (given, modelled) in plain.items():
        if given != modelled:
            raise UserError(f"--machine: models {key}={modelled} only, got {given}. Leave it out.")
    dtype = trainer.autocast or trainer.dtype
    if dtype not in machine.tflops:
        key = "trainer.autocast" if trainer.autocast else "trainer.dtype"
        raise UserError(
            f"--machine: {machine.name} has tflops of {', '.join(machine.tflops)}, and {key}="
            f"{dtype} needs its own. Add it to the file, or change {key}."
        )
