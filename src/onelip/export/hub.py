"""Directories for the Hugging Face hub; the trained networks of the package (`zoo/`) have the same form.

A directory has config.json, model.safetensors, README.md and maybe certificate.json. The config is the config.json of
the run, checked against its schema: the architecture is a name of `onelip.list_models`, never the path of a class.
zoo/zoo.json, written by benchmarks/zoo.py, has for each network of the package the command that made it, its results
and the checksum of its weights.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onelip._version import __version__
from onelip.certification.summary import summary
from onelip.core.bake import bake
from onelip.core.errors import RecipeError, did_you_mean
from onelip.core.files import file_hash, read_json
from onelip.export.files import (
    ExportError,
    ExportTaken,
    UnknownNetwork,
    new_directory,
    plain_bytes,
    read_certificate,
    read_plain,
    write_files,
)
from onelip.training.build import LoadedRun, build_plain, load_run
from onelip.training.evaluation import BY_CONSTRUCTION, Constants
from onelip.training.learner import set_layout
from onelip.training.run_directory import RunConfig, RunDirectory, read_config

CONFIG, WEIGHTS, CARD, CERTIFICATE = "config.json", "model.safetensors", "README.md", "certificate.json"
CONFIG_LIMIT = 16 * 2**20  # bytes

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


# Reading and writing directories.


@dataclass(frozen=True)
class Pretrained:
    """The contents of a directory written by `save_pretrained`.

    Attributes:
        model: the plain network, in eval mode on the CPU.
        config: class names, image shape and recipe.
        path: the directory.
        certificate: path of the certificate, or None.
    """

    model: nn.Module
    config: RunConfig
    path: Path
    certificate: Path | None

    @property
    def run(self) -> LoadedRun:
        """The same as a run, for `LoadedRun.predict`; it has no parameters of training.

        Examples:
            >>> found = load_pretrained("digits-fast").run.predict(torch.zeros(1, 1, 8, 8), mode="real-arithmetic")
            >>> found[0].radius > 0
            True
        """
        return LoadedRun(RunDirectory(self.path), self.config, self.model, is_finished=True)


def save_pretrained(
    source: str | Path | nn.Module,
    directory: str | Path,
    *,
    config: RunConfig | None = None,
    certificate: str | Path | None = None,
    force: bool = False,
) -> list[Path]:
    """Write a run, or a model with its config, as a directory; upload it with `huggingface_hub.upload_folder`.

    Args:
        source: directory of a finished run, or a model, which is baked.
        directory: new directory, written completely or not at all. With `force`, files in an existing directory are
            replaced.
        config: the config that builds the model, if `source` is a model.
        certificate: a certificate for these weights to copy.
        force: write into an existing directory.

    Returns:
        The paths of the written files.

    Raises:
        ExportError: if the directory exists, the run is not finished, the config does not build the model, or the
            certificate is for other weights.

    Examples:
        >>> import onelip, tempfile
        >>> recipe = onelip.Recipe(data="digits", model="patchwise-tiny", channels_last=False)
        >>> config = RunConfig(recipe, "digits", "", tuple("0123456789"), (1, 8, 8))
        >>> net = onelip.create_model("patchwise-tiny", image_size=8, in_channels=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_pretrained(net, f"{folder}/net", config=config)
        ...     again = from_pretrained(f"{folder}/net")
        >>> x = torch.rand(2, 1, 8, 8)
        >>> torch.equal(again(x), onelip.bake(net)(x))
        True
    """
    directory = Path(directory)
    if directory.exists() and not force and (not directory.is_dir() or any(directory.iterdir())):
        raise ExportTaken(f"{directory}: the directory is not empty; choose another, or use --force")
    if not isinstance(source, nn.Module):
        content = read_source(source)
    elif config is None:
        raise ExportError("a model needs its config: pass config=, the RunConfig that it was built from")
    else:
        content = _source_of_model(source, config)
    files = [(CONFIG, content.config_bytes), (WEIGHTS, content.weights)]
    proved = None
    if certificate is not None:
        raw, proved = read_certificate(certificate, content.weights_sha256, content.config_sha256)
        files.append((CERTIFICATE, raw))
    files.append((CARD, _model_card(content, proved, directory.name).encode()))
    _write_directory(directory, files)
    return [directory / name for name, _ in files]


def from_pretrained(name: str | Path, *, revision: str | None = None) -> nn.Module:
    """Load a trained network: one of the package, of a directory, or of a repository on the Hugging Face hub.

    Args:
        name: a name of `onelip zoo`, a directory of `save_pretrained`, or "owner/name" of a repository to download
            (`pip install 'onelip[hub]'`).
        revision: branch, tag or commit on the hub.

    Returns:
        The network, in eval mode on the CPU. Its logits are those of the saved network, bit for bit.

    Raises:
        ExportError: if there is no such directory or repository, or its files are inconsistent.

    Examples:
        >>> model = from_pretrained("digits-fast")
        >>> model(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    return load_pretrained(name, revision=revision).model


def load_pretrained(name: str | Path, *, revision: str | None = None) -> Pretrained:
    """Load a network like `from_pretrained`, with its config and the path of its certificate.

    Args:
        name: a name of `onelip zoo`, a directory of `save_pretrained`, or "owner/name" of a repository to download.
        revision: branch, tag or commit on the hub.

    Returns:
        The network, its config and the path of its certificate.

    Raises:
        ExportError: if there is no such directory or repository, or its files are inconsistent.
    """
    path = Path(name)
    if not path.is_dir():
        path = find_in_zoo(str(name)) or _download(str(name), revision)
    config_file = path / CONFIG
    if config_file.is_file() and config_file.stat().st_size > CONFIG_LIMIT:
        raise ExportError(f"{config_file}: expected a config of at most {CONFIG_LIMIT:,} bytes, got a larger file")
    config = read_config(RunDirectory(path))
    plain = _build(config)
    plain.load_state_dict(read_plain(path / WEIGHTS, plain.state_dict()), assign=True)
    set_layout(plain, config.recipe)
    certificate = path / CERTIFICATE
    return Pretrained(plain.eval(), config, path, certificate if certificate.is_file() else None)


def _build(config: RunConfig) -> nn.Module:
    try:
        return build_plain(config)
    except RecipeError as error:
        raise ExportError(f"{error}; the config was written by another version of onelip") from error


def _write_directory(directory: Path, files: list[tuple[str, bytes]]) -> None:
    if directory.exists():
        write_files([(directory / name, content) for name, content in files], force=True)
        return
    with new_directory(directory) as new:
        write_files([(new / name, content) for name, content in files], force=True)


def _download(name: str, revision: str | None) -> Path:
    if not _REPOSITORY.fullmatch(name) or name.startswith("."):
        known = [entry.name for entry in list_zoo()]
        raise UnknownNetwork(
            f"{name}: no such directory, and not the name of a repository (owner/name) or of a network of the package "
            f"({', '.join(known)}){did_you_mean(name, known)}"
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise ExportError(f"{name}: no such directory; to download from the hub: pip install 'onelip[hub]'") from error
    try:
        # Only these files: other files of a repository are never read.
        found = huggingface_hub.snapshot_download(
            repo_id=name, revision=revision, allow_patterns=[CONFIG, WEIGHTS, CARD, CERTIFICATE]
        )
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such repository, no permission
        lines = str(error).strip().splitlines()
        raise ExportError(
            f"{name}: no such directory, and downloading the repository from the hub failed "
            f"({lines[0] if lines else type(error).__name__})"
        ) from error
    return Path(found)


# Sources of an export.


@dataclass(frozen=True)
class Source:
    """A network with the bytes of its files.

    Attributes:
        config: config of the run.
        plain: the baked network.
        weights: content of plain.safetensors.
        config_bytes: content of config.json.
        constants: computes the Lipschitz constant of the plain network, in real arithmetic.
        results: results of these weights on the test images, or None.
    """

    config: RunConfig
    plain: nn.Module
    weights: bytes
    config_bytes: bytes
    constants: Callable[[], Constants]
    results: dict[str, Any] | None

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of the weights, as in a certificate."""
        return hashlib.sha256(self.weights).hexdigest()

    @cached_property
    def config_sha256(self) -> str:
        """Hash of the config, as in a certificate."""
        return hashlib.sha256(self.config_bytes).hexdigest()


def read_source(path: str | Path) -> Source:
    """Read a finished run; the network has the stored weights bit for bit."""
    run = RunDirectory(Path(path))
    read_config(run)
    if not run.plain.exists():
        raise ExportError(
            f"{run.path}: the run is not finished (no plain.safetensors); resume it: {run.resume_command}"
        )
    loaded = load_run(run.path)
    try:
        weights, config = run.plain.read_bytes(), run.config.read_bytes()
    except OSError as error:
        raise ExportError(f"{run.path}: cannot read the run ({error.strerror})") from error
    return Source(loaded.config, loaded.plain, weights, config, lambda: loaded.constants, _results(run, weights))


def _results(run: RunDirectory, weights: bytes) -> dict[str, Any] | None:
    """Results on the test images for the model card; None if they cannot be read, or are those of other weights."""
    try:
        table = json.loads(run.results.read_bytes())["test"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_own = isinstance(table, dict) and table.get("weights_sha256") == hashlib.sha256(weights).hexdigest()
    return table if is_own else None


def _source_of_model(model: nn.Module, config: RunConfig) -> Source:
    """The source for a model and its config; raises if the config builds another function."""
    plain = bake(model).cpu().eval()
    weights = plain_bytes(plain, {})
    built = _build(config).eval()
    mine, theirs = ({n: (t.shape, t.dtype) for n, t in m.state_dict().items()} for m in (plain, built))
    if mine != theirs:
        name = next(n for n in (*mine, *theirs) if mine.get(n) != theirs.get(n))
        raise ExportError(f"the config builds another model: tensor {name!r} differs; pass the config of this model")
    built.load_state_dict(plain.state_dict(), assign=True)
    set_layout(built, config.recipe)
    images = torch.rand(4, *config.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Equal tensors do not imply equal activations. The memory layout may differ, so compare up to rounding.
        same = torch.allclose(built(images), plain(images), rtol=1e-4, atol=1e-5)
    if not same:
        raise ExportError("the config builds a different function than the model; pass the config of this model")
    text = json.dumps(config.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return Source(config, plain, weights, text.encode(), lambda: Constants(summary(model).constant), None)


# The model card.

_HEAD = """---
library_name: onelip
pipeline_tag: image-classification
tags: [lipschitz, certified-robustness]
---

# {model} on {data}

An image classifier as a plain torch network, created with onelip {version}.

## What is proved

"""

_USE = """
## Use

```python
import onelip, torch

model = onelip.from_pretrained("{place}")      # this directory, or the name of the repository on the hub
logits = model(torch.rand(1, {shape}))         # images in [0, 1]: uint8 / 255, no other normalisation
```

Classes: {classes}.

Files: `config.json` (architecture and recipe), `model.safetensors` (plain weights, sha256 `{sha}`){certificate}.
Nothing here is pickled or executed.
"""


def _model_card(source: Source, certificate: dict[str, Any] | None, place: str) -> str:
    """README.md of a directory."""
    names = source.config.class_names
    check = ", `certificate.json` (check it: `onelip check certificate.json --images IMAGES.npy`)"
    return "".join(
        [
            _HEAD.format(model=source.config.recipe.model, data=source.config.data_name, version=__version__),
            _constant(source, certificate),
            "" if source.results is None else _evaluated(source.results),
            "" if certificate is None else _certified(certificate),
            _USE.format(
                place=place,
                shape=", ".join(map(str, source.config.shape)),
                classes=", ".join(names[:20]) + (", …" if len(names) > 20 else ""),
                sha=source.weights_sha256,
                certificate="" if certificate is None else check,
            ),
        ]
    )


def _constant(source: Source, certificate: dict[str, Any] | None) -> str:
    try:
        proved = float(Fraction(certificate["nodes"][-1]["lipschitz"])) if certificate is not None else None
    except (KeyError, IndexError, TypeError, ValueError, ArithmeticError):
        proved = None
    if proved is not None:
        return (
            f"According to `certificate.json`, the L2 Lipschitz constant from the image in [0, 1] to the logits is at "
            f"most **{proved!r}** for the stored weights, in exact arithmetic, and the radii include the rounding of "
            "the float64 program. `onelip check` proves both again.\n"
        )
    found = source.constants()
    if found.total is not None and found.mode != BY_CONSTRUCTION:
        return (
            f"The L2 Lipschitz constant from the image in [0, 1] to the logits is at most **{found.total!r}**, "
            "by bounds of the stored weights, in real arithmetic. `onelip certify` includes rounding errors.\n"
        )
    if found.total is not None:
        return (
            f"The L2 Lipschitz constant from the image in [0, 1] to the logits is **{found.total:g}** by construction: "
            "in real arithmetic, before the rounding of the stored weights. `onelip certify` proves the number for the "
            "stored weights.\n"
        )
    return "No Lipschitz constant is proved for this network.\n"


def _evaluated(results: dict[str, Any]) -> str:
    try:
        rows = [("accuracy", results["accuracy"]), *((f"CRA at {r}", v) for r, v in results["cra"].items())]
        return _table(f"On {results['images']} test images of {results['data']}; mode: {results['mode']}.", rows)
    except (KeyError, TypeError, AttributeError, ValueError):
        return ""


def _certified(certificate: dict[str, Any]) -> str:
    try:
        count, cra = certificate["summary"]["count"], certificate["summary"]["cra"]
        rows = [("accuracy" if radius == "0" else f"CRA at {radius}", n / count) for radius, n in cra.items()]
        return _table(
            f"On the {count} images, according to the certificate; mode: sound, with the rounding of float64.", rows
        )
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        return ""


def _table(title: str, rows: list[tuple[str, Any]]) -> str:
    lines = [f"| {name} | {'none' if share is None else f'{100 * share:.2f} %'} |\n" for name, share in rows]
    return f"\n{title}\n\n| | |\n|---|---|\n{''.join(lines)}"


FOLDER = Path(__file__).with_name("zoo")


@dataclass(frozen=True)
class ZooEntry:
    """A trained network of the package.

    Attributes:
        name: name for `from_pretrained`.
        path: its directory, with the model card README.md.
        facts: its entry in zoo.json: data, model, parameters, accuracy, cra, constant, attack, command, seconds.
    """

    name: str
    path: Path
    facts: dict[str, Any]


def list_zoo() -> list[ZooEntry]:
    """Return the trained networks of the package, in the order of their names.

    Examples:
        >>> "digits-fast" in [entry.name for entry in list_zoo()]
        True
    """
    entries = read_json(FOLDER / "zoo.json")["networks"]
    return [ZooEntry(name, FOLDER / name, facts) for name, facts in sorted(entries.items())]


def find_in_zoo(name: str) -> Path | None:
    """Return the directory of a network of the package; None if there is none of this name.

    Raises:
        ExportError: if its weights do not have the checksum of the package.
    """
    for entry in list_zoo():
        if entry.name == name:
            weights = entry.path / "model.safetensors"
            if file_hash(weights) != entry.facts["sha256"]:
                raise ExportError(f"{weights}: the file is damaged (wrong checksum); reinstall onelip")
            return entry.path
    return None
