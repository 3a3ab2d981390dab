"""A model of an encoder and a decoder to place on devices, and its gradients and moves."""

import torch
from torch import nn


class Coder(nn.Module):
    """Two convolutions, the second of them named with a dot."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.rest = nn.Sequential(nn.GELU(), nn.Conv2d(3, 3, 3, padding=1))

    def forward(self, x, *, scale=None):
        x = self.rest(self.first(x))
        return x if scale is None else x * scale["by"]

    def extra_repr(self):
        return "kind=own"


class Model(nn.Module):
    """An encoder and a decoder, and a sum of both."""

    def __init__(self):
        super().__init__()
        self.encoder = Coder()
        self.decoder = Coder()
        self.register_buffer("offset", torch.ones(1))

    def forward(self, x):
        encoded = self.encoder(x, scale={"by": x.new_tensor(2.0)})
        return encoded + self.decoder(encoded) + self.offset


def an_input():
    return torch.linspace(-1, 1, 2 * 3 * 6 * 5, dtype=torch.float64).view(2, 3, 6, 5)


def gradients(model, x):
    """Return the output and the gradients of input and parameters, all on the CPU."""
    x = x.clone().requires_grad_()
    made = model(x)
    weights = torch.arange(made.numel(), dtype=made.dtype, device=made.device).view(made.shape)
    made.mul(weights).sum().backward()
    of = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [tensor.detach().cpu() for tensor in (made, *of)]


def weights_moved(model, moves):
    """Return the layers whose weights were moved and their devices, in order."""
    names = {id(p): name.removesuffix(".weight") for name, p in model.named_parameters()}
    named = [(names.get(id(thing), ""), to) for thing, to in moves]
    return [(name, to) for name, to in named if name and not name.endswith(".bias")]


def attributes(model):
    """Return the attributes of every module, and the model's text."""
    return [set(vars(m)) for m in model.modules()], repr(model)
