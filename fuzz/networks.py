"""Whole networks through the audit: no pair of inputs may be steeper than the proved constant."""

import copy
import random
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fuzz import library, oracle, programs
from fuzz.case import TAME, Case, Outcome, Random, crash

CALLS = 24  # of a model before it is measured: state may act late
ROOM = 1 + 1e-6  # of a ratio, for rounding inside of the network
BLOCK = 4  # networks with the same program and different weights


def draw(rng: Random, templates: list[str] | None = None, block: str | None = None) -> Case:
    """One to six lines on a small input.

    Networks of a block share their program, so that it is exported once, if it has weights and nothing else that may
    change it.
    """
    if block is not None:
        case = draw(random.Random(block), templates)
        if not case["attributes"] and not case["setup"] and programs.has_weights(case):
            return case | {"fill": rng.choice(TAME), "seed": rng.randrange(2**20), "lower": rng.random() < 0.1}
    rank = rng.choice((1, 2, 3, 3, 3, 3, 4)) if rng.random() < 0.95 else 2
    most = {1: 8, 2: 6, 3: 6, 4: 3}[rank]
    shape = tuple(rng.randint(1, 4 if axis == 0 and rank > 1 else most) for axis in range(rank))
    writer = programs.Writer(rng, shape, rng.choice(("float32", "float64")))
    wanted, odd = rng.choice((1, 1, 2, 3, 4, 6)), rng.random()
    is_chain = templates is None and rng.random() < 0.15
    for _ in range(4 * wanted):
        if len(writer.case["lines"]) < wanted:
            x = writer.case["result"] if is_chain else None
            writer.add(programs.TEMPLATES["modules"] if is_chain else templates, x=x)
    if odd < 0.06:
        template, attributes = rng.choice(programs.STATES)
        writer.add([template], attributes)
    elif odd < 0.2:
        writer.set_up()
    return programs.pruned(writer.case) | {"part": "networks", "lower": rng.random() < 0.1}


def check(case: Case) -> Outcome:
    shape = tuple(case["input"])
    if programs.shape_of(case) is None:
        return Outcome("invalid")
    outcome = Outcome("proved", "state or setup" if case["setup"] or case["attributes"] else "program")
    dtype = torch.float64 if case["dtype"] == "float64" else torch.float32
    model, generator = programs.build(case), torch.Generator().manual_seed(case["seed"] + 2)
    example = torch.rand((1, *shape), generator=generator, dtype=torch.float64).to(dtype)
    before = _contents(model)
    try:
        proved = library.audit(model, example, lower=case["lower"])
    except library.UnsoundBound as error:
        return outcome.fail("contradiction", crash(error))
    except Exception as error:
        if not library.is_refusal(error):
            return outcome.fail("crash", crash(error))
        outcome.verdict, proved = "refused", None
    if (changed := _difference(before, _contents(model))) is not None:
        return outcome.fail("model changed", f"the audit has changed {changed} of the model")
    if proved is None:
        outcome.verdict = "unproved" if outcome.verdict == "proved" else outcome.verdict
        return outcome
    return measure(case, proved, outcome)


@torch.no_grad()
def measure(case: Case, proved: float, outcome: Outcome) -> Outcome:
    """Compare with a new copy of the network that is called many times."""
    shape, generator = tuple(case["input"]), torch.Generator().manual_seed(case["seed"] + 3)
    network = programs.build(case).double()
    try:
        for _ in range(CALLS if case["attributes"] or case["setup"] else 0):
            network(torch.zeros((2, *shape), dtype=torch.float64))
        if oracle.mixes_samples(network, shape, generator):
            reason = "the answer to a sample depends on its place in the batch, or changes from call to call"
            return outcome.fail("false bound", f"proved {proved!r}, but {reason}")
        measured = oracle.steepest(network, shape, generator)
    except (RuntimeError, TypeError, IndexError) as error:  # works for two samples of its own type only
        outcome.verdict, outcome.message = "unmeasured", crash(error)
        return outcome
    outcome.compare("audit", measured, proved, not measured <= proved * ROOM)
    if (stated := _of_chain(programs.build(case), case)) is not None:
        outcome.compare("summary", measured, stated, not measured <= stated * ROOM)
    return outcome


def _of_chain(model: nn.Module, case: Case) -> float | None:
    """What the summary states of a program that is its modules one after the other."""
    names = []
    for i, line in enumerate(case["lines"]):
        before = case["lines"][i - 1].split(" = ")[0] if i else "v0"
        found = re.fullmatch(rf"v\d+ = self\.(m\d+)\({before}\)", line)
        if found is None or case["setup"]:
            return None
        names.append(found[1])
    return library.stated(nn.Sequential(*(model.get_submodule(name) for name in names)))


def _contents(model: nn.Module) -> dict[str, Any]:
    """Everything that a model holds by name: tensors, numbers, containers, modes."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
            if isinstance(value, Tensor | bool | int | float | str | tuple) or name in ("state", "table"):
                found[f"{path}.{name}"] = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    return found


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        return type(a) is type(b) and bool(a == b)

    if one.keys() != other.keys():
        return ", ".join(sorted(one.keys() ^ other.keys()))
    return next((name for name in one if not same(one[name], other[name])), None)


def smaller(case: Case) -> Iterator[Case]:
    """Fewer lines, then smaller numbers everywhere, then simpler weights."""
    for i in reversed(range(len(case["lines"]))):
        made = re.match(r"(?:.*; )?(v\d+)", case["lines"][i])
        uses = [v for v in re.findall(r"\bv\d+\b", case["lines"][i]) if made and v != made[1]]
        for use in dict.fromkeys(uses):
            assert made
            lines = [re.sub(rf"\b{made[1]}\b", use, line) for line in case["lines"][:i] + case["lines"][i + 1 :]]
            result = use if case["result"] == made[1] else case["result"]
            yield programs.pruned(case | {"lines": lines, "result": result})
    for i in range(len(case["setup"])):
        yield programs.pruned(case | {"setup": case["setup"][:i] + case["setup"][i + 1 :]})
    yield from smaller_program(case)
    for key, value in (("fill", "ones"), ("seed", 0), ("dtype", "float64"), ("lower", False)):
        if case.get(key, value) != value:
            yield case | {key: value}


def smaller_program(case: Case) -> Iterator[Case]:
    """The same program with an option left out, or with another number in all places."""
    text = {key: case[key] for key in ("lines", "modules", "setup")}
    sources = [*case["lines"], *case["modules"].values()]
    for source in sources:
        for option in re.findall(r", \w+=(?:\([^()]*\)|'[^']*'|[\w.-]+)", source):
            yield case | {key: _replaced(value, source, source.replace(option, "")) for key, value in text.items()}
    for i in range(len(case["input"])):
        for n in range(1, case["input"][i]):
            yield case | {"input": [*case["input"][:i], n, *case["input"][i + 1 :]]}
    numbers = sorted(
        {int(n) for source in sources for n in re.findall(r"(?<![\w.])\d+(?![\w.])", source)} | {*case["input"]}
    )
    for n in reversed(numbers):
        for less in dict.fromkeys((1, n - 1)):
            if 0 < less < n:
                change = lambda t, n=n, less=less: re.sub(rf"(?<![\w.]){n}(?![\w.])", str(less), t)  # noqa: E731
                edited: Case = {
                    "input": [less if m == n else m for m in case["input"]],
                    "lines": [*map(change, case["lines"])],
                }
                edited["modules"] = {name: change(source) for name, source in case["modules"].items()}
                shapes = {name: [less if m == n else m for m in shape] for name, shape in case["constants"].items()}
                yield case | edited | {"constants": shapes}
    for source in sources:
        for number in {*re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", source)}:
            for less in ("1.0",) if "." in number else ("0", "1"):
                if less != number:
                    new = re.sub(rf"(?<![\w.]){re.escape(number)}(?![\w.])", less, source, count=1)
                    yield case | {key: _replaced(value, source, new) for key, value in text.items()}


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {name: new if source == old else source for name, source in value.items()}
    return [new if source == old else source for source in value]
