"""A directory that the Hugging Face hub can hold: config.json, model.safetensors, README.md, certificate.json.

    from_pretrained(save_pretrained(run)) has the logits of the run's plain network, bit for bit.

The config is the run's config.json, read against its schema: the architecture is a name of `onelip.list_models`, never
the path of a class. A directory needs no package besides; the name of a repository needs `pip install 'onelip[hub]'`.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from onelip.export._bake import bake
from onelip.export.card import model_card
from onelip.export.certificates import read_certificate
from onelip.export.errors import ExportError, ExportTaken
from onelip.export.places import make_folder, place
from onelip.export.plain import plain_bytes, read_plain
from onelip.export.source import Source, read_source
from onelip.training.build import build_model, set_layout
from onelip.training.errors import RecipeError, RunError
from onelip.training.files import disk_error
from onelip.training.run_directory import RunConfig, RunDirectory, read_config

CONFIG, WEIGHTS, CARD, CERTIFICATE = "config.json", "model.safetensors", "README.md", "certificate.json"
CONFIG_LIMIT = 16 * 2**20  # bytes

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Pretrained:
    """A directory read back."""

    model: nn.Module  # plain, in eval mode, on the CPU
    config: RunConfig
    path: Path
    certificate: Path | None


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
        source: directory of a finished run, or a model (it is baked).
        directory: a new one, which appears whole or not at all; with `force`, files in an old one are replaced.
        config: for a model: what it was built from.
        certificate: copied along, if it is about these weights.
        force: write into a directory that is there.

    Returns: the files written.

    Example:
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
        raise ExportTaken(f"{directory}: expected a new directory, got one with files; choose another, or use --force")
    if isinstance(source, nn.Module):
        if config is None:
            raise ExportError("expected a config with a model, got none; give the RunConfig that it was built from")
        content = _source_of_model(source, config)
    else:
        content = read_source(source)
    files = [(CONFIG, content.config_bytes), (WEIGHTS, content.weights)]
    facts = None
    if certificate is not None:
        raw, facts = read_certificate(certificate, content.weights_sha256, content.config_sha256)
        files.append((CERTIFICATE, raw))
    files.append((CARD, model_card(content, facts, directory.name).encode()))
    _write_directory(directory, files)
    return [directory / name for name, _ in files]


def from_pretrained(name: str | Path, *, revision: str | None = None) -> nn.Module:
    """The plain network of a directory, or of a repository on the hub, in eval mode on the CPU."""
    return load_pretrained(name, revision=revision).model


def load_pretrained(name: str | Path, *, revision: str | None = None) -> Pretrained:
    """The same with its config (class names, image shape, recipe) and the path of its certificate.

    Args:
        name: a directory of `save_pretrained`; or "owner/name", which is downloaded.
        revision: branch, tag or commit on the hub.
    """
    path = Path(name)
    if not path.is_dir():
        path = _download(str(name), revision)
    config_file = path / CONFIG
    if config_file.is_file() and config_file.stat().st_size > CONFIG_LIMIT:
        raise ExportError(f"{config_file}: expected a config of at most {CONFIG_LIMIT:,} bytes, got a larger file")
    config = read_config(RunDirectory(path))
    # Without memory at first: a config from elsewhere may ask for a network of any size; the file must have it.
    with torch.device("meta"):
        plain = _build(config)
    plain.load_state_dict(read_plain(path / WEIGHTS, plain.state_dict()), assign=True)
    # In memory as training had it: the layout decides the order of sums, and so the last bits.
    set_layout(plain, config.recipe)
    certificate = path / CERTIFICATE
    return Pretrained(plain.eval(), config, path, certificate if certificate.is_file() else None)


def _build(config: RunConfig) -> nn.Module:
    """The plain network of a config, with any weights."""
    try:
        model = build_model(config.recipe, len(config.class_names), config.shape)
    except RecipeError as error:
        raise ExportError(f"{error}; the config is not one of this onelip") from error
    return bake(model)


def _source_of_model(model: nn.Module, config: RunConfig) -> Source:
    """A model as if it had been trained by a run, if its config builds the same function."""
    plain = bake(model).cpu().eval()
    weights = plain_bytes(plain, {})
    built = _build(config).eval()
    mine, theirs = ({n: (t.shape, t.dtype) for n, t in m.state_dict().items()} for m in (plain, built))
    if mine != theirs:
        name = next(n for n in (*mine, *theirs) if mine.get(n) != theirs.get(n))
        raise ExportError(
            f"expected the model that its config builds, got another tensor {name!r}; give its own config"
        )
    built.load_state_dict(plain.state_dict())
    set_layout(built, config.recipe)
    images = torch.rand(4, *config.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Equal names can hide another activation. The memory layout may differ, so equality is up to rounding.
        same = torch.allclose(built(images), plain(images), rtol=1e-4, atol=1e-5)
    if not same:
        raise ExportError("expected the model that its config builds, got another function; give its own config")
    text = json.dumps(config.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    from onelip._summary import summary

    return Source(config, plain, weights, text.encode(), summary(model).constant, None)


def _write_directory(directory: Path, files: list[tuple[str, bytes]]) -> None:
    if directory.exists():
        place([(directory / name, content) for name, content in files], force=True)
        return
    make_folder(directory.parent)
    part = directory.with_name(f"{directory.name}.part")
    try:
        if part.exists():  # of an export that was killed
            shutil.rmtree(part)
        place([(part / name, content) for name, content in files], force=True)
        os.replace(part, directory)
    except OSError as error:
        raise disk_error(error, directory) from error
    except RunError:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _download(name: str, revision: str | None) -> Path:
    if not _REPOSITORY.fullmatch(name) or name.startswith("."):
        raise ExportError(f"{name}: expected a directory or the name owner/name of a repository, got neither")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ExportError(
            f"{name}: no such directory, and the hub needs a package that is missing: pip install 'onelip[hub]'"
        ) from error
    try:
        # Only these files: a repository may hold others, and none of them is ever read.
        found = huggingface_hub.snapshot_download(
            repo_id=name, revision=revision, allow_patterns=[CONFIG, WEIGHTS, CARD, CERTIFICATE]
        )
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such repository, no right to read it
        told = str(error).strip().splitlines()
        raise ExportError(
            f"{name}: no such directory here, and the hub could not give a repository of that name "
            f"({told[0] if told else type(error).__name__})"
        ) from error
    return Path(found)
