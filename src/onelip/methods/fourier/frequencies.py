"""Frequencies of real images, their real Fourier basis, and convolutions by one matrix per frequency."""

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelip.core.modes import Constant

_FEW_PIXELS = 16  # up to here products with the basis are faster than FFTs


class Frequencies(NamedTuple):
    """The frequencies that determine a real image, among those of `torch.fft.rfftn` in the order of `flatten`.

    The coefficient at -f is the conjugate of that at f, so one of the two is enough. Along the last axis rfftn keeps
    both f and -f of the other axes for f = 0 and f = n / 2; here one of them is dropped.

    Attributes:
        kept: the frequencies.
        place: for each kept frequency, its index in rfftn.
        source: for each frequency of rfftn, the index of the kept one that it or its mirror image is.
        mirrored: for each frequency of rfftn, whether it is the mirror image of that one.
        own_mirror: for each kept frequency, whether it is its own mirror image.
    """

    kept: tuple[tuple[int, ...], ...]
    place: tuple[int, ...]
    source: tuple[int, ...]
    mirrored: tuple[bool, ...]
    own_mirror: tuple[bool, ...]


@lru_cache(maxsize=64)
def frequencies(size: tuple[int, ...]) -> Frequencies:
    """Return the frequencies of real images of this size.

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
    r"""Return real and imaginary part of $\exp(2 \pi i f s / n)$ in float64, (2, kept frequencies, taps).

    Args:
        size: of the images.
        shifts: for each axis, the shifts $s$ of the taps. $f s$ is reduced modulo $n$ in integers first.

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
    sine[torch.tensor(found.own_mirror)] = 0  # exactly, without rounding
    return torch.stack([angle.cos(), sine])


def real_waves(size: tuple[int, ...], seen: tuple[int, ...]) -> Tensor:
    r"""Return the real Fourier basis $\Phi$ (2 frequencies, pixels) in float64.

    With $w_f = 1$ where $f$ is its own mirror image and $w_f = 2$ elsewhere, the rows for the frequency $f$ are

    $$\sqrt{w_f / n} \cos(2 \pi f x / n), \qquad -\sqrt{w_f / n} \sin(2 \pi f x / n),$$

    the second one zero where $f$ is its own mirror image. They are orthonormal: $\Phi^\top \Phi = I$.

    Args:
        size: of the images.
        seen: size of the part, from the origin on, whose pixels are the columns.

    Examples:
        >>> Phi = real_waves((5, 4), (5, 4))
        >>> bool((Phi.T @ Phi - torch.eye(20)).abs().max() < 1e-14)
        True
    """
    cosine, sine = fourier_matrix(size, tuple(tuple(range(n)) for n in seen))
    weight = torch.where(torch.tensor(frequencies(size).own_mirror), 1.0, 2.0).double()
    scale = (weight / math.prod(size)).sqrt()
    return torch.stack([cosine, -sine], 1).mul(scale[:, None, None]).flatten(0, 1)


def real_form(parts: Tensor) -> Tensor:
    r"""Return complex matrices $M$ as real ones, $\begin{pmatrix} \mathrm{Re}\,M & -\mathrm{Im}\,M \\ \mathrm{Im}\,M &
    \mathrm{Re}\,M \end{pmatrix}$.

    Args:
        parts: real and imaginary parts (b, rows, columns, 2).

    Returns:
        (b, 2 rows, 2 columns).
    """
    real, imaginary = parts.unbind(-1)
    return torch.cat([torch.cat([real, -imaginary], 2), torch.cat([imaginary, real], 2)], 1)


class Period:
    """A circular convolution of real images by one complex matrix per frequency: `Period(size)(x, matrices)`.

    For a few pixels the basis is a matrix to multiply with, which is faster than transforms; otherwise by FFT. Tensors
    that only depend on the size are made once, so that compilers do not trace their construction.

    Args:
        size: spatial size of the images.

    Examples:
        >>> matrices = torch.ones(3, 2, 2, dtype=torch.complex64)  # one for each kept frequency
        >>> Period((4,))(torch.ones(1, 2, 4), matrices)[0, 0].tolist()
        [2.0, 2.0, 2.0, 2.0]
    """

    def __init__(self, size: tuple[int, ...]) -> None:
        self.size = size
        self.is_small = math.prod(size) <= _FEW_PIXELS
        found = frequencies(size)
        self._waves = Constant(real_waves(size, size)) if self.is_small else None
        self._has_mirrored = any(found.mirrored)
        self._place = Constant(torch.tensor(found.place))
        self._source = Constant(torch.tensor(found.source))
        self._mirrored = Constant(torch.tensor(found.mirrored)[:, None, None])

    def is_for(self, size: tuple[int, ...]) -> bool:
        """Whether this is still the period of images of this size: its attributes can be changed."""
        if type(self) is not Period:
            return False
        mine, expected = vars(self), vars(Period(size))
        return mine.keys() == expected.keys() and all(_same(mine[name], expected[name]) for name in mine)

    def __call__(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Map x (batch, columns, *size) to (batch, rows, *size) by matrices (kept frequencies, rows, columns)."""
        return self.by_waves(x, matrices) if self.is_small else self.by_transforms(x, matrices)

    def by_transforms(self, x: Tensor, matrices: Tensor) -> Tensor:
        """The map, by FFT."""
        axes = tuple(range(2, 2 + len(self.size)))
        spectrum = torch.fft.rfftn(x, dim=axes)
        at_each = spectrum.flatten(2).permute(2, 1, 0)  # (frequencies, columns, batch)
        if not self._has_mirrored:
            product = torch.bmm(matrices, at_each)
        else:
            product = torch.bmm(matrices, at_each[self._place.like(x)])[self._source.like(x)]
            product = torch.where(self._mirrored.like(x), product.conj(), product)
        return torch.fft.irfftn(product.permute(2, 1, 0).unflatten(2, spectrum.shape[2:]), s=self.size, dim=axes)

    def by_waves(self, x: Tensor, matrices: Tensor) -> Tensor:
        """The map in real numbers, by three products of matrices as in `onelip.methods.fourier.plain`."""
        count, rows = matrices.shape[:2]
        waves = real_waves(self.size, self.size).to(x) if self._waves is None else self._waves.like(x)
        pixels = x.flatten(2).mT  # (batch, pixels, columns)
        spectrum = torch.matmul(waves, pixels).unflatten(1, (count, 2)).flatten(2)  # (batch, frequencies, 2 columns)
        blocks = real_form(torch.view_as_real(matrices.resolve_conj()))
        product = torch.bmm(spectrum.transpose(0, 1), blocks.mT).transpose(0, 1)  # (batch, frequencies, 2 rows)
        y = torch.matmul(waves.T, product.reshape(len(x), 2 * count, rows))
        return y.mT.unflatten(2, self.size)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(other, Constant):
        return bool(one == other)
    if type(one) is not Constant or not torch.equal(one.value, other.value):
        return False
    return all(torch.equal(made, one.value.to(device, dtype)) for (device, dtype), made in one._made.items())
