"""Norms and slopes by brute force. Nothing here knows onelip.

Linear maps: the dense matrix, from forward passes on unit vectors, in float64. A product with 0 or 1 is exact, so its
entries are the stored weights, and `exceeds` decides in whole numbers.

Other maps: ratios ||f(x) - f(y)|| / ||x - y|| of pairs. Each is a lower bound of every Lipschitz constant, however it
was found: by chance, along the steepest direction of forward differences, or by zooming into a segment, for jumps.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


@torch.no_grad()
def dense(f: Function, shape: tuple[int, ...]) -> np.ndarray:
    """The matrix (outputs, inputs) of a linear f on samples of this shape."""
    n = math.prod(shape)
    return f(torch.eye(n, dtype=torch.float64).reshape(n, *shape)).reshape(n, -1).T.contiguous().numpy()


def whole(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Python integers M and an exponent e with array = 2^e M, exactly."""
    mantissas, exponents = np.frexp(array)
    mantissas = (mantissas * 2.0**53).astype(np.int64)
    least = int(exponents[mantissas != 0].min()) if (mantissas != 0).any() else 0
    shifts = np.where(mantissas != 0, exponents - least, 0)
    numbers = [int(m) << int(s) for m, s in zip(mantissas.ravel(), shifts.ravel(), strict=True)]
    return np.array(numbers, dtype=object).reshape(array.shape), least - 53


def norm_of(matrix: np.ndarray) -> tuple[float, np.ndarray]:
    """The largest singular value in float64, and its right singular vector."""
    if matrix.size == 0 or not matrix.any():
        return 0.0, np.zeros(matrix.shape[1])
    scale = 2.0 ** (math.frexp(float(np.abs(matrix).max()))[1] - 1)
    try:
        _, values, rows = np.linalg.svd(matrix / scale, full_matrices=False)
    except np.linalg.LinAlgError:  # LAPACK can fail for equal singular values, but not for the transpose
        columns, values, _ = np.linalg.svd(matrix.T / scale, full_matrices=False)
        rows = columns.T
    return float(values[0]) * scale, rows[0]


def exceeds(matrix: np.ndarray, bound: float | Fraction) -> bool:
    """Whether the norm is proved to be above the bound: ||A v||^2 > bound^2 ||v||^2 in whole numbers.

    v is the singular vector of float64. Its error enters squared, so there is no tolerance to choose.
    """
    norm, v = norm_of(matrix)
    if not norm > bound * (1 - 1e-9):
        return False
    (A, e), (q, _) = whole(matrix), whole(v)
    left, right = A.dot(q), q  # v is 2^f q on both sides
    square = sum(int(x) ** 2 for x in left) * Fraction(4) ** e
    return square > Fraction(bound) ** 2 * sum(int(x) ** 2 for x in right)


def ratios(f: Function, x: Tensor, y: Tensor) -> Tensor:
    """Of each pair, less what rounding of the values may have added; 0 where it is no number."""
    a, b = f(torch.cat([x, y])).reshape(2, len(x), -1)
    distance = (y - x).flatten(1).norm(dim=1)
    seen = (b - a).norm(dim=1) - 2.0**-44 * (a.norm(dim=1) + b.norm(dim=1))
    return torch.nan_to_num(seen / distance, nan=0.0, posinf=0.0, neginf=0.0)


def start_points(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Zero, constant, small, large, in [0, 1], and with ties."""
    noise = torch.randn((6, *shape), dtype=torch.float64, generator=generator)
    pixels = torch.rand((2, *shape), dtype=torch.float64, generator=generator)
    return torch.cat([noise[:3], 10 * noise[3:4], 0.1 * noise[4:5], noise[5:].round(), pixels, 0.0 * pixels[:1] + 0.5])


@torch.no_grad()
def steepest(f: Function, shape: tuple[int, ...], generator: torch.Generator, rounds: int = 3) -> float:
    """The largest ratio that was found, by forward passes alone."""
    n = math.prod(shape)
    starts = start_points(shape, generator)
    best, x, v = 0.0, starts[0], torch.zeros(shape, dtype=torch.float64)

    def take(xs: Tensor, ys: Tensor) -> None:
        nonlocal best, x, v
        found = ratios(f, xs, ys)
        i = int(found.argmax())
        if float(found[i]) > best:
            best, x = float(found[i]), xs[i]
            v = (ys[i] - xs[i]) / (ys[i] - xs[i]).norm()

    pairs = torch.cat([starts, starts, starts])
    noise = torch.randn(pairs.shape, dtype=torch.float64, generator=generator)
    lengths = torch.tensor([2.0, 1e-1, 1e-3], dtype=torch.float64).repeat_interleave(len(starts))
    take(pairs, pairs + lengths.reshape(-1, *(1,) * len(shape)) * noise)
    unit = torch.eye(n, dtype=torch.float64).reshape(n, *shape)
    reach = torch.tensor([1e-3, 3e-2, 1.0, 30.0, -1e-3, -1.0], dtype=torch.float64).reshape(-1, *(1,) * len(shape))
    for turn in range(rounds):
        for point in (x, starts[turn]):
            here = f(point[None]).reshape(1, -1)
            change = (f(point + 1e-4 * unit).reshape(n, -1) - here) / 1e-4  # (inputs, outputs)
            if bool(change.isfinite().all()) and change.numel():
                top = torch.from_numpy(norm_of(change.T.numpy())[1]).reshape(shape)
                take(point.expand(len(reach), *shape), point + reach * top)
                take(point - reach * top, point + 0.0 * reach)
        moved = x + 0.1 * torch.randn((8, *shape), dtype=torch.float64, generator=generator)
        take(moved, moved + 1e-2 * v)
    for end in (x + 4 * torch.randn(shape, dtype=torch.float64, generator=generator), -3 * x - v):
        _zoom(f, x, end, take)
    return best


def _zoom(f: Function, a: Tensor, b: Tensor, take: Callable[[Tensor, Tensor], None]) -> None:
    """Of 32 pieces of a segment the steepest, three times: a jump becomes steeper each time."""
    for _ in range(3):
        t = torch.linspace(0, 1, 33, dtype=torch.float64).reshape(-1, *(1,) * a.dim())
        points = a + t * (b - a)
        take(points[:-1], points[1:])
        change = f(points).reshape(33, -1).diff(dim=0).norm(dim=1)
        i = int(torch.nan_to_num(change).argmax())
        a, b = points[i], points[i + 1]


@torch.no_grad()
def mixes_samples(f: Function, shape: tuple[int, ...], generator: torch.Generator) -> bool:
    """Whether a sample is answered by its place in the batch, or by the others in it."""
    x = torch.randn((9, *shape), dtype=torch.float64, generator=generator)
    together, turned = f(x), f(x.flip(0)).flip(0)
    if together.shape[0] != len(x):
        return True
    others = torch.cat([x[:1], 2 * x[1:] + 1])
    moved = f(others)[:1]
    room = 1e-9 * (1 + float(together.abs().max()))
    return not (
        torch.allclose(together, turned, rtol=0, atol=room, equal_nan=True)
        and torch.allclose(together[:1], moved, rtol=0, atol=room, equal_nan=True)
    )
