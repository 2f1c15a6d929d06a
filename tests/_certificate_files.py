"""The files of a certificate, with hashes and digest that fit whatever it says."""

import hashlib
import json
from pathlib import Path

import numpy as np

from onelip.certification.certificate import WeightFile, write_certificate
from onelip.export import save_plain


def write_files(folder: Path, model, found, images):
    """Weights, images and certificate of a network that was certified; the path of the certificate."""
    weights, path = folder / "plain.safetensors", folder / "c.json"
    save_plain(model, weights)
    np.save(folder / "images.npy", images.numpy())
    write_certificate(path, found, images, WeightFile(weights), source="random", images_file="images.npy")
    return path


def safetensors(tensors):
    header, body = {"__metadata__": {"format": "test"}}, b""
    for name, (array, kind) in tensors.items():
        data = array.astype("<f4" if kind == "F32" else "<f8").tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    top = json.dumps(header).encode()
    return len(top).to_bytes(8, "little") + top + body


def sealed(certificate):
    """With the digest of what it says now."""
    body = {key: value for key, value in certificate.items() if key != "digest"}
    data = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return {**body, "digest": hashlib.sha256(data).hexdigest()}


def write(directory: Path, certificate, weights: bytes, config: bytes = b"{}", images=None):
    """All files of a certificate, hashes and digest made to fit; the path of the certificate."""
    directory.mkdir(exist_ok=True)
    (directory / "plain.safetensors").write_bytes(weights)
    (directory / "config.json").write_bytes(config)
    if images is not None:
        np.save(directory / "images.npy", images)
    certificate["weights"]["sha256"] = hashlib.sha256(weights).hexdigest()
    if certificate["config"]:
        certificate["config"]["sha256"] = hashlib.sha256(config).hexdigest()
    path = directory / "cert.json"
    path.write_text(json.dumps(sealed(certificate), indent=1))
    return path
