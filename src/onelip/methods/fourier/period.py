"""A circular convolution of real images by one complex matrix for each frequency: `Period(size)(x, matrices)`.

Up to a few pixels the waves are a matrix to multiply with, which is faster than transforms of so few; else by FFT.
"""

import math

import torch
from torch import Tensor

from onelip.core.tracing import Constant
from onelip.methods.fourier.frequencies import frequencies, real_waves

_FEW_PIXELS = 16


class Period:
    """Images of one size. What depends on the size alone is made once: compilers would trace how it is made.

    Args:
        size: of the images.

    Examples:
        >>> matrices = torch.ones(3, 2, 2, dtype=torch.complex64)  # one for each frequency that is kept
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

    def __call__(self, x: Tensor, matrices: Tensor) -> Tensor:
        """x (batch, columns, *size) -> y (batch, rows, *size) by complex matrices (kept frequencies, rows, columns)."""
        return self.by_waves(x, matrices) if self.is_small else self.by_transforms(x, matrices)

    def by_transforms(self, x: Tensor, matrices: Tensor) -> Tensor:
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
        """The same in real numbers, as in `onelip.methods.fourier.plain`, (1): three products of matrices."""
        count, rows = matrices.shape[:2]
        waves = real_waves(self.size, self.size).to(x) if self._waves is None else self._waves.like(x)
        pixels = x.flatten(2).mT  # (batch, pixels, columns)
        spectrum = torch.matmul(waves, pixels).unflatten(1, (count, 2)).flatten(2)  # (batch, frequencies, 2 columns)
        real, imaginary = torch.view_as_real(matrices.resolve_conj()).unbind(-1)
        blocks = torch.cat([torch.cat([real, -imaginary], 2), torch.cat([imaginary, real], 2)], 1)
        product = torch.bmm(spectrum.transpose(0, 1), blocks.mT).transpose(0, 1)  # (batch, frequencies, 2 rows)
        y = torch.matmul(waves.T, product.reshape(len(x), 2 * count, rows))
        return y.mT.unflatten(2, self.size)
