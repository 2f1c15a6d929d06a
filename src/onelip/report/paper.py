"""Results of the AOL paper (Prach and Lampert, 2022): accuracy, and CRA at the radii of its tables, in %."""

from onelip.certification.margins import PAPER_RADII

_RESULTS = {
    "cifar10": {
        "AOL-Small": (69.8, 62.0, 54.4, 47.1, 21.8),
        "AOL-Medium": (71.1, 63.8, 56.1, 48.6, 23.2),
        "AOL-Large": (71.6, 64.0, 56.4, 49.0, 23.7),
    },
    "cifar100": {
        "AOL-Small": (42.4, 32.5, 24.8, 19.2, 6.7),
        "AOL-Medium": (43.2, 33.7, 26.0, 20.2, 7.2),
        "AOL-Large": (43.7, 33.7, 26.3, 20.7, 7.8),
    },
}


def paper_results(data: str, model: str) -> dict[str, dict[float, float]]:
    """The published network that is nearest to a model, and its accuracies by radius; none for other data.

    Examples:
        >>> paper_results("cifar10", "aol-large")
        {'AOL-Large, 1000 epochs (paper)': {0.0: 0.716, 0.141...: 0.64, 0.282...: 0.564, 0.423...: 0.49, 1.0: 0.237}}
        >>> paper_results("digits", "patchwise-tiny")
        {}
    """
    known = _RESULTS.get(data, {})
    name = next((name for name in known if name.lower().split("-")[1] in model.lower()), "AOL-Small")
    shares = dict(zip((0.0, *PAPER_RADII), (round(p / 100, 3) for p in known.get(name, ())), strict=False))
    return {f"{name}, 1000 epochs (paper)": shares} if shares else {}
