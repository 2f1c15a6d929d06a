"""Audit a pretrained network in continuous integration: a change that raises the proved constant fails the build.

    python examples/gallery/audit_in_ci.py

One command is the check. It needs a function that returns the network, and exits with 1 if an operation has no proved
bound or if the constant of the network is above the limit:

    onelip audit audit_in_ci.py:build --input-shape 3,32,32 --require 10

`build` makes a small residual network here; load your own weights there (torch.load with weights_only=True).
"""

import contextlib
import io
from pathlib import Path

import torch
from torch import Tensor, nn

import onelip
from onelip.cli import main as command_line


class Residual(nn.Module):
    """The basic block of a ResNet: convolutions, batch normalisation, a sum."""

    def __init__(self, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.skip = nn.Conv2d(channels, out_channels, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(branch)) + self.skip(x))


def build() -> nn.Module:
    """The network of the audit; the seed stands for a file of weights."""
    torch.manual_seed(0)
    blocks = [Residual(8, 8), Residual(8, 16, 2), Residual(16, 16)]
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()


def main() -> list[int]:
    """The audit from Python, then the command of the build with a limit that holds and one that does not."""
    found = onelip.audit(build(), torch.zeros(1, 3, 32, 32))
    print(found)
    assert found.upper is not None
    codes = []
    for limit in (2 * found.upper, found.upper / 2):
        target = f"{Path(__file__).resolve()}:build"
        command = ["audit", target, "--input-shape", "3,32,32", "--require", f"{limit:g}"]
        with contextlib.redirect_stdout(io.StringIO()):
            code = command_line(command)
        print(f"onelip audit {Path(__file__).name}:build --input-shape 3,32,32 --require {limit:g}: exit code {code}")
        codes.append(code)
    return codes


if __name__ == "__main__":
    main()
