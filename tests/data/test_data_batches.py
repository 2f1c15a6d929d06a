"""Batches: every image once, the same for any number of processes, resumed bit for bit. Splits: stratified, stable."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from onelip.data import (
    Augmentation,
    Batch,
    Batches,
    DataError,
    load_digits,
    stratified_split,
    to_float,
    validation_split,
)

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (23, 3, 6, 6), dtype=np.uint8))
LABELS = torch.arange(23) % 4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in zip(one, other, strict=True)
    )


@settings(max_examples=30, deadline=None)
@given(batch_size=st.integers(1, 30), world_size=st.integers(1, 5), shuffle=st.booleans(), drop_last=st.booleans())
def test_processes_share_every_global_batch(batch_size, world_size, shuffle, drop_last):
    if drop_last and batch_size > len(IMAGES):
        return
    options = {"shuffle": shuffle, "drop_last": drop_last}
    alone = list(Batches(IMAGES, LABELS, batch_size, generator=seeded(), **options))
    shared = [
        list(Batches(IMAGES, LABELS, batch_size, generator=seeded(), rank=r, world_size=world_size, **options))
        for r in range(world_size)
    ]
    for number, whole in enumerate(alone):
        pieces = [process[number] for process in shared]
        assert torch.equal(torch.cat([p.indices for p in pieces]), whole.indices)
        assert torch.equal(torch.cat([p.images for p in pieces]), whole.images)
        assert torch.equal(torch.cat([p.labels for p in pieces]), whole.labels)
        assert {p.global_size for p in pieces} == {len(whole)}
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    assert {len(process) for process in shared} == {len(alone)}
    seen = torch.cat([b.indices for b in alone])
    assert len(seen.unique()) == len(seen) == (23 // batch_size * batch_size if drop_last else 23)


def test_augmentation_is_the_same_for_any_number_of_processes():
    options = {"shuffle": True, "augmentation": Augmentation()}
    alone = list(Batches(IMAGES, LABELS, 8, generator=seeded(), **options))
    shared = [list(Batches(IMAGES, LABELS, 8, generator=seeded(), rank=r, world_size=3, **options)) for r in range(3)]
    for number, whole in enumerate(alone):
        # Vectorised arithmetic may round differently at other positions of a tensor, so not bit for bit.
        joined = torch.cat([process[number].images for process in shared])
        torch.testing.assert_close(joined, whole.images, atol=1e-6, rtol=0)


def test_in_order_and_as_x_over_255_without_shuffling():
    loader = Batches(IMAGES, LABELS, 10)
    assert len(loader) == 3
    assert [len(batch) for batch in loader] == [10, 10, 3]
    for start, (images, labels) in zip((0, 10, 20), loader, strict=True):
        assert torch.equal(images, to_float(IMAGES[start : start + 10]))
        assert torch.equal(labels, LABELS[start : start + 10])


def test_epochs_differ_and_seeds_repeat():
    loader = Batches(IMAGES, LABELS, 7, shuffle=True, generator=seeded(3), augmentation=Augmentation())
    first, second = list(loader), list(loader)
    assert not same(first, second)
    again = Batches(IMAGES, LABELS, 7, shuffle=True, generator=seeded(3), augmentation=Augmentation())
    assert same(first, list(again))
    assert same(second, list(again))


@pytest.mark.parametrize("done", [0, 1, 3, 4])
@pytest.mark.parametrize("augmentation", [None, Augmentation()])
def test_going_on_in_the_middle_of_an_epoch_is_bit_identical(done, augmentation):
    def loader(generator: torch.Generator) -> Batches:
        return Batches(IMAGES, LABELS, 7, shuffle=True, generator=generator, augmentation=augmentation)

    generator = seeded(1)
    uninterrupted = loader(generator)
    list(uninterrupted)
    state = generator.get_state()  # what a checkpoint holds: the state at the epoch's beginning, and `done`
    rest_of_epoch, next_epoch = list(uninterrupted)[done:], list(uninterrupted)

    restored = torch.Generator()
    restored.set_state(state)
    resumed = loader(restored)
    assert same(list(resumed.epoch(skip=done)), rest_of_epoch)
    assert same(list(resumed), next_epoch)


def test_the_data_stay_as_they_are_and_an_identity_needs_no_generator():
    before = IMAGES.clone()
    list(Batches(IMAGES, LABELS, 5, shuffle=True, generator=seeded(), augmentation=Augmentation()))
    assert torch.equal(IMAGES, before)
    assert len(list(Batches(IMAGES, LABELS, 23, augmentation=Augmentation.none()))) == 1


def test_the_device_is_where_batches_go():
    batch = next(iter(Batches(IMAGES, LABELS, 5, device="meta")))
    assert batch.images.device.type == batch.labels.device.type == "meta"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch size of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch size of at least 1, got 2.5"),
        ({"batch_size": True}, "batch size of at least 1"),
        ({"rank": 2, "world_size": 2}, "0 <= rank < world_size, got rank 2 of 2"),
        ({"shuffle": True}, r"shuffling and augmentation need a generator: pass generator=torch.Generator"),
        ({"augmentation": Augmentation()}, "need a generator"),
        ({"batch_size": 24, "drop_last": True}, "batch size of at most 23"),
        ({"images": IMAGES.float()}, "expected uint8 images"),
        ({"labels": LABELS[:5]}, "one label for each image, got 23 images, 5 labels"),
    ],
)
def test_wrong_requests_are_refused_at_once(arguments, message):
    with pytest.raises(DataError, match=message):
        Batches(**{"images": IMAGES, "labels": LABELS, "batch_size": 4, **arguments})


def test_skipping_too_much_is_refused():
    with pytest.raises(DataError, match="expected to skip 0 to 6 batches, got 7"):
        Batches(IMAGES, LABELS, 4).epoch(skip=7)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(2, 30), min_size=1, max_size=6),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
def test_a_split_takes_its_share_of_every_class(counts, fraction, seed):
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
    kept, held = stratified_split(labels, fraction, seed)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(len(labels)))
    for c, n in enumerate(counts):
        assert int((labels[held] == c).sum()) == min(max(round(fraction * n), 1), n - 1)
    again = stratified_split(labels, fraction, seed)
    assert torch.equal(held, again[1])


def test_a_split_is_the_same_for_ever():
    labels = torch.arange(20) % 2
    assert stratified_split(labels, 0.3, seed=7)[1].tolist() == [3, 4, 6, 11, 12, 13]
    assert stratified_split(labels, 0.3, seed=8)[1].tolist() != stratified_split(labels, 0.3, seed=7)[1].tolist()


def test_validation_takes_from_training_and_never_from_test():
    digits = load_digits()
    split = validation_split(digits, 0.1, seed=0)
    assert len(split.train_labels) + len(split.test_labels) == len(digits.train_labels)
    assert split.test_labels.bincount().min() >= 14
    assert split.class_names == digits.class_names
    train = sorted(map(bytes, digits.train_images.numpy()))
    assert sorted([*map(bytes, split.train_images.numpy()), *map(bytes, split.test_images.numpy())]) == train
    assert split.name == "digits (validation 0.1, seed 0)"
    assert split.fingerprint != digits.fingerprint


@pytest.mark.parametrize(
    ("fraction", "seed", "labels", "message"),
    [
        (0.0, 0, LABELS, "fraction between 0 and 1, got 0.0"),
        (1.0, 0, LABELS, "fraction between 0 and 1"),
        (0.1, -1, LABELS, "seed to be an integer of at least 0"),
        (0.1, 0, torch.tensor([0, 0, 1]), "at least two images of each class to split them, got one of class 1"),
    ],
)
def test_wrong_splits_are_refused(fraction, seed, labels, message):
    with pytest.raises(DataError, match=message):
        stratified_split(labels, fraction, seed)


@pytest.mark.parametrize(("part", "images"), [(0.5, 5), (0.26, 3), (0.01, 1), (1.0, 10)])
def test_part_of_an_epoch(part, images):
    """Another part each time, of the order that a whole epoch would have."""

    def orders(part):
        loader = Batches(
            torch.zeros(10, 1, 2, 2, dtype=torch.uint8),
            torch.zeros(10, dtype=torch.int64),
            2,
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
            part=part,
        )
        return [torch.cat([batch.indices for batch in loader]).tolist() for _ in range(5)], len(loader)

    parts, length = orders(part)
    assert length == -(-images // 2)
    assert parts == [order[:images] for order in orders(1.0)[0]]
    assert len(set(map(tuple, parts))) > 1


@pytest.mark.parametrize("part", [0.0, -0.5, 1.5, float("nan")])
def test_no_part_of_an_epoch(part):
    with pytest.raises(DataError, match="above 0 and at most 1"):
        Batches(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 2, part=part)
