"""What a row says besides accuracy: cost against the plain network, the proved constant, the singular values.

Each measure stands by itself: one that cannot be taken is None with the reason, and the row keeps the others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onelip.compare.memory import peak_mebibytes
from onelip.compare.spectrum import spectrum_of_network
from onelip.compare.stepping import interleaved, step_times
from onelip.core.bake import bake
from onelip.core.errors import RunError, Stopped
from onelip.data import ImageData, to_float
from onelip.training.build import build_model, set_layout
from onelip.training.distributed import find_device, use_threads
from onelip.training.evaluation import is_channels_last
from onelip.training.recipe import Recipe

_LEAST_MEBIBYTES = 2  # the allocator takes memory from the system in pieces of this order


def measure(
    recipe: Recipe,
    plain_twin: Recipe,
    model: nn.Module,
    plain: nn.Module,
    data: ImageData,
    *,
    twins_memory: float | None = None,
    memory: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All measures of a trained method.

    Args:
        recipe: of its run.
        plain_twin: the recipe of the same network without a method.
        model: its network, as it is trained, on the CPU.
        plain: the same, baked.
        data: whose training images are used for timing, and whose first test image is where layers are looked at.
        twins_memory: MiB of the plain twin; None if it could not be measured.
        memory: whether to measure memory at all.
        say: called with a line of text before each measure.
    """
    fast = bake(model, expand=False)  # as one would predict; `plain` is what can be certified
    say("measuring the training step")
    found = {"step": _or_why(lambda: step_times(recipe, plain_twin, data))}
    say("measuring prediction")
    found["inference"] = _or_why(lambda: inference_times(fast, recipe, plain_twin, data))
    if memory:
        say("measuring memory")
        found["memory"] = _or_why(lambda: memory_ratio(recipe, data, twins_memory))
    else:
        found["memory"] = _not_taken("not asked for")
    say("proving the constant of the stored weights")
    found["constant"] = _or_why(lambda: proved_constant(plain, data))
    say("computing singular values")
    found["singular_values"] = _or_why(lambda: spectrum_of_network(fast, to_float(data.test_images[:1])))
    return found


def inference_times(
    plain: nn.Module, recipe: Recipe, plain_twin: Recipe, data: ImageData, seconds: float = 2.0
) -> dict[str, Any]:
    """Prediction by the baked network against the plain twin's, on the same batch."""
    device = find_device(recipe.device)
    with torch.random.fork_rng(devices=[]):
        twin = bake(build_model(plain_twin, data.num_classes, data.shape))
    set_layout(twin, plain_twin)
    layout = torch.channels_last if is_channels_last(plain) else torch.contiguous_format
    images = to_float(data.test_images[: recipe.batch_size]).to(device).contiguous(memory_format=layout)
    ours, theirs = plain.to(device).eval(), twin.to(device).eval()

    def predict(model: nn.Module) -> float:
        return float(model(images)[0, 0])  # waits for a GPU

    try:
        with torch.no_grad(), use_threads(recipe.threads):
            return interleaved(lambda: predict(ours), lambda: predict(theirs), seconds).to_json()
    finally:
        plain.cpu()


def memory_ratio(recipe: Recipe, data: ImageData, twins_memory: float | None) -> dict[str, Any]:
    """Growth of the peak over a training step, against the plain twin's."""
    mine = peak_mebibytes(recipe, data.num_classes, data.shape)
    if twins_memory is None:
        ratio, why = None, "the plain network's could not be measured"
    elif not twins_memory >= _LEAST_MEBIBYTES:
        ratio, why = None, f"the plain network needs {twins_memory:.2g} MiB; ratios below {_LEAST_MEBIBYTES} are noise"
    else:
        ratio, why = mine / twins_memory, None
    return {"ratio": ratio, "mebibytes": mine, "plain_mebibytes": twins_memory, "why": why}


def proved_constant(plain: nn.Module, data: ImageData) -> dict[str, Any]:
    """The audit's bound for the stored weights, whatever the method states; None where it is unproved."""
    from onelip.certification.audit import audit

    found = audit(plain, to_float(data.test_images[:2]), lower=False, effort="high")
    why = None if found.upper is not None else "; ".join(found.unproved)
    return {"proved": found.upper, "why": why}


def _or_why(take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"why": None, **take()}
    except Stopped:
        raise
    except Exception as error:  # whatever it is, the row keeps what else is known
        return _not_taken(reason(error))


def _not_taken(why: str) -> dict[str, Any]:
    return {"ratio": None, "proved": None, "why": why}


def reason(error: Exception) -> str:
    """An error in a line; our own and the machine's say enough by themselves, others are named.

    Examples:
        >>> reason(KeyError("weight"))
        "KeyError: 'weight'"
    """
    text = " ".join(str(error).split())
    is_told = isinstance(error, RunError | OSError) or type(error) is ValueError or _is_ours(error)
    return text if is_told and text else f"{type(error).__name__}: {text}"


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("onelip.")
