"""The model card: what the network is, what is proved of it and in which arithmetic, and how to load it."""

from fractions import Fraction
from typing import Any

from onelip._version import __version__
from onelip.export.source import Source

_HEAD = """---
library_name: onelip
pipeline_tag: image-classification
tags: [lipschitz, certified-robustness]
---

# {model} on {data}

An image classifier as a plain torch network, made with onelip {version}.

"""

_LOAD = """
## Use

```python
import onelip, torch

model = onelip.from_pretrained("{place}")      # this directory, or the name of the repository on the hub
logits = model(torch.rand(1, {shape}))         # images in [0, 1]: uint8 / 255, no other normalisation
```

Classes: {classes}.

Files: `config.json` (architecture and recipe), `model.safetensors` (plain weights, sha256 `{sha}`){certificate}.
Nothing here is pickled, and nothing runs code.
"""


def model_card(source: Source, certificate: dict[str, Any] | None, place: str) -> str:
    """README.md of a directory for a hub."""
    recipe = source.config.recipe
    parts = [_HEAD.format(model=recipe.model, data=source.config.data_name, version=__version__)]
    parts.append("## What is proved\n\n")
    parts.append(_constant(source.lipschitz, certificate))
    if source.results is not None:
        parts.append(_table(source.results))
    if certificate is not None:
        parts.append(_certified(certificate))
    listed = ", ".join(source.config.class_names[:20]) + (", …" if len(source.config.class_names) > 20 else "")
    told = ", `certificate.json` (check it: `onelip check certificate.json --images IMAGES.npy`)"
    parts.append(
        _LOAD.format(
            place=place,
            shape=", ".join(map(str, source.config.shape)),
            classes=listed,
            sha=source.weights_sha256,
            certificate=told if certificate is not None else "",
        )
    )
    return "".join(parts)


def _constant(lipschitz: float | None, certificate: dict[str, Any] | None) -> str:
    try:
        proved = float(Fraction(certificate["nodes"][-1]["lipschitz"])) if certificate is not None else None
    except (KeyError, IndexError, TypeError, ValueError, ArithmeticError):
        proved = None
    if proved is not None:
        return (
            f"The L2 Lipschitz constant from the image in [0, 1] to the logits is at most **{proved!r}**, proved for "
            "the stored weights in exact arithmetic. The certificate holds for the float64 program with its rounding.\n"
        )
    if lipschitz is not None:
        return (
            f"The L2 Lipschitz constant from the image in [0, 1] to the logits is **{lipschitz:g}** by construction: "
            "in real arithmetic, before the rounding of the stored weights. `onelip certify` proves the number for the "
            "weights as they are.\n"
        )
    return "Nobody vouches for a Lipschitz constant of this network.\n"


def _table(results: dict[str, Any]) -> str:
    try:
        rows = [("accuracy", results["accuracy"]), *((f"CRA at {r}", v) for r, v in results["cra"].items())]
        lines = [f"| {name} | {'none' if value is None else f'{100 * value:.2f} %'} |\n" for name, value in rows]
        head = f"\nOn {results['images']} test images of {results['data']}; mode: {results['mode']}.\n\n"
    except (KeyError, TypeError, AttributeError, ValueError):
        return ""
    return head + "| | |\n|---|---|\n" + "".join(lines)


def _certified(certificate: dict[str, Any]) -> str:
    try:
        count, cra = certificate["summary"]["count"], certificate["summary"]["cra"]
        rows = [("accuracy" if radius == "0" else f"CRA at {radius}", n / count) for radius, n in cra.items()]
        lines = [f"| {name} | {100 * share:.2f} % |\n" for name, share in rows]
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        return ""
    head = f"\nOn the {count} images of the certificate; mode: sound, with the rounding of float64.\n\n"
    return head + "| | |\n|---|---|\n" + "".join(lines)
