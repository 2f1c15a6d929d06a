"""The attempt to refute a proof, through which every public bound goes before it is returned.

A ratio ||f(x) - f(y)|| / ||x - y|| that was measured is a lower bound of every Lipschitz constant of f. Here ratios are
measured in float64 for every step of a program and for the whole, between points at several distances, in directions
that power steps on the derivative find. If one is above what was proved, a rule is wrong, or a module states a constant
that does not hold: `UnsoundBound` instead of an answer. The other way round nothing follows: no ratio is a proof.

Derivatives only choose directions. What torch gives for one need not be the derivative of what it computes.

Note [Slack]
    Rounding must not refute a true bound. Let c be the proved constant of a step. Its result y, computed from operands
    z_i with the constants c_i, is taken to be off by UNIT (|y| / c + sum |z_i| / c_i) in units of the input, besides
    the largest such number of its operands: shifting operands by t c_i shifts the result by at most t c. For two
    points both are allowed, times c. UNIT = 2^-36 is 2^17 roundings of float64. A sum of n products is off by n
    roundings of the sum of their magnitudes, which is at most sqrt(n) times c |z|: so it covers the worst case for n up
    to 2^11, and what is seen in practice (sqrt(n) instead of n) far beyond any layer. Distances are computed with
    relative errors of a few times sqrt(n) 2^-53; SLACK = 2^-30 covers these. Constants below 2^-900 are not tested:
    float64 has no relative precision there. A bound that is too small by less than about 1e-6 is not found out.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.bake import bake, copy_model
from onelip.core.errors import NonFiniteWeight, UnsoundBound, UnsupportedLayer
from onelip.core.lipschitz_module import is_changed

UNIT = 2.0**-36
_SLACK = 2.0**-30
_SMALLEST = 2.0**-900
_REALISTIC = 2.0**-8  # the share of UNIT that is taken off a ratio which is only shown
_FEW = 3  # power steps at every point
_STEP = 2.0**-10  # distance of the points of a pair, relative to their length: far above rounding, small for a slope


@dataclass(frozen=True)
class Claim:
    """One step of a program with the bounds that are claimed for it.

    Attributes:
        title: for messages.
        inputs: the steps that it reads; the input of the program is step 0.
        run: from the values of these, in float64 with a batch axis, to its own.
        constant: proved, from the input of the program up to here; None: nothing is claimed.
        factor: proved of the step by itself, for steps with one operand.
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

    The cost is that of running the program on about 50 samples, for two points and three steps. With more steps, the
    two points with the steepest slopes after three steps are followed further.

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
    def __init__(self, claims: Sequence[Claim], generator: torch.Generator, smallest: float = 0.0) -> None:
        self.claims, self.generator = claims, generator
        self.smallest = smallest  # numbers below may be lost; the constants that are tested are far above float64's
        self.best = self.last = 0.0  # ratios of the whole: the largest, and of the last pair
        self.values: list[Any] = []  # of the last pair
        self.longest = torch.zeros(0)  # of all values of a sample, in the last run
        self.underflow = 0.0  # what numbers that were lost did to the output in that run, in units of the input

    def run(self, x: Tensor) -> tuple[list[Any], list[Tensor]]:
        """Values of all steps, and what rounding may have done to each sample, in units of the input; Note [Slack]."""
        values: list[Any] = [x]
        lengths: list[Any] = [sample_norms(x)]
        rounding = [torch.zeros(len(x), dtype=torch.float64)]
        underflow = [0.0]
        for claim in self.claims[1:]:
            values.append(claim.run(*(values[i] for i in claim.inputs)))
            lengths.append(None if claim.constant is None else sample_norms(values[-1]))
            here, lost = (
                torch.zeros(len(x), dtype=torch.float64),
                max((underflow[i] for i in claim.inputs), default=0.0),
            )
            for i in claim.inputs:
                here = torch.maximum(here, rounding[i])
            for number, c in ((len(values) - 1, claim.constant), *((i, self.claims[i].constant) for i in claim.inputs)):
                if c is not None and c > _SMALLEST and lengths[number] is not None:
                    here = here + claim.unit * lengths[number] / c
                    lost += self.smallest * math.sqrt(values[number][0].numel()) / c
            rounding.append(here)
            underflow.append(lost)
        self.longest = torch.stack([length for length in lengths if length is not None]).amax(0)
        self.underflow = underflow[-1]
        return values, rounding

    def pair(self, x: Tensor, y: Tensor) -> None:
        """Compare all steps at x and y."""
        with torch.no_grad():
            self._compare(*self.run(torch.cat([x, y])), sample_norms(y - x))

    def _compare(self, values: list[Any], rounding: list[Tensor], distance: Tensor) -> None:
        self.values = values
        last = len(self.claims) - 1
        for number, (claim, value) in enumerate(zip(self.claims, values, strict=True)):
            # Without a claim nothing is known of the first axis either: it need not be the batch.
            is_shown = number == last and isinstance(value, Tensor) and value.shape[:1] == (2 * len(distance),)
            if isinstance(value, Tensor) and (claim.constant is not None or is_shown):
                ratio = self._ratio(claim, value.detach(), rounding[number], distance)
                if number == last:
                    self.best, self.last = max(self.best, ratio), ratio

    def _ratio(self, claim: Claim, value: Tensor, rounding: Tensor, distance: Tensor) -> float:
        """The largest ratio of the pairs, as it may be shown; raises if one is above the claim."""
        half = len(value) // 2
        seen = sample_norms(value[:half] - value[half:])
        both = sample_norms(value)[:half] + sample_norms(value)[half:]
        c = claim.constant
        if c is None:
            shown = (seen - claim.unit * _REALISTIC * both) / distance
        else:
            allowed = claim.unit * both  # all that there is for what does not depend on the input
            if c > 0:
                allowed = c * (distance * (1 + _SLACK) + rounding[:half] + rounding[half:])
            is_above = (seen > allowed) & (distance > 0) & (c == 0 or c > _SMALLEST)
            if bool(is_above.any()):
                refute(claim.title, float((seen / distance)[is_above].max()), c)
            shown = (seen - c * _REALISTIC * (rounding[:half] + rounding[half:])) / distance
        shown = shown[torch.isfinite(shown)]
        largest = max(0.0, float(shown.max())) if len(shown) else 0.0
        return largest if c is None else min(largest, c)

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
                self._compare(values, rounding, sample_norms(other - leaf))
                if values[-1].shape[:1] != (2 * len(x),):  # an output without the batch, of which nothing is claimed
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
        """A function of the output with values that are numbers: its own gradient is the steepest direction."""
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
                gap = sample_norms(both[len(x) :] - both[: len(x)])
                self._ratio(target, target.run(values[-1]), 2 * scale * rounding[-1], gap)

    def alone(self, number: int, steps: int) -> float:
        """The steepest slope of one step at its operand, by power steps there."""
        claim = self.claims[number]
        (source,) = claim.inputs
        operand = self.values[source]
        if not isinstance(operand, Tensor) or not operand.numel():
            return 0.0
        z, half = operand[:1].detach(), 1
        own = replace(claim, constant=claim.factor)
        best, v = 0.0, _unit(torch.randn(z.shape, dtype=z.dtype, generator=self.generator))
        for step in range(steps):
            leaf = z.requires_grad_()
            with torch.enable_grad():
                other = leaf + _stride(z) * v
                y = claim.run(torch.cat([leaf, other]))
                if not isinstance(y, Tensor):
                    return 0.0
                best = max(best, self._alone(own, torch.cat([leaf, other]).detach(), y.detach()))
                u = _unit((y[half:] - y[:half]).detach())
                v = _gradient((y[:half] * u).sum(), leaf, v, self.generator)
            z = z.detach()
            if step == 0 and steps <= 8:  # also where all entries rise together, as averages and copies like it
                ones = _unit(torch.ones_like(z))
                with torch.no_grad():
                    both = torch.cat([z, z + _stride(z) * ones])
                    best = max(best, self._alone(own, both, claim.run(both)))
        return best

    def _alone(self, claim: Claim, operands: Tensor, value: Tensor) -> float:
        half = len(value) // 2
        c = claim.constant
        rounding = torch.zeros(len(value), dtype=torch.float64)
        if c is not None and c > _SMALLEST:
            rounding = claim.unit * (sample_norms(operands) + sample_norms(value) / c)
        distance = sample_norms(operands[half:] - operands[:half])
        return self._ratio(claim, value, rounding, distance)


def refute(title: str, seen: float, proved: float) -> None:
    raise UnsoundBound(
        f"expected every measured ratio below the proved bound, got {seen} above {proved} for {title}: a rule is "
        "wrong, or a module states a constant that does not hold; please report it"
    )


def _stride(x: Tensor) -> Tensor:
    """A distance for each sample, in proportion to its length and of use for zero, too."""
    return (_STEP * sample_norms(x).clamp(min=1.0)).reshape(-1, *(1,) * (x.dim() - 1))


def sample_norms(x: Any) -> Any:
    """The norm of each sample; None for values that are not tensors.

    Examples:
        >>> sample_norms(torch.tensor([[3e-200, 4e-200]], dtype=torch.float64))  # the squares underflow
        tensor([5.0000e-200], dtype=torch.float64)
    """
    if not isinstance(x, Tensor):
        return None
    flat = x.detach().reshape(len(x), -1)  # not flatten(1): a network may have one number for each sample
    if not flat.numel():
        return flat.norm(dim=1)
    most = 900 if flat.dtype == torch.float64 else 100
    exponent = torch.frexp(flat.abs().amax(1)).exponent.clamp(-most, most)
    return torch.ldexp(torch.ldexp(flat, -exponent[:, None]).norm(dim=1), exponent)


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
        module: of LINEAR_LAYERS; one whose forward is another than torch's is left out.
        constant: what is claimed.
        input_size: of images; by default such that the kernel fits in three times.

    Raises:
        UnsoundBound: if a measured ratio is above it.
    """
    if is_changed(module) or any(parameter.is_meta for parameter in module.parameters()):
        return
    try:
        layer: Any = bake(module, fold=False).cpu().double().eval().requires_grad_(False)
    except NonFiniteWeight:
        return
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

    It is measured on the first of some usual shapes that it accepts, with channels as in its own tensors, else 60 or
    64. A module that accepts none of them is left out.

    Args:
        module: from one tensor to one tensor, with the batch as the first axis.
        constant: what is claimed.

    Raises:
        UnsoundBound: if a measured ratio is above it.

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
    for image in ((), (12, 12), (12,), (6, 6, 6)):
        for channels in (*own, 60, 64):
            points = example_points(torch.full((1, channels, *image), 0.5), 4) - 0.5  # of both signs
            try:
                with torch.no_grad():
                    fits = isinstance(y := copy(points), Tensor) and len(y) == len(points)
            except Exception:  # of any class: another shape, or none
                continue
            if fits and y.is_floating_point() and y.numel():
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
