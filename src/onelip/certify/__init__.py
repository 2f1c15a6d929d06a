"""From margins to certified radii: `onelip.certify(model, images)`, proofs of programs, certificate files.

Names are loaded when they are first used: the parts without torch can be had without it. The package itself can be
called, as it bears the name of its main function.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from onelip.core.lazy import lazy_names

if TYPE_CHECKING:
    from onelip.certify.certificate import write_certificate as write_certificate
    from onelip.certify.certification import Certification as Certification
    from onelip.certify.predict import certify as certify
    from onelip.certify.proof import Proof as Proof, prove as prove
    from onelip.core.errors import ProofError as ProofError

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)


class _CallablePackage(ModuleType):
    """`onelip.certify` is this package and, called, the function: importing a part must not take the verb away."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Certification":
        return __getattr__("certify")(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
