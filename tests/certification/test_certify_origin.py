"""Certificates against a run: what the checker accepts, but is about another network, other images or other labels."""

import json
import re

import pytest
import torch
from _runs import SMALL_FLAGS, call

from onelip.certification.certificate import digest, find_images
from onelip.cli import main
from onelip.core.errors import ProofError
from onelip.core.images import images_hash


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin")
    assert main(["train", *SMALL_FLAGS, "--epochs", "1", "--out", str(folder / "run")]) == 0
    assert main(["certify", str(folder / "run"), "--limit", "5", "--out", str(folder / "cert.json")]) == 0
    return folder


def changed(folder, tmp_path, change):
    """A certificate with a new digest beside the images, as a forger would make it."""
    content = json.loads((folder / "cert.json").read_text())
    change(content)
    content["digest"] = digest({key: value for key, value in content.items() if key != "digest"})
    for name in ("cert.images.npy", "run/plain.safetensors", "run/config.json"):
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes((folder / name).read_bytes())
    (tmp_path / "cert.json").write_text(json.dumps(content))
    return tmp_path / "cert.json"


def test_its_own_run(run, capsys):
    code, out, _ = call(capsys, "check", run / "cert.json", "--run", run / "run", "--quiet")
    assert code == 0
    assert "the first 5 of digits, test" in out
    assert "not checked" not in out  # all images have a radius
    code, out, _ = call(capsys, "check", run / "cert.json", "--run", run / "run", "--quiet", "--json")
    verdict = json.loads(out)
    assert (code, verdict["accepted"], verdict["not_checked"]) == (0, True, [])


def relabelled(content):
    result = content["results"][0]
    result["label"] = (result["label"] + 1) % 10
    right = [r["class"] == r["label"] for r in content["results"]]
    radii = [float.fromhex(r["radius"]) for r in content["results"]]
    for name in content["summary"]["cra"]:
        one, _, other = name.partition("/")
        reached = [ok and r >= int(one) / int(other or 1) for ok, r in zip(right, radii, strict=True)]
        content["summary"]["cra"][name] = sum(reached)


def renamed(content):
    content["nodes"][1]["place"] = "elsewhere"


def unlabelled(content):
    for result in content["results"]:
        result["label"] = None
    content["summary"]["cra"] = {}


def without_config(content):
    content["config"] = None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (relabelled, "result 0: expected the label"),
        (unlabelled, r"result 0: expected the label \d of the data, got null"),
        (without_config, "config: expected the SHA-256 of .*config.json, got null"),
        (renamed, "node 1 .*place: expected .* as in the network"),
    ],
)
def test_what_only_the_run_can_tell(run, tmp_path, capsys, change, words):
    path = changed(run, tmp_path, change)
    code, out, _ = call(capsys, "check", path, "--quiet")
    assert code == 0  # nothing in it is false of the program that it describes
    code, out, _ = call(capsys, "check", path, "--run", run / "run", "--quiet")
    assert code == 1
    assert out.startswith("REJECTED: does not belong to ")
    assert re.search(words, out)
    code, out, _ = call(capsys, "check", path, "--run", run / "run", "--quiet", "--json")
    assert (code, json.loads(out)["accepted"]) == (1, False)


def test_images_are_compared_with_their_shape():
    """The same bytes with another shape are other images."""
    images = torch.arange(32, dtype=torch.uint8).reshape(2, 1, 4, 4)
    stated = {"count": 2, "shape": [1, 4, 4], "dtype": "uint8", "sha256": images_hash(images), "source": ""}
    parts = {"test": (images, torch.zeros(2, dtype=torch.int64))}
    assert find_images({"images": stated, "results": []}, parts) == "test"
    for change in ({"shape": [1, 2, 8]}, {"dtype": "float32"}, {"count": 3}):
        with pytest.raises(ProofError, match="expected the first"):
            find_images({"images": stated | change, "results": []}, parts)


def test_another_run_and_none(run, tmp_path, capsys):
    assert main(["train", *SMALL_FLAGS, "--epochs", "1", "--seed", "7", "--out", str(tmp_path / "other")]) == 0
    code, out, _ = call(capsys, "check", run / "cert.json", "--run", tmp_path / "other", "--quiet")
    assert code == 1
    assert "plain.safetensors is not the file that was certified" in out
    code, _, err = call(capsys, "check", run / "cert.json", "--run", tmp_path / "nowhere")
    assert code == 2
    assert "is not a run" in err
