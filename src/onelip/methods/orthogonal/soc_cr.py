"""SOC with Householder activations, a normalised last layer and certificate regularisation.

The layers are those of `soc`, the loss is `onelip.losses.CertificateRegularisation`. The guarantee is that of the
layers.
"""

from dataclasses import replace

from onelip.methods.norms.last_layer import lln
from onelip.methods.orthogonal.soc import METHOD as SOC
from onelip.nn import Householder

METHOD = replace(
    SOC,
    name="soc-cr",
    title="SOC + CR: Householder activations, normalised last layer, certificate regularisation (Singla et al., 2022)",
    citation="Sahil Singla, Surbhi Singla, Soheil Feizi, "
    '"Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022.',
    paper=None,
    options=(),
    loss="certificate-regularisation",
    loss_options={"per_pair": True},
    certificate="pairs",
    activation=Householder,
    head=lln,
    hyperparameters={**SOC.hyperparameters, "offset": 0.0, "temperature": 1.0},
    note="layers of SOC; certified per pair of classes",
)
