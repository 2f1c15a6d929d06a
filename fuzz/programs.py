"""Random networks, written as lines of Python.

operations.txt holds templates: lines with holes. `{x}` is an earlier value, `{y}` one of the same shape, `{2..4}` a
whole number, `{a|b}` one of several texts, `{f}` a number, `{p}` a positive one, `{d}` an axis of x that is not the
batch, `{C}`, `{H}`, `{N}` the lengths of its axes 1, 2 and the last, `{K}` a small number that is the same in the whole
line, `{w:2,K}` a constant tensor of that shape, `{m:nn.Linear(2, 3)}` a module, `{M}` a module that is there, and `{v}`
the new value (without it the line is `{v} = ...`).

A case holds the lines themselves, so it can be read, and no shapes: a line is kept if torch runs it. Only words that
occur in operations.txt may occur in a case, so a file of the corpus cannot call anything else.
"""

import ast
import collections
import copy
import itertools
import json
import random
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuzz import library
from fuzz.case import TAME, Case, Random, fill, tensor


class Moving(nn.Module):
    """A parametrization whose weight grows at each use, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.factor *= 1.5
        return weight * self.factor


def _read() -> dict[str, list[str]]:
    """The templates of operations.txt by section."""
    sections: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "operations.txt").read_text().splitlines():
        if found := re.fullmatch(r"\[([a-z0-9 ]+)\]", line):
            sections[found[1]] = []
        elif line and not line.startswith("#"):
            sections[[*sections][-1]].append(line)
    return sections


# What an attribute may be besides numbers, texts, lists and dictionaries.
OBJECTS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.ones(1),
    "integer buffer": lambda: torch.ones(1, dtype=torch.int64),
    "namespace": lambda: types.SimpleNamespace(value=1.0),
    "array": lambda: np.ones(1),
    "deque": collections.deque,
    "count": lambda: itertools.count(1),
    "random": lambda: random.Random(0),
    "generator": lambda: torch.Generator().manual_seed(0),
    "class number": lambda: 1.0,
}
TEMPLATES = _read()
STATES = [(line.split("  ##  ")[0], json.loads(line.split("  ##  ")[1])) for line in TEMPLATES.pop("state")]
NAMES: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "ol": library.layers, "made": library.methods}
NAMES |= {"P": nn.utils.parametrizations, "parametrize": nn.utils.parametrize, "Moving": Moving}
_WORDS = {*re.findall(r"[A-Za-z]\w*", str(TEMPLATES) + str(STATES))}
_OWN = re.compile(r"[vmcxio]\d*b?")
ODD = ("-3.0", "-1.0", "-0.5", "0.0", "0.01", "0.5", "1.0", "1.7", "3.0")
POSITIVE = ("0.01", "0.1", "0.5", "1.0", "2.0", "7.5")


def _checked(source: str) -> str:
    """Refuses words that are not in the tables, and private names."""
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, key, None) for key in ("id", "attr", "arg", "name")]
        for name in names:
            if isinstance(name, str) and name not in _WORDS and not _OWN.fullmatch(name) and name != "self":
                raise ValueError(f"{name!r} is not in fuzz/operations.txt, so a case cannot have it")
    return source


def build(case: Case) -> nn.Module:
    """The network of a case, in eval mode."""
    torch.manual_seed(case["seed"])
    body = "\n    ".join([*case["lines"], f"return {case['result']}"])
    space: dict[str, Any] = dict(NAMES)
    exec(compile(_checked(f"def forward(self, v0):\n    {body}\n"), "case", "exec"), space)
    program = {key: value for key, value in case.items() if key not in ("fill", "seed", "lower")}
    members = {"forward": space["forward"], "program": json.dumps(program, sort_keys=True)}
    network = type("Network", (nn.Module,), members)()
    for name, source in case["modules"].items():
        setattr(network, name, eval(compile(_checked(source), "case", "eval"), dict(NAMES)))
    fill(network, case["fill"], case["seed"])
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    for name, shape in case["constants"].items():
        value = tensor(case["fill"], tuple(shape), generator, torch.float32)
        if int(name[1:]) % 2:
            network.register_parameter(name, nn.Parameter(value))
        else:
            network.register_buffer(name, value)
    for name, value in case["attributes"].items():
        made: Any = OBJECTS[value]() if isinstance(value, str) and value in OBJECTS else copy.deepcopy(value)
        if value == "integer buffer":
            network.register_buffer(name, made)
        else:
            setattr(type(network) if value == "class number" else network, name, made)
    network.to(torch.float64 if case["dtype"] == "float64" else torch.float32)
    return change(network.eval(), case["setup"])


def has_weights(case: Case) -> bool:
    """Whether the network of a case has parameters or buffers with real numbers."""
    if shape_of(case) is None:
        return False
    return any(value.is_floating_point() for value in build(case).state_dict().values())


def change(network: nn.Module, lines: list[str]) -> nn.Module:
    """Runs lines on a network that was built."""
    for line in lines:
        exec(compile(_checked(line), "case", "exec"), dict(NAMES) | {"self": network})
    return network


class Writer:
    """Draws a program line by line, keeping those that torch runs."""

    def __init__(self, rng: Random, shape: tuple[int, ...], dtype: str, fill: str = "", most: int = 600) -> None:
        self.rng, self.most = rng, most
        fill = fill or rng.choice(TAME)
        self.case: Case = {"input": list(shape), "dtype": dtype, "fill": fill, "seed": rng.randrange(2**20)}
        self.case |= {"modules": {}, "constants": {}, "attributes": {}, "setup": [], "lines": [], "result": "v0"}
        self.shapes: dict[str, tuple[int, ...]] = {"v0": (2, *shape)}

    def add(
        self, templates: list[str] | None = None, attributes: dict[str, Any] | None = None, x: str | None = None
    ) -> bool:
        """One more line; False if torch does not run it, or its result is empty, large or without a batch."""
        x = x or self.rng.choice([name for name, shape in self.shapes.items() if len(shape) > 1][-3:])
        if templates is None:
            by_rank = TEMPLATES.get(str(len(self.shapes[x])), [])
            templates = by_rank if by_rank and self.rng.random() < 0.5 else TEMPLATES["any"]
            templates = TEMPLATES["batch"] if self.rng.random() < 0.03 else templates
        tried = {key: copy.copy(value) for key, value in self.case.items()}
        v = f"v{len(tried['lines']) + 1}"
        template = self.rng.choice(templates)
        line = self._filled(template, x, v, tried)
        tried["lines"] = [*tried["lines"], line if "{v}" in template else f"{v} = {line}"]
        tried["result"] = v
        if attributes:
            tried["attributes"] = {**tried["attributes"], **attributes}
        shape = shape_of(tried)
        if shape is None or shape[0] != 2 or not 0 < torch.Size(shape).numel() <= self.most:
            return False
        self.case, self.shapes[v] = tried, shape
        return True

    def set_up(self) -> bool:
        """One of the lines that change a model after it was built; False if it does not run then."""
        line = self._filled(self.rng.choice(TEMPLATES["setup"]), "v0", "", self.case)
        tried = self.case | {"setup": [line]}
        if shape_of(tried) is None:
            return False
        self.case = tried
        return True

    def _filled(self, template: str, x: str, v: str, case: Case) -> str:
        rng, shape = self.rng, self.shapes[x]
        alike = [name for name, other in self.shapes.items() if other == shape]
        letters = {"C": shape[1], "N": shape[-1], "H": shape[min(2, len(shape) - 1)], "K": rng.randint(1, 4)}

        def one(hole: re.Match[str]) -> str:
            text = hole.group(1)
            if text in ("x", "v"):
                return {"x": x, "v": v}[text]
            if text == "y":
                return rng.choice(alike)
            if text in letters:
                return str(letters[text])
            if text == "d":
                return str(rng.choice([*range(1, len(shape)), -1]))
            if text in ("f", "p"):
                return rng.choice(ODD if text == "f" else POSITIVE)
            if text == "M":
                return rng.choice([*case["modules"], "none"])
            if text.startswith("w:"):
                name = f"c{len(case['constants'])}"
                sizes = [letters[part] if part in letters else int(part) for part in text[2:].split(",")]
                case["constants"] = {**case["constants"], name: sizes}
                return f"self.{name}"
            if text.startswith("m:"):
                name = f"m{len(case['modules'])}"
                case["modules"] = {**case["modules"], name: text[2:]}
                return f"self.{name}"
            if found := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", text):
                return str(rng.randint(int(found[1]), int(found[2])))
            return rng.choice(text.split("|"))

        while (filled := re.sub(r"\{([^{}]*)\}", one, template)) != template:
            template = filled
        return template


@torch.no_grad()
def shape_of(case: Case) -> tuple[int, ...] | None:
    """Of the result for two samples; None if it does not run, or not in the case's own type."""
    try:
        network = build(case)
        x = torch.rand((2, *case["input"]), dtype=torch.float64 if case["dtype"] == "float64" else torch.float32)
        y = network(x)
        return tuple(y.shape) if isinstance(y, Tensor) and y.dtype == x.dtype and bool(y.isfinite().all()) else None
    except Exception:
        return None


def pruned(case: Case) -> Case:
    """Without lines, modules and constants that the result does not need."""
    lines, needed = [], {case["result"]}
    for line in reversed(case["lines"]):
        made = {*re.findall(r"\bv\d+b?\b", line.split("=")[0])}
        if made & needed or any(f"self.{name}" in line for name in case["attributes"]):
            lines.insert(0, line)
            needed |= {*re.findall(r"\bv\d+b?\b", line)}
    text = "\n".join([*lines, *case["setup"]])
    used = {*re.findall(r"\bself\.(\w+)", text)}
    kept = {key: {n: v for n, v in case[key].items() if n in used} for key in ("modules", "constants", "attributes")}
    return case | {"lines": lines} | kept
