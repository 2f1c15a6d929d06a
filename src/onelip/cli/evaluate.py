"""`onelip evaluate RUN`: accuracy and certified robust accuracy of a run, for each class."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from onelip.cli._common import (
    UNFINISHED,
    DataRoot,
    Device,
    Flag,
    Json,
    RunPath,
    load_labelled,
    make_console,
    parse,
    unset,
)


@dataclass(frozen=True)
class Evaluate:
    """Compute accuracy and certified robust accuracy (CRA) on the test images.

    The baked network runs in float32. Its Lipschitz constant is proved by the method, or from the stored weights, in
    real arithmetic.
    """

    run: RunPath
    data: Annotated[str | None, unset("NAME|PATH")] = None
    """Other images than those of the run, of the same shape: all images of a folder or .npz file without a split, else
    its test images. Classes are matched by name."""
    resize: Flag = False
    """Resize the images of --data to the size that the network takes. The results are then for the resized images."""
    data_root: DataRoot = None
    device: Device = "cpu"
    json: Json = False


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Evaluate, "evaluate", arguments)

    from onelip.losses import OffsetCrossEntropy
    from onelip.training.build import load_run
    from onelip.training.display import constant_line, results_table
    from onelip.training.distributed import find_device
    from onelip.training.evaluation import evaluate

    loaded = load_run(command.run)
    config = loaded.config
    data = load_labelled(config, command.data_root, command.data, resize=command.resize)
    loss = OffsetCrossEntropy(config.recipe.offset, config.recipe.temperature)
    constants = loaded.constants  # on the CPU
    plain = loaded.plain.to(find_device(command.device))
    found = evaluate(plain, data.images, data.labels, constants, loss=loss)
    results = {
        "run": str(command.run),
        "finished": loaded.is_finished,
        "data": data.name,
        "split": data.split,
        **found.to_json(config.class_names),
    }
    if command.json:
        print(json.dumps(results))
        return 0
    make_console().print(results_table(results, per_class=True))
    if not loaded.is_finished:
        print(UNFINISHED)
    proved = found.lipschitz is not None
    print(constant_line(results), *(["Rounding errors are not included."] if proved else []))
    if proved:
        print(f"Radii that include rounding errors: onelip certify {shlex.quote(str(command.run))}")
    return 0
