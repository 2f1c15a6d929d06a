"""The optimizers of a recipe: what they are, resuming, and that evaluation never sees unscaled weights."""

import math

import pytest
import torch
from _process_pairs import assert_close, finish_pair
from _runs import SMALL, Interrupted, Interrupter, same_bytes

import onelip
from onelip.data import load_data
from onelip.optim import LipschitzMuon
from onelip.training import (
    Diverged,
    Recipe,
    RecipeError,
    RunDirectory,
    load_run,
    make_optimizer,
    preset,
    read_log,
    train,
)
from onelip.training.checkpoint import read_position
from onelip.training.learner import Learner

FAST = SMALL.replace(
    model="aol-fast-small",
    model_options=("widths=[8,8,8]", "depths=[2,1,1]"),
    optimizer="muon",
    momentum=0.8,
    lr=0.05,
    epochs=2,
    threads=1,
    interpolations="none",
    rotation=0.0,
)


def test_by_name():
    model = onelip.create_model("patchwise-tiny", image_size=8, in_channels=1)
    recipe = Recipe(lr=0.02, momentum=0.7, weight_decay=0.01)
    muon = make_optimizer(model, recipe.replace(optimizer="muon"))
    assert isinstance(muon, LipschitzMuon)
    assert (muon.defaults["lr"], muon.defaults["momentum"], muon.defaults["weight_decay"]) == (0.02, 0.7, 0.01)
    adamw = make_optimizer(model, recipe.replace(optimizer="adamw"))
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.defaults["betas"] == (0.7, 0.999)
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.01, 0.0]
    assert isinstance(make_optimizer(model, recipe), torch.optim.SGD)
    with pytest.raises(RecipeError, match="'sgd' or 'adamw' or 'muon', got 'moun'"):
        Recipe(optimizer="moun")
    with pytest.raises(RecipeError, match="momentum below 1"):
        Recipe(optimizer="muon", momentum=1.0)


def test_options_of_the_optimizer():
    model = onelip.create_model("patchwise-tiny", image_size=8, in_channels=1)
    recipe = Recipe(optimizer="muon", optimizer_options=("retraction=r1", "tangent=false", "orthogonalize=0"))
    found = make_optimizer(model, recipe).defaults
    assert (found["retraction"], found["tangent"], found["orthogonalize"]) == ("r1", False, 0)
    for options, message in (
        (("retraction=r3",), "optimizer muon: .*'r1', 'r2' or None"),
        (("speed=9",), "speed"),
        (("tangent=no",), "tangent to be true or false, got 'no'"),
        (("weight_decay=0.1",), "--weight-decay"),
        (("products=float32",), "--products"),
        (("lr=0.1",), "--lr"),
        (("momentum=0.1",), "--momentum"),
    ):
        with pytest.raises(RecipeError, match=message):
            make_optimizer(model, Recipe(optimizer="muon", optimizer_options=options))
    with pytest.raises(RecipeError, match="--momentum, the second"):
        make_optimizer(model, Recipe(optimizer="adamw", optimizer_options=("betas=[0.9,0.9]",)))
    plain = onelip.create_model("patchwise-tiny", image_size=8, in_channels=1, method="cayley")
    with pytest.raises(RecipeError, match="the network has none; use --optimizer sgd"):
        make_optimizer(plain, Recipe(optimizer="muon", method="cayley"))
    with pytest.raises(RecipeError, match="optimizer_options as key=value"):
        Recipe(optimizer_options=("fast",))


@pytest.mark.parametrize(
    ("options", "is_unscaled"),
    [((), True), (("retraction=r1",), False), (("every=2",), True), (("every=2", "tangent=false"), False)],
)
def test_steps_without_r2_use_the_weights_of_aol(options, is_unscaled):
    torch.manual_seed(0)
    model = onelip.create_model("aol-fast-small", image_size=8, in_channels=1, widths=(8, 8, 8), depths=(1, 1, 1))
    seen = []
    aol = model.fc1.parametrizations.weight[0]
    model.fc1.register_forward_hook(lambda *_: seen.append(aol.is_unscaled))
    learner = Learner(FAST.replace(optimizer_options=options), model)
    learner.step(torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64), batch_size=4, progress=0.0, lr=0.01)
    assert seen == [is_unscaled]


@pytest.mark.parametrize(
    ("changes", "is_unscaled"),
    [({"optimizer": "sgd", "retract_every": 2}, True), ({"optimizer": "sgd"}, False), ({"optimizer": "muon"}, False)],
)
def test_retracted_steps_of_kernels_with_several_taps(changes, is_unscaled):
    torch.manual_seed(0)
    model = onelip.create_model("patchwise-tiny", image_size=8, in_channels=1, channels=8, width=2)
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3))
    P = layer.parametrizations.weight.original
    seen = []
    hook = layer.register_forward_hook(lambda *_: seen.append(torch.equal(layer.weight, P)))
    with torch.no_grad():
        P *= 1.1  # what AOL would undo
    learner = Learner(Recipe(momentum=0.5, **changes), model)
    distances = []
    for _ in range(4):
        learner.step(torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64), batch_size=4, progress=0.0, lr=1e-4)
        flat = P.detach().flatten(1)
        distances.append(float((flat @ flat.T - torch.eye(len(flat))).abs().max()))
    hook.remove()
    assert seen == [is_unscaled] * 4
    if changes.get("retract_every"):
        assert distances[0] > 0.1 > 0.01 > distances[1]  # retracted at the second step
    assert onelip.audit(model, torch.zeros(1, 1, 8, 8), lower=False).upper <= 1 + 1e-6


def test_retract_every_is_for_aol_and_for_optimizers_of_torch():
    with pytest.raises(RecipeError, match="--optimizer-options every=N"):
        Recipe(optimizer="muon", retract_every=4)
    with pytest.raises(RecipeError, match="retract_every of at least 0, got -1"):
        Recipe(retract_every=-1)
    plain = onelip.create_model("patchwise-tiny", image_size=8, in_channels=1, method="bcop")
    with pytest.raises(RecipeError, match="a model with AOL layers, got none"):
        make_optimizer(plain, Recipe(retract_every=4))


def test_two_processes(tmp_path):
    options = ["--model-options", *FAST.model_options, "--products", "float32"]
    flags = [
        *("--data", "digits", "--model", "aol-fast-small", "--optimizer", "muon", "--momentum", "0.8"),
        *("--batch-size", "241", "--epochs", "1", "--lr", "0.02", "--weight-decay", "0"),
    ]
    finish_pair(tmp_path / "log", "train", *flags, *options, "--out", tmp_path / "two")
    changes = {"batch_size": 241, "epochs": 1, "lr": 0.02, "weight_decay": 0.0, "optimizer": "muon", "momentum": 0.8}
    recipe = preset("digits").replace(model="aol-fast-small", model_options=FAST.model_options, **changes)
    train(recipe.replace(products="float32"), tmp_path / "one")
    assert_close(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "retracted sgd"])
@pytest.mark.parametrize("model", ["aol-fast-small", "patchwise-tiny"])
def test_killed_and_resumed(optimizer, model, tmp_path, monkeypatch):
    """Retractions are counted through the interruption, which is between two of them."""
    every = 0 if optimizer == "adamw" else 3
    is_sgd = optimizer == "retracted sgd"
    recipe = FAST.replace(
        optimizer="sgd" if is_sgd else optimizer,
        retract_every=every if is_sgd else 0,
        optimizer_options=("every=3",) if optimizer == "muon" else (),
        model=model,
        lr=0.01,
    )
    recipe = recipe.replace(epoch_part=0.8, evaluate_every=2, epochs=3)
    if model == "patchwise-tiny":  # with 3x3 kernels
        recipe = recipe.replace(model_options=SMALL.model_options)
    monkeypatch.setattr("onelip.training.learner.bfloat16_is_faster", lambda device: False)
    train(recipe, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "part", display=Interrupter(8), save_steps=4)
    steps = read_position(tmp_path / "part" / "checkpoint.safetensors").batch
    assert not every or steps % every
    # The type of products is measured once, and kept in the config.
    monkeypatch.setattr("onelip.training.learner.bfloat16_is_faster", lambda device: True)
    monkeypatch.setattr("onelip.optim.muon.bfloat16_is_faster", lambda device: True)
    train(recipe, tmp_path / "part", resume=True)
    assert same_bytes(tmp_path / "whole", tmp_path / "part")


def test_parts_of_several_processes(tmp_path):
    """The last batch has 2 images, one for each process; each part of a step has communication of the centring."""
    flags = [
        *("--data", "digits", "--model", "aol-fast-small", "--optimizer", "muon", "--momentum", "0.8", "--lr", "0.02"),
        *("--batch-size", "240", "--epochs", "1", "--accumulate", "3", "--model-options", *FAST.model_options),
    ]
    finish_pair(tmp_path / "log", "train", *flags, "--out", tmp_path / "two")
    log = read_log(RunDirectory(tmp_path / "two"))
    assert math.isfinite(log[0]["train_loss"])


def test_muon_learns_more_than_sgd(tmp_path):
    """On the digits, from the same weights."""
    recipe = FAST.replace(
        model_options=("widths=[16,16,16]", "depths=[1,1,1]"), batch_size=50, augment=False, offset=1.0
    )
    muon = train(recipe, tmp_path / "muon")["test"]["cra"]["36/255"]
    sgd = train(recipe.replace(optimizer="sgd", lr=0.005), tmp_path / "sgd")["test"]["cra"]["36/255"]
    assert muon > sgd + 0.2


def test_evaluation_never_sees_unscaled_weights(tmp_path):
    """A network whose P is far from orthogonal: steps use P, everything else the weights of AOL."""
    data = load_data("digits")
    torch.manual_seed(0)
    model = onelip.create_model("aol-fast-small", image_size=8, in_channels=1, widths=(8, 8, 8), depths=(1, 1, 1))
    for name, parameter in model.named_parameters():
        if "original" in name:
            parameter.data *= 2
    learner = Learner(FAST, model)
    seen = []
    hook = model.fc1.register_forward_hook(lambda layer, *_: seen.append(layer.weight.detach().clone()))
    exact = model.fc1.weight.detach().clone()
    P = model.fc1.parametrizations.weight.original.detach().clone()
    model.train()
    images, labels = data.train_images[:20] / 255.0, data.train_labels[:20]
    learner.step(images, labels, batch_size=20, progress=0.0, lr=0.0)
    assert torch.equal(seen.pop(), P)
    # lr = 0, but R2 has moved P; what AOL makes of the P before is compared.
    model.fc1.parametrizations.weight.original.data.copy_(P)
    for is_training in (True, False):
        model.train(is_training)(images)
        assert torch.equal(seen.pop(), exact)
        assert torch.equal(onelip.bake(model).fc1.weight, exact)
    hook.remove()
    assert onelip.audit(model.train(), images[:1], lower=False).upper <= 1 + 1e-6


def test_a_finished_run_is_proved(tmp_path):
    train(FAST, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert 0.9 < run.lipschitz <= 1 + 1e-6
    found = onelip.certify(run.plain.double(), load_data("digits").test_images[:20])
    assert found.constant <= 1 + 1e-6


def test_divergence_keeps_the_last_good_weights(tmp_path, monkeypatch):
    steps = []
    real = torch.Tensor.backward

    def backward(tensor, *arguments, **settings):
        real(tensor * (float("nan") if len(steps) == 9 else 1.0), *arguments, **settings)
        steps.append(tensor)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    with pytest.raises(Diverged, match=r"a gradient has a NaN .* \(step 10, epoch 2\).* try a lower --lr"):
        train(FAST, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert all(p.isfinite().all() for p in run.model.parameters())


@pytest.mark.parametrize("change", [{"epoch_part": 0.0}, {"epoch_part": 1.5}, {"evaluate_every": 0}])
def test_parts_that_mean_nothing(change):
    with pytest.raises(RecipeError, match=next(iter(change))):
        Recipe(**change)
