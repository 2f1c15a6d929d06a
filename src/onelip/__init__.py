"""Neural networks with a proved Lipschitz constant.

    import onelip
    model = onelip.constrain(model, "aol")   # a whole model
    layer = onelip.aol(torch.nn.Conv2d(...)) # or a layer
    plain = onelip.bake(model)               # a plain torch network that computes the same
    audit = onelip.audit(model, images)      # bounds of any torch model, step by step, and the steps without one
    found = onelip.certify(plain.double().eval(), images)   # class and radius of each image, rounding included
    onelip.check("certificate.json")        # proves a certificate file again, without torch

Names are loaded when they are first used, so that the command line can answer without importing torch.
"""

from typing import TYPE_CHECKING

from onelip._version import __version__ as __version__
from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip import (
        attacks as attacks,
        bounds as bounds,
        certification as certification,
        data as data,
        export as export,
        graph as graph,
        losses as losses,
        methods as methods,
        models as models,
        nn as nn,
        optim as optim,
        plots as plots,
        report as report,
        testing as testing,
        training as training,
    )
    from onelip.attacks import AttackResult as AttackResult, attack as attack
    from onelip.certification.audit import Audit as Audit, audit as audit
    from onelip.certification.predict import Certification as Certification, certify as certify
    from onelip.certification.proof import Proof as Proof, prove as prove
    from onelip.certification.summary import Summary as Summary, summary as summary
    from onelip.checker import check as check
    from onelip.core.bake import bake as bake
    from onelip.core.errors import NonFiniteWeight as NonFiniteWeight, UnsupportedLayer as UnsupportedLayer
    from onelip.export import (
        export_onnx as export_onnx,
        from_pretrained as from_pretrained,
        save_pretrained as save_pretrained,
    )
    from onelip.gram.jacobian import jtj as jtj
    from onelip.losses import (
        OffsetCrossEntropy as OffsetCrossEntropy,
        gradient_penalty as gradient_penalty,
        orthogonality_penalty as orthogonality_penalty,
        register_loss as register_loss,
    )
    from onelip.methods.constrain import constrain as constrain
    from onelip.methods.projections import project as project, project_after as project_after
    from onelip.methods.registry import list_methods as list_methods, register_method as register_method
    from onelip.models import create_model as create_model, list_models as list_models, register_model as register_model
    from onelip.nn.aol import AOL as AOL, aol as aol
    from onelip.training.build import load_run as load_run
    from onelip.training.recipe import Recipe as Recipe
    from onelip.training.trainer import train as train

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
