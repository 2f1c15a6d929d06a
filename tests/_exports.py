"""What the tests of export share: a finished run without training, and a certificate for it."""

import json
from pathlib import Path

import torch

import onelip
from onelip.checker.certificate import VERSION
from onelip.export.certificates import digest
from onelip.training import Recipe, RunDirectory
from onelip.training.build import build_model, save_weights, set_layout
from onelip.training.files import write_json
from onelip.training.run_directory import RunConfig

RECIPE = Recipe(
    data="digits", model="patchwise-tiny", model_options=("channels=8", "width=2", "convs=1", "linears=1"), epochs=1
)


def make_run(path: Path, recipe: Recipe = RECIPE) -> RunDirectory:
    """The directory of a run that has ended, with random weights."""
    torch.manual_seed(0)
    path.mkdir(parents=True)
    run = RunDirectory(path)
    config = RunConfig(recipe, "digits", "0" * 64, tuple("0123456789"), (1, 8, 8))
    model = build_model(recipe, 10, (1, 8, 8))
    set_layout(model, recipe)
    save_weights(run, model, onelip.bake(model))
    write_json(run.config, config.to_json())
    write_json(run.results, {"test": {"images": 3, "data": "digits", "mode": "m", "accuracy": 0.5, "cra": {"1": None}}})
    return run


def make_certificate(path: Path, run: RunDirectory, **changes: object) -> Path:
    """The parts of a certificate that export looks at."""
    import hashlib

    hashes = {name: {"sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for name, p in
              (("weights", run.plain), ("config", run.config))}  # fmt: skip
    content = {
        "format": "onelip certificate",
        "version": VERSION,
        **hashes,
        "nodes": [{"op": "input", "lipschitz": "0x1p+0"}, {"op": "affine", "lipschitz": (1 + 2**-20).hex()}],
        "summary": {"count": 3, "certified": 2, "cra": {"36/255": 0.5}},
        **changes,
    }
    path.write_text(json.dumps({**content, "digest": digest(content)}))
    return path
