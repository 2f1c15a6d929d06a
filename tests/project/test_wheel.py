"""The wheel, built and installed into an empty environment, passes the quickstart."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def run(*command, cwd=None):
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The bin directory of an environment with the wheel, and the dependencies of this one without downloads."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("onelip-*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    # A path in a .pth file is searched last, and .pth files there are not read: this onelip cannot be imported from it.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    bin = folder / "env" / "bin"
    run(sys.executable, "-m", "pip", "--python", bin / "python", "install", "--quiet", "--no-deps", "--no-index", wheel)
    return bin


def test_the_quickstart_of_the_readme(installed, tmp_path):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code
    (tmp_path / "quickstart.py").write_text("\n".join([*code, "print(onelip.__file__)"]))
    where = run(installed / "python", "quickstart.py", cwd=tmp_path).splitlines()[-1]
    assert where.startswith(str(installed.parent))


def test_the_commands(installed, tmp_path):
    assert re.fullmatch(r"onelip \d+\.\d+\.\d+\n", run(installed / "onelip", "--version"))
    assert run(installed / "python", "-m", "onelip", "--version") == run(installed / "onelip", "--version")
    printed = run(installed / "onelip", "demo", "--epochs", "1", "--out", "run", cwd=tmp_path)
    assert "ACCEPTED" in printed
    assert "Open run/report.html in a browser" in printed
    assert "What is proved, and what is not" in (tmp_path / "run" / "report.html").read_text()
