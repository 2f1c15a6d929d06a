"""Falsification: look for points at which a certified decision changes.

    found = onelip.attack.find_adversarials(model, images, radii=certification.radii)
    assert not found.broken.any()

A certificate is a proof and an attack is not: it can only show that something is wrong. One flip inside a certified
ball refutes the certificate, whatever the proof says. Distances are exact rationals, so there is no tolerance.
"""

from onelip.attack.adapters import with_foolbox
from onelip.attack.result import AttackResult
from onelip.attack.search import find_adversarials

__all__ = ["AttackResult", "find_adversarials", "with_foolbox"]
