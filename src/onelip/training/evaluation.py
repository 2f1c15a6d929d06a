r"""Accuracy and certified robust accuracy of a network, in real arithmetic, and the constants that they rest on.

The network is baked and runs in float32, whatever training used. Its constants come from its construction: the product
of the bounds that the methods prove for every weight. Where a method proves nothing (free or penalised weights), or
the baked network is not bit for bit that of the trained one, the stored weights of the baked network are bounded, layer
by layer (`onelip.bounds`). Estimates of training are never used. Either way

$$ f_i - f_j \text{ has the constant } \sqrt 2\,L, \quad \text{or per pair of classes} \quad K |w_i - w_j|, $$

with $K$ the constant of the features and $w$ the rows of the last layer; LMT, GloRo and last-layer normalisation
certify with the second. The rounding of the forward pass is not part of these numbers: `onelip.certify` includes it.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onelip.bounds.falsify import Claim, Claims, example_points, falsify
from onelip.certification.radius import PAPER_RADII, certified_accuracy, margins, radius_name, real_radii
from onelip.certification.summary import summary
from onelip.core.bake import bake
from onelip.core.errors import NonFiniteWeight
from onelip.core.images import to_float
from onelip.core.modes import full_precision, rounding_room
from onelip.core.parametrization import find_parametrization
from onelip.core.rounding import multiply_up
from onelip.graph.modules import bound_chain, bound_stored, links
from onelip.losses.chain import head_rows, output_shape, pair_distances, split_head
from onelip.methods.last_layer import UnitRows
from onelip.training.objective import certifies_pairs, resolve_method
from onelip.training.recipe import Recipe

Effort = Literal["quick", "normal", "high"]

BY_CONSTRUCTION = "by construction (real arithmetic)"
BY_WEIGHTS = "by bounds of the stored weights (real arithmetic)"
BY_PAIRS = "by bounds of the stored weights, per pair of classes (real arithmetic)"

# Covers the rounding of float64 sums over a row of the last layer, which is at most 2^-53 * 2^13 terms.
_SLACK = 1 + 1e-12


@dataclass(frozen=True)
class Constants:
    """Lipschitz constants that radii are computed from.

    Attributes:
        total: constant of the map from the image to the scores; None if none is proved.
        pairs: (classes, classes) float64, constants of f_i - f_j; None to use sqrt(2) times the total.
        mode: how they were obtained.
    """

    total: float | None
    pairs: Tensor | None = None
    mode: str = BY_CONSTRUCTION

    @property
    def slopes(self) -> Tensor | float | None:
        """Constants of f_i - f_j: one for each pair, or one for all; None if none is proved."""
        if self.total is None:
            return None
        return math.sqrt(2) * self.total if self.pairs is None else self.pairs


def find_constants(
    model: nn.Module, plain: nn.Module, recipe: Recipe, shape: Sequence[int], effort: Effort = "normal"
) -> Constants:
    """The constants of a network. Plain layers without any method are not bounded here: `onelip audit` does that.

    They are compared with ratios that are measured on about 50 samples, in float64.

    Args:
        model: as in training.
        plain: the same, baked. If it differs from `onelip.bake(model)` in any bit, as files of another computer may,
            its stored weights are bounded instead.
        recipe: names the method and the loss.
        shape: of an image (channels, height, width).
        effort: how much work to spend on small bounds, where bounds are needed.

    Raises:
        UnsoundBound: if a measurement contradicts a constant: a mistake in the library.
    """
    found = _find_constants(model, plain, recipe, shape, effort)
    _test(found, plain, shape)
    return found


def _find_constants(
    model: nn.Module, plain: nn.Module, recipe: Recipe, shape: Sequence[int], effort: Effort
) -> Constants:
    stored = functools.partial(bound_stored, effort=effort)
    per_pair = certifies_pairs(recipe) or _has_normalised_rows(model)
    parts = split_head(plain) if per_pair else None
    if parts is None:
        known = summary(model).constant if _is_baked(plain, model) else None
        if known is not None or resolve_method(recipe) is None:
            return Constants(known)
        return Constants(bound_chain(links(plain), stored).constant, None, BY_WEIGHTS)
    features, head = parts
    before, after = bound_chain(features, stored).constant, bound_chain(head, stored).constant
    if before is None or after is None:
        return Constants(None, None, BY_PAIRS)
    return Constants(multiply_up(before, after), _pair_constants(features, head, shape, before), BY_PAIRS)


def _is_baked(plain: nn.Module, model: nn.Module) -> bool:
    """Whether `plain` has the weights of `bake(model)`, bit for bit; both may come from files."""
    try:
        expected = bake(model).state_dict()
    except NonFiniteWeight:
        return False
    found = plain.state_dict()
    # In float64, in which a copy for a certificate has the same numbers.
    return found.keys() == expected.keys() and all(
        torch.equal(tensor.cpu().double(), expected[name].cpu().double()) for name, tensor in found.items()
    )


def _test(constants: Constants, plain: nn.Module, shape: Sequence[int]) -> None:
    """Try to refute the constants of the network, and of the difference of its two largest scores, at two points."""
    slopes = constants.slopes
    if constants.total is None or slopes is None:
        return
    device = next((p.device for p in plain.parameters()), torch.device("cpu"))
    if device.type == "mps":  # has no float64
        device = torch.device("cpu")
    network = copy.deepcopy(plain).to(device).double().eval().requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        return network(x.to(device)).cpu()

    points = example_points(torch.full((1, *shape), 0.5), 2)
    # By construction constants are those of real arithmetic; each stored weight exceeds them by its own rounding.
    slack = math.prod(rounding_room(p.dtype) for p in plain.parameters() if p.is_floating_point())
    with torch.no_grad():
        largest = run(points).topk(2).indices.tolist()
    targets = []
    for i, j in largest:
        slope = float(slopes[i, j]) if isinstance(slopes, Tensor) else slopes
        difference = functools.partial(_difference, i=i, j=j)
        targets.append(Claim(f"score {i} - score {j}", (1,), difference, slope * slack))
    steps = [Claim("the input", (), nn.Identity(), 1.0), Claim("the network", (0,), run, constants.total * slack)]
    falsify(Claims(steps, 64, targets), points)


def _difference(scores: Tensor, i: int, j: int) -> Tensor:
    return scores[:, i : i + 1] - scores[:, j : j + 1]


def _has_normalised_rows(model: nn.Module) -> bool:
    parts = split_head(model)
    return parts is not None and isinstance(find_parametrization(parts[1][0]), UnitRows)


def _pair_constants(features: list[nn.Module], head: list[nn.Module], shape: Sequence[int], before: float) -> Tensor:
    weight = next(head[0].parameters())
    feature_shape = output_shape(features, torch.zeros(1, *shape, dtype=weight.dtype, device=weight.device))
    # Copies in float64 on the CPU, in which float32 weights are exact.
    wide = [copy.deepcopy(module).cpu().double().eval() for module in head]
    rows = head_rows(wide, feature_shape, torch.zeros((), dtype=torch.float64)).detach()
    return pair_distances(rows) * _SLACK * (before * _SLACK)


@dataclass(frozen=True)
class Scores:
    """Results on a set of images.

    Attributes:
        images: their number.
        accuracy: share of images whose label has the largest score; ties do not count.
        cra: certified robust accuracy by radius; None if no constant is proved.
        mean_margin: mean of f_y - max f_i, negative where the network is wrong; None if a score is not finite.
        median_margin: the median of the same.
    """

    images: int
    accuracy: float
    cra: dict[str, float | None]
    mean_margin: float | None
    median_margin: float | None


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`."""

    total: Scores
    loss: float | None
    lipschitz: float | None
    per_class: dict[int, Scores]
    mode: str

    def to_json(self, class_names: Sequence[str]) -> dict[str, Any]:
        """All results, with the names of the classes."""
        return {
            **asdict(self.total),
            "loss": self.loss,
            "lipschitz": self.lipschitz,
            "mode": self.mode,
            "per_class": [{"name": class_names[k], **asdict(scores)} for k, scores in self.per_class.items()],
        }


def evaluate(
    plain: nn.Module,
    images: Tensor,
    labels: Tensor,
    constants: Constants,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    radii: Sequence[float] = PAPER_RADII,
    batch_size: int = 500,
) -> Evaluation:
    """Evaluate a network on uint8 images.

    Args:
        plain: the baked network (`onelip.bake`), in float32; it is put into eval mode.
        images: (N, C, H, W) uint8.
        labels: (N) int64.
        constants: to certify with, from `find_constants`, or `Constants(onelip.summary(model).constant)`.
        loss: a loss of (scores, labels) to evaluate too.
        radii: where to compute the certified robust accuracy.
        batch_size: images per forward pass; changes only speed and memory.
    """
    scores = compute_scores(plain, images, batch_size)
    margin = margins(scores, labels)
    found = None if constants.slopes is None else real_radii(scores, constants.slopes)
    mean_loss = None if loss is None else _finite_or_none(float(loss(scores, labels)))

    def part(chosen: Tensor) -> Scores:
        return _scores(margin[chosen], None if found is None else found[chosen], radii)

    per_class = {label: part(labels == label) for label in torch.unique(labels).tolist()}
    everything = part(torch.ones_like(labels, dtype=torch.bool))
    return Evaluation(everything, mean_loss, constants.total, per_class, constants.mode)


def _scores(margin: Tensor, found: Tensor | None, radii: Sequence[float]) -> Scores:
    right = margin > 0  # false for ties and for NaN

    def cra(radius: float) -> float | None:
        return None if found is None else certified_accuracy(right, found, radius, inclusive=False)

    return Scores(
        images=len(margin),
        accuracy=int(right.sum()) / len(right),
        cra={radius_name(radius): cra(radius) for radius in radii},
        mean_margin=_finite_or_none(float(margin.mean())),
        median_margin=_finite_or_none(float(margin.quantile(0.5))),
    )


@torch.no_grad()
def compute_scores(plain: nn.Module, images: Tensor, batch_size: int = 500) -> Tensor:
    """Scores (N, classes) of uint8 images in float32, on the CPU, never under autocast."""
    plain.eval()
    weight = next(plain.parameters())
    layout = torch.channels_last if is_channels_last(plain) else torch.contiguous_format
    parts = []
    with full_precision(weight.device):
        for part in images.split(batch_size):
            batch = to_float(part.to(weight.device)).contiguous(memory_format=layout)
            parts.append(plain(batch).float().cpu())
    return torch.cat(parts)


def is_channels_last(model: nn.Module) -> bool:
    """Whether the kernels have the channels-last memory layout, so that images should have it too."""
    kernels = [p for p in model.parameters() if p.dim() == 4]
    return any(not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last) for p in kernels)


def _finite_or_none(value: float) -> float | None:
    return value if abs(value) < math.inf else None  # JSON has no NaN
