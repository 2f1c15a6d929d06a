"""`onelip completion`: the scripts work in real shells."""

import shutil
import subprocess

import pytest
from _runs import onelip

from onelip.cli import COMMANDS

# bash calls the function of `complete` with the words of the line and the index of the current one.
COMPLETE = """
source "$1"; shift
function=$(complete -p onelip | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"$function" onelip "${COMP_WORDS[COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("shell") / "onelip.bash"
    done = onelip("completion", "bash")
    assert done.returncode == 0, done.stderr
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("onelip ", {*COMMANDS}),
        ("onelip cer", {"certify"}),
        ("onelip certify --ef", {"--effort"}),
        ("onelip certify --effort ", {"quick", "normal", "high"}),
        ("onelip train --sched", {"--schedule"}),
        ("onelip data f", {"fetch"}),
    ],
)
def test_bash_completes(script, line, wanted):
    words = line.split(" ")
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE, "bash", str(script), *words], capture_output=True, text=True, check=True
    )
    assert wanted <= {found.strip() for found in done.stdout.splitlines()}, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells(shell, tmp_path):
    done = onelip("completion", shell)
    assert done.returncode == 0, done.stderr
    assert "certify" in done.stdout
    if shutil.which(shell):
        (tmp_path / "script").write_text(done.stdout)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)
