"""Helpers of the export tests: a finished run without training, and a certificate for it."""

import functools
import json
from pathlib import Path

import torch

import onelip
from onelip.certification.certificate import WeightFile, digest, make_certificate as certificate_of
from onelip.core.files import file_hash, write_json
from onelip.training import Recipe, RunDirectory
from onelip.training.build import build_model, load_run, save_weights
from onelip.training.learner import set_layout
from onelip.training.run_directory import RunConfig

RECIPE = Recipe(
    data="digits", model="patchwise-tiny", model_options=("channels=8", "width=2", "convs=1", "linears=1"), epochs=1
)


def make_run(path: Path, recipe: Recipe = RECIPE) -> RunDirectory:
    """Write the directory of a finished run with random weights."""
    torch.manual_seed(0)
    path.mkdir(parents=True)
    run = RunDirectory(path)
    config = RunConfig(recipe, "digits", "0" * 64, tuple("0123456789"), (1, 8, 8))
    model = build_model(recipe, 10, (1, 8, 8))
    set_layout(model, recipe)
    save_weights(run, model, onelip.bake(model))
    write_json(run.config, config.to_json())
    results = {"images": 3, "data": "digits", "mode": "m", "accuracy": 0.5, "cra": {"1": None}}
    write_json(run.results, {"test": {**results, "weights_sha256": file_hash(run.plain)}})
    return run


def make_certificate(path: Path, run: RunDirectory, **changes: object) -> Path:
    """Write a certificate of three images, with changes and a matching digest."""
    content = {**_certificate(run.path), **changes}
    path.write_text(json.dumps({**content, "digest": digest(content)}))
    return path


@functools.cache
def _certificate(run: Path) -> dict:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 1, 8, 8), generator=generator, dtype=torch.uint8)
    place = RunDirectory(run)
    model = load_run(run).plain.double()
    found = onelip.certify(model, images, model(images.double() / 255).argmax(1), exact=True, effort="quick")
    files = WeightFile(place.plain, place.config)
    return certificate_of(found, images, files, folder=run, source="random")
