"""AOL with optimizers of torch, schedulefree and pogo-torch, beside those of onelip: results/other_optimizers.json.

pip install schedulefree pogo-torch
python benchmarks/other_optimizers.py --data-root DIR [--out DIR]

Four dense AOL layers of width 512 on CIFAR-10, because torch.optim.Muon and POGO take matrices only. As in the part
`methods` of fast_trials.py, each row has the same CPU seconds on one thread, and the best learning rate on 5,000
held-out images, from the same search; then three seeds. Biases are trained by SGD at the same rate. Momentum is 0.9, or
as stated in the row. The rate of schedule-free optimizers is constant after a warm-up, as their authors say.
"""

from collections.abc import Callable
from typing import Any

import torch
from fast_trials import BASE, Record, Runs, Trials, make_parser
from torch import Tensor, nn
from torch.optim import SGD, Muon, Optimizer

from onelip.optim import LipschitzMuon, retract_after
from onelip.optim.layers import orthogonal_parameters

RECIPE = BASE.replace(model="aol-fc", model_options=("width=512", "depth=4"), method_options=("side=auto",))


class Several:
    """Optimizers of different parameters, as one."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        self.keeps_norms = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters P of AOL, and all others."""
    weights: list[Tensor] = [p.P for p in orthogonal_parameters(model)]
    return weights, [p for p in model.parameters() if all(p is not weight for weight in weights)]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def sgd_r2(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)
    retract_after(optimizer, model)
    return optimizer


def torch_muon(model: nn.Module, momentum: float = 0.8) -> Several:
    weights, others = split(model)
    muon = Muon(weights, weight_decay=0.0, momentum=momentum)
    return Several(muon, SGD(others, lr=0.1, momentum=0.9, nesterov=True))


def torch_muon_r2(model: nn.Module, momentum: float = 0.8) -> Several:
    both = torch_muon(model, momentum)
    retract_after(both.parts[0], model)
    both.keeps_norms = True
    return both


def pogo(model: nn.Module) -> Several:
    from pogo import POGO, base  # pyright: ignore[reportMissingImports]

    weights, others = split(model)
    rule = base.SGD(momentum=0.9, nesterov=True)
    # Each P is square or wide here: its rows are kept orthonormal.
    optimizer = POGO(weights, rule, lr=0.1, flatten_fn=lambda P: P[None])
    both = Several(optimizer, SGD(others, lr=0.1, momentum=0.9, nesterov=True))
    both.keeps_norms = True  # P itself in training, as after R2
    return both


def schedule_free(name: str) -> Callable[[nn.Module], Optimizer]:
    def make(model: nn.Module) -> Optimizer:
        import schedulefree  # pyright: ignore[reportMissingImports]

        return getattr(schedulefree, name)(model.parameters(), lr=0.1)

    return make


# How the optimizer is made, the first rate of the search, and whether the rate ends at zero.
OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], float, bool]] = {
    "SGD": (sgd, 0.3, True),
    "SGD, R2": (sgd_r2, 0.03, True),
    "torch.optim.Muon, momentum 0.8": (torch_muon, 0.01, True),
    "torch.optim.Muon, momentum 0.8, R2": (torch_muon_r2, 0.03, True),
    "torch.optim.Muon, momentum 0.95, R2": (lambda model: torch_muon_r2(model, 0.95), 0.03, True),
    "POGO (pogo-torch), SGD": (pogo, 0.003, True),
    "SGDScheduleFree": (schedule_free("SGDScheduleFree"), 1.0, False),
    "AdamWScheduleFree": (schedule_free("AdamWScheduleFree"), 0.003, False),
    "LipschitzMuon, momentum 0.8": (lambda model: LipschitzMuon(model, momentum=0.8), 0.08, True),
    "LipschitzMuon, momentum 0.95": (lambda model: LipschitzMuon(model, momentum=0.95), 0.08, True),
}


def main() -> None:
    args = make_parser(__doc__).parse_args()
    args.command = "other_optimizers.py"
    torch.set_num_threads(1)
    trials = Trials(args.data_root)
    record = Record("other_optimizers", args, RECIPE, seeds=args.seeds, budget_cpu_seconds=args.seconds)
    for name, (make, start, is_annealed) in OPTIMIZERS.items():
        if args.only and name not in args.only:
            continue
        recipe = RECIPE.replace(lr=start)
        options = {"make_optimizer": make, "is_annealed": is_annealed}
        Runs(trials, record, record.row(name), recipe, args.seconds, **options).complete(args.seeds)


if __name__ == "__main__":
    main()
