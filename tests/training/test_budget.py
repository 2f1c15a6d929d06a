"""Budgets of time: the recipe they start from, the epochs that fit, what is refused."""

import io
import json
import re
import time

import pytest
import torch
from _process_pairs import finish_pair
from _runs import call
from rich.console import Console

from onelip.data import load_data
from onelip.methods.registry import METHODS
from onelip.training import (
    Display,
    Recipe,
    RecipeError,
    RunDirectory,
    budget as module,
    fit_to_budget,
    read_config,
    recipe_for_budget,
    train,
)
from onelip.training.distributed import Process
from onelip.training.objective import with_method
from onelip.training.recipe import format_seconds, parse_seconds

TINY = ("widths=[8,8,8]", "depths=[1,1,1]")
CPU = Process(torch.device("cpu"))


@pytest.fixture(scope="module")
def digits():
    return load_data("digits")


def times(monkeypatch, step, evaluation, bfloat16=None):
    """Pretend that steps and evaluations take these seconds."""
    low = step if bfloat16 is None else bfloat16
    monkeypatch.setattr(module, "seconds_per_step", lambda recipe, *_: low if recipe.bf16 else step)
    monkeypatch.setattr(module, "seconds_per_evaluation", lambda *_: evaluation)


def fitted(monkeypatch, digits, seconds, step, evaluation):
    times(monkeypatch, step, evaluation)
    return fit_to_budget(Recipe(data="digits", model="patchwise-tiny", batch_size=100), seconds, digits, CPU)


def steps_of(recipe, digits):
    images = round(len(digits.train_images) * recipe.epoch_part)
    return recipe.epochs * -(-images // recipe.batch_size)


@pytest.mark.parametrize("seconds", [3.0, 7.7, 30.0, 333.0])
def test_as_many_steps_as_fit(monkeypatch, digits, seconds):
    step, evaluation = 0.05, 0.5
    recipe = fitted(monkeypatch, digits, seconds, step, evaluation)
    evaluations = -(-recipe.epochs // recipe.evaluate_every)
    spent = steps_of(recipe, digits) * step + (evaluations + 1) * evaluation
    assert 0.7 * seconds < spent <= seconds + step * recipe.epochs
    assert evaluations <= 10


def test_less_than_an_epoch(monkeypatch, digits):
    times(monkeypatch, 1.0, 0.1)
    recipe = fit_to_budget(Recipe(data="digits", model="patchwise-tiny", batch_size=10), 26.0, digits, CPU)
    assert (recipe.epochs, steps_of(recipe, digits)) == (1, 25)
    assert recipe.epoch_part < 1


def test_epochs_have_whole_batches(monkeypatch, digits):
    """Every step is counted: a last batch of a few images costs a step too."""
    for seconds in (7.0, 11.3, 19.9):
        recipe = fitted(monkeypatch, digits, seconds, 0.05, 0.1)
        images = round(len(digits.train_images) * recipe.epoch_part)
        assert recipe.epoch_part == 1 or images % recipe.batch_size == 0
        assert steps_of(recipe, digits) * 0.05 < seconds


def test_too_small_a_budget_is_refused_in_one_line(monkeypatch, digits, capsys, tmp_path):
    with pytest.raises(RecipeError, match=r"a budget of 1s is too small: .* use at least --budget 4s"):
        fitted(monkeypatch, digits, 1.0, 0.1, 0.5)
    code, _, err = call(capsys, "train", "--budget", "1s", "--out", tmp_path / "run")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_bfloat16_where_it_is_faster(monkeypatch, digits):
    recipe = Recipe(data="digits", model="patchwise-tiny")
    for seconds, wanted in ((0.05, True), (0.095, False), (0.2, False)):
        times(monkeypatch, 0.1, 0.5, bfloat16=seconds)
        assert fit_to_budget(recipe, 60, digits, CPU).bf16 is wanted
    times(monkeypatch, 0.1, 0.5, bfloat16=0.05)
    found = fit_to_budget(recipe, 60, digits, CPU)
    assert found.epochs == fit_to_budget(recipe.replace(bf16=True), 60, digits, CPU).epochs


def test_evaluations_take_a_tenth_of_the_budget_at_most(monkeypatch, digits):
    times(monkeypatch, 0.02, 1.5)
    recipe = fit_to_budget(Recipe(data="digits", model="patchwise-tiny", batch_size=100), 20, digits, CPU)
    assert -(-recipe.epochs // recipe.evaluate_every) == 2
    assert steps_of(recipe, digits) * 0.02 > 0.7 * 20


@pytest.mark.parametrize(("one", "all_threads", "wanted"), [(0.1, 0.3, 1), (0.3, 0.1, 0)])
def test_the_faster_number_of_threads(monkeypatch, digits, tmp_path, one, all_threads, wanted):
    before, shown = torch.get_num_threads(), io.StringIO()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(module, "seconds_per_step", lambda recipe, *_: one if recipe.threads == 1 else all_threads)
        monkeypatch.setattr(module, "seconds_per_evaluation", lambda *_: 0.1)
        recipe = Recipe(data="digits", model="patchwise-tiny", batch_size=500)
        assert fit_to_budget(recipe, 8, digits, CPU).threads == wanted
        assert fit_to_budget(recipe.replace(threads=2), 8, digits, CPU).threads == 2
        train(recipe, tmp_path / "run", budget=8, display=Display(Console(file=shown, width=200)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    threads, other = ("1 thread", 2) if wanted else ("2 threads", 1)
    assert f"device    cpu, {threads} (faster than {other}, measured)" in shown.getvalue()
    assert read_config(RunDirectory(tmp_path / "run")).recipe.threads == wanted


def test_a_gpu_gets_a_larger_network(monkeypatch, digits):
    times(monkeypatch, 0.01, 0.1)
    monkeypatch.setattr(module, "require_memory", lambda *_: (module.StepMemory(1, 1, 1), 1e12))
    gpu, recipe = Process(torch.device("cuda")), recipe_for_budget(60, "digits")
    found = {device: fit_to_budget(recipe, 60, digits, device).model for device in (CPU, gpu)}
    assert found == {CPU: "aol-fast-small", gpu: "aol-fast-large"}
    for chosen in ({"model": "aol-small"}, {"model_options": ("overlap=0",)}):
        assert fit_to_budget(recipe.replace(**chosen), 60, digits, gpu).model == chosen.get("model", recipe.model)
    kept = fit_to_budget(recipe.replace(lr=0.01, hue=0.3), 60, digits, gpu)
    assert (kept.model, kept.lr, kept.hue) == ("aol-fast-large", 0.01, 0.3)
    cayley = fit_to_budget(with_method(recipe, "cayley"), 60, digits, gpu, {"method"})
    lr = METHODS["cayley"].fast_lr * (cayley.batch_size / 500) ** 0.5
    assert (cayley.model, cayley.lr) == ("aol-fast-large", pytest.approx(lr))


def test_small_data_get_small_batches(monkeypatch, digits):
    times(monkeypatch, 0.01, 0.1)
    recipe = fit_to_budget(recipe_for_budget(20).replace(data="digits"), 20, digits, CPU)
    assert recipe.batch_size == len(digits.train_images) // 20
    assert recipe.lr == pytest.approx(recipe_for_budget(20).lr * (recipe.batch_size / 500) ** 0.5)
    own = fit_to_budget(recipe_for_budget(20).replace(data="digits", batch_size=200), 20, digits, CPU)
    assert (own.batch_size, own.lr) == (200, recipe_for_budget(20).lr)


def test_chosen_fields_stay(monkeypatch, digits):
    times(monkeypatch, 0.01, 0.1, bfloat16=0.001)
    recipe = recipe_for_budget(20).replace(data="digits")
    found = fit_to_budget(recipe, 20, digits, CPU, {"batch_size", "bf16"})
    assert (found.batch_size, found.bf16) == (500, False)
    found = fit_to_budget(recipe, 20, digits, CPU, {"lr"})
    assert (found.batch_size < 500, found.lr, found.bf16) == (True, recipe.lr, True)


def test_named_options_stay(monkeypatch, capsys, tmp_path):
    """Also where they have the value that the budget starts with."""
    times(monkeypatch, 0.05, 0.1, bfloat16=0.01)
    flags = ("--lr=0.08", "--no-bf16", "--batch-size", "500", "--threads", "1", "--model-options", *TINY)
    code, _, err = call(capsys, "train", "--budget", "4s", *flags, "--out", tmp_path / "run")
    assert code == 0, err
    found = read_config(RunDirectory(tmp_path / "run")).recipe
    assert (found.lr, found.bf16, found.batch_size) == (0.08, False, 500)


def test_measuring_leaves_nothing_behind(digits):
    before = torch.get_rng_state()
    recipe = recipe_for_budget(60).replace(data="digits", model_options=TINY, threads=1)
    found = fit_to_budget(recipe, 60, digits, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.epochs >= 1
    changed = ("bf16", "epochs", "epoch_part", "evaluate_every", "batch_size", "lr")
    assert found.replace(**{name: getattr(recipe, name) for name in changed}) == recipe


def test_a_run_with_a_budget(monkeypatch, capsys, tmp_path):
    times(monkeypatch, 0.05, 0.1)
    flags = ("train", "--budget", "4s", "--model-options", *TINY, "--threads", "1", "--out", tmp_path / "run")
    code, out, err = call(capsys, *flags)
    assert code == 0, err
    assert re.search(
        r"network +aol-fast-small, aol: [\d,]+ parameters\ntraining +muon, learning rate .*, batch size \d+", out
    )
    assert "time      4s, the budget" in out
    config = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert (config["model"], config["optimizer"], config["data"]) == ("aol-fast-small", "muon", "digits")
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert len(log) == -(-config["epochs"] // config["evaluate_every"])
    assert json.loads(log[-1])["epoch"] == config["epochs"]
    # The config is a recipe like any other: the same run again has the same weights.
    again = Recipe.from_json(config)
    train(again, tmp_path / "again")
    files = [tmp_path / name / "plain.safetensors" for name in ("run", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budget", "soon"], "expected a budget of time such as 30s, 10m or 1h30m, got 'soon'"),
        (["--budget", "0s"], "expected a budget"),
        (["--budget", "1..5m"], "expected a budget"),
        (["--budget", "10m", "--epochs", "3"], "--budget and --epochs exclude each other"),
        (["--budget", "10m", "--epoch-part", "0.5"], "--budget and --epoch-part exclude each other"),
        (
            ["--data", "cifar10", "--evaluate-every", "3"],
            "--evaluate-every needs --epochs: without it, the run has a budget of 10m",
        ),
        (["--budget", "10m", "--preset", "paper"], "--budget and --preset exclude each other"),
        (["--budget", "10m", "--resume", "somewhere"], "--resume and --budget exclude each other"),
    ],
)
def test_what_makes_no_sense(capsys, flags, message):
    code, _, err = call(capsys, "train", *flags)
    assert code == 2
    assert message in err


def test_times():
    for text, seconds in {"30s": 30, "10m": 600, "1h": 3600, "1.5h": 5400, "1h30m": 5400, "2M": 120}.items():
        assert parse_seconds(text) == seconds
    assert all(parse_seconds(format_seconds(s)) == s for s in (1, 59, 60, 61, 3600, 5400, 86399))


def default_of(option, capsys, *flags):
    """The default of an option in the help."""
    _, out, _ = call(capsys, "train", "--data", "cifar10", "--budget", "10m", *flags, "--help")
    return re.search(rf"--{option} (?:[A-Z]+|{{\S*}}) .*?\(default: ([^)]*)\)", " ".join(out.split())).group(1)


def test_the_recipe_of_a_budget(capsys):
    assert default_of("model", capsys) == "aol-fast-medium"
    assert (default_of("optimizer", capsys), default_of("lr", capsys)) == ("muon", "0.06")


@pytest.mark.parametrize(
    ("flags", "optimizer", "lr", "momentum"),
    [
        (("--model", "aol-small"), "muon", "0.005", "0.8"),
        (("--optimizer", "sgd"), "sgd", "0.9", "0.9"),
        (("--optimizer", "adamw"), "adamw", "0.003", "0.9"),
        (("--model", "aol-small", "--optimizer", "sgd"), "sgd", "0.01", "0.9"),
        (("--method", "cayley"), "sgd", f"{METHODS['cayley'].fast_lr:g}", "0.9"),
        (("--method", "cayley", "--optimizer", "sgd"), "sgd", f"{METHODS['cayley'].fast_lr:g}", "0.9"),
        (("--method", "cayley", "--optimizer", "muon"), "muon", "0.06", "0.8"),
        (("--method", "lln"), "sgd", "0.06", "0.9"),
        (("--method", "bjorck"), "muon", "0.06", "0.8"),
        (("--method", "cayley", "--model", "aol-small"), "sgd", "0.02", "0.9"),
        (("--model", "aol-fast-large"), "muon", "0.06", "0.8"),
    ],
)
def test_the_rate_depends_on_network_method_and_optimizer(capsys, flags, optimizer, lr, momentum):
    found = tuple(default_of(option, capsys, *flags) for option in ("optimizer", "lr", "momentum"))
    assert found == (optimizer, lr, momentum)


def test_two_processes(tmp_path):
    """Layers communicate in each step, so all processes time the same steps and decide alike."""
    out = tmp_path / "run"
    flags = ("--budget", "8s", "--model-options", *TINY, "--accumulate", "2", "--out", out)
    finish_pair(tmp_path / "log", "train", *flags)
    assert json.loads((out / "results.json").read_text())["test"]["accuracy"] > 0.5


def test_retractions_after_every_few_steps_are_a_part_of_the_time_of_a_step(monkeypatch, digits):
    recipe = Recipe(data="digits", model="patchwise-tiny", batch_size=100, retract_every=4)
    called = []

    def slow(model):
        called.append(model)
        time.sleep(2.0)

    monkeypatch.setattr(module, "retract_", slow)
    assert module.seconds_per_step(recipe, digits, CPU, 5) >= 0.5  # a fourth of a retraction
    assert len(called) == 1
    module.seconds_per_step(recipe.replace(retract_every=1), digits, CPU, 5)
    assert len(called) == 1  # each step that was timed has a retraction
