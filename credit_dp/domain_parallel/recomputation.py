"""Activation checkpointing of modules: backward computes them again, from what they received.

`checkpoint_modules` makes modules of a model keep only their inputs, and what their layers received
from other ranks: halos, rows of windows, sums of norms. In the backward pass torch calls the
forward once more. It finds these messages in the order in which they came, so that computing again
sends nothing. Backward itself sends gradients only. `repeated_blocks` chooses the modules of any
model.

A plan computes nothing twice: within `count_recomputation` a `RecomputationCounter` counts what the
modules keep and what they would compute again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from credit_dp.domain_parallel.band_tensor.filling import open_as_now
from credit_dp.domain_parallel.band_tensor.tensor import local_of
from credit_dp.domain_parallel.shared_exchange import (
    SharedExchange,
    detach_shared_exchange,
    open_hooks,
)
from credit_dp.domain_parallel.transport import ReceivedMessages
from credit_dp.errors import UserError
from credit_dp.torch_private import parameters_of, tree_leaves, version_of

# Called with a module at its forward: returns what makes the context of each recomputation.
KeepState = Callable[[nn.Module], Callable[[], AbstractContextManager[object]]]

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the paths of the blocks of a model: modules that occur several times in it.

    Those are the outermost modules with several layers whose class occurs more than once, and every
    `nn.Sequential` of several layers without such a module. A module that itself has a list of
    blocks, as the stage of a transformer, is not one. If there are none, the blocks are the model's
    children with several layers.
    """
    counts = Counter(type(m) for m in model.modules() if has_several_layers(m))
    blocks = list(_repeated(model, "", counts))
    if blocks:
        return blocks
    return [name for name, child in model.named_children() if has_several_layers(child)]


def has_several_layers(module: nn.Module) -> bool:
    """Whether several modules within this one have parameters of their own."""
    return sum(bool(parameters_of(m)) for m in module.modules() if m is not module) > 1


def _repeated(module: nn.Module, path: str, counts: Counter[type]) -> Iterator[str]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if _is_repeated(child, counts) and not _has_list_of_blocks(child, counts):
            yield child_path
            continue
        inside = list(_repeated(child, child_path, counts))
        if not inside and type(child) is nn.Sequential and has_several_layers(child):
            inside = [child_path]
        yield from inside


def _is_repeated(module: nn.Module, counts: Counter[type]) -> bool:
    return type(module) not in CONTAINERS and counts[type(module)] > 1


def _has_list_of_blocks(module: nn.Module, counts: Counter[type]) -> bool:
    return any(
        type(m) in CONTAINERS and sum(_is_repeated(child, counts) for child in m.children()) > 1
        for m in module.modules()
    )


def keep_nothing(_: nn.Module) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes an empty context for each recomputation."""
    return nullcontext


def may_draw(_: nn.Module) -> bool:
    """Return True: what a module draws is unknown."""
    return True


def checkpoint_modules(
    model: nn.Module,
    paths: Sequence[str],
    keep_state: KeepState = keep_nothing,
    draws: Callable[[nn.Module], bool] = may_draw,
) -> None:
    """Let backward compute these modules again, in place; names of parameters stay.

    Call it after conversion and after sharding of parameters.

    Args:
        paths: of the modules, none within another one; "" stands for the model.
        keep_state: keeps what a forward depends on beside its inputs.
        draws: whether a forward may draw from torch's random numbers.
    """
    modules = [model.get_submodule(path) for path in paths]
    _detach_exchanges_across(model, modules)
    for path, module in zip(paths, modules, strict=True):
        if not isinstance(module.__dict__.get("forward"), CheckpointedForward):
            # Replacing `forward` rather than wrapping the module keeps the names of parameters.
            module.forward = CheckpointedForward(
                module, path or "the model", keep_state, draws=draws
            )


@contextmanager
def checkpointed(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Checkpoint modules inside the context only, as `checkpoint_modules`."""
    modules = [model.get_submodule(path) for path in paths]
    before = [module.__dict__.get("forward") for module in modules]
    checkpoint_modules(model, paths)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _detach_exchanges_across(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Let layers fetch their own rows if they share an exchange with layers of other blocks.

    The rows that a layer of another block has fetched are not there when a block is computed again.
    """
    inside = {id(m): number for number, block in enumerate(blocks) for m in block.modules()}
    for scope in model.modules():
        for shared in open_hooks(scope):
            owners = {inside.get(id(reader)) for reader in shared.readers}
            if id(scope) not in inside and owners != {None}:
                detach_shared_exchange(scope, shared)


@final
class CheckpointedForward:
    """The forward of a module that keeps only its inputs, and what it received.

    Args:
        with_hooks: whether to call the module, so that its hooks run again, too; otherwise its
            forward alone.

    Raises:
        UserError: at the first call, if the forward changes a buffer: the second one would again.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        keep_state: KeepState = keep_nothing,
        with_hooks: bool = False,
        draws: Callable[[nn.Module], bool] = may_draw,
    ) -> None:
        self.module = module
        self.keep_state = keep_state
        self.draws = draws
        # A bound method, which deepcopy binds to the copy.
        self.original = module.__call__ if with_hooks else module.forward
        self.path = path
        self.with_hooks = with_hooks
        self._checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        if not (self.module.training and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        count = _count.get()
        if count is not None:
            return count(self.original, args, kwargs)
        before = {} if self._checked else self._buffer_versions()
        # Without the early stop torch would end the second forward at the last tensor that this
        # rank needs: another rank might need one more, and wait for an exchange that never comes.
        with set_checkpoint_early_stop(False):
            output = checkpoint(
                self.original,
                *args,
                use_reentrant=False,
                context_fn=self._contexts,
                preserve_rng_state=self.draws(self.module),
                **kwargs,
            )
        if not self._checked:
            self._check_buffers_unchanged(before)
        return output

    def _contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        messages = ReceivedMessages(self.path)
        shared = [] if self.with_hooks else open_hooks(self.module)
        again = [self.keep_state(self.module), open_as_now()]
        return messages.recording(), _Recomputation(messages, shared, again)

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        """Return identity and version of each buffer: one changes if it is replaced or written."""
        return {name: (id(b), version_of(b)) for name, b in self.module.named_buffers()}

    def _check_buffers_unchanged(self, before: dict[str, tuple[int, int]]) -> None:
        for name, version in self._buffer_versions().items():
            if before.get(name) != version:
                raise UserError(
                    "trainer.checkpoint_activations: needs a model whose forward changes no "
                    f"buffer, but {self.path} changes {name}, and would again in backward. Set "
                    "it (or model.activation_checkpointing) to false, or use a layer without such "
                    "a buffer."
                )
        self._checked = True


@final
class _Recomputation:
    """The context in which a forward is computed again; entered once for each backward pass.

    Args:
        shared: the exchanges that the module's hooks, which torch does not run again, had opened.
        again: make the contexts of the state that the forward depended on.
    """

    def __init__(
        self,
        messages: ReceivedMessages,
        shared: Sequence[SharedExchange],
        again: Sequence[Callable[[], AbstractContextManager[object]]],
    ) -> None:
        self.messages = messages
        self.shared = shared
        self.again = again
        self._replays: list[ExitStack] = []

    def __enter__(self) -> None:
        for shared in self.shared:
            shared.open()
        replay = ExitStack()
        replay.enter_context(self.messages.replaying())
        for make_context in self.again:
            replay.enter_context(make_context())
        self._replays.append(replay)

    def __exit__(self, *error: Any) -> None:
        self._replays.pop().close()
        for shared in self.shared:
            shared.close()


# Called instead of computing: with a forward and its arguments.
CountForward = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# A context variable and not a global: the ranks may be threads of one process.
_count: ContextVar[CountForward | None] = ContextVar("what counts recomputation", default=None)


@contextmanager
def count_recomputation(count: CountForward) -> Iterator[None]:
    """Call `count` for each checkpointed forward inside the context, and compute nothing again.

    `count` has to call the forward, and to return its output.
    """
    token = _count.set(count)
    try:
        yield
    finally:
        _count.reset(token)


@final
class SavedTensors:
    """Counts the bytes of tensors saved for backward: each storage once, `excluded` ones never."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        # The storages are kept alive, as the address of a freed one would be reused.
        self._storages = {id(x.untyped_storage()): x.untyped_storage() for x in excluded}
        self.bytes = 0

    def add(self, x: Tensor) -> Tensor:
        """Count a tensor and return it, as a pack hook of autograd."""
        storage = local_of(x).untyped_storage()
        # Views and tensors that several operations save share a storage.
        if id(storage) not in self._storages:
            self._storages[id(storage)] = storage
            self.bytes += storage.nbytes()
        return x


@final
class RecomputationCounter:
    """Counts what checkpointed modules keep, and what they compute again.

    Args:
        save: counts a tensor that is kept for backward.
        launched: returns the number of kernels that the step has started so far.

    Attributes:
        received: bytes of messages that are kept.
        recomputed: bytes that the module with most saves when it is computed again, which nothing
            else keeps.
        repeated: the number of kernels that are started again, without copies of kept messages.
    """

    def __init__(
        self,
        save: Callable[[Tensor], Tensor],
        held: Iterable[Tensor],
        launched: Callable[[], int] = lambda: 0,
    ) -> None:
        self.save = save
        self.held = list(held)
        self.launched = launched
        self.received = self.recomputed = self.repeated = 0

    def __call__(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a forward and return its output."""
        leaves = tree_leaves((args, kwargs))
        inputs = [local_of(x) for x in leaves if isinstance(x, Tensor)]
        messages = ReceivedMessages()
        inner = SavedTensors([*self.held, *inputs])
        before = self.launched()
        with torch.autograd.graph.saved_tensors_hooks(inner.add, lambda x: x), messages.recording():
            output = forward(*args, **kwargs)
        self.repeated += self.launched() - before
        for x in inputs:
            self.save(x)
        self.received += messages.nbytes
        self.recomputed = max(self.recomputed, inner.bytes)
        return output
