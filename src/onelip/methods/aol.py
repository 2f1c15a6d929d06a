"""AOL as a registered method; the parametrization and the layers are in `onelip.nn.aol`."""

from onelip.core.geometry import LINEAR_LAYERS
from onelip.methods.method import Method, PaperRow
from onelip.nn.aol import aol

METHOD = Method(
    name="aol",
    title="AOL, almost-orthogonal layers (Prach and Lampert, 2022)",
    citation="Bernd Prach, Christoph H. Lampert, "
    '"Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks", ECCV 2022.',
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=aol,
    options=(
        {"side": "outputs"},
        {"side": "auto"},
        {"steps": 2},
        {"steps": 3, "side": "outputs"},
        {"learn_weights": True},
        {"learn_weights": True, "steps": 2},
        {"lipschitz": 0.5},
    ),
    paper=PaperRow(E="yes", F="yes", G="yes", M="yes"),
)
