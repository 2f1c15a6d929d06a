"""Which frequencies a real image has, and its real Fourier basis.

The coefficient of a real image at -f is the conjugate of that at f, so one of the two is enough. Kept are those of rfft
without the mirror images that it still has: along the last axis it keeps f = 0 and f = n / 2 for both f and -f of the
other axes. With weights w_f = 1 where f is its own mirror and 2 elsewhere, the waves

    sqrt(w_f / n) cos(2 pi f x / n),    -sqrt(w_f / n) sin(2 pi f x / n)

of the kept frequencies are an orthonormal basis: Phi^T Phi = I for the matrix Phi whose rows they are, two for each
frequency, the second one zero where f is its own mirror.
"""

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Frequencies(NamedTuple):
    """Of images of one size: what is kept of rfftn, whose frequencies count in the order of `flatten`."""

    kept: tuple[tuple[int, ...], ...]
    place: tuple[int, ...]  # of each that is kept, in rfftn
    source: tuple[int, ...]  # for each of rfftn, the kept one that it or its mirror image is
    mirrored: tuple[bool, ...]  # for each of rfftn, whether it is the mirror image of that
    own_mirror: tuple[bool, ...]  # of each that is kept


@lru_cache(maxsize=64)
def frequencies(size: tuple[int, ...]) -> Frequencies:
    """The frequencies of real images of this size.

    Examples:
        >>> frequencies((3, 2)).kept, frequencies((3, 2)).mirrored
        (((0, 0), (0, 1), (1, 0), (1, 1)), (False, False, False, False, True, True))
    """
    index: dict[tuple[int, ...], int] = {}
    place, source, mirrored = [], [], []
    for at, f in enumerate(itertools.product(*map(range, size[:-1]), range(size[-1] // 2 + 1))):
        mirror = _mirror(f, size)
        mirrored.append(mirror in index and mirror != f)
        if not mirrored[-1]:
            index[f] = len(index)
            place.append(at)
        source.append(index[mirror if mirrored[-1] else f])
    own = tuple(_mirror(f, size) == f for f in index)
    return Frequencies(tuple(index), tuple(place), tuple(source), tuple(mirrored), own)


def _mirror(f: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-i % n for i, n in zip(f, size, strict=True))


def fourier_matrix(size: tuple[int, ...], shifts: tuple[tuple[int, ...], ...]) -> Tensor:
    """Real and imaginary part of exp(2 pi i f s / n) in float64, (2, kept frequencies, taps).

    Whole numbers are reduced first.

    Examples:
        >>> fourier_matrix((4,), ((-1, 0, 1),)).round().tolist()[1]
        [[0.0, 0.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """
    found = frequencies(size)
    turns = torch.zeros(len(found.kept), 1, dtype=torch.float64)
    for axis, (n, reads) in enumerate(zip(size, shifts, strict=True)):
        f = torch.tensor([kept[axis] for kept in found.kept])
        phase = (f[:, None] * torch.tensor(reads)[None] % n).double() / n  # (frequencies, taps)
        turns = (turns[:, :, None] + phase[:, None, :]).flatten(1)
    angle = (2 * math.pi) * (turns % 1)
    sine = angle.sin()
    sine[torch.tensor(found.own_mirror)] = 0  # so it is, but for rounding
    return torch.stack([angle.cos(), sine])


def real_waves(size: tuple[int, ...], seen: tuple[int, ...]) -> Tensor:
    """Phi, (2 frequencies, pixels) in float64: cosine and minus sine for each frequency, of the first pixels seen.

    Examples:
        >>> Phi = real_waves((5, 4), (5, 4))
        >>> bool((Phi.T @ Phi - torch.eye(20)).abs().max() < 1e-14)
        True
    """
    cosine, sine = fourier_matrix(size, tuple(tuple(range(n)) for n in seen))
    weight = torch.where(torch.tensor(frequencies(size).own_mirror), 1.0, 2.0).double()
    scale = (weight / math.prod(size)).sqrt()
    return torch.stack([cosine, -sine], 1).mul(scale[:, None, None]).flatten(0, 1)
