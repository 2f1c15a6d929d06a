"""Add the network of a finished run to the zoo of the package: python benchmarks/zoo.py NAME RUN

Certifies all test images of the run in the sound mode, attacks some of them, writes a certificate and the model card to
src/onelip/export/zoo/NAME, and the results to zoo.json there and to results/zoo.json.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import onelip
from onelip.core.files import file_hash, write_json
from onelip.export.hub import FOLDER
from onelip.training.recipe import format_seconds

CERTIFIED, ATTACKED = 1000, 200  # images of the certificate, and images that are attacked
ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the commands and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-root")
    given = parser.parse_args()
    place = [] if given.data_root is None else ["--data-root", given.data_root]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / given.name
        shutil.copytree(given.run, run)
        forget_places(run)
        certified = call("certify", run, *place)
        certificate = run / "certificate.json"
        call("certify", run, *place, "--limit", CERTIFIED, "--out", certificate, "--no-keep-images")
        attacked = call("attack", run, *place, "--limit", ATTACKED)
        target = FOLDER / given.name
        shutil.rmtree(target, ignore_errors=True)
        onelip.save_pretrained(run, target, certificate=certificate)
    facts = describe(given.run, target, certified, attacked)
    card = target / "README.md"
    card.write_text(card.read_text() + training_section(facts))
    index = FOLDER / "zoo.json"
    before = json.loads(index.read_text())["networks"] if index.exists() else {}
    command = "python benchmarks/zoo.py NAME RUN, for a run of the command of each network"
    networks = dict(sorted({**before, given.name: facts}.items()))
    content = {"command": command, "torch": torch.__version__, "networks": networks}
    for path in (index, ROOT / "results" / "zoo.json"):
        write_json(path, content)


def forget_places(run: Path) -> None:
    """Remove paths of this machine from the config; the certificate contains its hash."""
    config = json.loads((run / "config.json").read_text())
    config["data"]["root"] = None
    write_json(run / "config.json", config)


def call(*arguments: object) -> dict[str, Any]:
    """A command of onelip; returns its JSON."""
    command = [sys.executable, "-m", "onelip", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def describe(run: Path, target: Path, certified: dict[str, Any], attacked: dict[str, Any]) -> dict[str, Any]:
    """The entry of zoo.json."""
    loaded = onelip.load_run(run)
    sessions = json.loads((run / "environment.json").read_text())
    steps = [line for line in (run / "log.jsonl").read_text().splitlines() if line]
    return {
        "data": loaded.config.data_name,
        "model": loaded.config.recipe.model,
        "parameters": sum(p.numel() for p in loaded.plain.parameters()),
        "images": certified["images"],
        "accuracy": certified["accuracy"],
        "cra": certified["cra"],
        "constant": certified["constant"],
        "attack": {name: attacked[name] for name in ("images", "attacked", "broken", "smallest_ratio")},
        "command": shlex.join(["onelip", *without_paths(sessions[0]["command"][1:])]),
        "seconds": round((run / "plain.safetensors").stat().st_mtime - (run / "config.json").stat().st_mtime),
        "steps": json.loads(steps[-1])["step"],
        "cores": sessions[0]["cores"],
        "threads": sessions[0]["threads"],
        "sha256": file_hash(target / "model.safetensors"),
    }


def without_paths(words: list[str]) -> list[str]:
    """A command line without the options that name directories of this machine."""
    kept, left = [], iter(words)
    for word in left:
        if word in ("--out", "--data-root"):
            next(left, None)
        elif not word.startswith(("--out=", "--data-root=")):
            kept.append(word)
    return kept


def training_section(facts: dict[str, Any]) -> str:
    """The part of the model card about training and attack."""
    attack, elapsed = facts["attack"], format_seconds(facts["seconds"])
    return f"""
## Training and attack

    {facts["command"]}

{facts["steps"]} steps; {elapsed} from start to results, with {facts["threads"]} of {facts["cores"]} CPU cores, which
other programs used as well.

`onelip attack` on {attack["attacked"]} certified decisions of the first {attack["images"]} test images broke
{attack["broken"]}; the nearest adversarial image was {attack["smallest_ratio"]:.3f} times as far as the certified
radius.
"""


if __name__ == "__main__":
    main()
