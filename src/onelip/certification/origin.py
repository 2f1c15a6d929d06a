"""Whether a certificate belongs to a given network and given data, which its independent checker cannot know.

The checker proves a statement about the program in the file. Here the network is traced again and compared with that
program node by node, and the images and labels are compared with the data. This uses torch and the rest of onelip, so
it is not part of the proof.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from onelip.certification.certificate import check_weights, file_hash
from onelip.certification.proof import program_of
from onelip.core.errors import ProofError
from onelip.core.images import DTYPES, images_hash


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
            raise ProofError(f"{key}: expected the SHA-256 of {path}, got null")
        if named["sha256"] != file_hash(path):
            raise ProofError(f"{key}: {path} is not the file that was certified (SHA-256 differs)")
    program = program_of(plain, tuple(certificate["images"]["shape"]))
    if "weights" in files:
        check_weights(program, files["weights"])
    own, nodes = [node.record() for node in program.nodes], certificate["nodes"]
    if len(nodes) != len(own):
        raise ProofError(f"nodes: expected the {len(own)} of the network, got {len(nodes)}")
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
                    raise ProofError(f"result {index}: expected the label {expected} of the data, got {got}")
            return name
    first = f"the first {data['count']} images of {' or '.join(parts)}"
    raise ProofError(f"images: expected {first}, got others ({data['source']})")
