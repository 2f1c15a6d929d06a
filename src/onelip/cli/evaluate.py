"""`onelip evaluate RUN`: the table of a run, per class, from the stored weights."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from onelip.cli._parse import parse
from onelip.cli._run_data import load_run_data


@dataclass(frozen=True)
class Evaluate:
    """Accuracy and certified robust accuracy on the test images.

    The baked network runs in float32. Its Lipschitz constant is that of its construction, or a bound of the stored
    weights, in real arithmetic.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of a run."""
    data: str | None = None
    """Other data than those of the run, by name or path, with the same number of classes."""
    data_root: Path | None = None
    """Directory of named data sets; see onelip data."""
    device: str = "cpu"
    """Device to compute on."""
    json: bool = False
    """Print JSON."""


def run(arguments: Sequence[str]) -> int:
    """Parse, evaluate, print the table."""
    command = parse(Evaluate, "evaluate", arguments)

    from rich.console import Console

    from onelip.losses import OffsetCrossEntropy
    from onelip.training.build import load_run
    from onelip.training.display import results_table
    from onelip.training.distributed import find_device
    from onelip.training.evaluation import evaluate

    loaded = load_run(command.run)
    config = loaded.config
    data = load_run_data(config, command.data_root, command.data)
    loss = OffsetCrossEntropy(config.recipe.offset, config.recipe.temperature)
    constants = loaded.constants  # on the CPU
    plain = loaded.plain.to(find_device(command.device))
    found = evaluate(plain, data.test_images, data.test_labels, constants, loss=loss)
    results = {
        "run": str(command.run),
        "finished": loaded.is_finished,
        "data": data.name,
        "split": "test",
        **found.to_json(data.class_names),
    }
    if command.json:
        print(json.dumps(results))
        return 0
    console = Console()
    console.print(results_table(results, per_class=True))
    if not loaded.is_finished:
        print("The run is not finished; these are the weights of its last checkpoint.")
    if found.lipschitz is None:
        print("No CRA: no Lipschitz constant is proved for this network.")
    else:
        print(f"CRA with the Lipschitz constant {found.lipschitz:g}, {found.mode}; without rounding errors.")
        print(f"Radii that include rounding errors: onelip certify {shlex.quote(str(command.run))}")
    return 0
