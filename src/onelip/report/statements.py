"""Four sentences about a run for its user: the proved constant, the certified images, the limits, and the attack."""

from typing import TYPE_CHECKING, Any

from onelip.certification.margins import PAPER_RADII, certified_accuracy, radius_name
from onelip.core.rounding import rounded_up

if TYPE_CHECKING:
    from onelip.report.gather import View

_NEAR, _FAR = PAPER_RADII[0], PAPER_RADII[-1]
_LIMITS = (
    "Not proved: that the class of a new image is right; and nothing is stated about changes beyond the radius of an "
    "image, such as a rotation or another camera."
)


def statements(view: "View") -> list[str]:
    """Four sentences: the constant, the certified images, the limits of the proof, and the attack."""
    return [_constant(view), _certified(view), _LIMITS, _attack(view)]


def _constant(view: "View") -> str:
    found = view.certification
    if found is None:
        why = (view.row.get("constant") or {}).get("why")
        return "Not proved here: this report has no Lipschitz constant of the network" + (f" ({why})." if why else ".")
    return (
        "Proved: changing an image by d (L2 norm, pixels in [0, 1]) changes the scores of the stored network by at "
        f"most {rounded_up(found.constant)} d"
        + (
            f", and the float64 program is off by at most {rounded_up(found.proof.error, 2)}."
            if found.mode == "sound" and found.proof is not None
            else ", in real arithmetic; rounding errors are not included."
        )
    )


def _certified(view: "View") -> str:
    found = view.certification
    if found is None:
        results: Any = (view.row.get("results") or {}).get("test") or {}
        share = (results.get("cra") or {}).get(radius_name(_NEAR))
        if share is None:
            return "Not proved: no image is certified."
        mode = f", {results['mode']}" if results.get("mode") else ""
        return (
            f"Stated by the training: {100 * share:.1f} % of the test images are classified correctly up to a radius "
            f"of {radius_name(_NEAR)}{mode}; this report could not repeat it."
        )
    count, shares = len(found.classes), found.cra((_NEAR, _FAR))
    near, far = (100 * shares[radius_name(radius)] for radius in (_NEAR, _FAR))
    return (
        f"Proved: of {count} test images, {near:.1f} % are classified correctly and stay so under every change of a "
        f"norm up to {radius_name(_NEAR)}, and {far:.1f} % up to {radius_name(_FAR)}."
    )


def _attack(view: "View") -> str:
    found, certified = view.attack, view.certification
    if found is None or certified is None or certified.labels is None:
        return "Not known: no attack was run, so the true robust accuracy may be anything above the certified one."
    if view.is_broken:
        return (
            f"REFUTED: an attack changed {int(found.broken.sum())} certified decisions, so the certificate is wrong; "
            "do not rely on it, and please report it."
        )
    labels = certified.labels[: len(found)]
    right, radii = found.classes == labels, certified.radii[: len(found)]
    low = 100 * certified_accuracy(right, radii, _NEAR, inclusive=certified.mode == "sound")
    between = f"between {low:.1f} % (certified) and {100 * found.accuracy(labels, _NEAR):.1f} % (no change found)"
    return (
        f"Tested: an attack on {len(found)} images changed no certified decision; the robust accuracy of these images "
        f"at {radius_name(_NEAR)} is {between}."
    )
