"""What the parts share: the outcome of a case, random choices, and weights."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Case = dict[str, Any]
Random = random.Random
FILLS = ("gauss", "ones", "rank one", "repeated", "one hot", "zero", "heavy", "integers", "tiny", "huge", "subnormal")
TAME = ("gauss", "gauss", "ones", "rank one", "one hot", "heavy", "integers")


@dataclass
class Outcome:
    """The outcome of a case.

    Attributes:
        verdict: "invalid" (torch itself refuses it: not counted), "refused", "unproved", or "proved"; for a forgery
            "rejected" or "accepted"; "unmeasured" where no oracle could be run.
        label: what the table counts it under.
        claims: number of proved statements that were compared with an oracle.
        tightness: measured over proved, of each claim that has a number.
        failure: the kind of failure, or None.
        message: what is wrong, for people.
    """

    verdict: str
    label: str = ""
    claims: int = 0
    tightness: list[float] = field(default_factory=list)
    failure: str | None = None
    message: str = ""

    def fail(self, kind: str, message: str) -> "Outcome":
        self.failure, self.message = kind, message
        return self

    def compare(self, name: str, measured: float, proved: float, is_above: bool) -> None:
        """One claim; the first that does not hold is the failure."""
        self.claims += 1
        if proved > 0 and 0 <= measured < float("inf"):
            self.tightness.append(min(1.0, measured / proved))
        if is_above and self.failure is None:
            self.fail("false bound", f"{name}: proved {proved!r}, measured {measured!r}")


def crash(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def tensor(kind: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers of one of the kinds in FILLS."""
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    limits = torch.finfo(dtype)
    if kind == "ones":
        noise = torch.ones(shape, dtype=torch.float64)
    elif kind == "rank one" and len(shape) >= 2:
        column = torch.randn((shape[0], *(1,) * (len(shape) - 1)), generator=generator, dtype=torch.float64)
        noise = column * noise[:1]
    elif kind == "repeated" and len(shape) >= 2:
        noise = noise[:, :1].expand(shape).clone()
    elif kind in ("one hot", "zero"):
        noise = torch.zeros(shape, dtype=torch.float64)
        if kind == "one hot" and noise.numel():
            noise.view(-1)[int(torch.randint(noise.numel(), (1,), generator=generator))] = 1
    elif kind == "heavy":
        noise = noise / (torch.randn(shape, generator=generator, dtype=torch.float64).abs() + 1e-2)
    elif kind == "integers":
        noise = noise.round()
    elif kind == "tiny":
        noise = noise * limits.tiny**0.6
    elif kind == "huge":
        noise = noise * (1e30 if dtype == torch.float32 else 1e150)
    elif kind == "subnormal":
        noise = noise * limits.smallest_normal / 16
    return noise.to(dtype)


@torch.no_grad()
def fill(module: nn.Module, kind: str, seed: int) -> None:
    """Parameters of this kind, and running statistics that a network may have."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(tensor(kind, tuple(parameter.shape), generator, parameter.dtype))
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var", ".mean", ".std")) and buffer.is_floating_point():
            noise = tensor("gauss", tuple(buffer.shape), generator, buffer.dtype)
            buffer.copy_(noise if "mean" in name else noise.abs() + 0.05)


def smaller_numbers(value: Any) -> list[Any]:
    """Simpler values of a setting, simplest first."""
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int):
        return [n for n in dict.fromkeys((0, 1, value // 2, value - 1)) if 0 <= n < value]
    if isinstance(value, list):
        return [[*value[:i], n, *value[i + 1 :]] for i in range(len(value)) for n in smaller_numbers(value[i])]
    return []
