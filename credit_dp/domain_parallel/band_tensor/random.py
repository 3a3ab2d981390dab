"""Random numbers: those of bands differ between ranks, those of whole tensors do not.

While a model runs, all ranks of its domain have the first rank's state of torch's generators, and
of Python's and NumPy's, which one message of that rank brings. Whatever has no rows draws from
them, so that it is the same on all ranks, as `torch.randperm` or the dropout of channels, and
nothing has to look at what a model calls.

A band has another number of entries on each rank. It takes one number from the generator, on all
ranks the same, and draws from a generator of its own that starts from that number and the rank. So
the generators of all ranks stay equal; and a block that is computed again draws the same once more,
as torch's checkpointing restores the states of its own generators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.band_tensor.moving import (
    refresh_all,
    with_rows,
    write_back,
)
from credit_dp.domain_parallel.band_tensor.pointwise import common_rows
from credit_dp.domain_parallel.band_tensor.rules import decompose, run_whole
from credit_dp.domain_parallel.band_tensor.tensor import (
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Part,
    domain_of,
    rule_for,
)
from credit_dp.domain_parallel.band_tensor.values import from_first_rank, has_no_data
from credit_dp.domain_parallel.transport import message_device
from credit_dp.errors import UserError
from credit_dp.random_streams import python_random_state, set_python_random_state
from credit_dp.torch_private import (
    all_modules,
    is_fake_mode_active,
    schema_of,
    tree_leaves,
    tree_map,
)

CPU = torch.device("cpu")
# Two ranks start from numbers that are this far apart: an odd number near 2**64 / 1.618.
BETWEEN_RANKS = 0x9E3779B97F4A7C15


def is_captured(device: torch.device) -> bool:
    """Return whether work on a device is captured in a CUDA graph now, not carried out."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def get_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator of a device, as bytes on the CPU."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_state(device: torch.device, state: Tensor) -> None:
    """Set the state of torch's generator of a device."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


# ---------------------------------------------------------------- while a model runs


@contextmanager
def same_random_numbers(
    domain: Domain, model: nn.Module, inputs: Sequence[Tensor], error: UserError | None = None
) -> Iterator[None]:
    """Draw on all ranks what the first rank draws: inside, their generators are equal.

    A collective. Afterwards the first rank's generators go on from where they are, and those of
    other ranks from where they were; but what a model keeps as an attribute remains the same.

    Args:
        error: why this rank can't go on.

    Raises:
        UserError: that of this rank, or one that names another rank with an error.
    """
    group = domain.manager.domain_group
    # Ranks that are threads have one generator, a dry run has one rank, and a step that reads the
    # states of generators can't become a CUDA graph.
    if group is None or is_captured(message_device(group)):
        if error is not None:
            raise error
        yield
        return
    own = _States(model, inputs)
    # An error of one rank travels along: the others would wait for it in the forward.
    mine = np.append(own.as_bytes(), np.uint8(error is not None))
    everyone = domain.transport.all_gather(torch.from_numpy(mine).to(message_device(group))).cpu()
    failed = everyone[:, -1].nonzero().flatten().tolist()
    if failed:
        raise error or UserError(f"rank {failed[0]} of the domain can't run: see its message.")
    if domain.rank:
        own.restore(everyone[0, :-1].numpy())
        own.restore_attributes(everyone[0, :-1].numpy())
    try:
        yield
    finally:
        if domain.rank:
            own.restore(own.bytes)


class _States:
    """The states of all generators that a model may draw from.

    Those of Python and NumPy, of torch for the CPU and for the devices of the model and its inputs,
    and those that the model has as attributes.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        tensors = [*inputs, *(x for x in (next(model.parameters(), None),) if x is not None)]
        others = {x.device for x in tensors if x.device.type not in ("cpu", "meta")}
        self.devices = [CPU, *sorted(others, key=str)]
        self.generators = [
            value
            for module in all_modules(model)
            for value in vars(module).values()
            if type(value) is torch.Generator
        ]
        self.bytes = self.as_bytes()

    def as_bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        states = [python_random_state().view(np.uint8)]
        states += [get_state(device).numpy() for device in self.devices]
        states += [generator.get_state().numpy() for generator in self.generators]
        self.sizes = [len(state) for state in states]
        return np.concatenate(states)

    def _parts(self, states: np.ndarray[Any, np.dtype[np.uint8]]) -> list[Any]:
        return np.split(states, np.cumsum(self.sizes)[:-1])

    def restore(self, states: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        python, *others = self._parts(states)
        set_python_random_state(python.copy().view(np.int64))
        for device, state in zip(self.devices, others, strict=False):
            set_state(device, torch.from_numpy(state.copy()))

    def restore_attributes(self, states: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        _, *others = self._parts(states)
        for generator, state in zip(self.generators, others[len(self.devices) :], strict=True):
            generator.set_state(torch.from_numpy(state.copy()))


# ---------------------------------------------------------------- of a band


def next_number(generator: torch.Generator | None) -> int:
    """Take a number from a generator, of torch's for the CPU if it is None."""
    if generator is None or generator.device.type == "cpu":
        number = torch.randint(2**63 - 1, (), device=CPU, dtype=torch.int64, generator=generator)
        return int(number)
    state = generator.get_state().numpy().tobytes()
    torch.rand(1, device=generator.device, generator=generator)  # one step on
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")


def own_generator(
    domain: Domain, device: torch.device, generator: torch.Generator | None = None
) -> torch.Generator:
    """Return a generator of this rank for one draw of a band; the given one takes a step.

    Args:
        generator: the one that the model wants to draw from; torch's own if it is None.
    """
    number = next_number(generator) + BETWEEN_RANKS * domain.rank
    return torch.Generator(device).manual_seed(number % 2**64)


@contextmanager
def own_numbers(domain: Domain, local: Tensor) -> Iterator[None]:
    """Let torch's generator draw this rank's numbers: for kernels that draw from no other one."""
    device = local.device
    if has_no_data(local) or is_fake_mode_active() or is_captured(device):
        yield
        return
    generator = own_generator(domain, device)
    before = get_state(device)
    set_state(device, generator.get_state())
    try:
        yield
    finally:
        set_state(device, before)


@rule_for(
    "rand_like.default", "rand_like.generator", "randn_like.default", "randn_like.generator",
    "randint_like.default", "randint_like.generator", "randint_like.low_dtype",
    "randint_like.low_generator_dtype",
    "bernoulli.default", "bernoulli.p", "bernoulli.Tensor", "bernoulli_", "normal_", "uniform_",
    "random_", "exponential_", "geometric_", "cauchy_", "log_normal_",
    "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", "normal_functional",
    "uniform.default", "exponential.default", "geometric.default", "cauchy.default",
    "log_normal.default", "random.default", "random.from", "random.to",
    "poisson.default", "binomial.default", "_standard_gamma.default",
    "native_dropout.default", "_fused_dropout.default",
    "rrelu_with_noise.default", "rrelu_with_noise_", "rrelu_with_noise_functional",
)  # fmt: skip
def draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the entries of each band by itself, and those of a whole tensor alike on all ranks."""
    domain = domain_of((args, kwargs))
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    refresh_all(*tensors)
    is_in_place = schema_of(func).is_mutable
    rows = common_rows(tensors)
    written = args[0] if is_in_place and "out" not in kwargs else None
    if not isinstance(rows, Band) or (
        is_in_place and (type(written) is not BandTensor or written.rows != rows)
    ):
        return _draw_whole(func, args, kwargs, domain)
    local_args, local_kwargs = tree_map(
        lambda x: with_rows(x, rows, domain) if isinstance(x, Tensor) else x, (args, kwargs)
    )
    result = _draw_own(func, local_args, local_kwargs, domain)
    if func.overloadpacket in WRITES_NOISE and type(args[1]) is BandTensor:
        write_back(args[1])
    if written is not None and func.overloadpacket is not torch.ops.aten.rrelu_with_noise:
        write_back(written)
        return written
    if isinstance(result, tuple):
        return tuple(Part(x, rows) for x in result)
    return Part(result, rows)


WRITES_NOISE = (torch.ops.aten.rrelu_with_noise, torch.ops.aten.rrelu_with_noise_)


def _draw_own(func: Any, args: Any, kwargs: Any, domain: Domain) -> Any:
    local = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    if has_no_data(local) or is_captured(local.device):  # a graph draws from torch's generator
        return func(*args, **kwargs)
    if all(argument.name != "generator" for argument in schema_of(func).arguments):
        with own_numbers(domain, local):
            return func(*args, **kwargs)
    generators = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
    args = [x for x in args if not isinstance(x, torch.Generator)]
    own = own_generator(domain, local.device, generators[0] if generators else None)
    return func(*args, **{**kwargs, "generator": own})


def _draw_whole(func: Any, args: Any, kwargs: Any, domain: Domain) -> Any:
    """Call an operator that draws the same on all ranks."""
    if is_captured(next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))):
        raise UserError(
            f"{func}: random numbers that are the same on all ranks can't be drawn in a CUDA "
            "graph. Set trainer.cuda_graph=false."
        )
    result = run_whole(func, args, kwargs)
    manager = domain.manager
    if manager.domain_group is not None or domain.ranks == 1:
        return result
    # Ranks that are threads have one generator, and draw from it one after the other.
    if type(result) is BandTensor and result.rows is WHOLE:
        result.local.copy_(from_first_rank(result.local, domain))
    if isinstance(result, Part) and result.rows is WHOLE:
        return result._replace(local=from_first_rank(result.local, domain))
    return result


# In inference mode torch has not computed it by the one above.
rule_for("rrelu.default", "rrelu_.default")(decompose)
