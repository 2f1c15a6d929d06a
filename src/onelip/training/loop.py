"""The training of a network, from top to bottom.

Every step is a function of the state that a checkpoint holds. So a run that is killed and gone on with ends with the
same weights as one that was not, bit for bit, on the same machine with as many threads (tested on CPUs).
"""

import math
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onelip.data import DataNotFound, ImageData, batches, load_data, validation_split
from onelip.data._places import from_everywhere
from onelip.export import bake
from onelip.losses import OffsetCrossEntropy
from onelip.training.build import build_model, make_augmentation, save_weights, set_layout
from onelip.training.checkpoint import Position, check_same_data, load_checkpoint, save_checkpoint
from onelip.training.constants import constants_of
from onelip.training.display import Display
from onelip.training.distributed import Process, processes, use_threads
from onelip.training.errors import Diverged, RecipeError, RunError, Stopped
from onelip.training.evaluation import evaluate_with
from onelip.training.files import write_json
from onelip.training.log import RunLog
from onelip.training.objective import Objective
from onelip.training.optimizer import make_optimizer
from onelip.training.recipe import Recipe
from onelip.training.run_directory import RunConfig, RunDirectory, open_run, read_config, record_session, trim_log
from onelip.training.schedule import learning_rate
from onelip.training.stop import StopWish, listen


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    data: ImageData | None = None,
    data_root: str | Path | None = None,
    display: Display | None = None,
    tensorboard: bool = False,
    save_minutes: float = 10.0,
    save_steps: int = 0,
) -> dict[str, Any]:
    """Train by a recipe; returns what results.json holds.

    Args:
        recipe: all that decides the result.
        out: directory of the run; new, or with `resume` one that holds a run of this recipe.
        resume: go on from the last checkpoint, if there is one.
        data: the images; loaded by the recipe's name if not given.
        data_root: where named data sets are looked for.
        display: shows the progress; None shows nothing.
        tensorboard: log for TensorBoard, too.
        save_minutes: besides each epoch, write a checkpoint that often; 0 for never.
        save_steps: the same in steps.

    Raises:
        Stopped: after SIGINT or SIGTERM, the run being saved.
        Diverged: when the loss or a weight is not finite any more, the last good checkpoint being kept.
        RecipeError: when the recipe makes no sense, by itself or for these images.
        RunError: when the directory cannot be used.
    """
    for name, value in (("save_minutes", save_minutes), ("save_steps", save_steps)):
        if not value >= 0:  # a NaN neither
            raise RecipeError(f"expected {name} of at least 0, got {value}")
    run = RunDirectory(Path(out))
    with listen() as wish, processes(recipe.device) as process:
        shown = display if display is not None and process.is_first else Display(None)
        if data is None:
            data = process.together(_load_data, recipe, data_root, run, resume)
            recipe = recipe.replace(data=from_everywhere(recipe.data))
        gpu = [process.device] if process.device.type == "cuda" else []
        # fork_rng: the random numbers of the caller are the caller's.
        with ExitStack() as opened, torch.random.fork_rng(devices=gpu), use_threads(recipe.threads):
            process.together(lambda: process.is_first and opened.enter_context(open_run(run, recipe, resume=resume)))
            try:
                return _train(recipe, run, data, resume, process, shown, wish, tensorboard, save_minutes, save_steps)
            except RuntimeError as error:
                if not recipe.compile or not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    raise
                what = str(error).strip().partition("\n")[0]
                raise RunError(f"torch.compile cannot serve this network here ({what}); leave --compile out") from error
            finally:
                shown.stop()


def _train(
    recipe: Recipe,
    run: RunDirectory,
    data: ImageData,
    resume: bool,
    process: Process,
    display: Display,
    wish: StopWish,
    tensorboard: bool,
    save_minutes: float,
    save_steps: int,
) -> dict[str, Any]:
    # The images to train on, and those to look at after each epoch.
    device = process.device
    split = "validation" if recipe.validation else "test"
    used = validation_split(data, recipe.validation) if recipe.validation else data
    generator = torch.Generator().manual_seed(recipe.seed)
    loader = batches(
        used.train_images,
        used.train_labels,
        recipe.batch_size,
        shuffle=True,
        generator=generator,
        augmentation=make_augmentation(recipe),
        device=device,
        rank=process.rank,
        world_size=process.count,
    )
    steps = recipe.epochs * len(loader)

    # The network, its loss and its optimizer.
    torch.manual_seed(recipe.seed)
    model = process.together(build_model, recipe, data.num_classes, data.shape).to(device)
    layout = set_layout(model, recipe)
    optimizer = make_optimizer(model, recipe)
    objective = Objective(recipe, model)
    mean_loss = OffsetCrossEntropy(recipe.offset, recipe.temperature)

    # Begin, or go on from the checkpoint.
    at = Position()
    if process.share(resume and run.checkpoint.exists()):
        at, states = process.together(load_checkpoint, run.checkpoint, model, optimizer, data.fingerprint)
        _set_random_states(states, generator, device)
        display.say(f"going on with {run.path} after epoch {at.epoch}, step {at.batch}")

    def write_checkpoint(position: Position, data_state: Tensor) -> None:
        if not process.is_first:
            return
        states = _random_states(data_state, device)
        try:
            save_checkpoint(run.checkpoint, model, optimizer, states, position, data.fingerprint)
        except Diverged as error:
            raise _diverged(run, str(error)) from error

    def save(position: Position, data_state: Tensor) -> None:
        process.together(write_checkpoint, position, data_state)

    def begin_log() -> RunLog | None:
        if not process.is_first:
            return None
        if resume:  # also where no checkpoint was written yet
            check_same_data(run.config, read_config(run).fingerprint, data.fingerprint)
        config = RunConfig(recipe, data.name, data.fingerprint, data.class_names, data.shape)
        write_json(run.config, config.to_json())
        threads = torch.get_num_threads()
        facts = {"torch": torch.__version__, "device": str(device), "threads": threads, "processes": process.count}
        for name, before in record_session(run, **facts).items():
            display.say(f"note: {name} was {before} and is {facts[name]}; the weights will agree up to rounding only")
        trim_log(run, at.epoch)
        return RunLog(run, tensorboard=tensorboard, epoch=at.epoch)

    def look(at: Position) -> dict[str, Any] | None:
        if log is None:
            return None
        plain = bake(model, forms=False)  # the faster one
        known = constants_of(model, plain, recipe, data.shape)
        found = evaluate_with(known, plain, used.test_images, used.test_labels, mean_loss)
        line = {
            "epoch": at.epoch + 1,
            "step": (at.epoch + 1) * len(loader),
            "train_loss": at.loss_sum / at.images,
            "lr": learning_rate(recipe, (at.epoch + 1) * len(loader) - 1, steps),
            "seconds": at.seconds,
            "images_per_second": at.images / at.seconds,
            "split": split,
            "loss": found.loss,
            **found.total.to_json(),
        }
        log.write(line)
        return line

    def finish() -> dict[str, Any] | None:
        if log is None:
            return None
        log.close()
        plain = bake(model)
        save_weights(run, model, plain)
        known = constants_of(model, plain, recipe, data.shape, effort="high")
        results: dict[str, Any] = {}
        for name, part in (({"validation": used} if recipe.validation else {}) | {"test": data}).items():
            found = evaluate_with(known, plain, part.test_images, part.test_labels, mean_loss)
            results[name] = {"data": data.name, "split": name, **found.to_json(data.class_names)}
        write_json(run.results, results)
        return results

    log = process.together(begin_log)
    if at == Position():
        save(at, generator.get_state())

    trained: nn.Module = model
    if process.count > 1:
        trained = DistributedDataParallel(model)
    if recipe.compile:
        trained.compile()
    precision = torch.autocast(device.type, torch.bfloat16) if recipe.bf16 else nullcontext()

    display.start(recipe.epochs, steps, at.epoch * len(loader) + at.batch)
    last_save = time.monotonic()
    while at.epoch < recipe.epochs:
        model.train()
        data_state = generator.get_state()  # of the beginning of the epoch: see checkpoint.py
        clock = time.monotonic()
        for batch in loader.epoch(skip=at.batch):
            step = at.epoch * len(loader) + at.batch
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step, steps)

            loss = objective(
                trained,
                batch.images.contiguous(memory_format=layout),
                batch.labels,
                batch_size=batch.global_size,
                progress=step / steps,
                precision=precision,
            )
            optimizer.zero_grad(set_to_none=True)
            # DistributedDataParallel takes the mean over processes of what is a sum over their parts of the batch.
            (loss * process.count).backward()
            if recipe.gradient_clip:
                # After the mean over processes: each has the same gradient, so each shortens it alike.
                nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
            optimizer.step()
            objective.after_step()

            value = float(process.total(loss.detach()))
            if not math.isfinite(value):
                raise _diverged(run, f"expected a finite loss, got {value} in step {step + 1} (epoch {at.epoch + 1})")
            at = replace(
                at,
                batch=at.batch + 1,
                loss_sum=at.loss_sum + value * batch.global_size,
                images=at.images + batch.global_size,
                seconds=at.seconds + time.monotonic() - clock,
            )
            display.step(at.epoch + 1, step + 1, batch.global_size, value)

            minutes = (time.monotonic() - last_save) / 60
            is_due = (save_steps and (step + 1) % save_steps == 0) or (save_minutes and minutes > save_minutes)
            number, is_due = process.largest(wish.signal_number, int(is_due))  # clocks differ: all save, or none
            if number:
                save(at, data_state)
                raise Stopped(f"stopped and saved after step {step + 1} of {steps}", number)
            if is_due:
                save(at, data_state)
                last_save = time.monotonic()
            clock = time.monotonic()

        if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
            raise _diverged(run, f"expected finite weights after epoch {at.epoch + 1}, got NaN or infinity")
        # Before the evaluation: a kill in it costs no steps. It is done again then; what is logged twice is trimmed.
        save(at, data_state)
        last_save = time.monotonic()
        if line := process.together(look, at):
            display.epoch(line)
        at = Position(epoch=at.epoch + 1)
        if at.epoch == recipe.epochs:  # nothing is left to do again
            save(at, generator.get_state())
        display.pause(time.monotonic() - clock)

    # The end: weights for others, and the test images.
    display.stop()
    return process.share(process.together(finish))


def _load_data(recipe: Recipe, root: str | Path | None, run: RunDirectory, resume: bool) -> ImageData:
    try:
        return load_data(recipe.data, root)
    except DataNotFound as error:
        if not resume:
            raise
        raise DataNotFound(
            f"{error}; if they lie elsewhere now, go on by `{run.resume_command} --data PATH`"
        ) from error


def _diverged(run: RunDirectory, what: str) -> Diverged:
    return Diverged(f"{what}: the run has diverged; {run.checkpoint} keeps the last good weights; try a lower --lr")


def _random_states(data_state: Tensor, device: torch.device) -> dict[str, Tensor]:
    states = {"data": data_state, "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: dict[str, Tensor], generator: torch.Generator, device: torch.device) -> None:
    generator.set_state(states["data"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
