"""`onelip audit TARGET`: prove an upper bound of the Lipschitz constant of a network, layer by layer."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from onelip.cli._common import Json, parse, require_at_least, unset
from onelip.core.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Audit:
    """Prove an upper bound of the Lipschitz constant of a network, layer by layer, and measure a lower bound.

    The target is the directory of a run, or package.module:name or file.py:name, where name is a torch module or a
    function that returns one. Naming a function RUNS its code: audit only code that you trust. Reading a run does not
    run code from it.

    The constant is that of one image, in the L2 norm, for pixels in [0, 1], in eval mode and in real arithmetic. The
    exit code is 1 if an operation has no proof, or if the bound is above --require.
    """

    target: Annotated[str | None, tyro.conf.Positional, unset("[TARGET]")] = None
    """Run directory, package.module:name or file.py:name."""
    model: Annotated[str | None, unset("NAME")] = None
    """Audit this architecture with initial weights instead of a target; see onelip models."""
    input_shape: Annotated[str | None, unset("SHAPE")] = None
    """Shape of one input, such as 3,32,32. Not needed for a run."""
    num_classes: int = 10
    """Number of classes of --model."""
    image_size: int = 32
    """Height and width of the images of --model."""
    in_channels: int = 3
    """Number of channels of the images of --model."""
    mean: Annotated[tuple[float, ...], unset("FLOAT ...")] = ()
    """Mean of each channel, if images are standardised before the network. The audit includes it."""
    std: Annotated[tuple[float, ...], unset("FLOAT ...")] = ()
    """Standard deviation of each channel."""
    effort: Literal["quick", "normal", "high"] = "normal"
    """Effort for each weight: more effort gives tighter bounds."""
    lower: bool = True
    """Also measure lower bounds."""
    require: Annotated[float | None, unset("FLOAT")] = None
    """Exit with code 1 unless this bound, or a smaller one, is proved."""
    seed: int = 0
    """Seed of the initial weights, of the example input and of the measurement."""
    json: Json = False


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Audit, "audit", arguments)
    if (command.target is None) == (command.model is None):
        raise RecipeError("give a TARGET or --model, not both; see onelip audit --help")
    if bool(command.mean) != bool(command.std):
        raise RecipeError("--mean and --std must be given together")
    require_at_least(0, command, "require")

    import torch
    from rich.console import Console
    from rich.markup import escape

    from onelip.certification.audit import audit
    from onelip.nn import Normalize

    torch.manual_seed(command.seed)
    if command.mean:
        with _usage_errors():
            Normalize(command.mean, command.std)
    model, shape = _network(command)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    example = torch.rand((2, *shape), generator=torch.Generator().manual_seed(command.seed)).to(dtype)
    with Console(stderr=True).status("") as status:  # shown in a terminal only
        found = audit(
            model,
            example,
            normalize=(command.mean, command.std) if command.mean else None,
            lower=command.lower,
            effort=command.effort,
            seed=command.seed,
            progress=lambda line: status.update(escape(f"{line[:100]} ...")),
        )
    is_enough = found.upper is not None and (command.require is None or found.upper <= command.require)
    if command.json:
        print(json.dumps({**found.to_json(), "require": command.require, "is_enough": is_enough}))
    else:
        print(found)
        if command.require is not None and not is_enough:
            print(f"Not proved: the required bound {command.require:g}.")
    return 0 if is_enough else 1


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn a ValueError about an option into a usage error."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _network(command: Audit) -> "tuple[nn.Module, tuple[int, ...]]":
    """The network and the shape of one input."""
    if command.model is not None:
        from onelip.models import create_model

        with _usage_errors():
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
        raise RecipeError(f"{command.target} needs --input-shape, such as --input-shape 3,32,32")
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
    """Load the module given as package.module:name or file.py:name; call it if it is a function."""
    import importlib
    import importlib.util

    from torch import nn

    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise RecipeError(f"{where}: no such file")
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
        raise RecipeError(f"{where} has no {name!r}; name a torch module or a function that returns one")
    found = getattr(source, name)
    try:
        model = found if isinstance(found, nn.Module) else found()
    except TypeError as error:  # no function, or one that needs arguments
        raise RecipeError(f"calling {target} without arguments failed: {error}") from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"{target} is not a torch module and does not return one, but {type(model).__name__}")
    return model
