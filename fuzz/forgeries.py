"""Certificates that were changed: the checker must reject them, or what they state must be true.

A forgery is a valid certificate of a small network, and a list of edits. The hashes are made to fit, and often all else
that follows from what was edited (`reference.settle`), so that only the forged place is left to be found.
"""

import atexit
import contextlib
import copy
import functools
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzz import library, programs, radii, reference
from fuzz.case import Case, Outcome, Random, crash

BLOCK = 48  # forgeries of each certificate
PROVED = ("lipschitz", "norm", "error", "sigma", "absolute", "bias_norm", "constant", "mean_norm", "gain")
SETTINGS = ("stride", "dilation", "offset", "circular", "groups", "transposed", "shape", "take", "axis", "group_size")
SETTINGS += ("factor", "bias", "weight", "mean", "std", "terms")
OPERATIONS = (
    "relu",
    "abs",
    "add",
    "join",
    "scale",
    "sort",
    "max",
    "sum",
    "normalize",
    "affine",
    "potential",
    "exponential",
    "input",
    "x",
)
BOUNDS: dict[str, list[Any]] = {
    "kind": ["schur", "cholesky"],
    "side": ["inputs", "outputs"],
    "steps": [0, 1, 2, 3, 4, 5],
}
BOUNDS["scale"], BOUNDS["tree"] = [["1"], ["1 1 1"], []], ["1", "0", "011", "0011011", "1" * 400, "0" * 400, "2"]
KINDS = (
    "proved",
    "proved",
    "setting",
    "wiring",
    "bound",
    "weight",
    "result",
    "result",
    "value",
    "key",
    "image",
    "cost",
)
KINDS += ("op", "setting", "bound", "weight")
Edit = dict[str, Any]
RUBBISH: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**33,
    "",
    "0",
    "1/0",
    "-1/2",
    "nan",
    "inf",
    [],
    [0],
    {},
    "0x0.0p+0",
    "1e3",
    "²",
]


@functools.cache
def _scratch() -> Path:
    """A folder of this process."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.lru_cache(maxsize=4)
def _base(text: str) -> tuple[dict[str, Any], reference.Tensors, np.ndarray] | None:
    """A valid certificate with its weights and images; None if the network does not run, or the library refuses it."""
    case = json.loads(text)
    if programs.shape_of(case) is None:
        return None
    model = library.bake(programs.build(case))
    images = radii.images_of(case["images"], case["input"])
    labels = torch.arange(len(images)) % 2 if case["labels"] else None
    try:
        content = library.save_certificate(_scratch(), model, images, labels)
    except Exception as error:
        if not library.is_refusal(error):
            raise
        return None
    tensors = {name: value.double().numpy().copy() for name, value in model.state_dict().items()}
    return content, tensors, images.numpy()


@functools.lru_cache(maxsize=4)
def _network(seed: str) -> Case:
    rng = Random(seed)
    images = {
        "count": rng.randint(1, 4),
        "dtype": rng.choice(("uint8", "float32", "float64")),
        "seed": rng.randrange(2**20),
    }
    return radii.classifier(rng, with_numbers=False) | {"images": images, "labels": rng.random() < 0.7}


def draw(rng: Random, block: str) -> Case:
    """Some edits of a certificate, which is the same for all draws with this block."""
    case: Case = {"part": "forgeries", "network": _network(block), "edits": []}
    case |= {"settle": rng.random() < 0.6, "rerun": rng.random() < 0.5}
    with contextlib.suppress(Exception):  # of the library: `check` will meet it again
        if base := _base(json.dumps(case["network"])):
            for _ in range(0 if rng.random() < 1 / BLOCK else rng.choice((1, 1, 1, 2, 3))):
                case["edits"] += _edits(rng, *base)
    return case


def _edits(rng: Random, content: dict[str, Any], tensors: reference.Tensors, images: np.ndarray) -> list[Edit]:
    """One change of one of several kinds, as one or several edits."""
    nodes, results = content["nodes"], content["results"]
    i, k = rng.randrange(len(nodes)), rng.randrange(len(results))
    node, kind = nodes[i], rng.choice(KINDS)
    layers = [j for j, n in enumerate(nodes) if "bound" in n]
    if kind == "proved":
        key = rng.choice([key for key in PROVED if key in node])
        value = float(Fraction(node[key]))
        near = math.nextafter(value, 0.0), math.nextafter(value, math.inf)
        return [_set(str(Fraction(rng.choice((*near, value / 2, value * 0.99, 0.0, value * 2, 1.0)))), "nodes", i, key)]
    if kind == "setting":
        key = rng.choice([key for key in SETTINGS if key in node])
        return [_set(_other(rng, node[key], tensors), "nodes", i, key)]
    if kind == "wiring" and rng.random() < 0.7:
        return [_set([rng.randrange(len(nodes)) for _ in range(rng.choice((1, 1, 2, 3)))], "nodes", i, "inputs")]
    if kind == "wiring":  # two nodes change places
        j = rng.randrange(len(nodes))
        return [_set(nodes[j], "nodes", i), _set(nodes[i], "nodes", j)]
    if kind == "bound" and layers:
        j = rng.choice(layers)
        key = rng.choice([*nodes[j]["bound"]])
        less = float(Fraction(nodes[j]["sigma"])) * rng.choice((0.5, 0.9, 0.999))  # as if another proof gave it
        both = [_set(rng.choice(BOUNDS[key]), "nodes", j, "bound", key), _set(str(Fraction(less)), "nodes", j, "sigma")]
        return both[: rng.randint(1, 2)]
    if kind == "weight" and (names := [name for name in sorted(tensors) if tensors[name].size]):
        name = rng.choice(names)
        index = rng.randrange(tensors[name].size)
        value = float(tensors[name].ravel()[index])
        others = (math.nextafter(value, math.inf), 2 * value, -value, value + 1, 0.0, 1e160, math.nan, math.inf)
        return [{"tensor": name, "index": index, "to": rng.choice(others).hex()}]
    if kind == "result":
        key = rng.choice([*results[k]])
        return [_set(_other(rng, results[k][key], tensors), "results", k, key)]
    if kind == "image":
        return [{"image": rng.randrange(images.size), "to": rng.choice((0, 1, 255, 0.5, -1, 2, 256))}]
    if kind == "op":
        return [_set(rng.choice(OPERATIONS), "nodes", i, "op")]
    if kind == "cost":
        return _costly(rng, content, i, layers)
    path, value = _anywhere(rng, content)
    if kind == "key" and isinstance(value, dict):
        return [_set(1, *path, "more")]
    return [_set(rng.choice(RUBBISH) if rng.random() < 0.5 else _other(rng, value, tensors), *path)]


def _set(value: Any, *path: Any) -> Edit:
    return {"at": [*path], "to": value}


def _other(rng: Random, value: Any, tensors: reference.Tensors) -> Any:
    """Something of the same kind that is not the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 1, 2))
    if isinstance(value, list) and value:
        k = rng.randrange(len(value))
        if rng.random() < 0.15:
            return value[:k] + value[k + 1 :]
        return [*value[:k], _other(rng, value[k], tensors), *value[k + 1 :]]
    if isinstance(value, str) and value in tensors:
        return rng.choice(sorted(tensors))
    if isinstance(value, str) and value.lstrip("-").startswith("0x"):
        x = float.fromhex(value)
        return float(rng.choice((math.nextafter(x, math.inf), math.nextafter(x, 0), x * 2, x + 0.1, -x))).hex()
    return rng.choice(RUBBISH)


def _anywhere(rng: Random, content: Any) -> tuple[list[Any], Any]:
    path: list[Any] = []
    while isinstance(content, dict | list) and content and (not path or rng.random() < 0.8):
        key = rng.choice([*content]) if isinstance(content, dict) else rng.randrange(len(content))
        path.append(key)
        content = content[key]
    return path, content


def _costly(rng: Random, content: dict[str, Any], i: int, layers: list[int]) -> list[Edit]:
    """What asks for much work or memory in few bytes."""
    nodes, choice = content["nodes"], rng.randrange(5)
    if choice == 0:
        return [_set([2 ** rng.randint(8, 25), *nodes[i]["shape"][1:]], "nodes", i, "shape")]
    if choice == 1 and layers:
        j = rng.choice(layers)
        return [_set({"kind": "schur", "steps": 4, "scale": ["9" * 10 ** rng.randint(1, 4)]}, "nodes", j, "bound")]
    if choice == 2:  # joins of joins that nothing uses
        join = {"op": "join", "inputs": [0] * rng.choice((8, 64)), "shape": [2 ** rng.choice((10, 20, 26))]}
        return [{"unused": nodes[0] | join, "count": rng.choice((1, 12))}]
    if choice == 3 and layers:  # a layer again and again
        return [{"unused": nodes[rng.choice(layers)] | {"inputs": [0]}, "count": rng.choice((1, 100))}]
    return [_set([[0] * 4 for _ in range(rng.choice((1, 4000)))], "nodes", i, "take")]


def _change(case: Case, content: dict[str, Any], tensors: reference.Tensors, images: np.ndarray) -> dict[str, Any]:
    """The changed certificate; weights and images are changed in place."""
    for edit in case["edits"]:
        if "tensor" in edit:
            tensors[edit["tensor"]].ravel()[edit["index"]] = float.fromhex(edit["to"])
        elif "image" in edit:
            with contextlib.suppress(OverflowError):  # numpy does not put 256 into uint8
                images.ravel()[edit["image"]] = edit["to"]
        elif "unused" in edit:
            with contextlib.suppress(KeyError, TypeError):
                for node in content["nodes"]:
                    node["inputs"] = [j + edit["count"] if j else 0 for j in node["inputs"]]
                content["nodes"][1:1] = [copy.deepcopy(edit["unused"]) for _ in range(edit["count"])]
        else:
            _put(content, edit)
    if case["settle"]:
        settled = copy.deepcopy(content)
        edits = [edit for edit in case["edits"] if "at" in edit]
        with contextlib.suppress(Exception):  # nothing follows from rubbish
            kept = {tuple(edit["at"][1:]) for edit in edits if edit["at"][0] == "nodes"}
            reference.settle(settled, tensors, images, case["rerun"], kept)
            for edit in edits:
                if edit["at"][0] != "nodes":
                    _put(settled, edit)
            content = settled
    return content


def _put(content: Any, edit: dict[str, Any]) -> None:
    *path, last = edit["at"]
    with contextlib.suppress(KeyError, IndexError, TypeError):  # an edit before has taken the place away
        for key in path:
            content = content[key]
        content[last] = copy.deepcopy(edit["to"])


def write(folder: Path, content: dict[str, Any], tensors: reference.Tensors, images: np.ndarray) -> Path:
    """All files, with hashes and digest that fit."""
    header, body = {}, b""
    for name, array in tensors.items():
        data = np.ascontiguousarray(array, "<f8").tobytes()
        header[name] = {"dtype": "F64", "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    top = json.dumps(header).encode()
    weights = len(top).to_bytes(8, "little") + top + body
    (folder / "forged.safetensors").write_bytes(weights)
    np.save(folder / "forged.npy", images)
    for key, data in (("weights", weights), ("images", np.ascontiguousarray(images).tobytes())):
        if isinstance(content.get(key), dict):
            content[key]["sha256"] = hashlib.sha256(data).hexdigest()
    body = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    content["digest"] = hashlib.sha256(text.encode()).hexdigest()
    path = folder / "forged.json"
    path.write_text(json.dumps(content))
    return path


def check(case: Case) -> Outcome:
    outcome = Outcome("rejected", "valid" if not case["edits"] else "settled" if case["settle"] else "edited", claims=1)
    try:
        base = _base(json.dumps(case["network"]))
    except Exception as error:
        return outcome.fail("crash", f"while certifying: {crash(error)}")
    if base is None:
        return Outcome("invalid")
    folder, (content, tensors, images) = _scratch(), copy.deepcopy(base)
    content = _change(case, content, tensors, images)
    try:
        path = write(folder, content, tensors, images)
    except (ValueError, TypeError):  # NaN in JSON
        return Outcome("invalid")
    reason = ""
    try:
        found = library.check(path, folder / "forged.safetensors", None, folder / "forged.npy")
        outcome.verdict = "accepted" if found["accepted"] and found["logits_checked"] else "rejected"
    except (library.Rejected, OSError) as error:
        reason = crash(error)
    except MemoryError:
        raise
    except Exception as error:
        return outcome.fail("crash", crash(error))
    if outcome.verdict == "rejected":
        return outcome if case["edits"] else outcome.fail("valid file rejected", reason)
    try:
        problem = reference.problems(content, tensors, images, exact=not case["edits"])
    except MemoryError:  # it writes every operator as a matrix; the checker does not
        return Outcome("unmeasured", outcome.label)
    except Exception as error:
        problem = f"the reference cannot read it: {crash(error)}"
    return outcome if problem is None else outcome.fail("false certificate", problem)


def smaller(case: Case) -> Iterator[Case]:
    for i in range(len(case["edits"])):
        yield case | {"edits": case["edits"][:i] + case["edits"][i + 1 :]}
    for key in ("settle", "rerun"):
        if case[key]:
            yield case | {key: False}
    network = case["network"]
    if network["images"]["count"] > 1:
        yield case | {"network": network | {"images": network["images"] | {"count": 1}}}
    if network["labels"]:
        yield case | {"network": network | {"labels": False}}
    yield from ({**case, "network": small} for small in radii.networks.smaller(network))
