"""Neural networks with a proved Lipschitz constant.

    import onelip
    model = onelip.constrain(model, "aol")   # a whole model
    layer = onelip.aol(torch.nn.Conv2d(...)) # or a layer
    plain = onelip.bake(model)               # a plain torch network that computes the same
    audit = onelip.lipschitz(model, images)  # what is proved of any torch model, and what nobody vouches for
    found = onelip.certify(plain.double().eval(), images)   # class and radius of each image, rounding included

Names are loaded when they are first used, so that the command line can answer without importing torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from onelip._version import __version__

if TYPE_CHECKING:
    from onelip import attack, bounds, certify, data, models, nn, testing, training
    from onelip._constrain import constrain
    from onelip._summary import Summary, summary
    from onelip.bounds.audit import Audit, lipschitz
    from onelip.certify.certification import Certification
    from onelip.certify.proof import Proof, prove
    from onelip.export import NonFiniteWeight, bake, export_onnx, from_pretrained, save_pretrained
    from onelip.geometry import UnsupportedLayer
    from onelip.losses import OffsetCrossEntropy
    from onelip.methods._projection import project, project_after
    from onelip.methods._registry import list_methods
    from onelip.methods.aol import AOL, aol
    from onelip.methods.gradient_penalty import gradient_penalty
    from onelip.methods.ocnn import penalty
    from onelip.models import create_model, list_models
    from onelip.training.build import load_run
    from onelip.training.loop import train
    from onelip.training.recipe import Recipe

_WHERE = {
    "AOL": "onelip.methods.aol",
    "Audit": "onelip.bounds.audit",
    "Certification": "onelip.certify.certification",
    "NonFiniteWeight": "onelip.export",
    "OffsetCrossEntropy": "onelip.losses",
    "Proof": "onelip.certify.proof",
    "Recipe": "onelip.training.recipe",
    "Summary": "onelip._summary",
    "UnsupportedLayer": "onelip.geometry",
    "aol": "onelip.methods.aol",
    "attack": "onelip.attack",
    "bake": "onelip.export",
    "bounds": "onelip.bounds",
    "certify": "onelip.certify",
    "constrain": "onelip._constrain",
    "create_model": "onelip.models",
    "data": "onelip.data",
    "export_onnx": "onelip.export",
    "from_pretrained": "onelip.export",
    "gradient_penalty": "onelip.methods.gradient_penalty",
    "lipschitz": "onelip.bounds.audit",
    "list_methods": "onelip.methods._registry",
    "list_models": "onelip.models",
    "load_run": "onelip.training.build",
    "models": "onelip.models",
    "nn": "onelip.nn",
    "penalty": "onelip.methods.ocnn",
    "project": "onelip.methods._projection",
    "project_after": "onelip.methods._projection",
    "prove": "onelip.certify.proof",
    "save_pretrained": "onelip.export",
    "summary": "onelip._summary",
    "testing": "onelip.testing",
    "train": "onelip.training.loop",
    "training": "onelip.training",
}

__all__ = [
    "AOL",
    "Audit",
    "Certification",
    "NonFiniteWeight",
    "OffsetCrossEntropy",
    "Proof",
    "Recipe",
    "Summary",
    "UnsupportedLayer",
    "__version__",
    "aol",
    "attack",
    "bake",
    "bounds",
    "certify",
    "constrain",
    "create_model",
    "data",
    "export_onnx",
    "from_pretrained",
    "gradient_penalty",
    "lipschitz",
    "list_methods",
    "list_models",
    "load_run",
    "models",
    "nn",
    "penalty",
    "project",
    "project_after",
    "prove",
    "save_pretrained",
    "summary",
    "testing",
    "train",
    "training",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'onelip' has no attribute {name!r}")
    module = importlib.import_module(_WHERE[name])
    value = module if _WHERE[name] == f"onelip.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
