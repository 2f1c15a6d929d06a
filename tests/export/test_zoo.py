"""The trained networks of the package."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from _runs import call

import onelip
from onelip.data import load_data
from onelip.export import ExportError, hub, list_zoo, load_pretrained

ROOT = Path(__file__).parents[2]
NAMES = [entry.name for entry in list_zoo()]


def test_the_list(capsys):
    code, out, _ = call(capsys, "zoo")
    assert code == 0
    assert all(name in out for name in NAMES)
    code, out, _ = call(capsys, "zoo", "--json")
    assert [row["name"] for row in json.loads(out)] == NAMES
    code, out, _ = call(capsys, "zoo", "digits-fast")
    assert "onelip train --data digits" in out
    code, _, err = call(capsys, "zoo", "digit-fast")
    assert (code, "did you mean 'digits-fast'" in err) == (2, True)


@pytest.mark.parametrize("name", NAMES)
def test_each_network(name):
    found = load_pretrained(name)
    images = torch.rand(2, *found.config.shape)
    assert onelip.from_pretrained(name)(images).shape == (2, len(found.config.class_names))
    assert "/work" not in (found.path / "config.json").read_text()
    facts = next(entry.facts for entry in list_zoo() if entry.name == name)
    assert facts["attack"]["broken"] == 0
    # The certificate is for these weights and this config, and has the constant of the list.
    _, certificate = onelip.export.read_certificate(found.certificate, facts["sha256"])
    assert certificate["summary"]["count"] >= 355


def test_the_results_are_those_of_the_package():
    published, packaged = (ROOT / "results" / "zoo.json", hub.FOLDER / "zoo.json")
    assert published.read_bytes() == packaged.read_bytes()


def test_the_numbers_of_the_list():
    data = load_data("digits")
    found = load_pretrained("digits-fast").run.predict(data.test_images, mode="real-arithmetic")
    facts = next(entry.facts for entry in list_zoo() if entry.name == "digits-fast")
    right = found.certification.classes == data.test_labels
    assert right.double().mean().item() == pytest.approx(facts["accuracy"])
    assert (right & (found.certification.radii >= 36 / 255)).double().mean().item() == pytest.approx(
        facts["cra"]["36/255"]
    )


def test_the_certificate_is_accepted(capsys, tmp_path):
    np.save(tmp_path / "images.npy", load_data("digits").test_images.numpy())
    certificate = load_pretrained("digits-fast").certificate
    code, out, err = call(capsys, "check", certificate, "--images", tmp_path / "images.npy", "--quiet")
    assert code == 0, err
    assert out.startswith("ACCEPTED: 355 of 355 images")


def test_predict(capsys, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = load_data("digits").test_images[0, 0].numpy()
    image.fromarray(pixels).save(tmp_path / "a.png")
    code, out, err = call(capsys, "predict", "--pretrained", "digits-fast", tmp_path / "a.png", "--json")
    assert code == 0, err
    (row,) = json.loads(out)["predictions"]
    assert row["radius"] > 0
    assert row["class"] == str(load_data("digits").test_labels[0].item())
    for words, message in (
        (("--pretrained", "digit-fast", tmp_path / "a.png"), "did you mean 'digits-fast'"),
        (("--pretrained", "digits-fast"), "IMAGES are missing"),
        ((), "RUN is missing"),
    ):
        code, _, err = call(capsys, "predict", *words)
        assert code != 0
        assert message in err
        assert len(err.splitlines()) == 1


def test_damaged_weights_are_refused(monkeypatch, tmp_path):
    shutil.copytree(hub.FOLDER, tmp_path / "zoo")
    monkeypatch.setattr(hub, "FOLDER", tmp_path / "zoo")
    weights = tmp_path / "zoo" / "digits-fast" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ExportError, match="wrong checksum"):
        onelip.from_pretrained("digits-fast")
