"""Files that are missing, broken, or others than those that were certified; images whose logits are not the file's."""

import copy
import hashlib
import json
import os

import numpy as np
import pytest
from _certificate_files import safetensors, sealed, write
from _certificates import Builder
from _certified_networks import change, everything, files, pixels, rejected, report, small, without_node

from onelip.checker import Rejected, check
from onelip.checker.reading import context, read_tensors


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    net = everything()
    return json.loads(files(net, tmp_path_factory.mktemp("right")).read_text()), net


def test_other_weights(right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    data = bytearray((tmp_path / "plain.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "plain.safetensors").write_bytes(data)
    rejected(path, "plain.safetensors: not the file that was certified")
    rejected(write(tmp_path, copy.deepcopy(content), bytes(data)), "node 13")
    other = {name: (-2 * array if name == "t2" else array, kind) for name, (array, kind) in net.tensors.items()}
    rejected(write(tmp_path, copy.deepcopy(content), safetensors(other)), "node 2 .*sigma: not the smallest")


def test_other_config(right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    (tmp_path / "config.json").write_text('{"other": 1}')
    rejected(path, "config.json: not the file that was certified")
    (tmp_path / "config.json").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="config"):
        check(path)
    rejected(path, "elsewhere: not the file that was certified", config=tmp_path / "elsewhere")


def test_missing_files(right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    (tmp_path / "plain.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="plain"):
        check(path)
    assert check(path, weights=tmp_path / "elsewhere")["accepted"]
    with pytest.raises(FileNotFoundError, match="none"):
        check(tmp_path / "none")


def test_pipes_are_not_read(tmp_path):
    path = files(small(), tmp_path)
    (tmp_path / "plain.safetensors").unlink()
    os.mkfifo(tmp_path / "plain.safetensors")
    with pytest.raises(FileNotFoundError, match="no such file"):
        check(path)


@pytest.mark.parametrize("part", [0, 1, 10, 0.5, 0.99])
def test_truncated_certificate(part, right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data)) if part < 1 else part])
    rejected(path, "not JSON, truncated")


def file_of(header, body=bytes(8)):
    top = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(top).to_bytes(8, "little") + top + body


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN_WEIGHTS = {
    "empty": (b"", "truncated"),
    "short": (b"\x01\x00\x00", "truncated"),
    "huge header": ((2**62).to_bytes(8, "little") + file_of({"a": entry()}, b"")[8:], "gap or overlap of tensors"),
    "beyond the end": (file_of({"a": entry()})[:-1], "a: gap or overlap of tensors"),
    "twice": (file_of(b'{"a": 1, "a": 2}'), "a key occurs twice"),
    "size": (file_of({"a": entry(shape=(3,))}), "of other size"),
    "half": (file_of({"a": entry("F16", (4,))}), "expected F32 or F64 .* got 'F16'"),
    "integers": (file_of({"a": entry("I64", (1,))}), "expected F32 or F64 .* got 'I64'"),
    "before the start": (file_of({"a": entry(offsets=(-8, 0))}), "expected integers from 0"),
    "negative": (file_of({"a": entry(shape=(-1,))}), "expected integers from 0"),
    "backwards": (file_of({"a": entry(offsets=(8, 0))}), "gap or overlap of tensors"),
    "rest": (file_of({"a": entry()}, bytes(9)), "data after the last tensor"),
    "hole": (file_of({"a": entry(offsets=(4, 12))}, bytes(12)), "gap or overlap of tensors"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "b: gap or overlap of tensors"),
    "overlap and hole": (file_of({"a": entry(), "b": entry()}, bytes(16)), "b: gap or overlap of tensors"),
    "nan": (file_of({"a": entry()}, np.array([1, np.nan], np.float32).tobytes()), "expected numbers below 2.500"),
    "infinity": (file_of({"a": entry()}, np.array([1, -np.inf], np.float32).tobytes()), "expected numbers below 2.500"),
    "many axes": (file_of({"a": entry(shape=[1] * 9)}), "a: expected at most 8 axes"),
    "too many axes to multiply": (file_of({"a": entry(shape=[2**33] * 300_000)}), "a: expected at most 8 axes"),
    "a list": (file_of([]), "header: expected an object"),
    "pickle": (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}q\x00.", "truncated"),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_weights(name):
    data, reason = BROKEN_WEIGHTS[name]
    with pytest.raises(Rejected, match=f"weights: .*({reason})"), context("weights"):
        read_tensors(data, 1.0)


BROKEN_JSON = {
    "twice": b'{"format": "onelip certificate", "format": "onelip certificate"}',
    "nan": b'{"format": NaN}',
    "infinity": b'{"format": -Infinity}',
    "deep": b'{"format": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many digits": b'{"version": 1' + b"0" * 5000 + b"}",
    "large integer": b'{"version": 1' + b"0" * 50 + b"}",
    "latin": b'{"format": "\xe9"}',
    "list": b"[]",
    "null": b"null",
    "true for one": b'{"format": "onelip certificate", "version": true}',
    "one point nought": b'{"format": "onelip certificate", "version": 1.0}',
}


@pytest.mark.parametrize("name", BROKEN_JSON)
def test_broken_json(name, tmp_path):
    (tmp_path / "cert.json").write_bytes(BROKEN_JSON[name])
    said, code = report(tmp_path / "cert.json")
    assert code == 1
    assert said.startswith("REJECTED: certificate: ")


def test_images(tmp_path):
    net = small()
    path, images = files(net, tmp_path), tmp_path / "images.npy"
    good = np.load(images)
    for wrong, reason in (
        (good[::-1], "not the images that were certified"),
        (good[:2], r"expected 3 images of \[6\]"),
        (good.astype(np.float64), "got float64"),
        (good.astype(">f4"), "got >f4"),
    ):
        np.save(images, wrong)
        rejected(path, reason, images=images)
    images.write_bytes(b"no array")
    rejected(path, "images, .*images.npy: malformed value .ValueError", images=images)
    np.save(images, np.array([{}]), allow_pickle=True)
    rejected(path, "images, .*images.npy: .*Python objects in dtype", images=images)
    with pytest.raises(FileNotFoundError):
        check(path, images=tmp_path / "none.npy")


def test_images_out_of_range(tmp_path):
    net = small()
    for value in (1.5, -0.5, np.nan):
        path = files(net, tmp_path, images=np.array([[0.5] * 5 + [value if value == value else 0.0]]))
        if value != value:
            np.save(tmp_path / "images.npy", bad := np.array([[0.5] * 5 + [np.nan]]))
            content = json.loads(path.read_text())
            content["images"]["sha256"] = hashlib.sha256(bad.tobytes()).hexdigest()
            path.write_text(json.dumps(sealed(content)))
        rejected(path, "expected values from 0 to 1", images=tmp_path / "images.npy")


@pytest.mark.parametrize("size", [1e-6, 1e-3])
@pytest.mark.parametrize("pairs", [True, False])
def test_logits_that_are_not_those_of_the_images(size, pairs, tmp_path):
    """Radii fit the false logits, so only a run of the program can tell."""

    class Liar(Builder):
        def logits(self, x):
            return super().logits(x) + np.array([size, 0.0, 0.0])

    net = small()
    net.__class__ = Liar
    path = files(net, tmp_path, pairs=pairs)
    assert check(path)["accepted"]
    rejected(path, "more than rounding explains", images=tmp_path / "images.npy")


@pytest.mark.parametrize(
    ("edit", "make"),
    [
        (without_node(2), small),
        (change("nodes", 2, "op", to="relu"), small),
        (change("nodes", 2, "circular", to=[True, True]), everything),
        (change("nodes", 3, "axis", to=1), everything),
    ],
)
def test_another_program_with_the_same_numbers(edit, make, tmp_path):
    """The numbers hold for that program too; its logits are others."""

    def both(content):
        edit(content)
        node = content["nodes"][2]
        if node["op"] == "relu":
            del node["axis"], node["group_size"]

    net = make()
    path = files(net, tmp_path, edit=both, images=pixels(net.states[0][0], 6))
    rejected(path, "more than rounding explains", images=tmp_path / "images.npy")


@pytest.mark.parametrize("moved", [0.0, 2.0, 3.0])
def test_radii_are_proved_whatever_the_logits_are_within_what_runs_differ_by(moved, tmp_path):
    """Logits of 2^52 are whole numbers: 0.02 from the image the program has another class, by rounding alone."""
    net = Builder((1,))
    net.map(np.array([[0.0], [1.0]]), np.array([2.0**52, 2.0**52]))
    assert np.argmax(net.logits(np.array([0.51]))) == 1
    assert np.argmax(net.logits(np.array([0.49]))) == 0

    class Liar(Builder):
        def logits(self, x):
            return super().logits(x) + np.array([-moved, moved])

    net.__class__ = Liar
    path = files(net, tmp_path, images=np.array([[0.51]]))
    assert 2 * net.states[-1][3] >= moved
    assert check(path, images=tmp_path / "images.npy")["certified"] == 0


@pytest.mark.parametrize(("share", "good"), [(1.9, True), (2.2, False)])
def test_all_logits_moved_alike(share, good, tmp_path):
    """No margin tells; two runs are apart by twice the error at most."""
    net = small()
    shift = share * float(net.states[-1][3])

    class Liar(Builder):
        def logits(self, x):
            return super().logits(x) + shift

    net.__class__ = Liar
    path = files(net, tmp_path, pairs=False)
    if good:
        assert check(path, images=tmp_path / "images.npy")["logits_checked"]
    else:
        rejected(path, "more than rounding explains", images=tmp_path / "images.npy")


def test_files_are_found_where_the_certificate_says_or_by_their_hashes(tmp_path):
    """In another directory, as `onelip certify RUN --out cert.json` leaves them; under another name, as exports do."""
    path = files(small(), tmp_path / "run")
    content = json.loads(path.read_text())
    content["weights"]["file"], content["images"]["file"] = "run/plain.safetensors", "run/images.npy"
    content["config"]["file"] = "run/config.json"
    moved = tmp_path / "cert.json"
    moved.write_text(json.dumps(sealed(content)))
    assert check(moved)["logits_checked"]
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "certificate.json").write_text(moved.read_text())
    (alone / "model.safetensors").write_bytes((tmp_path / "run" / "plain.safetensors").read_bytes())
    (alone / "settings.json").write_bytes((tmp_path / "run" / "config.json").read_bytes())
    assert report(alone / "certificate.json")[1] == 3  # no images there
    with pytest.raises(FileNotFoundError, match=r"plain\.safetensors"):  # the checker itself does not look around
        check(alone / "certificate.json")
    (alone / "model.safetensors").write_bytes(b"another")
    said, code = report(alone / "certificate.json")
    assert (code, "cannot read" in said, "plain.safetensors" in said) == (2, True, True)


def test_forged_logits_are_found_by_the_images_of_the_certificate(tmp_path):
    """All that follows from the logits is right, but they are those of other images: only the program can tell."""
    net = small()
    images = pixels(net.states[0][0])
    others = np.flip(images, 0).copy()

    def forge(content):
        content["images"] |= {"file": "images.npy", "sha256": hashlib.sha256(others.tobytes()).hexdigest()}

    path = files(net, tmp_path, images=images, edit=forge)
    np.save(tmp_path / "images.npy", others)
    rejected(path, "image 0: logits differ by")
    (tmp_path / "images.npy").unlink()
    assert report(path)[1] == 3
