"""WGAN-GP, the gradient penalty.

Citation: Ishaan Gulrajani, Faruk Ahmed, Martin Arjovsky, Vincent Dumoulin, Aaron Courville, "Improved Training of
Wasserstein GANs", NeurIPS 2017.

Penalty: lambda (|grad_x f(x)| - 1)^2, or one-sided lambda max(0, |grad_x f(x)| - 1)^2. For a critic f is its score, at
random points between real and generated samples. For a classifier f is the margin f_y - max_{i != y} f_i, divided by
sqrt(2) so that a 1-Lipschitz network meets it, at the training images. Needs second derivatives.
Assumes: no layer that mixes the samples of a batch (BatchNorm in training): their gradients would mix too.
Guarantee: none; a gradient at some points says nothing about others. Evaluation goes by the bound of the weights.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from onelip.geometry import LINEAR_LAYERS
from onelip.methods._method import Method, PaperRow, Step
from onelip.methods._untouched import untouched


def excess(gradient: Tensor, *, one_sided: bool = False) -> Tensor:
    """(|g| - 1)^2 for each sample (N), or of its positive part only."""
    difference = torch.linalg.vector_norm(gradient.flatten(1), dim=1) - 1
    return (difference.clamp(min=0) if one_sided else difference).square()


def gradient_penalty(
    critic: Callable[[Tensor], Tensor],
    real: Tensor,
    fake: Tensor,
    *,
    weight: float = 10.0,
    one_sided: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The penalty of WGAN-GP for a critic: at points drawn evenly from the lines between real and generated samples.

    Args:
        critic: gives one number per sample.
        real: samples (N, ...).
        fake: as many of the same shape.
        weight: lambda.
        one_sided: punish only gradients longer than 1.
        generator: of the points.

    Example:
        >>> x = torch.zeros(4, 3)
        >>> float(gradient_penalty(lambda x: 2 * x[:, 0], x, x))
        10.0
    """
    if real.shape != fake.shape:
        raise ValueError(f"expected samples of one shape, got {tuple(real.shape)} and {tuple(fake.shape)}")
    shape = (len(real), *(1,) * (real.dim() - 1))
    part = torch.rand(shape, dtype=real.dtype, device=real.device, generator=generator)
    points = torch.lerp(fake.detach(), real.detach(), part).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
    return weight * excess(gradient, one_sided=one_sided).mean()


class MarginGradientPenalty:
    """The penalty for a classifier, see the module's docstring.

    Args:
        weight: lambda.
        one_sided: punish only gradients longer than 1.
    """

    needs_input_gradient = True

    def __init__(self, weight: float = 10.0, one_sided: bool = True) -> None:
        if not weight >= 0:
            raise ValueError(f"expected weight to be at least 0, got {weight!r}")
        self.weight = float(weight)
        self.one_sided = bool(one_sided)

    def __call__(self, step: Step) -> Tensor:
        right = step.labels[:, None]
        others = step.scores.scatter(1, right, -math.inf)
        margin = step.scores.gather(1, right)[:, 0] - others.amax(1)
        (gradient,) = torch.autograd.grad(margin.sum() / math.sqrt(2), step.images, create_graph=True)
        return self.weight * excess(gradient, one_sided=self.one_sided)


METHOD = Method(
    name="gradient-penalty",
    title="WGAN-GP, gradient penalty (Gulrajani et al., 2017)",
    mechanism="penalty",
    guarantee="none",
    layers=LINEAR_LAYERS,
    apply=untouched,
    paper=PaperRow(E="yes", F="no", G="yes", M="partly", notes={"M": 1}),
    penalty=MarginGradientPenalty,
    term_options=("weight", "one_sided"),
    hyperparameters={"lr": 0.02, "weight_decay": 0.0},
    note="bound of the stored weights in evaluation",
)
