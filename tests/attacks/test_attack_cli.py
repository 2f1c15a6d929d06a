"""The command `onelip attack`."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from _runs import SMALL

from onelip.certification.predict import certify
from onelip.cli.attack import run
from onelip.training import train

FAST = ("--limit", "30", "--steps", "5", "--restarts", "0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    train(SMALL, out=out)
    return out


@pytest.fixture
def wrong_radii(monkeypatch):
    """A certifier whose radii are too large by a factor of 100."""

    import onelip.certification.predict

    def wrong(*arguments, **options):
        found = certify(*arguments, **options)
        return replace(found, radii=100 * found.radii)

    monkeypatch.setattr(onelip.certification.predict, "certify", wrong)


def test_sound_certificates_stand(trained, capsys, tmp_path):
    assert run([str(trained), *FAST, "--json", "--out", str(tmp_path / "flips.npz")]) == 0
    captured = capsys.readouterr()
    results = json.loads(captured.out)
    assert results["broken"] == 0
    assert results["attacked"] > 0
    assert results["smallest_ratio"] > 1
    assert list(results["radii"]) == ["36/255", "72/255", "108/255", "1"]
    for row in results["radii"].values():
        assert 0 <= row["cra"] <= row["attacked"] <= results["accuracy"]
        assert row["gap"] == row["attacked"] - row["cra"]
    assert "attacking images" in captured.err
    assert not (trained / "counterexamples.npz").exists()
    with np.load(tmp_path / "flips.npz", allow_pickle=False) as saved:
        assert len(saved["adversarials"]) == 30


def test_wrong_certificates_fail_loudly(trained, capsys, wrong_radii):
    assert run([str(trained), *FAST]) == 1
    captured = capsys.readouterr()
    assert "certified decisions were changed" in captured.err
    assert "attacked accuracy" in " ".join(captured.out.split())
    path = trained / "counterexamples.npz"
    assert str(path) in captured.err
    with np.load(path, allow_pickle=False) as saved:
        assert len(saved["index"])
        assert (saved["distances"] <= saved["radii"]).all()
    path.unlink()


def test_integers_and_foolbox(trained, capsys):
    for flags in (["--integers"], ["--clip"], ["--foolbox", "DeepFool"]):
        assert run([str(trained), "--limit", "8", "--steps", "3", "--restarts", "0", "--radius", "0.1", *flags]) == 0
        assert "; 0 decisions were changed" in capsys.readouterr().out


def test_certificate_file(trained, capsys, tmp_path):
    from onelip.cli.certify import run as run_certify

    path = tmp_path / "cert.json"
    assert run_certify([str(trained), "--limit", "12", "--out", str(path)]) == 0
    capsys.readouterr()
    flags = [str(trained), "--limit", "12", "--steps", "3", "--restarts", "0", "--json", "--certificate", str(path)]
    assert run(flags) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["broken"], whole["attacked"]) == (0, 12)

    content = json.loads(path.read_text())
    content["results"][0]["radius"] = (100.0).hex()  # a lie
    path.write_text(json.dumps(content))
    assert run(flags) == 1
    capsys.readouterr()
    (trained / "counterexamples.npz").unlink()
    part = [*flags, "--start", "5", "--limit", "7"]  # without the lie
    assert run(part) == 0
    assert json.loads(capsys.readouterr().out)["attacked"] == 7
    with pytest.raises(RuntimeError, match="first 13 images in order, got 12; use --limit 7"):
        run([*part, "--limit", "8"])
    with pytest.raises(ValueError, match="--start 100000 is not below the number of images"):
        run([*part, "--start", "100000"])

    for change, message in (
        ({"weights": {"sha256": "0" * 64}}, "for other weights"),
        ({"images": {**content["images"], "sha256": "0" * 64}}, "for other images"),
        ({"version": 1}, "of version 3"),
        ({"results": [{}]}, "not an onelip certificate"),
        ({"results": 3}, "not an onelip certificate"),
        ({"results": [{**content["results"][0], "class": 10**30}]}, "not an onelip certificate"),
        ({"results": [{**content["results"][0], "radius": "0x1p+99999"}]}, "not an onelip certificate"),
        ({"results": [{**content["results"][0], "pixels": math.inf}]}, "expected JSON, but the file is damaged"),
        ({"images": {**content["images"], "count": "12"}}, "not an onelip certificate"),
        ({"images": {**content["images"], "count": -12}}, "not an onelip certificate"),
        ({"results": content["results"][1:]}, "in order"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(RuntimeError, match=message):
            run(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "--limit"),
        (["--start", "-1"], "--start"),
        (["--steps", "0"], "--steps"),
        (["--restarts", "-1"], "--restarts"),
        (["--batch-size", "0"], "--batch-size"),
        (["--radius", "-1"], "radii"),
        (["--foolbox", "FMN", "--integers"], "foolbox"),
    ],
)
def test_invalid_commands(tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        run([str(tmp_path), *flags])
