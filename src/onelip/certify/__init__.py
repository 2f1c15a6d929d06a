"""From margins to certified radii: `onelip.certify(model, images)`, proofs of programs, certificate files.

Names are loaded when they are first used: the parts without torch can be had without it. The package itself can be
called, as it bears the name of its main function.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onelip.certify.certificate import write_certificate
    from onelip.certify.certification import Certification
    from onelip.certify.predict import certify
    from onelip.certify.proof import Proof, prove
    from onelip.certify.rounding import ProofError

_WHERE = {
    "Certification": "certification",
    "Proof": "proof",
    "ProofError": "rounding",
    "certify": "predict",
    "prove": "proof",
    "write_certificate": "certificate",
}

__all__ = ["Certification", "Proof", "ProofError", "certify", "prove", "write_certificate"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'onelip.certify' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"onelip.certify.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _CallablePackage(ModuleType):
    """`onelip.certify` is this package and, called, the function: importing a part must not take the verb away."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Certification":
        return __getattr__("certify")(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
