"""Try to refute a proof by measurements; every public bound is tested like this before it is returned.

A ratio ||f(x) - f(y)|| / ||x - y|| that was measured is a lower bound of every Lipschitz constant of f. Here ratios are
measured in float64 for every step of a program and for the whole, between points at several distances, in directions
that power steps on the derivative find. If a ratio is above the proved constant, a rule is wrong, or a module states a
wrong constant, and `UnsoundBound` is raised. If none is, nothing is proved: a ratio is never part of a bound.

Derivatives only choose directions, since a derivative from torch need not be that of the computed function.

Note [Slack]
    Rounding must not refute a true bound. Let c be the proved constant of a step. Its result y, computed from operands
    z_i with the constants c_i, is taken to be off by UNIT (|y| / c + sum |z_i| / c_i) in units of the input, besides
    the largest such number of its operands: shifting operands by t c_i shifts the result by at most t c. For two
    points both are allowed, times c. UNIT = 2^-36 is 2^17 roundings of float64. A sum of n products is off by n
    roundings of the sum of their magnitudes, which is at most sqrt(n) times c |z|: so it covers the worst case for n up
    to 2^11, and the usual case (sqrt(n) instead of n) far beyond any layer. Distances are computed with
    relative errors of a few times sqrt(n) 2^-53; SLACK = 2^-30 covers these. Constants below 2^-900 are not tested:
    float64 has no relative precision there. A bound that is too small by less than about 1e-6 is not detected.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.bake import bake, copy_model
from onelip.core.errors import NonFiniteWeight, UnsoundBound, UnsupportedLayer
from onelip.core.lipschitz_module import LipschitzModule, is_changed
from onelip.core.state import uncached

UNIT = 2.0**-36
_SLACK = 2.0**-30
_SMALLEST = 2.0**-900
_REALISTIC = 2.0**-8  # the share of UNIT that is subtracted from a ratio that is only shown
_FEW = 3  # power steps at every point
_SCALES = (10.0, -100.0, 1000.0)  # a wrong rule may hold near the example and fail far away
_STEP = 2.0**-10  # distance of the points of a pair, relative to their length: far above rounding, small for a slope


@dataclass(frozen=True)
class Claim:
    """One step of a program with the bounds that are claimed for it.

    Attributes:
        title: for messages.
        inputs: the steps that it reads; the input of the program is step 0.
        run: computes its value from the values of `inputs`, in float64 with a batch axis.
        constant: proved constant from the input of the program to this step; None if nothing is claimed.
        factor: proved constant of the step alone, for steps with one operand.
    """

    title: str
    inputs: tuple[int, ...]
    run: Callable[..., Any]
    constant: float | None = None
    factor: float | None = None

    @property
    def unit(self) -> float:
        """Relative rounding of its result, see Note [Slack]."""
        return getattr(self.run, "unit", UNIT)


@dataclass(frozen=True)
class Claims:
    """A program with the bounds that are claimed for it.

    Attributes:
        steps: in order; the first is the input, the last the output.
        at_once: how many pairs of points the program can run together; 1 if it is made for two samples.
        targets: further claims about numbers that follow from the output, such as differences of two logits.
    """

    steps: Sequence[Claim]
    at_once: int = 1
    targets: Sequence[Claim] = ()


@dataclass(frozen=True)
class Measured:
    """The largest ratios that were found: of the whole program, and of single steps by their number."""

    network: float
    steps: dict[int, float]


def falsify(
    claims: Claims, points: Tensor, *, steps: int = 3, thorough: Collection[int] = (), seed: int = 0
) -> Measured:
    """Measure ratios of a program and of its steps, and compare them with the claimed bounds.

    Multiples of the points, up to a thousand times as far from zero, are tested as well. The cost is that of running
    the program on about 60 samples, for two points and three steps. With more steps, the two points with the steepest
    slopes after three steps are followed further.

    Args:
        claims: the program.
        points: float64 inputs (N, ...) to start from.
        steps: of the power method.
        thorough: numbers of steps that are measured by themselves as long as the whole; all others with a claimed
            factor in brief.
        seed: of random directions.

    Raises:
        UnsoundBound: if a ratio is above a claim.

    Examples:
        >>> input, double = Claim("x", (), nn.Identity(), 1.0), Claim("2 x", (0,), lambda x: 2 * x, 1.9)
        >>> falsify(Claims([input, double]), torch.ones(1, 3).double())
        Traceback (most recent call last):
        onelip.core.errors.UnsoundBound: ...
    """
    search = Search(claims.steps, torch.Generator().manual_seed(seed))
    with torch.inference_mode(False):
        started = []
        for x in points.split(claims.at_once):
            x, v = search.climb(x, min(steps, _FEW))
            started.append((search.last, x, v))
            search.far(x, v)
        # A long search goes on where the slope is steepest.
        for _, x, v in sorted(started, key=lambda start: start[0])[-2:] if steps > _FEW else ():
            search.far(*search.climb(x, steps - _FEW, v))
        for scale in _SCALES:
            x = scale * points[: claims.at_once]
            search.far(*search.climb(x, 1))
            search.pair(x, -x)
        if len(points) > 1:
            for x, y in zip(points[:-1].split(claims.at_once), points[1:].split(claims.at_once), strict=True):
                search.pair(x, y)
        for x, target in zip(points.split(1), claims.targets, strict=False):
            search.follow(x, target)
        found = {
            number: search.alone(number, steps if number in thorough else min(steps, _FEW))
            for number, claim in enumerate(claims.steps)
            if claim.factor is not None or number in thorough
        }
    return Measured(search.best, found)


class Search:
    """Runs a program at pairs of points, and compares all of its steps with their claims.

    Args:
        claims: the steps of the program.
        generator: of random directions.
        smallest: numbers below it may underflow to zero.

    Attributes:
        best: the largest ratio of the output so far.
        last: the ratio of the output for the last pair.
        values: the values of all steps for the last pair.
        longest: (N) the largest norm of all values of a sample, in the last run.
        underflow: the effect of underflow on the output of the last run, in units of the input.
    """

    def __init__(self, claims: Sequence[Claim], generator: torch.Generator, smallest: float = 0.0) -> None:
        self.claims, self.generator, self.smallest = claims, generator, smallest
        self.best = self.last = 0.0
        self.values: list[Any] = []
        self.longest = np.zeros(0)
        self.underflow = 0.0

    def run(self, x: Tensor) -> tuple[list[Any], list[np.ndarray]]:
        """Values of all steps, and the possible rounding error of each sample, in units of the input; Note [Slack]."""
        values: list[Any] = [x]
        for claim in self.claims[1:]:
            values.append(claim.run(*(values[i] for i in claim.inputs)))
        known = [
            i for i, claim in enumerate(self.claims) if claim.constant is not None and _is_batch(values[i], len(x))
        ]
        lengths = dict(zip(known, _norms([values[i] for i in known]), strict=True))
        rounding, underflow = [np.zeros(len(x))], [0.0]
        for number, claim in enumerate(self.claims[1:], start=1):
            here = functools.reduce(np.maximum, [rounding[i] for i in claim.inputs], np.zeros(len(x)))
            lost = max((underflow[i] for i in claim.inputs), default=0.0)
            for i in (number, *claim.inputs):
                c = self.claims[i].constant
                if c is not None and c > _SMALLEST and i in lengths:
                    here = here + claim.unit * lengths[i] / c
                    lost += self.smallest * math.sqrt(values[i][0].numel()) / c
            rounding.append(here)
            underflow.append(lost)
        self.longest = np.max(np.stack(list(lengths.values())), axis=0)
        self.underflow = underflow[-1]
        return values, rounding

    def pair(self, x: Tensor, y: Tensor) -> None:
        """Compare all steps at x and y."""
        with torch.no_grad():
            self._compare(*self.run(torch.cat([x, y])), sample_norms(y - x).numpy())

    def _compare(self, values: list[Any], rounding: list[np.ndarray], distance: np.ndarray) -> None:
        self.values = values
        half, last = len(distance), len(self.claims) - 1
        chosen = [
            number
            for number, (claim, value) in enumerate(zip(self.claims, values, strict=True))
            if _is_batch(value, 2 * half) and (claim.constant is not None or number == last)
        ]
        differences = _norms([values[number][:half] - values[number][half:] for number in chosen])
        for number, seen in zip(chosen, differences, strict=True):
            both = rounding[number][:half] + rounding[number][half:]
            _check(self.claims[number], values[number], seen, both, distance)
            if number == last:
                self.last = _shown(self.claims[number], values[number], seen, both, distance)
                self.best = max(self.best, self.last)

    def climb(self, x: Tensor, steps: int, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Power steps on the derivative of the output; in a long search every third also moves the points uphill.

        Returns:
            The points, and a steep direction at each.
        """
        if v is None:
            v = _unit(torch.randn(x.shape, dtype=x.dtype, generator=self.generator))
        for step in range(steps):
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                other = leaf + _stride(x) * v
                values, rounding = self.run(torch.cat([leaf, other]))
                self._compare(values, rounding, sample_norms(other - leaf).numpy())
                if not _is_batch(values[-1], 2 * len(x)):  # an output without a batch axis has no claim
                    break
                here, there = values[-1][: len(x)], values[-1][len(x) :]
                u = _unit((there - here).detach())
                is_long = steps > 8 and step % 3 == 2
                v = _gradient((here * u).sum(), leaf, v, self.generator, keep=is_long)
                if is_long:
                    uphill = _gradient((there * u).sum() - (here * u).sum(), leaf, v, self.generator)
                    x = x + 0.1 * uphill
        return x, v

    def far(self, x: Tensor, v: Tensor) -> None:
        """Pairs that are as far apart as the points are long, in the direction that was found."""
        self.pair(x, x + _stride(x) / _STEP * v)

    def follow(self, x: Tensor, target: Claim) -> None:
        """A scalar function of the output: its own gradient is the steepest direction."""
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            value = target.run(self.run(torch.cat([leaf, leaf]))[0][-1])
            v = _gradient(value[: len(x)].sum(), leaf, leaf.detach(), self.generator)
        for distance in (_stride(x), _stride(x) / _STEP):
            both = torch.cat([x, x + distance * v])
            with torch.no_grad():
                values, rounding = self.run(both)
                # The rounding of the output is in units of the input by the constant of the output, not of the target.
                last = self.claims[-1].constant or 0.0
                scale = last / target.constant if target.constant else 0.0
                _measure(target, both, target.run(values[-1]), 2 * scale * rounding[-1])

    def alone(self, number: int, steps: int) -> float:
        """The steepest slope of one step at its operand, by power steps there."""
        claim = self.claims[number]
        (source,) = claim.inputs
        operand = self.values[source]
        if not isinstance(operand, Tensor) or not operand.numel():
            return 0.0
        z = operand[:1].detach()
        own = replace(claim, constant=claim.factor)
        best, v = 0.0, _unit(torch.randn(z.shape, dtype=z.dtype, generator=self.generator))
        for step in range(steps):
            leaf = z.requires_grad_()
            with torch.enable_grad():
                operands = torch.cat([leaf, leaf + _stride(z) * v])
                y = claim.run(operands)
                if not isinstance(y, Tensor):
                    return 0.0
                best = max(best, _measure(own, operands, y))
                u = _unit((y[1:] - y[:1]).detach())
                v = _gradient((y[:1] * u).sum(), leaf, v, self.generator)
            z = z.detach()
            if step == 0 and steps <= 8:  # also the direction in which all entries rise: averages and copies like it
                with torch.no_grad():
                    operands = torch.cat([z, z + _stride(z) * _unit(torch.ones_like(z))])
                    best = max(best, _measure(own, operands, claim.run(operands)))
        return best


def _measure(claim: Claim, operands: Tensor, value: Tensor, rounding: np.ndarray | None = None) -> float:
    """The largest ratio between the first and the second half of a batch; raises if one is above the claim.

    Args:
        claim: of a function of the operands.
        operands: (2 N, ...).
        value: (2 N, ...), of the function.
        rounding: (2 N) possible rounding errors, in units of the operands. Default: those of one step.
    """
    half, c = len(value) // 2, claim.constant
    lengths, sizes = _norms([operands, value])
    if rounding is None:
        rounding = claim.unit * (lengths + sizes / c) if c is not None and c > _SMALLEST else np.zeros(len(value))
    seen, distance = _norms([z[:half] - z[half:] for z in (value, operands)])
    both = rounding[:half] + rounding[half:]
    _check(claim, value, seen, both, distance)
    return _shown(claim, value, seen, both, distance)


def _check(claim: Claim, value: Tensor, seen: np.ndarray, rounding: np.ndarray, distance: np.ndarray) -> None:
    """Raise if a distance of two results, `seen`, is above the claim; see Note [Slack]."""
    c = claim.constant
    if c is None or 0 < c <= _SMALLEST:
        return
    # Rounding is all that remains of a step that does not depend on the input.
    allowed = c * (distance * (1 + _SLACK) + rounding) if c > 0 else claim.unit * _pair_sums(value)
    is_above = (seen > allowed) & (distance > 0)
    if is_above.any():
        refute(claim.title, float((seen / distance)[is_above].max()), c)


def _shown(claim: Claim, value: Tensor, seen: np.ndarray, rounding: np.ndarray, distance: np.ndarray) -> float:
    """The largest ratio, less a realistic rounding error: a number to print."""
    c = claim.constant
    error = claim.unit * _pair_sums(value) if c is None else c * rounding
    with np.errstate(all="ignore"):
        ratios = (seen - _REALISTIC * error) / distance
    ratios = ratios[np.isfinite(ratios)]
    largest = max(0.0, float(ratios.max())) if len(ratios) else 0.0
    return largest if c is None else min(largest, c)


def _pair_sums(value: Tensor) -> np.ndarray:
    """The norms of the first and of the second half of a batch, added."""
    lengths = _norms([value])[0]
    half = len(value) // 2
    return lengths[:half] + lengths[half:]


def refute(title: str, seen: float, proved: float) -> None:
    raise UnsoundBound(
        f"expected every measured ratio below the proved bound, got {seen} above {proved} for {title}: a rule is "
        "wrong, or a module states a constant that does not hold; please report it"
    )


def _stride(x: Tensor) -> Tensor:
    """A distance for each sample, in proportion to its length and of use for zero, too."""
    return (_STEP * sample_norms(x).clamp(min=1.0)).reshape(-1, *(1,) * (x.dim() - 1))


def sample_norms(x: Tensor) -> Tensor:
    """The norm of each sample, also where squares underflow or overflow.

    Examples:
        >>> sample_norms(torch.tensor([[3e-200, 4e-200]], dtype=torch.float64))  # the squares underflow
        tensor([5.0000e-200], dtype=torch.float64)
    """
    flat = x.detach().reshape(len(x), -1)  # not flatten(1): a network may have one number for each sample
    norms = torch.linalg.vector_norm(flat, dim=1)
    if not flat.numel() or _is_moderate(norms.numpy() if norms.dtype == torch.float64 else np.zeros(1)):
        return norms
    most = 900 if flat.dtype == torch.float64 else 100
    exponent = torch.frexp(flat.abs().amax(1)).exponent.clamp(-most, most)
    return torch.ldexp(torch.ldexp(flat, -exponent[:, None]).norm(dim=1), exponent)


def _is_moderate(norms: np.ndarray) -> bool:
    """Whether no square of these norms has underflowed or overflowed."""
    return bool(norms.min() > 1e-140 and norms.max() < 1e140)


def _is_batch(value: Any, count: int) -> bool:
    """Whether a value has that many samples; a split has several tensors."""
    return isinstance(value, Tensor) and value.shape[:1] == (count,)


def _norms(values: Sequence[Tensor]) -> list[np.ndarray]:
    """The norms of the samples of several values."""
    return [sample_norms(value).numpy() for value in values]


def _unit(x: Tensor) -> Tensor:
    """Every sample divided by its norm; samples that are zero or not finite become zero."""
    norms = sample_norms(x).reshape(-1, *(1,) * (x.dim() - 1))
    return torch.where((norms > 0) & torch.isfinite(norms), x / norms, 0.0)


def _gradient(y: Tensor, x: Tensor, otherwise: Tensor, generator: torch.Generator, *, keep: bool = False) -> Tensor:
    """The direction of the gradient, with a little noise; another one where there is none."""
    try:
        (found,) = torch.autograd.grad(y, x, retain_graph=keep)
    except RuntimeError:  # no derivative
        found = otherwise
    found = torch.where(torch.isfinite(found), found, 0.0)
    noise = torch.randn(found.shape, dtype=found.dtype, generator=generator)
    return _unit(_unit(found) + 1e-9 * _unit(noise))


def example_points(example: Tensor, count: int, seed: int = 0) -> Tensor:
    """Inputs in float64 to start from: of the example, of [0, 1], noise, and zero."""
    generator = torch.Generator().manual_seed(seed)
    start = example[:2].detach().double().cpu()
    shape = (2, *start.shape[1:])
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    near = start[:1] + 0.1 * noise
    points = torch.cat([start[:1], uniform[:1], start[1:], uniform[1:], near, noise, torch.zeros_like(start[:1])])
    return points[:count]


def falsify_layer(module: nn.Module, constant: float, input_size: int | Sequence[int] | None = None) -> None:
    """Try to refute a constant of a linear layer of torch, with the weight that it has in eval mode.

    Args:
        module: of LINEAR_LAYERS; a layer whose forward is not that of torch is skipped.
        constant: the claimed constant.
        input_size: of images; by default three times the size of the kernel.

    Raises:
        UnsoundBound: if a measured ratio is above it.
        NonFiniteWeight: if its weight or its bias is not finite.
    """
    if is_changed(module) or any(parameter.is_meta for parameter in module.parameters()):
        return
    layer: Any = bake(module, fold=False).cpu().double().eval().requires_grad_(False)
    if not layer.weight.numel():
        return
    layer.register_parameter("bias", None)
    shape = (layer.weight.shape[1],)
    if isinstance(layer, nn.modules.conv._ConvNd):
        inputs, taps = layer.weight.shape[0 if layer.transposed else 1], layer.weight.shape[2:]
        shape = (inputs * (1 if layer.transposed else layer.groups), *_size(layer, taps, input_size))
    start = torch.rand((1, *shape), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        layer(start)
    except ValueError:  # the guard of a layer that is made for images of another size
        return
    except RuntimeError as error:
        raise UnsupportedLayer(f"the layer does not run on inputs of size {tuple(shape[1:])}: {error}") from error
    step = Claim(type(module).__name__, (0,), layer, constant, constant)
    falsify(Claims([Claim("the input", (), nn.Identity(), 1.0), step]), start, steps=4)


def falsify_module(module: nn.Module, constant: float) -> None:
    """Try to refute a constant of a module whose input shape is not known, in eval mode.

    It is measured on the first shape that it accepts: the `input_shape` of a layer in it, else some usual shapes, with
    channels as in its own tensors, else 60 or 64. A module that accepts none of them is left out.

    Args:
        module: from one tensor to one tensor, with the batch as the first axis.
        constant: the claimed constant.

    Raises:
        UnsoundBound: if a measured ratio is above it.
        NonFiniteWeight: if it gives NaN or an infinity.

    Examples:
        >>> falsify_module(nn.LeakyReLU(3.0), 2.9)
        Traceback (most recent call last):
        onelip.core.errors.UnsoundBound: ...
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return
    copy: Any = copy_model(module).cpu().double().eval().requires_grad_(False)
    own = dict.fromkeys(n for tensor in tensors for n in tensor.shape[:2])
    images = ((), (12, 12), (12,), (6, 6, 6))
    usual = [(channels, *image) for image in images for channels in (*own, 60, 64)]
    stated = [part.input_shape for part in module.modules() if isinstance(part, LipschitzModule)]
    with uncached(), parametrize.cached():  # each weight is computed once
        for shape in [*filter(None, stated), *usual]:
            points = example_points(torch.full((1, *shape), 0.5), 4) - 0.5  # of both signs
            try:
                with torch.no_grad():
                    fits = isinstance(y := copy(points), Tensor) and len(y) == len(points)
            except Exception:  # of any class: another shape, or none
                continue
            if fits and y.is_floating_point() and y.numel():
                if not bool(torch.isfinite(y).all()):
                    raise NonFiniteWeight("gives NaN or an infinity at a finite input; load an earlier checkpoint")
                step = Claim(type(module).__name__, (0,), copy, constant, constant)
                falsify(Claims([Claim("the input", (), nn.Identity(), 1.0), step], 2), points)
                return


def _size(layer: Any, taps: Sequence[int], size: int | Sequence[int] | None) -> tuple[int, ...]:
    if size is not None:
        return (size,) * len(taps) if isinstance(size, int) else tuple(size)
    extents = [3 * (d * (k - 1) + 1) for k, d in zip(taps, layer.dilation, strict=True)]
    if layer.transposed:  # its padding crops the output
        extents = [n + 2 * p for n, p in zip(extents, layer.padding, strict=True)]
    return tuple(-(-n // s) * s for n, s in zip(extents, layer.stride, strict=True))
