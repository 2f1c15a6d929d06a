"""Whether a certificate is about a given network and given data: what its independent checker cannot know.

The checker proves what the file says of the program in the file. Here the program is read off the network again, and
compared with that one node by node; and the images and labels are looked for in the data. This uses torch and the rest
of onelip, so it is no part of the proof.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from onelip.certify.certificate import file_hash, node_settings
from onelip.certify.images import DTYPES, images_hash
from onelip.certify.lowering import lower
from onelip.certify.rounding import ProofError


def check_network(certificate: Mapping[str, Any], plain: nn.Module, files: Mapping[str, Path]) -> None:
    """Raise ProofError unless the nodes are those of the network, and the named files are those that are given.

    Args:
        certificate: the content of a file that the checker accepts.
        plain: the baked network.
        files: paths of "weights" and "config".
    """
    for key, path in files.items():
        told = certificate[key]
        if told is not None and told["sha256"] != file_hash(path):
            raise ProofError(f"{key}: expected those that the certificate is about, got others in {path}")
    program = lower(plain.to("cpu").double().eval(), tuple(certificate["images"]["shape"]))
    own = [node_settings(program.nodes, index) for index in range(len(program.nodes))]
    told = certificate["nodes"]
    if len(told) != len(own):
        raise ProofError(f"expected the {len(own)} nodes of the network, got a certificate of {len(told)}")
    for index, (mine, theirs) in enumerate(zip(own, told, strict=True)):
        for key, value in mine.items():
            if repr(theirs.get(key)) != repr(value):
                where = f"node {index} ({theirs.get('place') or theirs.get('op')}), {key}"
                got = f"got {theirs.get(key)!r:.80}"
                raise ProofError(f"{where}: expected {value!r:.80} as in the network, {got}")


def find_images(certificate: Mapping[str, Any], parts: Mapping[str, tuple[Tensor, Tensor]]) -> str:
    """The part of the data whose first images, with their labels, are those of the certificate.

    Args:
        certificate: the content of a file that the checker accepts.
        parts: images and labels by name, e.g. of "test" and "train".

    Raises:
        ProofError: if they are in none of them, or labels differ.
    """
    told = certificate["images"]
    for name, (images, labels) in parts.items():
        part = images[: told["count"]]
        alike = [*part.shape] == [told["count"], *told["shape"]] and DTYPES.get(part.dtype) == told["dtype"]
        if alike and images_hash(part) == told["sha256"]:
            for index, result in enumerate(certificate["results"]):
                if result["label"] is not None and result["label"] != int(labels[index]):
                    raise ProofError(
                        f"result {index}: expected the label {int(labels[index])} of the data, got {result['label']}"
                    )
            return name
    raise ProofError(
        f"expected the first {told['count']} images of {' or '.join(parts)}, got others ({told['source']})"
    )
