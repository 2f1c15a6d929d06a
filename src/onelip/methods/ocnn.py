"""OCNN, orthogonal convolutional networks.

Citation: Jiayun Wang, Yubei Chen, Rudrasis Chakraborty, Stella X. Yu, "Orthogonal Convolutional Neural Networks", CVPR
2020.

Penalty: the Frobenius norm of J J^T - I or of J^T J - I, J being the layer's operator, as the self-correlation of its
kernel less a one in the middle. Both forms differ by a constant, so the side with fewer channels is taken. For a kernel
of one tap, or as large as its stride, that is ||W W^T - I||_F of the reshaped kernel.
Guarantee: none. Evaluation goes by the proved bound of the stored weights.
"""

import torch
from torch import Tensor, nn

from onelip.geometry import LINEAR_LAYERS, geometry_of
from onelip.gram.correlation import self_correlation
from onelip.methods._method import Method, PaperRow, Step
from onelip.methods._untouched import untouched


def orthogonality_residual(module: nn.Module) -> Tensor:
    """||J J^T - I||_F (or of J^T J) per output pixel of a layer, differentiable.

    Example:
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


class OrthogonalityPenalty:
    """r times the sum of the residuals of all linear layers.

    Args:
        weight: r; 0.1 in the paper's code.
        skip_first: leave the first layer out, as the paper does: three colours cannot be orthogonal rows.
    """

    def __init__(self, weight: float = 0.1, skip_first: bool = False) -> None:
        if not weight >= 0:
            raise ValueError(f"expected weight to be at least 0, got {weight!r}")
        self.weight = float(weight)
        self.skip_first = bool(skip_first)

    def of(self, model: nn.Module) -> Tensor:
        """The penalty of a model."""
        layers = [module for module in model.modules() if isinstance(module, LINEAR_LAYERS)]
        layers = layers[1:] if self.skip_first else layers
        if not layers:
            raise ValueError("expected a model with linear layers, got none")
        return self.weight * torch.stack([orthogonality_residual(layer) for layer in layers]).sum()

    def __call__(self, step: Step) -> Tensor:
        return self.of(step.model)


def penalty(model: nn.Module, *, weight: float = 0.1, skip_first: bool = False) -> Tensor:
    """The penalty of OCNN on a model's weights: add it to the loss.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> penalty(model).backward()
    """
    return OrthogonalityPenalty(weight, skip_first).of(model)


METHOD = Method(
    name="ocnn",
    title="OCNN, orthogonal convolutional networks (Wang et al., 2020)",
    mechanism="penalty",
    guarantee="none",
    layers=LINEAR_LAYERS,
    apply=untouched,
    paper=PaperRow(E="yes", F="no", G="yes", M="partly", notes={"M": 1}),
    penalty=OrthogonalityPenalty,
    term_options=("weight", "skip_first"),
    hyperparameters={"lr": 0.02, "weight_decay": 0.0},
    note="bound of the stored weights in evaluation",
)
