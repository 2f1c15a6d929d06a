"""Penalties on the weights or on the gradient: OCNN, WGAN-GP. They give no guarantee; evaluation uses proved bounds."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from onelip.core.errors import check_number
from onelip.core.geometry import LINEAR_LAYERS, geometry_of
from onelip.gram.products import self_correlation
from onelip.losses.registry import LARGEST, OffsetLoss, Reduction, register_loss, widened


@register_loss("ocnn")
class OrthogonalityLoss(OffsetLoss):
    r"""OCNN, orthogonal convolutional networks: the offset cross-entropy plus `orthogonality_penalty`.

    Citation: Jiayun Wang, Yubei Chen, Rudrasis Chakraborty, Stella X. Yu, "Orthogonal Convolutional Neural Networks",
    CVPR 2020.

    Args:
        weight: factor of the penalty; 0.1 in the paper's code.
        skip_first: skip the first layer, as the paper does, because three colours are too few for orthogonal rows.
        offset: $u$ of `OffsetCrossEntropy`.
        temperature: $t$ of `OffsetCrossEntropy`.
        reduction: "mean" over the batch, "sum", or "none"; the penalty is added for each image.

    Shape:
        scores (N, classes); labels (N), int64; output a scalar, or (N) with `reduction="none"`.

    Examples:
        >>> model, images = nn.Sequential(nn.Linear(3, 2)), torch.rand(5, 3)
        >>> OrthogonalityLoss()(model(images), torch.tensor([0, 1, 0, 1, 0]), model=model).backward()
    """

    def __init__(
        self,
        weight: float = 0.1,
        skip_first: bool = False,
        offset: float = math.sqrt(2),
        temperature: float = 0.25,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(offset, temperature, reduction)
        self.weight = check_number("weight", weight, 0, LARGEST)
        self.skip_first = bool(skip_first)

    def forward(self, scores: Tensor, labels: Tensor, *, model: nn.Module) -> Tensor:
        penalty = orthogonality_penalty(model, weight=self.weight, skip_first=self.skip_first)
        return self.reduce(self.offset_cross_entropy(scores, labels) + penalty)


def orthogonality_penalty(model: nn.Module, *, weight: float = 0.1, skip_first: bool = False) -> Tensor:
    """Return the penalty of OCNN: `weight` times the sum of `orthogonality_residual` over all linear layers.

    Args:
        model: model with at least one linear layer.
        weight: factor of the penalty.
        skip_first: skip the first layer.

    Returns:
        The penalty, a scalar.

    Raises:
        ValueError: if the model has no linear layer.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> orthogonality_penalty(model).backward()
    """
    layers = [module for module in model.modules() if isinstance(module, LINEAR_LAYERS)]
    layers = layers[1:] if skip_first else layers
    if not layers:
        raise ValueError(f"the model has no linear layer{' besides the first' if skip_first else ''}")
    return weight * torch.stack([orthogonality_residual(layer) for layer in layers]).sum()


def orthogonality_residual(module: nn.Module) -> Tensor:
    r"""Return $\|J J^\top - I\|_F$ or $\|J^\top J - I\|_F$ per output pixel of a layer with the operator $J$.

    It is computed from the self-correlation of the kernel, minus one in the middle, and is differentiable. The squares
    of the two forms differ by a constant, so the side with fewer channels is used. For a kernel of one tap, or as large
    as its stride, it is $\|W W^\top - I\|_F$ of the reshaped kernel.

    Args:
        module: a linear layer.

    Returns:
        The norm, a scalar.

    Examples:
        >>> layer = nn.Linear(3, 3)
        >>> _ = nn.init.eye_(layer.weight)
        >>> float(orthogonality_residual(layer).detach())
        0.0
    """
    geometry = geometry_of(module)
    weight = module.weight
    assert isinstance(weight, Tensor)
    columns = {side: geometry.kernel_shape(weight.shape, side)[2] for side in ("inputs", "outputs")}
    kernel = geometry.to_kernel(weight, min(columns, key=lambda side: columns[side]))  # (g, rows, columns, *taps)
    G = self_correlation(kernel)  # (g, columns, columns, *offsets)
    middle = tuple(n // 2 for n in G.shape[3:])
    one = torch.zeros_like(G)
    one[(slice(None), slice(None), slice(None), *middle)] = torch.eye(G.shape[1], dtype=G.dtype, device=G.device)
    return torch.linalg.vector_norm(G - one)


@register_loss("gradient-penalty")
class GradientPenaltyLoss(OffsetLoss):
    r"""The offset cross-entropy plus the gradient penalty of WGAN-GP for a classifier.

    The penalty is $\lambda (|\nabla_x m| - 1)^2$, or one-sided $\lambda \max(0, |\nabla_x m| - 1)^2$, at the training
    images. The margin $m = (f_y - \max_{i \ne y} f_i) / \sqrt 2$ is scaled so that the one-sided penalty of a
    1-Lipschitz network is 0. The loss needs second derivatives, images that require a gradient, and a network without
    layers that mix the samples of a batch (BatchNorm in training).

    Citation: Ishaan Gulrajani, Faruk Ahmed, Martin Arjovsky, Vincent Dumoulin, Aaron Courville, "Improved Training of
    Wasserstein GANs", NeurIPS 2017.

    Args:
        weight: $\lambda$.
        one_sided: penalise only gradients with a norm above 1.
        offset: $u$ of `OffsetCrossEntropy`.
        temperature: $t$ of `OffsetCrossEntropy`.
        reduction: "mean" over the batch, "sum", or "none".

    Shape:
        scores (N, classes); labels (N), int64; output a scalar, or (N) with `reduction="none"`.

    Examples:
        >>> model, images = nn.Sequential(nn.Linear(3, 2)), torch.rand(5, 3, requires_grad=True)
        >>> GradientPenaltyLoss()(model(images), torch.tensor([0, 1, 0, 1, 0]), images=images).backward()
    """

    needs_input_gradient = True

    def __init__(
        self,
        weight: float = 10.0,
        one_sided: bool = True,
        offset: float = math.sqrt(2),
        temperature: float = 0.25,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(offset, temperature, reduction)
        self.weight = check_number("weight", weight, 0, LARGEST)
        self.one_sided = bool(one_sided)

    def forward(self, scores: Tensor, labels: Tensor, *, images: Tensor) -> Tensor:
        if not images.requires_grad:
            raise ValueError("images do not require a gradient; call images.requires_grad_() before the forward pass")
        scores, right = widened(scores), labels[:, None]
        others = scores.scatter(1, right, -math.inf)
        margin = scores.gather(1, right)[:, 0] - others.amax(1)
        (gradient,) = torch.autograd.grad(margin.sum() / math.sqrt(2), images, create_graph=True)
        penalty = self.weight * _excess(gradient, one_sided=self.one_sided)
        return self.reduce(self.offset_cross_entropy(scores, labels) + penalty)


def gradient_penalty(
    critic: Callable[[Tensor], Tensor],
    real: Tensor,
    fake: Tensor,
    *,
    weight: float = 10.0,
    one_sided: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Return the WGAN-GP penalty of a critic, at random points between real and generated samples.

    Args:
        critic: function that returns one number per sample.
        real: real samples (N, ...).
        fake: generated samples, of the same shape.
        weight: $\lambda$, factor of the penalty.
        one_sided: penalise only gradients with a norm above 1.
        generator: random number generator for the points.

    Returns:
        The mean of $\lambda (|\nabla_x f| - 1)^2$ over the samples, a scalar.

    Raises:
        ValueError: if the shapes differ.

    Examples:
        >>> x = torch.zeros(4, 3)
        >>> float(gradient_penalty(lambda x: 2 * x[:, 0], x, x))
        10.0
    """
    if real.shape != fake.shape:
        raise ValueError(
            f"expected samples of the same shape, got {tuple(real.shape)} and {tuple(fake.shape)}; "
            "use batches of the same size"
        )
    shape = (len(real), *(1,) * (real.dim() - 1))
    part = torch.rand(shape, dtype=real.dtype, device=real.device, generator=generator)
    points = torch.lerp(fake.detach(), real.detach(), part).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
    return weight * _excess(gradient, one_sided=one_sided).mean()


def _excess(gradient: Tensor, *, one_sided: bool) -> Tensor:
    """(|g| - 1)^2 for each sample (N); with `one_sided`, max(0, |g| - 1)^2."""
    difference = torch.linalg.vector_norm(gradient.flatten(1), dim=1) - 1
    return (difference.clamp(min=0) if one_sided else difference).square()
