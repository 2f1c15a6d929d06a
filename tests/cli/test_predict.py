"""`onelip predict` and `LoadedRun.predict`: classes and radii of new images."""

import csv
import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from _runs import ENVIRONMENT, SMALL, call

import onelip
from onelip.data import DataError, load_data, load_images
from onelip.training import train

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    train(SMALL.replace(epochs=1), path)
    return path


@pytest.fixture(scope="module")
def images():
    return load_data("digits").test_images[:5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, images):
    path = tmp_path_factory.mktemp("images")
    for i, image in enumerate(images):
        Image.fromarray(image[0].numpy()).save(path / f"{i}.png")
    (path / ".hidden").write_text("x")
    (path / "Thumbs.db").write_text("x")
    return path


@pytest.fixture(scope="module")
def certified(run, images):
    """The same images by `onelip.certify`."""
    return onelip.certify(onelip.load_run(run).plain.double(), images)


def test_sources_of_every_kind_give_what_certify_gives(run, images, folder, certified, tmp_path, capsys, monkeypatch):
    np.savez(tmp_path / "new.npz", images=images[:, 0].numpy())
    files = [str(folder / f"{i}.png") for i in range(5)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(files) + "\n\n"))
    for given in (files, [folder], [f"{folder}/*.png"], [tmp_path / "new.npz"], ["-"]):
        code, out, _ = call(capsys, "predict", run, *given, "--json")
        assert code == 0
        found = json.loads(out)
        assert (found["mode"], found["reason"], found["skipped"]) == ("sound", None, [])
        rows = found["predictions"]
        assert [row["class"] for row in rows] == [str(k) for k in certified.classes.tolist()]
        assert [row["radius"] for row in rows] == certified.radii.tolist()
        assert [row["pixels"] for row in rows] == list(certified.pixels)
        names = [f"{tmp_path / 'new.npz'}[{i}]" for i in range(5)] if "new.npz" in str(given) else files
        assert [row["image"] for row in rows] == names


def test_csv_has_all_digits_and_the_table_rounds_down(run, folder, certified, capsys):
    rows = list(csv.DictReader(io.StringIO(call(capsys, "predict", run, folder, "--csv")[1])))
    assert [float(row["radius"]) for row in rows] == certified.radii.tolist()
    assert {row["mode"] for row in rows} == {"sound"}
    out = call(capsys, "predict", run, folder)[1]
    assert "include all rounding errors" in out
    shown = [float(line.split()[2]) for line in out.splitlines() if ".png" in line]
    for short, radius in zip(shown, certified.radii.tolist(), strict=True):
        assert radius - 1e-4 < short <= radius


def test_python_gives_the_same_and_proves_once(run, images, folder, certified, monkeypatch):
    loaded = onelip.load_run(run)
    found = loaded.predict(folder)
    assert [item.radius for item in found] == certified.radii.tolist()
    assert found[0].class_name == str(int(certified.classes[0]))
    from onelip.certification import predict as module

    monkeypatch.setattr(module, "prove_baked", lambda *_: pytest.fail("proved again"))
    assert [item.radius for item in loaded.predict(images)] == certified.radii.tolist()
    assert next(loaded.plain.parameters()).dtype == torch.float32


def test_changed_weights_are_proved_again(run, images):
    loaded = onelip.load_run(run)
    before = loaded.predict(images)
    with torch.no_grad():
        for parameter in loaded.plain.parameters():
            parameter.mul_(0.5)
    after = loaded.predict(images)
    assert after.mode == "sound"
    assert after.certification.constant < before.certification.constant


def test_real_arithmetic_where_the_sound_mode_has_no_proof(run, images, monkeypatch, capsys, folder):
    from onelip.core.errors import ProofError
    from onelip.training import prediction

    def refuse(*_):
        raise ProofError("no rule for this operation")

    monkeypatch.setattr(prediction, "_certify_soundly", refuse)
    found = onelip.load_run(run).predict(images)
    assert (found.mode, found.reason) == ("real-arithmetic", "no rule for this operation")
    assert all(item.pixels is None and item.radius > 0 for item in found)
    assert "no rule for this operation" in call(capsys, "predict", run, folder)[1]
    with pytest.raises(ProofError):
        onelip.load_run(run).predict(images, mode="sound")


def test_radii_are_finite_for_json():
    class Constant(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :2] * 0 + torch.tensor([1.0, 0.0])

    from onelip.data import NewImages
    from onelip.training.prediction import predict

    blank = NewImages(torch.zeros(1, 1, 2, 2), ("blank",), (None,))
    found = predict(Constant().eval(), blank, ("a", "b"), mode="real-arithmetic")
    assert 0 < found[0].radius <= math.sqrt(4)


def test_other_sizes_and_colours(run, images, tmp_path, capsys):
    Image.new("RGB", (20, 10), (200, 30, 40)).save(tmp_path / "big.png")
    code, out, err = call(capsys, "predict", run, tmp_path / "big.png")
    assert (code, out) == (1, "")
    assert "takes images of 8x8 pixels, got 20x10" in err
    assert "--resize" in err
    code, out, _ = call(capsys, "predict", run, tmp_path / "big.png", "--resize", "--json")
    assert code == 0
    assert json.loads(out)["predictions"][0]["change"] == "converted to grey, resized from 20x10"
    out = call(capsys, "predict", run, tmp_path / "big.png", "--resize")[1]
    assert "radii are for the changed images" in out
    # Grey pixels in three channels keep their values, and are no change.
    Image.fromarray(images[0, 0].numpy()).convert("RGB").save(tmp_path / "grey.png")
    loaded = load_images(tmp_path / "grey.png", (1, 8, 8))
    assert torch.equal(loaded.images, images[:1])
    assert loaded.changes == (None,)
    # A network of three channels takes grey images.
    repeated = load_images(tmp_path / "grey.png", (3, 8, 8)).images
    assert torch.equal(repeated, images[:1].expand(1, 3, 8, 8))


def test_one_bad_file_stops_everything_or_is_skipped(run, folder, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes((folder / "0.png").read_bytes()[:40])
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "sub").mkdir()
    bad = [tmp_path / "bad.png", tmp_path / "notes.txt", tmp_path / "missing.png"]
    for path in bad:
        code, out, err = call(capsys, "predict", run, folder, path)
        assert code == (2 if path.name == "missing.png" else 1)
        assert out == ""
        assert err.count("\n") == 1
        assert str(path) in err
    code, out, err = call(capsys, "predict", run, folder, tmp_path, bad[2], "--skip-bad", "--json")
    assert code == 0
    found = json.loads(out)
    assert len(found["predictions"]) == 5
    assert len(found["skipped"]) == 4
    assert err.count("skipped: ") == 4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 8, 8))}, "expected uint8 images, got float64"),
        ({"images": np.zeros((0, 8, 8), np.uint8)}, "at least one image"),
        ({"a": np.zeros((2, 8, 8), np.uint8), "b": np.zeros(2)}, "expected an array `images`, got a, b"),
        ({"images": np.zeros((2, 9, 8), np.uint8)}, r"\[0\]: the network takes images of 8x8 pixels, got 8x9"),
    ],
)
def test_unusable_npz_files(arrays, message, tmp_path):
    np.savez(tmp_path / "new.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_images(tmp_path / "new.npz", (1, 8, 8))


def test_animations_and_other_channel_counts_are_refused(tmp_path):
    frames = [Image.new("L", (8, 8), k) for k in (0, 99)]
    frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match="got 2 frames"):
        load_images(tmp_path / "two.gif", (1, 8, 8))
    with pytest.raises(DataError, match="4 channels"):
        load_images(tmp_path / "two.gif", (4, 8, 8))


def test_tensors_of_another_shape_are_refused(run):
    with pytest.raises(DataError, match=r"expected images of shape \(N, 1, 8, 8\), got \(2, 3, 8, 8\)"):
        onelip.load_run(run).predict(torch.zeros(2, 3, 8, 8))


def test_names_with_markup_and_control_characters(run, folder, tmp_path, capsys):
    (tmp_path / "[red]a\x1b[1m.png").write_bytes((folder / "0.png").read_bytes())
    out = call(capsys, "predict", run, tmp_path)[1]
    assert "[red]a\\x1b[1m.png" in out.replace("\n", "")


def test_a_list_in_a_pipe(run, folder):
    command = [sys.executable, "-m", "onelip", "predict", str(run), "-", "--csv"]
    done = subprocess.run(
        command, input=f"{folder / '1.png'}\n", capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert done.stdout.count("\n") == 2
