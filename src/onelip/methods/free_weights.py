"""Methods that leave the weights free and act on the loss: LMT, GloRo, EMMA, OCNN, WGAN-GP; see `onelip.losses`."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.geometry import geometry_of
from onelip.core.parametrization import attach
from onelip.methods.power_iteration import PowerIterated
from onelip.methods.registry import Layer, Method, PaperRow, register_method


class Tracked(PowerIterated):
    """The weight itself, with a vector that follows its largest singular value in training; `track` registers it.

    **Guarantee.** None: the estimate is for the loss. Evaluation uses proved bounds of the stored weights, and no
    estimate enters a certificate.

    The arguments are those of `track`.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str = "weight",
        *,
        iterations: int = 5,
        input_size: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(module, name, iterations=iterations, input_size=input_size)

    def forward(self, P: Tensor) -> Tensor:
        return P

    def constant_in(self, dtype: torch.dtype) -> None:
        return None

    def estimated_constant(self, P: Tensor) -> Tensor:
        return self.estimate(P)

    def describe(self) -> str:
        return "free weights, with an estimate of their norm for the loss"


def track(
    module: Layer, name: str = "weight", *, iterations: int = 5, input_size: int | Sequence[int] | None = None
) -> Layer:
    """Estimate the norm of a layer in training, for the loss, in place, and return the layer; the weight is unchanged.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the weight.
        iterations: steps of the power method in each step of training.
        input_size: spatial size of the inputs, for the estimate.

    Returns:
        The same module, with `Tracked` as parametrization.

    Raises:
        onelip.UnsupportedLayer: if no bound is known for this layer or its padding.

    Examples:
        >>> layer = track(nn.Linear(3, 3))
        >>> estimate = layer.parametrizations.weight[0].estimated_constant(layer.weight)
        >>> bool(estimate <= torch.linalg.matrix_norm(layer.weight, 2) * (1 + 1e-6))
        True
    """
    return attach(module, Tracked(module, name, iterations=iterations, input_size=input_size), name)


def unconstrained(module: Layer) -> Layer:
    """Return the layer itself, unchanged, if evaluation can bound its norm.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.

    Returns:
        The same module.

    Raises:
        onelip.UnsupportedLayer: if no bound is known for this layer or its padding.

    Examples:
        >>> layer = unconstrained(nn.Linear(3, 3))
    """
    geometry_of(module)
    return module


# Without the constant, the losses of these methods are the plain cross-entropy.
_PLAIN = {"offset": 0.0, "temperature": 1.0, "weight_decay": 0.0}

register_method(
    Method(
        name="lmt",
        title="LMT, Lipschitz-margin training (Tsuzuku et al., 2018)",
        citation="Yusuke Tsuzuku, Issei Sato, Masashi Sugiyama, "
        '"Lipschitz-Margin Training: Scalable Certification of Perturbation Invariance for Deep Neural Networks", '
        "NeurIPS 2018.",
        mechanism="loss",
        apply=track,
        options=({"iterations": 1},),
        paper=PaperRow(E="partly", F="no", G="yes", M="no", notes={"E": 3}),
        loss="lmt",
        certificate="pairs",
        fast_lr=0.1,
        hyperparameters={**_PLAIN, "lr": 5e-3},
        note="bound of the stored weights in evaluation, per pair of classes",
    )
)

register_method(
    Method(
        name="gloro",
        title="GloRo, globally-robust networks (Leino et al., 2021)",
        citation='Klas Leino, Zifan Wang, Matt Fredrikson, "Globally-Robust Neural Networks", ICML 2021.',
        mechanism="loss",
        apply=track,
        options=({"iterations": 1},),
        paper=PaperRow(E="partly", F="partly", G="yes", M="no", notes={"E": 3, "F": 2}),
        loss="gloro",
        certificate="pairs",
        fast_lr=0.3,
        hyperparameters={**_PLAIN, "lr": 0.01},
        note="bound of the stored weights in evaluation, per pair of classes",
    )
)

register_method(
    Method(
        name="emma",
        title="EMMA, efficient margin maximisation (Hu et al., 2023)",
        citation="Kai Hu, Andy Zou, Zifan Wang, Klas Leino, Matt Fredrikson, "
        '"Unlocking Deterministic Robustness Certification on ImageNet", NeurIPS 2023.',
        mechanism="loss",
        apply=track,
        loss="emma",
        certificate="pairs",
        fast_lr=0.3,
        # The derivative of a product of norms grows with the product: up to 130 on digits. The authors also clip at 3;
        # without clipping a learning rate that is right at first is too high later.
        hyperparameters={**_PLAIN, "lr": 6e-3, "gradient_clip": 3.0},
        note="bound of the stored weights in evaluation, per pair of classes",
    )
)

register_method(
    Method(
        name="ocnn",
        title="OCNN, orthogonal convolutional networks (Wang et al., 2020)",
        citation="Jiayun Wang, Yubei Chen, Rudrasis Chakraborty, Stella X. Yu, "
        '"Orthogonal Convolutional Neural Networks", CVPR 2020.',
        mechanism="penalty",
        apply=unconstrained,
        paper=PaperRow(E="yes", F="no", G="yes", M="partly", notes={"M": 1}),
        loss="ocnn",
        fast_lr=0.3,
        hyperparameters={"lr": 0.02, "weight_decay": 0.0},
        note="bound of the stored weights in evaluation",
    )
)

register_method(
    Method(
        name="gradient-penalty",
        title="WGAN-GP, gradient penalty (Gulrajani et al., 2017)",
        citation="Ishaan Gulrajani, Faruk Ahmed, Martin Arjovsky, Vincent Dumoulin, Aaron Courville, "
        '"Improved Training of Wasserstein GANs", NeurIPS 2017.',
        mechanism="penalty",
        apply=unconstrained,
        paper=PaperRow(E="yes", F="no", G="yes", M="partly", notes={"M": 1}),
        loss="gradient-penalty",
        fast_lr=0.0333,
        hyperparameters={"lr": 0.02, "weight_decay": 0.0},
        note="bound of the stored weights in evaluation",
    )
)
