"""Rules of recurrent layers that torch computes in one piece: ranks have some of the samples.

Layers that it computes step by step are products and pointwise functions of bands.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import refresh, with_rows
from credit_dp.domain_parallel.band_tensor.rules import run_whole
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Part,
    is_band,
    rule_for,
)
from credit_dp.domain_parallel.partition import falls_into_equal_parts

SAMPLES = -2  # of the input (steps, samples, features), and of a state (samples, features)


@rule_for("mkldnn_rnn_layer.default")
def layer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a layer of a recurrent network, in one direction.

    Bands of steps or features move to samples, if there is one for each rank.
    """
    x, weights, states, rest = args[0], args[1:5], args[5:7], args[7:]
    if not is_band(x) or any(type(w) is BandTensor for w in weights):
        return run_whole(func, args, kwargs)
    refresh(x)
    domain, band = x.domain, x.rows
    if band.dim != SAMPLES:
        if not falls_into_equal_parts(x.shape[SAMPLES], domain.ranks):
            return run_whole(func, args, kwargs)
        band = Band(SAMPLES, 1, domain.bounds(x.shape[SAMPLES]))
    local = with_rows(x, band, domain)
    samples = local.shape[SAMPLES]
    tensors = [local, *(with_rows(state, band, domain) for state in states)]
    local, hidden, cell = [_with_a_sample(y) for y in tensors]
    *results, workspace = func(local, *weights, hidden, cell, *rest, **kwargs)
    parts = [Part(y.narrow(SAMPLES, 0, samples), band) for y in results]
    # What backward alone reads: each rank has its own.
    return (*parts, Part(workspace, WHOLE))


@rule_for("mkldnn_rnn_layer_backward.default")
def layer_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of a layer's input, weights and states."""
    x, weights, fields, rest, workspace = args[0], args[1:5], args[5:13], args[13:-1], args[-1]
    output = args[7]
    if not is_band(output) or output.rows.dim != SAMPLES:
        return run_whole(func, args, kwargs)
    domain, band = output.domain, output.rows
    samples = band.outer * band.sizes(domain.rank)
    local, *others = [
        None if y is None else _with_a_sample(with_rows(y, band, domain)) for y in (x, *fields)
    ]
    grad_x, *grad_weights, grad_hidden, grad_cell = func(
        local, *weights, *others, *rest, workspace.local, **kwargs
    )
    own = [Part(y.narrow(SAMPLES, 0, samples), band) for y in (grad_x, grad_hidden, grad_cell)]
    return (own[0], *(Part(y, PARTIAL) for y in grad_weights), *own[1:])


def _with_a_sample(x: Tensor) -> Tensor:
    """Return samples, and one of zeros if there is none, which the library refuses."""
    if x.shape[SAMPLES]:
        return x
    shape = list(x.shape)
    shape[SAMPLES] = 1
    return x.new_zeros(shape)
