"""Attacks: search for points at which a certified decision changes.

    found = onelip.attack(model, images, certified.classes, radii=certified.radii)
    assert not found.broken.any()

A certificate is a proof; an attack can only refute it. One changed decision inside a certified ball means that the
certificate is wrong. Distances are exact rational numbers, so there is no tolerance on either side.
"""

from onelip.attacks.result import AttackResult
from onelip.attacks.search import attack, with_foolbox

__all__ = ["AttackResult", "attack", "with_foolbox"]
