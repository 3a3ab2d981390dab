"""A checksum of a tensor's bits: 64 bits that any single changed entry changes."""

import torch
from torch import Tensor

PIECE = 1 << 20  # entries worked on at once, so that no second copy of a large tensor is made
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that multiplying by them modulo 2**64 can be undone: different entries stay different.
STEP, FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
LOWER = 0xFFFFFFFF


def checksum(tensor: Tensor) -> Tensor:
    """The sum of mixed entries modulo 2**64; of bits, not of numbers.

    One changed entry always changes it, several or a swap all but surely. NaNs of equal bits are
    equal, 0.0 and -0.0 are not.

    Shapes:
        any, of any dtype -> `()` int64, on the same device.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(WORDS[flat.element_size()])
    total = torch.full((), len(words), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), PIECE):
        total += mixed(words[start : start + PIECE], start).sum()
    return total


def mixed(words: Tensor, start: int) -> Tensor:
    """Each entry and its position, from `start` on, spread over 64 bits; reversible in the entry.

    Integer arithmetic wraps around, on every device.
    """
    place = torch.arange(start, start + len(words), device=words.device)
    bits = words.to(torch.int64) ^ (place * STEP)
    for factor in (FIRST, SECOND):
        bits *= factor
        bits ^= (bits >> 32) & LOWER
    return bits
