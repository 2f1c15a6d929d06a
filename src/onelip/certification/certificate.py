"""Certificate files: everything that is needed to prove the radii again without this library.

A file identifies the weights by their hash. The checker proves or recomputes every number in it. Computed numbers are
written as float.hex() and proved ones as fractions, so they are exact. docs/certificates.md specifies the format.

The checker proves a statement about the program in the file. It cannot know which network and data the file was made
for: `check_network` traces the network again and compares it with that program node by node, and `find_images` compares
images and labels with the data. Both use torch and the rest of onelip, so they are not part of the proof.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from onelip._version import __version__
from onelip.certification.predict import Certification
from onelip.certification.proof import LayerBound, Proof, program_of
from onelip.certification.radius import PAPER_RADII, radius_name
from onelip.checker.certificate import ARITHMETIC, FORMAT, STATEMENT, VERSION
from onelip.core.errors import ProofError
from onelip.core.files import file_hash, write_whole
from onelip.core.images import DTYPES, check_labels, images_hash
from onelip.graph.kinds import Affine, Node
from onelip.graph.lowering import Program


@dataclass(frozen=True)
class WeightFile:
    """The files that a certificate is about.

    Attributes:
        weights: plain.safetensors of a run, or any safetensors file with the weights of the network.
        config: config.json of the run, or None.
    """

    weights: str | Path
    config: str | Path | None = None


def write_certificate(
    path: str | Path,
    certification: Certification,
    images: Tensor,
    files: WeightFile,
    *,
    source: str,
    images_file: str | Path | None = None,
    radii: Sequence[float] = PAPER_RADII,
) -> dict[str, Any]:
    """Write the certificate of images, completely or not at all.

    Args:
        path: path of the new file; the paths in it are relative to its directory.
        certification: the result of `certify` for these images in the sound mode, with `exact=True`.
        images: the certified images.
        files: weights and config; the weights in the file must be those of the proof.
        source: origin of the images, as a note for readers.
        images_file: a .npy file of the images that exists or will be written, relative to the directory of `path`.
        radii: radii of the certified robust accuracy in the summary.

    Returns:
        The content of the file.

    Raises:
        ProofError: if the certification is not sound and exact, or is about other weights or images.
        RunError: if a file cannot be read or written.
    """
    content = make_certificate(
        certification, images, files, folder=Path(path).parent, source=source, images_file=images_file, radii=radii
    )
    save_certificate(path, content)
    return content


def save_certificate(path: str | Path, content: dict[str, Any]) -> None:
    """Write the result of `make_certificate`, completely or not at all."""
    write_whole(Path(path), _text(content).encode())


def _text(content: dict[str, Any]) -> str:
    """JSON with one line for each node and each image, so that large files can be read and compared by line."""
    parts = []
    for key, value in content.items():
        if key in ("nodes", "results"):
            text = "[\n  " + ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in value) + "\n ]"
        else:
            text = json.dumps(value, allow_nan=False)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def make_certificate(
    certification: Certification,
    images: Tensor,
    files: WeightFile,
    *,
    folder: Path,
    source: str,
    images_file: str | Path | None = None,
    radii: Sequence[float] = PAPER_RADII,
) -> dict[str, Any]:
    """The content of a certificate file in `folder`; see `write_certificate`."""
    proof = certification.proof
    if certification.mode != "sound" or proof is None or not proof.exact:
        raise ProofError(
            f"expected a certification in the sound mode with exact=True, got mode {certification.mode!r} and "
            f"{'no proof' if proof is None else f'exact={proof.exact}'}; a file holds exact fractions: certify again"
        )
    found = images_hash(images)
    shape = (len(certification.classes), *proof.program.input_shape)
    if tuple(images.shape) != shape or found != certification.images_sha256:
        raise ProofError(
            f"expected the images that were certified, got others of shape {tuple(images.shape)}; "
            "pass the images that were given to certify"
        )
    check_weights(proof.program, Path(files.weights))
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "onelip": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "statement": STATEMENT,
        "arithmetic": ARITHMETIC,
        "weights": _hashed(Path(files.weights), folder),
        "config": None if files.config is None else _hashed(Path(files.config), folder),
        "images": {
            "source": source,
            "file": "" if images_file is None else _relative(folder / images_file, folder),
            "sha256": found,
            "dtype": DTYPES[images.dtype],
            "count": len(images),
            "shape": list(images.shape[1:]),
        },
        "preprocessing": {"divide_by": 255 if images.dtype == torch.uint8 else 1},
        "nodes": [_node(proof, index) for index in range(len(proof.program.nodes))],
        "pairs": proof.head.node is not None,
        "results": _results(certification),
        "summary": _summary(certification, radii),
    }
    return {**body, "digest": digest(body)}


def digest(content: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of everything except the digest itself.

    Examples:
        >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
        True
    """
    body = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _relative(path: Path, folder: Path) -> str:
    """Relative path from `folder` to a file; only its name if there is none (on another drive of Windows)."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return path.name


def _hashed(path: Path, folder: Path) -> dict[str, str]:
    return {"file": _relative(path, folder), "sha256": file_hash(path)}


def check_weights(program: Program, path: Path) -> None:
    """Raise a ProofError unless the file contains the numbers of the program bit for bit, under the same names."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ProofError(
            f"{path}: expected a safetensors file of the weights, got {error}; write it with onelip.export.save_plain"
        ) from error
    for name, tensor in stored.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ProofError(f"{path}: expected float32 and float64 only, got {tensor.dtype} in {name!r}; leave it out")
    for node in program.nodes:
        for role, (tensor, name) in node.tensors.items():
            if name is None:
                raise ProofError(
                    f"{node.title}: expected its {role} in the model's state dict, got a constant of the code, which a "
                    "weight file does not hold; register it as a buffer"
                )
            if name not in stored:
                raise ProofError(f"{path}: the tensor {name!r} is missing; this is the file of another network")
            if not torch.equal(stored[name].double().flatten(), tensor.flatten()):
                raise ProofError(
                    f"{path}: expected the weights of the proof, got others in {name!r}; "
                    "save the weights of the certified model"
                )


def _node(proof: Proof, index: int) -> dict[str, Any]:
    node, proved, bound = proof.program.nodes[index], proof.node_bounds[index], proof.layer_bounds.get(index)
    content = node.record()
    if bound is not None:
        content["bound"] = _bound(bound, node)
    numbers = {"lipschitz": proved.lipschitz, "norm": proved.norm, "error": proved.error, **proved.facts}
    return content | {name: str(Fraction(value)) for name, value in numbers.items()}


def _bound(bound: LayerBound, node: Node) -> dict[str, Any]:
    witness = bound.witness
    if witness.kind == "cholesky":
        return {"kind": "cholesky", "side": witness.side}
    if witness.kind == "frequencies":
        return {"kind": "frequencies", "side": witness.side, "tree": witness.tree}
    scale = witness.scale or ()
    if witness.kind == "zero":  # any positive numbers prove it for zero weights
        assert isinstance(node, Affine)
        groups, _, columns, *_ = node.geometry.kernel_shape(node.weight.values.shape, witness.side)
        scale = ((1,) * columns,) * groups
    rows = [" ".join(map(str, group)) for group in scale]  # as text: integers in a file have at most ten digits
    return {"kind": "schur", "side": witness.side, "steps": witness.steps, "scale": rows}


def _results(certification: Certification) -> list[dict[str, Any]]:
    if not bool(certification.logits.isfinite().all()):
        raise ProofError("expected finite logits, got NaN or infinity; a program that overflows has no certificate")
    labels = [None] * len(certification.classes)
    if certification.labels is not None:
        check_labels(certification.labels, certification.logits.shape[1], error=ProofError)
        labels = certification.labels.tolist()
    columns = (labels, certification.classes.tolist(), certification.logits.tolist(), certification.radii.tolist())
    return [
        {
            "index": index,
            "label": label,
            "class": predicted,
            "logits": [x.hex() for x in logits],
            "radius": radius.hex(),
            "pixels": pixels,
        }
        for index, (label, predicted, logits, radius, pixels) in enumerate(
            zip(*columns, certification.pixels, strict=True)
        )
    ]


def _summary(certification: Certification, radii: Sequence[float]) -> dict[str, Any]:
    """Numbers of images: all, those with a radius, and for each radius those with the right class and that radius."""
    summary: dict[str, Any] = {"count": len(certification.classes), "certified": certification.certified(), "cra": {}}
    if certification.labels is not None:
        odd = [radius for radius in radii if "." in radius_name(radius) or "e" in radius_name(radius)]
        if odd:
            raise ProofError(f"expected radii of at most nine digits in a certificate file, got {odd[0]!r}; round it")
        shares = certification.cra((0.0, *radii))
        summary["cra"] = {radius: round(share * len(certification.classes)) for radius, share in shares.items()}
    return summary


def check_network(certificate: Mapping[str, Any], plain: nn.Module, files: Mapping[str, Path]) -> None:
    """Compare a certificate with a network and its files.

    Args:
        certificate: the content of a file that the checker accepts.
        plain: the baked network, which is unchanged.
        files: paths of "weights" and "config".

    Raises:
        ProofError: if a file is missing in the certificate or differs, or the nodes are not those of the network.
    """
    for key, path in files.items():
        named = certificate[key]
        if named is None:
            raise ProofError(f"{key}: expected the SHA-256 of {path}, got null; certify again with this file")
        if named["sha256"] != file_hash(path):
            raise ProofError(f"{key}: {path} is not the file that was certified (SHA-256 differs)")
    program = program_of(plain, tuple(certificate["images"]["shape"]))
    if "weights" in files:
        check_weights(program, files["weights"])
    own, nodes = [node.record() for node in program.nodes], certificate["nodes"]
    if len(nodes) != len(own):
        raise ProofError(f"nodes: expected the {len(own)} of the network, got {len(nodes)}; certify the network again")
    for index, (mine, theirs) in enumerate(zip(own, nodes, strict=True)):
        for key, value in mine.items():
            if repr(theirs.get(key)) != repr(value):
                where = f"node {index} ({theirs.get('place') or theirs.get('op')}), {key}"
                got = f"got {theirs.get(key)!r:.80}"
                raise ProofError(f"{where}: expected {value!r:.80} as in the network, {got}")


def find_images(certificate: Mapping[str, Any], parts: Mapping[str, tuple[Tensor, Tensor]]) -> str:
    """Name of the part of the data whose first images, with their labels, are those of the certificate.

    Args:
        certificate: the content of a file that the checker accepts.
        parts: images and labels by name, e.g. of "test" and "train".

    Raises:
        ProofError: if no part contains them, or labels are missing or differ.
    """
    data = certificate["images"]
    for name, (images, labels) in parts.items():
        part = images[: data["count"]]
        alike = [*part.shape] == [data["count"], *data["shape"]] and DTYPES.get(part.dtype) == data["dtype"]
        if alike and images_hash(part) == data["sha256"]:
            for index, result in enumerate(certificate["results"]):
                if result["label"] != int(labels[index]):
                    expected, got = int(labels[index]), json.dumps(result["label"])
                    raise ProofError(
                        f"result {index}: expected the label {expected} of the data, got {got}; "
                        "certify again with these labels"
                    )
            return name
    first = f"the first {data['count']} images of {' or '.join(parts)}"
    raise ProofError(
        f"images: expected {first}, got others ({data['source']}); pass the data that were certified, or certify again"
    )
