"""Certified radii: inside of them no input may have another class.

Sound mode: the float64 program itself at float64 points whose distance is compared in whole numbers, and for uint8
images at images within the stated number of pixels. Real-arithmetic mode: up to, not including, the radius. A proof
that is made before the model is changed must be refused, or still hold.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fuzz import library, networks, programs, reference
from fuzz.case import Case, Outcome, Random, crash


def classifier(rng: Random, with_numbers: bool) -> Case:
    """A small network of operations that the sound mode knows, with logits."""
    shape = (rng.randint(1, 2), rng.randint(2, 4), rng.randint(2, 4)) if rng.random() < 0.7 else (rng.randint(2, 6),)
    fill = rng.choice(("gauss", "gauss", "integers", "one hot", "ones"))
    writer = programs.Writer(rng, shape, "float64", fill, most=160)
    for _ in range(rng.choice((0, 1, 2, 3, 4))):
        rank = len(writer.shapes[writer.case["result"]])
        tables = ["sound any", f"sound {rank}", f"sound {rank}", *(["sound numbers"] if with_numbers else [])]
        writer.add(
            [line for name in tables for line in programs.TEMPLATES.get(name, [])],
            {"gain": 0.5, "count": "integer buffer"},
        )
    if len(writer.shapes[writer.case["result"]]) > 2:
        writer.add(["{x}.flatten(1)"], x=writer.case["result"])
    if rng.random() < 0.85:
        writer.add(["{m:nn.Linear({N}, {2..4})}({x})"], x=writer.case["result"])
    return programs.pruned(writer.case)


def draw(rng: Random) -> Case:
    case = classifier(rng, with_numbers=True)
    images = {
        "count": rng.randint(2, 8),
        "dtype": rng.choice(("uint8", "float32", "float64")),
        "seed": rng.randrange(2**20),
    }
    line = rng.choice(programs.TEMPLATES["later"]).replace("{M}", rng.choice([*case["modules"], "none"]))
    return case | {
        "part": "radii",
        "images": images,
        "mode": rng.choice(("sound", "sound", "sound", "real-arithmetic")),
        "proof": rng.choice(("fast", "exact")),
        "later": [line] if rng.random() < 0.2 else [],
    }


def images_of(settings: dict[str, Any], shape: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(settings["seed"])
    if settings["dtype"] == "uint8":
        return torch.randint(0, 256, (settings["count"], *shape), generator=generator, dtype=torch.uint8)
    pixels = torch.rand((settings["count"], *shape), generator=generator, dtype=torch.float64)
    return pixels.to(torch.float32 if settings["dtype"] == "float32" else torch.float64)


def check(case: Case) -> Outcome:
    shape = programs.shape_of(case)
    if shape is None or len(shape) != 2 or shape[1] < 2:
        return Outcome("invalid")
    outcome = Outcome("proved", f"{case['mode']}{', changed later' if case['later'] else ''}")
    model, images = programs.build(case), images_of(case["images"], case["input"])
    if case["mode"] != "sound" and next(model.parameters(), None) is None:  # which the library computes in float32
        return Outcome("invalid")
    try:
        exact, proof = case["proof"] == "exact", None
        if case["later"]:
            proof = library.prove(model, case["input"], exact=exact)
            try:
                programs.change(model, case["later"])
            except AttributeError:
                return Outcome("invalid")
        found = library.certify(model, images, mode=case["mode"], exact=exact, proof=proof)
    except library.UnsoundBound as error:
        return outcome.fail("contradiction", crash(error))
    except Exception as error:
        if not library.is_refusal(error):
            return outcome.fail("crash", crash(error))
        outcome.verdict = "refused"
        return outcome
    plain = library.bake(programs.change(programs.build(case), case["later"]))
    for i in range(len(images)):
        R, y = float(found.radii[i]), int(found.classes[i])
        if R > 0:
            try_image(plain, images[i], y, min(R, 1e6), case, outcome, found.pixels[i])
    if outcome.claims == 0:
        outcome.verdict = "unproved"
    return outcome


def try_image(
    model: nn.Module, image: Tensor, y: int, R: float, case: Case, outcome: Outcome, pixels: int | None
) -> None:
    """Straight to the boundary along the steepest direction of each class, and points at the radius itself."""
    generator = torch.Generator().manual_seed(case["seed"])
    x = image.double() / (255 if image.dtype == torch.uint8 else 1)
    reach = R if case["mode"] == "sound" else R * (1 - 1e-6)
    points: list[tuple[Tensor, bool]] = []  # and whether it is to be inside
    with torch.no_grad():
        classes = model(x[None]).shape[1]
    for j in range(classes):
        if j == y:
            continue
        point = x
        for _ in range(3):
            direction = _uphill(model, point, y, j)
            if direction is None:
                break
            points += [(x + factor * reach * direction, factor == 1) for factor in (1, 1.001, 1.1, 2, 4)]
            point = x + reach * direction
    points += [
        (x + reach * d / d.norm(), True) for d in torch.randn((4, *x.shape), generator=generator, dtype=torch.float64)
    ]
    flat = x.numpy().ravel()
    kept = [
        torch.from_numpy(reference.inside(flat, p.numpy().ravel(), reach)).reshape(x.shape) if near else p
        for p, near in points
    ]
    with torch.no_grad():
        logits = model(torch.stack(kept))
    others = logits.clone()
    others[:, y] = -math.inf
    lost = [p for p, wrong in zip(kept, (others.amax(1) >= logits[:, y]).tolist(), strict=True) if wrong]
    close = [p for p in lost if reference.is_inside(flat, p.numpy().ravel(), reach)]
    nearest = min((float((p - x).norm()) for p in lost), default=math.inf)
    outcome.claims += 1
    if nearest < math.inf:
        outcome.tightness.append(min(1.0, R / nearest))
    if close and outcome.failure is None:
        outcome.fail("false radius", f"radius {R!r}, but class {y} is lost at a distance of {nearest!r}")
    if pixels is not None:
        _try_pixels(model, image, y, pixels, kept, outcome)


def _uphill(model: nn.Module, point: Tensor, y: int, j: int) -> Tensor | None:
    """The unit gradient of f_j - f_y; a direction to try, so it may be wrong."""
    with torch.enable_grad():
        moved = point[None].clone().requires_grad_()
        logits = model(moved)[0]
        if not logits.requires_grad:
            return None
        (gradient,) = torch.autograd.grad(logits[j] - logits[y], moved, allow_unused=True)
    if gradient is None or not 0 < float(gradient.norm()) < math.inf:
        return None
    return (gradient / gradient.norm())[0]


@torch.no_grad()
def _try_pixels(model: nn.Module, image: Tensor, y: int, pixels: int, points: list[Tensor], outcome: Outcome) -> None:
    """uint8 images near the same points, pulled back until the sum of squared differences is in the stated number."""
    tried = []
    for point in points:
        moved = (point * 255).round().clamp(0, 255).to(torch.int64)
        steps = moved - image.long()
        while int((steps**2).sum()) > pixels:
            steps = torch.where(steps.abs() == steps.abs().max(), steps - steps.sign(), steps)
        tried.append((image.long() + steps).double() / 255)
    logits = model(torch.stack(tried))
    outcome.claims += 1
    others = logits.clone()
    others[:, y] = -math.inf
    if bool((others.amax(1) >= logits[:, y]).any()) and outcome.failure is None:
        outcome.fail("false radius", f"an image within {pixels} squared pixels has another class than {y}")


def smaller(case: Case) -> Iterator[Case]:
    if case["images"]["count"] > 1:
        yield case | {"images": case["images"] | {"count": case["images"]["count"] - 1}}
    yield from networks.smaller(case)
