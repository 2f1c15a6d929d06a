"""Time of proofs of the norms of single layers: float64, rational arithmetic, and LAPACK for an unproved value."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _harness import interleaved, publish
from torch import nn

import onelip
from onelip.bounds import bound_layer, bound_weight, exact_bound
from onelip.core.geometry import geometry_of


def layers() -> dict[str, nn.Module]:
    """Weights as AOL leaves them, from normal and from orthogonal parameters."""
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        "dense 1024 -> 1024, near orthogonal": nn.Linear(1024, 1024, bias=False),
        "dense 1024 -> 1024, gaussian": nn.Linear(1024, 1024, bias=False),
        "3x3, 192 -> 192, gaussian": nn.Conv2d(192, 192, 3, padding=1, bias=False),
        "3x3, 192 -> 192, near identity": nn.Conv2d(192, 192, 3, padding=1, bias=False),
    }
    for name, layer in made.items():
        assert isinstance(layer.weight, torch.Tensor)
        if name.endswith("near orthogonal"):
            nn.init.orthogonal_(layer.weight)
        else:
            nn.init.normal_(layer.weight)
        if name.endswith("near identity"):
            with torch.no_grad():
                layer.weight.mul_(0.002).add_(nn.init.dirac_(torch.empty_like(layer.weight)))
        made[name] = onelip.bake(onelip.aol(layer))
    return made


def measured_norm(layer: nn.Module, size: int = 32, steps: int = 200) -> float:
    """A lower bound: the singular value of a matrix, or power iteration on images."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    if isinstance(layer, nn.Linear):
        return float(torch.linalg.matrix_norm(weight.detach().double(), 2))
    weight = weight.detach().double()
    x = torch.randn(1, weight.shape[1], size, size, dtype=torch.float64)
    y = x
    for _ in range(steps):
        y = nn.functional.conv2d(x / x.norm(), weight, padding=1)
        x = nn.functional.conv_transpose2d(y, weight, padding=1)
    return float(x.norm() / y.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-exact", action="store_true", help="leave out rational arithmetic, which takes longest")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, layer in layers().items():
        truth = measured_norm(layer, steps=30)
        geometry, weight = geometry_of(layer), layer.weight
        assert isinstance(weight, torch.Tensor)
        results: dict[str, float] = {}

        def keep(way: str, function: Callable[[], float], results: dict[str, float] = results) -> Callable[[], object]:
            return lambda: results.__setitem__(way, function())

        efforts = {effort: bound_weight(weight, geometry, effort=effort) for effort in ("quick", "normal")}
        ways = {
            "float64, quick": keep("float64, quick", lambda layer=layer: bound_layer(layer, effort="quick").value),
            "float64, normal": keep("float64, normal", lambda layer=layer: bound_layer(layer).value),
        }
        if not arguments.no_exact:
            for effort, bound in efforts.items():

                def prove(weight=weight, geometry=geometry, witness=bound.witness) -> float:
                    return exact_bound(weight, geometry, witness).value

                ways[f"exact, {effort}"] = keep(f"exact, {effort}", prove)
        if isinstance(layer, nn.Linear):
            ways["LAPACK, unproved"] = keep("LAPACK, unproved", lambda layer=layer: measured_norm(layer))
        times = interleaved(ways, arguments.rounds, warm_up=min(1, arguments.rounds - 1))
        rows += [
            {
                "layer": name,
                "way": way,
                "bound": results[way],
                "above a measured norm": results[way] / truth - 1,
                "seconds": timing.median,
                "ratio to quick": timing.ratio_to(times["float64, quick"]),
            }
            for way, timing in times.items()
        ]
    publish(
        "bounds", rows, what="upper bounds of the norm of stored weights; exact proves the witness that float64 found"
    )


if __name__ == "__main__":
    main()
