"""Inverses of batches, also after the number of threads was set, where torch's own are wrong."""

import subprocess
import sys

import pytest
import torch

from onelip.methods.fourier.matrix_functions import inverse

# In a process of its own: the number of threads, once set, changes the libraries for good.
RESIDUAL = """
import sys, torch
from onelip.methods.fourier.matrix_functions import inverse
torch.set_num_threads(2)
torch.manual_seed(0)
eye = torch.eye(192, dtype=torch.complex64)
A = torch.randn(20, 192, 192, dtype=torch.complex64) / 192**0.5
A = eye + A - A.mH
print(float(torch.stack([(A @ inverse(A) - eye).abs().max() for _ in range(3)]).max()))
"""


def test_batches_are_right_after_threads_were_set():
    done = subprocess.run([sys.executable, "-c", RESIDUAL], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1e-4


@pytest.mark.parametrize(("b", "n"), [(0, 3), (1, 80), (3, 5), (3, 80)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_values_and_derivatives(b, n, dtype):
    torch.manual_seed(0)
    A = (torch.randn(b, n, n, dtype=dtype) + 3 * n**0.5 * torch.eye(n)).requires_grad_()
    other = A.detach().clone().requires_grad_()
    weights = torch.randn(b, n, n, dtype=dtype)
    gradients, values = [], []
    for matrix, function in ((A, inverse), (other, torch.linalg.inv)):
        X = function(matrix)
        (first,) = torch.autograd.grad((X * weights).sum().abs(), matrix, create_graph=True)
        (second,) = torch.autograd.grad(first.abs().square().sum(), matrix)
        values.append(X)
        gradients.append((first, second))
    torch.testing.assert_close(values[0], values[1])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)


def test_transforms_of_torch():
    A = torch.randn(2, 3, 70, 70, dtype=torch.float64) + 30 * torch.eye(70)
    torch.testing.assert_close(torch.func.vmap(inverse)(A), torch.linalg.inv(A))
