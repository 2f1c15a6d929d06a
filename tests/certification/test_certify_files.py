"""Certificate files: written whole, for the right weights, and accepted by the checker, which shares no code."""

import hashlib
import json
import sys

import numpy as np
import pytest
import torch
from _certified_programs import Everything
from _runs import SMALL
from safetensors.torch import save_file
from torch import nn

import onelip
from onelip import checker
from onelip.certification import ProofError, certify, write_certificate
from onelip.certification.certificate import WeightFile, digest
from onelip.certification.radius import PAPER_RADII
from onelip.cli.certify import run as certify_command
from onelip.core.errors import RecipeError, RunError
from onelip.core.files import write_json, write_whole
from onelip.core.images import images_hash
from onelip.data import DataError, load_data
from onelip.nn import MaxMin
from onelip.training.build import build_model, save_weights
from onelip.training.run_directory import RunConfig, RunDirectory


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A certificate of a network with one of each operation, and all files beside it."""
    folder = tmp_path_factory.mktemp("everything")
    torch.manual_seed(0)
    model = Everything().eval()  # weights of float32, as runs store them
    save_file(model.state_dict(), folder / "plain.safetensors")
    model.double()
    images = torch.randint(0, 256, (8, 2, 6, 6), dtype=torch.uint8)
    np.save(folder / "images.npy", images.numpy())
    found = certify(model, images, torch.arange(8) % 3, exact=True)
    files = WeightFile(folder / "plain.safetensors")
    write_certificate(folder / "cert.json", found, images, files, source="made up", images_file="images.npy")
    return folder, model, found, images


def test_the_checker_accepts_every_operation(everything):
    folder, _, found, _ = everything
    verdict = checker.check(folder / "cert.json", images=folder / "images.npy")
    assert verdict["accepted"]
    assert verdict["error"] == found.proof.error
    assert verdict["certified"] == found.certified() > 0
    assert {radius: n / verdict["count"] for radius, n in verdict["cra"].items()} == found.cra((0.0, *PAPER_RADII))
    assert verdict["cra"]["0"] / verdict["count"] == found.accuracy()


def test_radii_of_the_summary_are_those_that_the_checker_reads(everything, tmp_path):
    folder, _, found, images = everything
    files = WeightFile(str(folder / "plain.safetensors"))
    radii = (0.1, 0.1234567, 36 / 255, 2.0)
    write_certificate(tmp_path / "cert.json", found, images, files, source="", radii=radii)
    verdict = checker.check(tmp_path / "cert.json", weights=folder / "plain.safetensors")
    assert list(verdict["cra"]) == ["0", "1/10", "1234567/10000000", "36/255", "2"]
    with pytest.raises(ProofError, match=r"at most nine digits.*got 0\.12345678901"):
        write_certificate(tmp_path / "other.json", found, images, files, source="", radii=[0.12345678901])
    assert not (tmp_path / "other.json").exists()


def test_the_file_says_what_was_found(everything):
    folder, _, found, images = everything
    content = json.loads((folder / "cert.json").read_text())
    assert content["weights"]["sha256"] == hashlib.sha256((folder / "plain.safetensors").read_bytes()).hexdigest()
    assert content["images"]["sha256"] == hashlib.sha256(images.numpy().tobytes()).hexdigest()
    assert [float.fromhex(r["radius"]) for r in content["results"]] == found.radii.tolist()
    assert [r["pixels"] for r in content["results"]] == list(found.pixels)
    assert content["digest"] == digest({key: value for key, value in content.items() if key != "digest"})
    assert content["digest"] != digest({**content, "version": 4})
    assert {node["op"] for node in content["nodes"]} >= {
        "affine",
        "normalize",
        "sum",
        "max",
        "sort",
        "add",
        "join",
    }


def test_a_certificate_needs_an_exact_sound_proof(everything, tmp_path):
    folder, model, found, images = everything
    files = WeightFile(folder / "plain.safetensors")
    ordinary = certify(model, images, mode="real-arithmetic", proof=found.proof)
    with pytest.raises(ProofError, match="sound mode with exact=True"):
        write_certificate(tmp_path / "cert.json", ordinary, images, files, source="")
    with pytest.raises(ProofError, match="images that were certified"):
        write_certificate(tmp_path / "cert.json", found, images[:3], files, source="")
    with pytest.raises(ProofError, match="images that were certified"):
        write_certificate(tmp_path / "cert.json", found, images.flip(0), files, source="")
    assert list(tmp_path.iterdir()) == []


def test_other_weights_are_refused(everything, tmp_path):
    _, model, found, images = everything
    state = {name: t.float() for name, t in model.state_dict().items()}

    def write(**changes):
        save_file({**state, **changes}, tmp_path / "w.safetensors")
        write_certificate(tmp_path / "cert.json", found, images, WeightFile(tmp_path / "w.safetensors"), source="")

    write()
    with pytest.raises(ProofError, match=r"others in 'last.bias'"):
        write(**{"last.bias": state["last.bias"] + 1e-3})
    with pytest.raises(ProofError, match=r"torch.int64 in 'extra'"):
        write(extra=torch.zeros(1, dtype=torch.int64))
    del state["last.bias"]
    with pytest.raises(ProofError, match=r"the tensor 'last.bias' is missing"):
        write()
    (tmp_path / "w.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ProofError, match="safetensors file"):
        write_certificate(tmp_path / "cert.json", found, images, WeightFile(tmp_path / "w.safetensors"), source="")


def test_a_constant_that_no_file_holds(tmp_path):
    class Hidden(nn.Module):
        def forward(self, x):
            return nn.functional.linear(x, torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=x.dtype))

    model = Hidden().double().eval()
    images = torch.tensor([[0.2, 0.9]])
    found = certify(model, images, exact=True)
    assert found.certified() == 1
    save_file({"other": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(ProofError, match="register it as a buffer"):
        write_certificate(tmp_path / "cert.json", found, images, WeightFile(tmp_path / "w.safetensors"), source="")


@pytest.mark.parametrize("tied", [True, False])
def test_shared_layers(tmp_path, tied):
    torch.manual_seed(0)
    layer = onelip.nn.AOLLinear(4, 4)
    model = nn.Sequential(layer, MaxMin(), layer if tied else onelip.nn.AOLLinear(4, 4), nn.Linear(4, 2)).eval()
    plain = onelip.bake(model)
    save_file({k: v.clone() for k, v in plain.state_dict().items()}, tmp_path / "w.safetensors")
    images = torch.rand(3, 4, dtype=torch.float64)
    found = certify(plain.double(), images, exact=True)
    write_certificate(tmp_path / "c.json", found, images, WeightFile(tmp_path / "w.safetensors"), source="")
    assert checker.check(tmp_path / "c.json")["accepted"]


def test_hash_of_images_is_that_of_their_bytes():
    images = torch.rand(2, 3, 4)
    assert (
        images_hash(images.transpose(1, 2))
        == hashlib.sha256(np.ascontiguousarray(images.numpy().transpose(0, 2, 1)).tobytes()).hexdigest()
    )


# The command line.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run that was never trained: what counts is that its files are there."""
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    data = load_data("digits")
    torch.manual_seed(0)
    model = build_model(SMALL, data.num_classes, data.shape)
    config = RunConfig(SMALL, data.name, data.fingerprint, data.class_names, data.shape)
    write_json(directory.config, config.to_json())
    save_weights(directory, model, onelip.bake(model))
    return directory.path


def test_certify_a_run(run, capsys, tmp_path):
    arguments = [run, "--limit", "20", "--out", run / "cert.json", "--images-out", run / "images.npy", "--json"]
    assert certify_command([str(a) for a in arguments]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["mode"] == "sound"
    assert results["proof"] == "exact"
    assert [row["mode"] for row in results["comparison"]] == ["real-arithmetic"] * 3 + ["sound"]
    verdict = checker.check(run / "cert.json", images=run / "images.npy")
    assert verdict["accepted"]
    assert verdict["certified"] == results["certified"]
    assert verdict["error"] == results["error"]


def test_what_a_person_sees(run, capsys):
    assert certify_command([str(run), "--limit", "5", "--effort", "quick"]) == 0
    out, err = capsys.readouterr()
    assert "The radii include rounding errors" in out
    assert "with rounding" in out
    assert "proving" in err
    assert certify_command([str(run), "--limit", "5", "--mode", "real-arithmetic", "--split", "train"]) == 0
    assert "The radii do not include rounding errors" in capsys.readouterr().out


def test_one_image(run, capsys, tmp_path):
    from PIL import Image

    pixels = load_data("digits").test_images[0, 0].numpy()
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    assert certify_command([str(run), "--image", str(tmp_path / "digit.png")]) == 0
    out = capsys.readouterr().out
    assert "class " in out
    assert "sum of squared pixel differences" in out
    Image.fromarray(pixels[:4]).save(tmp_path / "small.png")
    with pytest.raises(DataError, match="resize the image"):
        certify_command([str(run), "--image", str(tmp_path / "small.png")])
    (tmp_path / "no.png").write_text("no")
    with pytest.raises(DataError, match="not a complete PNG"):
        certify_command([str(run), "--image", str(tmp_path / "no.png")])


def test_commands_without_sense(run, tmp_path):
    with pytest.raises(RecipeError, match="--out needs --mode sound"):
        certify_command([str(run), "--mode", "real-arithmetic", "--out", str(tmp_path / "c.json")])
    with pytest.raises(RecipeError, match="--limit"):
        certify_command([str(run), "--limit", "0"])
    with pytest.raises(RunError, match="is not a run"):
        certify_command([str(tmp_path)])


def test_places_are_looked_at_before_the_work(run, tmp_path, capsys):
    def refused(error, message, *flags):
        with pytest.raises(error, match=message):
            certify_command([str(run), "--limit", "2", *map(str, flags)])
        assert "proving" not in capsys.readouterr().err

    refused(RecipeError, "there is no directory", "--out", tmp_path / "no" / "c.json")
    refused(RecipeError, "this is a directory", "--out", tmp_path)
    refused(RecipeError, "is a file of the run", "--out", run / "plain.safetensors")
    refused(RecipeError, "is a file of the run", "--images-out", run / "config.json")
    refused(RecipeError, "are the same file", "--out", tmp_path / "c", "--images-out", tmp_path / "c")


def test_certificates_are_not_replaced_unasked(run, tmp_path, capsys):
    flags = [str(run), "--limit", "2", "--out", str(tmp_path / "c.json")]
    assert certify_command(flags) == 0
    before = (tmp_path / "c.json").read_bytes()
    for taken in ("c.json", "c.images.npy"):
        with pytest.raises(RecipeError, match="exists; choose another name, or overwrite it with --force"):
            certify_command(flags)
        assert (tmp_path / "c.json").read_bytes() == before
        (tmp_path / taken).rename(tmp_path / "aside")
        (tmp_path / "c.json").write_bytes(before)
    (tmp_path / "c.images.npy").write_bytes(b"")
    assert certify_command([*flags, "--force", "--limit", "1"]) == 0
    assert checker.check(tmp_path / "c.json", images=tmp_path / "c.images.npy")["count"] == 1


def test_exact_proofs_without_flint(run, tmp_path, capsys, monkeypatch):
    from onelip.cli import main

    monkeypatch.setitem(sys.modules, "flint", None)
    for flags in (["--out", str(tmp_path / "c.json")], ["--exact"]):
        assert main(["certify", str(run), "--limit", "2", *flags]) == 1
        said = capsys.readouterr().err
        assert said == "onelip certify: --out and --exact need python-flint: pip install 'onelip[exact]'\n"


def test_the_printed_command_checks_the_certificate(run, tmp_path, capsys):
    from onelip.cli import main

    assert certify_command([str(run), "--limit", "2", "--out", str(tmp_path / "c.json")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Check it: onelip ")
    assert main([*last.removeprefix("Check it: onelip ").split(), "--quiet"]) == 0


def test_a_certificate_goes_along_with_an_export(run, tmp_path, capsys):
    """As docs/export.md has it; renamed files are found by their hashes."""
    from onelip.cli import main

    certificate = str(tmp_path / "cert.json")
    assert main(["certify", str(run), "--limit", "3", "--out", certificate]) == 0
    net = tmp_path / "elsewhere" / "net.safetensors"
    net.parent.mkdir()
    assert main(["export", str(run), "--out", str(net), "--certificate", certificate]) == 0
    images = str(tmp_path / "cert.images.npy")
    capsys.readouterr()
    assert main(["check", str(net.with_name("net.cert.json")), "--images", images, "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("ACCEPTED: ")


def test_ctrl_c_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr("onelip.core.files.os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "cert.json", b"{}")
    assert list(tmp_path.iterdir()) == []
