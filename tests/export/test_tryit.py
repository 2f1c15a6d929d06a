"""`onelip tryit`: the files of the page, what is refused, and its numbers in a real browser."""

import functools
import hashlib
import http.server
import io
import json
import tarfile
import threading
import time

import pytest
import torch
from _browser import Browser, browser, needs_chromium
from _runs import SMALL, call

import onelip.export.tryit as module
from onelip.export.files import ExportError, ExportTaken
from onelip.export.hub import find_in_zoo
from onelip.export.tryit import RUNTIME, write_tryit
from onelip.training import load_run, train

# Files of the network and the page; those of ONNX Runtime Web come in addition.
OURS = {"index.html", "tryit.css", "tryit.js", "model.onnx", "network.json"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "digits"
    train(SMALL.replace(epochs=2, threads=1), out)
    return out


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in place of that of ONNX Runtime Web."""
    path = tmp_path / "package.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name in module._RUNTIME_FILES:
            entry = tarfile.TarInfo(f"package/dist/{name}")
            entry.size = len(name)
            archive.addfile(entry, io.BytesIO(name.encode()))
    monkeypatch.setattr(module, "_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    # The export has tests of its own; that of a page is run in the browser below.
    monkeypatch.setattr(module, "export_onnx", lambda model, path, *a, **k: path.write_bytes(b"onnx"))
    return path


# Files.


def test_the_folder_has_everything(run, package, tmp_path, capsys):
    code, out, _ = call(capsys, "tryit", run, "--out", tmp_path / "page", "--runtime", package, "--images", "12")
    assert code == 0
    assert "python -m http.server --bind 127.0.0.1 --directory" in out
    assert {path.name for path in (tmp_path / "page").iterdir()} == {*OURS, *module._RUNTIME_FILES}
    network = json.loads((tmp_path / "page" / "network.json").read_text())
    assert (network["mode"], network["dtype"], network["shape"]) == ("sound", "float64", [1, 8, 8])
    assert "includes all rounding errors" in network["claim"]
    assert network["rounding"] > 0
    assert [image["label"] for image in network["images"]] == [*"0123456789", "0", "1"]
    page = (tmp_path / "page" / "index.html").read_text() + (tmp_path / "page" / "tryit.js").read_text()
    assert "http://" not in page
    assert "https://" not in page


def test_networks_of_the_zoo(package, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, _ = call(capsys, "tryit", "digits-fast", "--runtime", package, "--images", "2")
    assert code == 0
    network = json.loads((tmp_path / "digits-fast-tryit" / "network.json").read_text())
    weights = find_in_zoo("digits-fast") / "model.safetensors"
    assert network["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    code, _, error = call(capsys, "tryit", "digits-fats", "--runtime", package)
    assert code != 0
    assert "digits-fats is not a run" in error


def test_float32_states_real_arithmetic(run, package, tmp_path):
    found = write_tryit(run, tmp_path / "page", dtype="float32", images=2, runtime=package)
    network = json.loads((tmp_path / "page" / "network.json").read_text())
    assert (network["mode"], network["rounding"]) == ("real-arithmetic", 0.0)
    assert "The radius is that of real arithmetic" in network["claim"]
    assert found.predictions.mode == "real-arithmetic"


def test_without_the_data_there_are_no_images(run, package, tmp_path, monkeypatch):
    def missing(*args):
        raise module.RunError("the data of the run are missing")

    monkeypatch.setattr(module, "load_run_data", missing)
    assert write_tryit(run, tmp_path / "page", runtime=package).predictions is None
    assert json.loads((tmp_path / "page" / "network.json").read_text())["images"] == []


def test_existing_folders_are_kept(run, package, tmp_path):
    page = tmp_path / "page"
    page.mkdir()
    (page / "own.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(ExportTaken, match="exists; choose another --out"):
            write_tryit(run, page, runtime=package, force=force)
    assert [path.name for path in page.iterdir()] == ["own.txt"]
    other = tmp_path / "other"
    write_tryit(run, other, images=1, runtime=package)
    write_tryit(run, other, images=2, runtime=package, force=True)
    assert len(json.loads((other / "network.json").read_text())["images"]) == 2


def test_a_failure_leaves_nothing_behind(run, package, tmp_path, monkeypatch):
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(module, "export_onnx", lambda *a, **k: (_ for _ in ()).throw(ExportError("no")))
    with pytest.raises(ExportError, match="no"):
        write_tryit(run, tmp_path / "page", runtime=package)
    assert sorted(tmp_path.iterdir()) == before


def test_packages_are_checked(run, tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.tgz"
    wrong.write_bytes(b"no package")
    with pytest.raises(ExportError, match=rf"wrong.tgz is not the package onnxruntime-web {RUNTIME}"):
        write_tryit(run, tmp_path / "page", runtime=wrong)
    with pytest.raises(ExportError, match="cannot read the package"):
        write_tryit(run, tmp_path / "page", runtime=tmp_path / "none.tgz")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(ExportError, match=r"npm is missing; .* install Node\.js, or give the file with --runtime"):
        write_tryit(run, tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_unfinished_runs_are_refused(tmp_path, capsys):
    code, _, err = call(capsys, "tryit", tmp_path / "none")
    assert code == 2
    assert err.count("\n") == 1


# In a browser.


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module", params=["float64", "float32"])
def page(request, run, tmp_path_factory):
    """The address of a served page, the library's numbers for its images, and the run."""
    folder = tmp_path_factory.mktemp("page") / request.param
    try:
        found = write_tryit(run, folder, dtype=request.param)
    except ExportError as error:
        if "npm" not in str(error):
            raise
        pytest.skip(f"ONNX Runtime Web is missing: {error}")
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", found.predictions, load_run(run)
        server.shutdown()


def wait(tab: Browser, done: int) -> dict:
    """The numbers of the page after so many results."""
    end = time.monotonic() + 90
    while True:
        found = json.loads(tab.run("JSON.stringify({...document.body.dataset})"))
        assert "error" not in found, found
        if int(found.get("done", 0)) >= done:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.05)


def assert_same(found: dict, shown: dict, expected, mode: str) -> None:
    """The numbers of the page are those of the library."""
    assert found["class"] == expected.class_name == shown["class"]
    tolerance = 1e-12 if mode == "sound" else 1e-6
    assert float(found["radius"]) == pytest.approx(expected.radius, abs=tolerance)
    if mode == "sound":
        assert float(found["radius"]) <= expected.radius * (1 + 1e-14)
        assert found["pixels"] == shown["pixels"] == str(expected.pixels)
    else:
        assert shown["pixels"] == "only with the float64 model"
    if expected.radius > 0:
        assert float(shown["radius"]) == pytest.approx(expected.radius, abs=1e-4 + tolerance)


_SHOWN = """(() => {
  const text = (id) => document.getElementById(id).textContent;
  return JSON.stringify({ class: text("class"), radius: text("radius"), pixels: text("pixels") });
})()"""
_PIXELS = """(() => {
  const canvas = document.getElementById("image");
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return [...all].filter((_, k) => k % 4 === 0);
})()"""


@needs_chromium
def test_numbers_are_those_of_the_library(page, tmp_path):
    address, predictions, loaded = page
    mode = predictions.mode
    with browser(tmp_path) as tab:
        tab.open(address)
        wait(tab, 1)
        for number in (0, 7, 19):
            tab.run(f"document.querySelectorAll('#gallery button')[{number}].click()")
            found = wait(tab, 2 + (0, 7, 19).index(number))
            assert_same(found, json.loads(tab.run(_SHOWN)), predictions[number], mode)

        # Draw with the mouse from the middle to the right, and compare with the library on the drawn image.
        before = tab.run(_PIXELS)
        box = json.loads(tab.run("JSON.stringify(document.getElementById('image').getBoundingClientRect())"))
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        tab.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + box["width"] / 3, y=y, button="left", buttons=1)
        tab.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + box["width"] / 3, y=y, button="left")
        found = wait(tab, 5)
        time.sleep(0.3)  # the last of several events
        found, drawn = wait(tab, 5), tab.run(_PIXELS)
        assert drawn != before
        image = torch.tensor(drawn, dtype=torch.uint8).reshape(1, 1, 8, 8)
        assert_same(found, json.loads(tab.run(_SHOWN)), loaded.predict(image, mode=mode)[0], mode)

        # By touch, and by the keyboard.
        done = int(found["done"])
        touch = [{"x": x, "y": y - box["height"] / 3}]
        tab.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=touch)
        tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        touched = wait(tab, done + 1)
        assert tab.run(_PIXELS) != drawn
        tab.run("document.getElementById('clear').click()")
        wait(tab, int(touched["done"]) + 1)
        assert not any(tab.run(_PIXELS))
        tab.run("document.getElementById('image').focus()")
        for key, code in (("ArrowRight", 39), (" ", 32)):
            tab.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code)
        end = time.monotonic() + 30
        while not any(tab.run(_PIXELS)):
            assert time.monotonic() < end

        assert not tab.errors
        assert all(request.startswith((address, "data:")) for request in tab.requests)


# A click on the second image and a stroke on it, as soon as the page has them: the network is still loading.
_EARLY = """new Promise((resolve) => {
  const early = setInterval(() => {
    const button = document.querySelectorAll("#gallery button")[1];
    if (!button) return;
    clearInterval(early);
    button.click();
    const canvas = document.getElementById("image"), box = canvas.getBoundingClientRect();
    canvas.setPointerCapture = () => {};
    const at = { clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, pointerId: 1 };
    canvas.dispatchEvent(new PointerEvent("pointerdown", at));
    canvas.dispatchEvent(new PointerEvent("pointerup", at));
    resolve(document.getElementById("class").textContent);
  }, 1);
})"""


@needs_chromium
def test_drawing_while_the_network_loads(page, tmp_path):
    address, predictions, loaded = page
    with browser(tmp_path) as tab:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=f"window.early = {_EARLY}")
        tab.open(address)
        assert tab.run("early") == "loading the network"
        found = wait(tab, 1)
        image = torch.tensor(tab.run(_PIXELS), dtype=torch.uint8).reshape(1, 1, 8, 8)
        assert_same(
            found, json.loads(tab.run(_SHOWN)), loaded.predict(image, mode=predictions.mode)[0], predictions.mode
        )
        if predictions.mode == "sound":  # the limit is that of the chosen image, not of the drawn one
            changed = tab.run("document.getElementById('changed').textContent")
            assert f"of the {predictions[1].pixels} of the chosen image" in changed
        assert not tab.errors


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_the_page_can_be_read(page, tmp_path, width, dark):
    address, predictions, _ = page
    with browser(tmp_path) as tab:
        tab.open(address, width=width, dark=dark)
        wait(tab, 1)
        text = tab.run("document.body.innerText")
        arithmetic = "includes all rounding errors" if predictions.mode == "sound" else "that of real arithmetic"
        assert arithmetic in text
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.violations() == []
