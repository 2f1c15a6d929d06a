"""Proofs about networks: summary, audit, proof of the program, certified radii, certificate files."""

from typing import TYPE_CHECKING

from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip.certification.certificate import write_certificate as write_certificate
    from onelip.certification.predict import Certification as Certification, certify as certify
    from onelip.certification.proof import Proof as Proof, prove as prove
    from onelip.core.errors import ProofError as ProofError

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
