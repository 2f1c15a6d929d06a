"""Layers that compute the published recipes, for methods without an installable package.

They perform the same operations as the programs of the authors, with automatic differentiation, and are for measuring
time only. Half precision for GPUs (ECO) is omitted: CPUs are twenty times slower with it. The layers guarantee less
than those of onelip: the exponential of ECO has five terms, LOT and CPL are not converged, and kernels of ONI are not
divided by their overlap.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def shift_of_frequencies(n: int, by: int) -> Tensor:
    """exp(2 pi i s (f + g) / n), which moves the middle of a kernel to pixel 0."""
    f = torch.arange(n)
    return torch.exp(2j * math.pi * by * (f[:, None] + f[None, :]) / n)


class ECO(nn.Module):
    """Five real rotations as the frequencies of an even 3x3 kernel: five terms of exp, after one power iteration."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.randn(5, channels, channels) / channels**0.5)
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("u", torch.ones(5, 1, channels) / channels**0.5)
        for _ in range(50):
            self.estimate(self.skew())

    def skew(self) -> Tensor:
        return (self.free - self.free.mT) / 2

    def estimate(self, S: Tensor) -> Tensor:
        with torch.no_grad():
            v = (S * self.u).sum(2, keepdim=True)
            v = v / (v.norm(dim=1, keepdim=True) + 1e-12)
            u = (S * v).sum(1, keepdim=True)
            self.u = u / (u.norm(dim=2, keepdim=True) + 1e-12)
        return (S * self.u * v).sum((1, 2))

    def forward(self, x: Tensor) -> Tensor:
        S = self.skew()
        S = S / self.estimate(S)[:, None, None]
        term, total = S, S
        for k in range(2, 6):
            term = torch.bmm(term, S) / k
            total = total + term
        rotations = total + torch.eye(S.shape[1])
        at_frequencies = rotations[[0, 1, 1, 2, 3, 4, 2, 4, 3]].permute(1, 2, 0).unflatten(2, (3, 3))
        kernel = torch.fft.ifft2(at_frequencies).real
        apart = -(-x.shape[2] // 3)
        x = F.pad(x, (apart,) * 4, mode="circular")
        return F.conv2d(x, kernel, self.bias, dilation=apart)


class CPL(nn.Conv2d):
    """x - 2 / s^2 W^T relu(W x + b), s by one step of power iteration."""

    u: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        x, W = input, self.weight
        inside = F.conv_transpose2d(F.relu(F.conv2d(x, W, self.bias, padding=1)), W, padding=1)
        with torch.no_grad():
            u = torch.randn(1, *x.shape[1:]) if self.u is None else self.u
            v = F.conv2d(u, W, padding=1)
            v = v / (v.norm() + 1e-6)
            u = F.conv_transpose2d(v, W, padding=1)
            self.u = u / (u.norm() + 1e-6)
        s = (F.conv2d(self.u, W, padding=1) * v).sum()
        return x - 2 / (s**2 + 1e-6) * inside


class LOT(nn.Module):
    """(V V*)^(-1/2) V at all frequencies, by ten steps of the coupled iteration of Newton."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.dirac_(torch.empty(channels, channels, 3, 3)))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (1,) * 4)
        channels, n = len(self.weight), x.shape[2]
        V = shift_of_frequencies(n, -1) * torch.fft.fft2(self.weight, (n, n)).conj()
        V = V.flatten(2).permute(2, 0, 1)
        eye = torch.eye(channels, dtype=V.dtype)
        S = V @ V.mH + 1e-4 * eye
        size = torch.linalg.matrix_norm(S)[:, None, None] + 1e-4
        Y, Z = S / size, eye.expand(S.shape)
        for _ in range(10):
            T = 1.5 * eye - 0.5 * (Z @ Y)
            Y, Z = Y @ T, T @ Z
        W = (Z @ V) / size.sqrt()
        spectrum = torch.fft.fft2(x).permute(2, 3, 1, 0).flatten(0, 1)
        y = torch.fft.ifft2((W @ spectrum).unflatten(0, (n, n)).permute(3, 2, 0, 1)).real
        return y[:, :, 1:-1, 1:-1] + self.bias[:, None, None]


class Sandwich(nn.Module):
    """sqrt(2) A^T S relu(sqrt(2) S^-1 B x + b) at the frequencies of rfft, [A B] by the Cayley transform."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Conv2d(2 * channels, channels, 3).weight
        self.bias = nn.Parameter(torch.zeros(channels))
        self.psi = nn.Parameter(torch.zeros(channels))
        self.alpha = nn.Parameter(torch.ones(()) * channels**0.5)

    def forward(self, x: Tensor) -> Tensor:
        channels, n = len(self.bias), x.shape[2]
        half = n // 2 + 1
        M = torch.fft.rfft2(self.weight, (n, n)).flatten(2).permute(2, 0, 1).conj()
        M = shift_of_frequencies(n, -1)[:, :half].reshape(-1, 1, 1) * M
        M = (self.alpha * M / M.norm()).mT
        U, V = M[:, :channels], M[:, channels:]
        eye = torch.eye(channels, dtype=M.dtype)
        X = U - U.mH + V.mH @ V
        inverse = torch.linalg.inv(eye + X)
        Q = torch.cat([inverse @ (eye - X), -2 * V @ inverse], 1).mT

        def transformed(x: Tensor) -> Tensor:
            return torch.fft.rfft2(x).permute(2, 3, 1, 0).flatten(0, 1)

        def back(y: Tensor) -> Tensor:
            return torch.fft.irfft2(y.unflatten(0, (n, half)).permute(3, 2, 0, 1), (n, n))

        scale = self.psi.exp().to(M.dtype)
        h = back(2**0.5 * (1 / scale).diag() @ Q[:, :, channels:] @ transformed(x)) + self.bias[:, None, None]
        return back(2**0.5 * Q[:, :, :channels].mH @ scale.diag() @ transformed(F.relu(h)))


class BRO(nn.Module):
    """I - 2 V (V* V + e I)^-1 V* at the frequencies of rfft, by a linear solver; a half of the columns."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.dirac_(torch.empty(channels, channels // 2, 3, 3)))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (1,) * 4)
        channels, n = len(self.bias), x.shape[2]
        V = torch.fft.rfft2(self.weight, (n, n)).permute(2, 3, 0, 1).flatten(0, 1)
        W = torch.eye(channels, dtype=V.dtype) - 2 * V @ torch.linalg.solve(with_shift(V.mH @ V), V.mH)
        spectrum = torch.fft.rfft2(x).permute(2, 3, 1, 0).flatten(0, 1)
        y = torch.fft.irfft2((W @ spectrum).unflatten(0, (n, n // 2 + 1)).permute(3, 2, 0, 1), (n, n))
        return y[:, :, 1:-1, 1:-1] + self.bias[:, None, None]


class BROLinear(nn.Module):
    """The same for one matrix."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(features, features // 2)[None])
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        V = self.weight
        W = torch.eye(len(self.bias)) - 2 * V @ torch.linalg.solve(with_shift(V.mT @ V), V.mT)
        return F.linear(x, W[0], self.bias)


def with_shift(S: Tensor) -> Tensor:
    shift = 1e-5 * S.diagonal(dim1=-2, dim2=-1).mean(-1)
    return S + shift[:, None, None] * torch.eye(S.shape[-1], dtype=S.dtype)


def by_oni(W: Tensor) -> Tensor:
    """Five steps B <- 3/2 B - 1/2 B^3 S on the side of the outputs, rows centred."""
    Z = W.flatten(1)[None]
    Z = Z - Z.mean(-1, keepdim=True)
    S = Z @ Z.mT + 1e-5 * torch.eye(len(W))
    size = torch.linalg.matrix_norm(S)[:, None, None]
    S = S / size
    B = torch.eye(len(W)).expand(S.shape)
    for _ in range(5):
        B = torch.baddbmm(B, B @ B @ B, S, beta=1.5, alpha=-0.5)
    return (B @ Z / size.sqrt()).reshape(W.shape)


class ONIConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, by_oni(self.weight), self.bias, padding=1)


class ONILinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, by_oni(self.weight), self.bias)
