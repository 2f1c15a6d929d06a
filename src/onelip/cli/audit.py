"""`onelip audit TARGET`: what is proved of a network's Lipschitz constant, what is measured, what has no proof."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from onelip.cli._parse import parse
from onelip.core.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class AuditCommand:
    """Prove an upper bound of a network's Lipschitz constant, step by step, and measure a lower one.

    The constant is for one image, in L2, in pixel units ([0, 1]), in eval mode and in real arithmetic. Exit code 1 if
    something has no proof, or if the bound is above --require.
    """

    target: Annotated[str | None, tyro.conf.Positional] = None
    """Directory of a run; or package.module:name or file.py:name, where name is a module of torch or a function that
    returns one. Naming a function RUNS that code: audit only code that you trust. A run is read without running any."""
    model: str | None = None
    """Instead of a target: an architecture by name with fresh weights; see onelip models."""
    input_shape: str | None = None
    """Shape of one input, such as 3,32,32; a run knows its own."""
    num_classes: int = 10
    """For --model."""
    image_size: int = 32
    """For --model."""
    in_channels: int = 3
    """For --model."""
    mean: tuple[float, ...] = ()
    """Means per channel, if images are standardised before the network: that is part of the function."""
    std: tuple[float, ...] = ()
    """Standard deviations per channel."""
    effort: Literal["quick", "normal", "high"] = "normal"
    """How hard to work on each weight."""
    lower: bool = True
    """Measure lower bounds, too."""
    require: float | None = None
    """Exit with 1 unless a bound of at most this is proved."""
    seed: int = 0
    """Of fresh weights, of the example and of the measurement."""
    json: bool = False
    """Print JSON."""


def run(arguments: Sequence[str]) -> int:
    """Parse, audit, show."""
    command = parse(AuditCommand, "audit", arguments)
    if (command.target is None) == (command.model is None):
        raise RecipeError("expected a TARGET or --model, and not both; see onelip audit --help")
    if bool(command.mean) != bool(command.std):
        raise RecipeError("expected --mean and --std together, got one of them")
    if command.require is not None and not command.require >= 0:
        raise RecipeError(f"expected --require of at least 0, got {command.require}")

    import torch

    from onelip.certification.audit import audit
    from onelip.nn import Normalize

    torch.manual_seed(command.seed)
    if command.mean:
        with _as_mistake():
            Normalize(command.mean, command.std)
    model, shape = _network(command)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    example = torch.rand((2, *shape), generator=torch.Generator().manual_seed(command.seed)).to(dtype)
    progress = _Progress()
    found = audit(
        model,
        example,
        normalize=(command.mean, command.std) if command.mean else None,
        lower=command.lower,
        effort=command.effort,
        seed=command.seed,
        progress=progress,
    )
    progress.clear()
    is_enough = found.upper is not None and (command.require is None or found.upper <= command.require)
    if command.json:
        print(json.dumps({**found.to_json(), "require": command.require, "is_enough": is_enough}))
    else:
        print(found)
        if command.require is not None and not is_enough:
            print(f"Required: at most {command.require:g}. Not proved.")
    return 0 if is_enough else 1


@contextmanager
def _as_mistake() -> Iterator[None]:
    """What is refused within was typed so."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(str(error)) from error


class _Progress:
    """One line on stderr that is written over, where somebody watches."""

    def __init__(self) -> None:
        self.is_watched = sys.stderr.isatty()

    def __call__(self, line: str) -> None:
        if self.is_watched:
            print(f"\r\x1b[K{line[:100]} ...", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.is_watched:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _network(command: AuditCommand) -> "tuple[nn.Module, tuple[int, ...]]":
    """The network, and the shape of one of its inputs."""
    if command.model is not None:
        from onelip.models import create_model

        with _as_mistake():
            model = create_model(
                command.model,
                num_classes=command.num_classes,
                image_size=command.image_size,
                in_channels=command.in_channels,
            )
        return model, _shape(command.input_shape) or (command.in_channels, command.image_size, command.image_size)
    assert command.target is not None
    if ":" not in command.target:
        from onelip.training.build import load_run

        loaded = load_run(command.target)
        return loaded.plain, _shape(command.input_shape) or loaded.config.shape
    shape = _shape(command.input_shape)
    if shape is None:
        raise RecipeError(f"expected --input-shape for {command.target}, such as 3,32,32, got none")
    return _call(command.target), shape


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise RecipeError(f"expected --input-shape to be numbers such as 3,32,32, got {text!r}")
    return shape


def _call(target: str) -> "nn.Module":
    """What package.module:name or file.py:name names: a module, or what the function returns."""
    import importlib
    import importlib.util

    from torch import nn

    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise RecipeError(f"expected a file, got {where}, which is none")
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        source: Any = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, source)  # dataclasses and pickling look their module up
        spec.loader.exec_module(source)
    else:
        try:
            source = importlib.import_module(where)
        except ImportError as error:
            raise RecipeError(f"expected package.module:name, got {target!r}: {error}") from error
    if not hasattr(source, name):
        raise RecipeError(f"expected {where} to have {name!r}, got none; name a function that returns the model")
    found = getattr(source, name)
    try:
        model = found if isinstance(found, nn.Module) else found()
    except TypeError as error:  # no function, or one that needs arguments
        raise RecipeError(f"expected {target} to be a function without arguments, got: {error}") from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"expected {target} to give a torch module, got {type(model).__name__}")
    return model
