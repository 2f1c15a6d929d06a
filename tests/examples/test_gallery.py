"""The examples of the gallery in small: each keeps the promise that its proved constant makes."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"


def load(name):
    spec = importlib.util.spec_from_file_location(name, GALLERY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_critics_give_distances_from_below(tmp_path):
    picture = tmp_path / "gan.png"
    found = load("wasserstein_critic").main(["--steps", "60", "--gan-steps", "10", "--out", str(picture)])
    for true, estimate, constant in found.values():
        assert 0.8 * true < estimate < true + 0.05  # 20,000 samples of each side
        assert constant < 1.00001
    assert picture.stat().st_size > 1000


def test_rays_never_step_through_the_surface(tmp_path):
    picture, exported = tmp_path / "field.png", tmp_path / "field.onnx"
    found = load("distance_field").main(["--steps", "60", "--out", str(picture), "--onnx", str(exported)])
    assert found["overshoot"] < 1e-5
    assert found["mean_error"] < 0.15
    assert exported.stat().st_size > 1000


def test_signed_distances_of_a_square():
    module = load("distance_field")
    square = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])
    points = torch.tensor([[0.0, 0.1], [2.0, 0.1], [2.0, 2.0], [0.75, 0.1]])
    wanted = torch.tensor([-0.9, 1.0, math.sqrt(2), -0.25])
    assert torch.allclose(module.signed_distance(points, square), wanted, atol=1e-6)


def test_the_inverse_of_a_flow_is_within_its_tolerance(tmp_path):
    picture = tmp_path / "flow.png"
    found = load("invertible_block").main(["--steps", "10", "--blocks", "2", "--out", str(picture)])
    assert found["contraction"] < 0.9001
    assert found["inverse_error"] < 1e-4
    assert picture.stat().st_size > 1000


def test_robust_sets_keep_their_coverage_under_attack(tmp_path):
    rows = load("conformal_sets").main(["--epochs", "3", "--out", str(tmp_path / "sets.png")])
    for row in rows:
        assert row["robust"] >= 0.85  # promised 0.9 on average; 178 images have a deviation of 0.022
    assert rows[-1]["plain"] < rows[0]["plain"] - 0.05
    assert rows[-1]["size"] > rows[0]["size"]


def test_thresholds_keep_the_promised_share():
    scores, labels = torch.arange(19.0)[:, None].repeat(1, 2), torch.zeros(19, dtype=torch.long)
    module = load("conformal_sets")
    assert module.threshold(scores, labels, 0.1) == 1.0  # floor(0.1 * 20) = 2 of 20 may lie below the threshold
    assert module.threshold(scores, labels, 0.04) == -math.inf


def test_plug_and_play_steps_never_grow(tmp_path):
    found = load("plug_and_play").main(["--steps", "40", "--iterations", "30", "--out", str(tmp_path / "pnp.png")])
    assert found["constant"] <= 1.00001
    assert found["largest_growth"] <= 1 + 1e-9
    assert found["last_over_first"] < 0.5


def test_intervals_hold_for_every_disturbance_that_is_found(tmp_path):
    found = load("certified_intervals").main(["--steps", "40", "--out", str(tmp_path / "intervals.png")])
    assert 0 < found["worst"] <= found["half"] * (1 + 1e-5)


def test_certified_auroc_falls_with_the_budget(tmp_path):
    rows = load("one_class").main(["--steps", "150", "--out", str(tmp_path / "one.png")])
    values = [row["auroc"] for row in rows]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.9


@pytest.mark.parametrize(("inside", "outside", "wanted"), [([1.0, 2.0], [0.0], 1.0), ([1.0], [1.0, 0.0], 0.75)])
def test_auroc_counts_pairs(inside, outside, wanted):
    assert load("one_class").auroc(torch.tensor(inside), torch.tensor(outside)) == wanted


def test_monotone_responses_never_fall(tmp_path):
    picture = tmp_path / "monotone.png"
    found = load("monotone").main(["--steps", "500", "--out", str(picture)])
    assert found["monotone"]["falls"] == 0 < found["plain"]["falls"]
    assert found["monotone"]["error"] < 0.2
    assert picture.stat().st_size > 1000


def test_the_audit_fails_the_build_above_its_limit():
    assert load("audit_in_ci").main() == [0, 1]
