"""Exit codes of all commands: 2 for a usage error, 1 for a job that failed or an answer that is no.

Each row has a part of the message. A usage error leaves no files behind.
"""

import re

import pytest
from _runs import SMALL, call

from onelip.training import train

WRONG_COMMANDS = [
    # Commands and options.
    ("tarin", "did you mean 'train'"),
    ("train --epoch 3", "--epochs"),
    ("models --filtre x", "--filter"),
    ("evaluate", "Required"),
    ("data fecth", "did you mean 'fetch'"),
    # Values.
    ("train --epochs many", "many"),
    ("train --epochs 0", "epochs"),
    ("train --schedule stpes", "one-cycle"),
    ("train --save-minutes -1", "save_minutes of at least 0"),
    ("train --save-steps -1", "save_steps of at least 0"),
    ("train --augment --hue 7", "hue between"),
    ("train --device tpu", "unknown device 'tpu'"),
    ("train --model-options width=3", "width to be even"),
    ("train --method-options steps=0", "expected steps to be an integer"),
    ("train --method lmt --loss-options radius=-1", "loss lmt: expected radius"),
    ("train --loss emma --method none", "does not fit this network"),
    ("train --model aol-std --data digits", "multiple of 32"),
    ("evaluate RUN --device tpu", "unknown device 'tpu'"),
    ("predict RUN FILE --batch-size 0", "--batch-size of at least 1"),
    ("certify RUN --limit 0", "--limit of at least 1"),
    ("certify RUN --batch-size 0", "--batch-size of at least 1"),
    ("attack RUN --limit 0", "--limit of at least 1"),
    ("attack RUN --steps 0", "--steps of at least 1"),
    ("attack RUN --radius -1", "radii of at least 0"),
    ("report RUN --attack-images -1", "--attack-images of at least 0"),
    ("report RUN --seconds nan", "--seconds of at least 0"),
    ("report", "one or more directories of runs"),
    ("audit --model aol-small --image-size 30", "multiple of 4"),
    ("audit --model aol-small --num-classes 0", "num_classes"),
    ("audit torch.nn:Identity --input-shape x", "numbers such as 3,32,32"),
    ("audit torch.nn:Identity --input-shape 3 --mean 0.5 --std 0", "above 0"),
    ("audit torch.nn:Identity --input-shape 3 --require nan", "--require of at least 0"),
    ("compare --methods aol --budget soon", "expected a budget"),
    ("compare --methods aol --budget 1ep --model-options width=3", "width to be even"),
    ("data fetch mnist --url there", "http or https address"),
    ("demo --epochs 0", "expected epochs"),
    # Names.
    ("train --learning-rate 0.1", "unknown option --learning-rate; did you mean --lr?"),
    ("train --learning_rate=0.1", "did you mean --lr?"),
    ("train --optimiser sgd", "unknown option --optimiser; did you mean --optimizer?"),
    ("train --no-augmentt", "unknown option --no-augmentt"),
    ("zoo --xyz", "unknown option --xyz; see onelip zoo --help"),
    ("predict --pretrained digits-fats FILE", "did you mean 'digits-fast'?"),
    ("evaluate RUN --resize", "--resize needs --data"),
    ("report NOTHING", "NOTHING: there is no such directory"),
    ("check RUN", "this is a directory"),
    ("train --arch aol-small", "did you mean --model?"),
    ("evaluate RUN --dataset digits", "did you mean --data?"),
    ("certify RUN --output c.json", "did you mean --out?"),
    ("evaluate RUN --gpu 1", "did you mean --device?"),
    ("train --preset papr", "did you mean 'paper'"),
    ("train --model patchwise-tyni", "did you mean 'patchwise-tiny'"),
    ("audit --model patchwise-tyni", "did you mean 'patchwise-tiny'"),
    ("compare --methods aol --budget 1ep --model patchwise-tyni", "did you mean 'patchwise-tiny'"),
    ("train --method caley", "did you mean 'cayley'"),
    ("train --loss ema", "did you mean 'emma'"),
    ("train --loss no_such_module:loss", "cannot be imported"),
    ("train --loss emma --loss-options epsilom=1", "did you mean 'epsilon'?"),
    ("compare --methods aol,caley --budget 1ep", "did you mean 'cayley'"),
    ("methods caley", "did you mean 'cayley'"),
    ("models patchwise-tyni", "did you mean 'patchwise-tiny'"),
    ("train --model-options wdth=8", "patch, convs, linears; did you mean 'width'?"),
    ("train --model aol-dil --data digits --model-options dept=8", "did you mean 'depth'?"),
    ("train --method-options sids=auto", "aol has no option 'sids'; its method_options: side, steps, learn_weights"),
    ("train --method cayley --method-options lipshitz=1", "did you mean 'lipschitz'?"),
    ("train --data digit", "did you mean 'digits'"),
    ("evaluate RUN --data digit", "did you mean 'digits'"),
    ("certify RUN --data digit", "did you mean 'digits'"),
    ("compare --methods aol --budget 1ep --data digit", "did you mean 'digits'"),
    ("data fetch cifar", "did you mean 'cifar10'"),
    ("data fetch digits", "are part of the package"),
    ("audit no.such.package:net --input-shape 3", "expected package.module:name"),
    ("audit torch.nn:Idenity --input-shape 3", "has no 'Idenity'"),
    # Missing paths, and paths that are in use.
    ("train --resume nothing", "there is no such directory"),
    ("train --resume RUN --data nothing.npz", "no such file or directory"),
    ("evaluate nothing", "there is no such directory"),
    ("predict nothing FILE", "there is no such directory"),
    ("predict RUN", "IMAGES are missing"),
    ("predict RUN nothing.png", "nothing.png: no such file or folder"),
    ("predict RUN EMPTY", "the folder is empty"),
    ("predict RUN EMPTY/*.png", "no file matches this pattern"),
    ("certify nothing", "there is no such directory"),
    ("attack nothing", "there is no such directory"),
    ("audit nothing", "there is no such directory"),
    ("export nothing", "there is no such directory"),
    ("check nothing", "no such file"),
    ("train --data nothing.npz", "nor an existing file or folder"),
    ("audit nothing.py:net --input-shape 3", "nothing.py: no such file"),
    ("certify RUN --image nothing.png", "--image nothing.png: no such file"),
    ("attack RUN --certificate nothing", "--certificate nothing: no such file"),
    ("export RUN --certificate nothing", "--certificate nothing: no such file"),
    ("certify RUN --out nothing/c.json", "there is no directory nothing"),
    ("attack RUN --out nothing/flips.npz", "there is no directory nothing"),
    ("train --out RUN", "already contains a run"),
    ("train --out FILE", "is a file; choose another --out"),
    ("compare --methods aol --budget 1ep --out FILE", "is a file; choose another --out"),
    ("export RUN --format onnx --out RUN/model.onnx/", "expected a file name, got a directory"),
    ("export RUN --out RUN/plain.safetensors", "--force"),
    # Options that exclude each other.
    ("train --resume nothing --preset paper", "--resume and --preset exclude each other"),
    ("train --resume RUN --out other", "--resume and --out exclude each other"),
    ("train --resume RUN --lr 0.7", "the run has --lr"),
    ("predict RUN FILE --csv --json", "--csv and --json exclude each other"),
    ("certify RUN --mode real-arithmetic --out c.json", "--out needs --mode sound"),
    ("attack RUN --foolbox FMN --integers", "--foolbox and --integers exclude each other"),
    ("audit", "a TARGET or --model"),
    ("audit torch.nn:Identity", "needs --input-shape"),
    ("export RUN --format hub --dtype float64", "--dtype and --format hub exclude each other"),
]

FAILED_JOBS = [
    # The command is valid, but a file is missing or damaged.
    ("train --data cifar10 --data-root EMPTY", "onelip data fetch cifar10"),
    ("evaluate RUN --data cifar10 --data-root EMPTY", "onelip data fetch cifar10"),
    ("train --data FILE", "expected an .npz file or one of"),
    ("train --resume BROKEN", "the file is damaged"),
    ("evaluate BROKEN", "the file is damaged"),
    ("certify RUN --image FILE", "not a complete PNG"),
    ("predict RUN FILE", "not a complete PNG"),
    ("predict RUN FILE --skip-bad", "no image can be used (1 skipped)"),
    ("attack RUN --certificate FILE", "expected JSON"),
    ("export RUN --certificate FILE", "expected a certificate"),
    ("check FILE", "REJECTED"),
    # The answer is no.
    ("audit torch.nn:Softplus --input-shape 3", "NO PROOF"),
    ("audit torch.nn:Identity --input-shape 3 --require 0.5", "Not proved"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Paths for the words in capitals."""
    root = tmp_path_factory.mktemp("places")
    train(SMALL.replace(epochs=1), root / "run")
    (root / "run" / "model.onnx").mkdir()
    (root / "file").write_text("not what it should be")
    (root / "empty").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{")
    return {name.upper(): str(root / name) for name in ("run", "file", "empty", "broken")}


@pytest.mark.parametrize(
    ("command", "message", "code"), [(*row, 2) for row in WRONG_COMMANDS] + [(*row, 1) for row in FAILED_JOBS]
)
def test_exit_codes(capsys, tmp_path, monkeypatch, places, command, message, code):
    monkeypatch.chdir(tmp_path)
    words = [re.sub("^[A-Z]+", lambda found: places.get(found[0], found[0]), word) for word in command.split()]
    got, out, err = call(capsys, *words)
    assert message in re.sub(r"\s+", " ", out + err)  # tyro breaks lines
    assert got == code
    assert not list(tmp_path.iterdir())
