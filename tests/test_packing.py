"""Promises of scripts/packing.py: full rows, whole documents, positions, similar lengths, every sample once."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from scripts import data, packing
from scripts.data import IGNORE, Sample

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
QUICK = settings(max_examples=100, deadline=None)
lengths_list = st.lists(st.integers(2, 64), max_size=120)


def filled(rows, lengths):
    return [sum(lengths[i] for i in row) for row in rows]


# ---------------------------------------------------------------------------------------------------- packing


@QUICK
@given(lengths=lengths_list, seed=st.integers(0, 3))
def test_every_sample_is_in_one_row_that_has_room(lengths, seed):
    rows = packing.pack(lengths, 64, packing.permutation(len(lengths), seed, 0))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < total <= 64 for total in filled(rows, lengths))


@QUICK
@given(lengths=lengths_list)
def test_it_is_best_fit(lengths):
    """Each sample, longest first, goes where the least room is left, and a row is opened only if none fits."""
    rooms = []
    for n in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= n]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else 64) - n)
    found = filled(packing.pack(lengths, 64), lengths)
    assert sorted(64 - total for total in found) == sorted(rooms)


@QUICK
@given(lengths=lengths_list)
def test_the_number_of_rows_is_that_of_every_epoch(lengths):
    plans = [packing.pack(lengths, 64, packing.permutation(len(lengths), 7, e)) for e in range(4)]
    assert len({len(rows) for rows in plans}) == 1
    assert packing.pack(lengths, 64) == packing.pack(lengths, 64)


def test_epochs_pack_differently():
    lengths = [7, 9, 9, 11, 11, 11, 30, 30] * 10
    first, second = (packing.pack(lengths, 64, packing.permutation(80, 0, epoch)) for epoch in (0, 1))
    assert sorted(map(sorted, first)) != sorted(map(sorted, second))


def test_too_long_is_an_error():
    with pytest.raises(ValueError, match="65 tokens does not fit into 64"):
        packing.pack([3, 65], 64)


@pytest.mark.skipif(not SHARED.is_dir(), reason="there is no ../shared/data beside the repository")
def test_real_data_fill_the_rows(tmp_path, monkeypatch):
    import tiny

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = SimpleNamespace(
        dataset=str(SHARED / "alpaca_en_demo.json"), dataset_samples=None, dataset_format="auto",
        dataset_columns="", chat_template=False, train_on="completions", truncation="right",
        context_length=1024, skip_bad_rows=False, seed=0,
    )  # fmt: skip
    samples, counts = data.prepare(config, tiny.tokenizer())
    rows = packing.pack(samples.lengths, 1024)
    assert counts.kept >= 900 and counts.total_tokens / (len(rows) * 1024) >= 0.95


# ---------------------------------------------------------------------------------------------------- batches

samples_list = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=2, max_size=9).map(
        lambda pairs: Sample([i for i, _ in pairs], [i if on else IGNORE for i, on in pairs])
    ),
    max_size=4,
)


@QUICK
@given(rows=st.lists(samples_list.filter(bool), max_size=4))
def test_packed_rows_are_their_documents_one_by_one(rows):
    batch = packing.collate_packed(rows, pad_id=3)
    assert set(batch) == {"input_ids", "targets", "position_ids", "real"}
    assert {str(value.dtype) for name, value in batch.items() if name != "real"} == {"torch.int64"}
    assert len({value.shape for value in batch.values()}) == 1
    for r, row in enumerate(rows):
        at = 0
        for sample in row:
            alone = data.collate([sample], 3)
            n = len(sample.ids)
            assert batch["input_ids"][r, at : at + n].tolist() == alone["input_ids"][0].tolist()
            assert batch["targets"][r, at : at + n].tolist() == alone["targets"][0].tolist()
            assert batch["targets"][r, at + n - 1] == IGNORE
            assert batch["position_ids"][r, at : at + n].tolist() == list(range(n))
            at += n
        rest = batch["input_ids"].shape[1] - at
        assert batch["position_ids"][r, at:].tolist() == list(range(rest))
        assert batch["real"][r].tolist() == [True] * at + [False] * rest
        assert batch["targets"][r, at:].tolist() == [IGNORE] * rest


def test_no_rows_are_one_masked_row():
    batch = packing.collate_packed([], pad_id=3)
    assert batch["input_ids"].tolist() == [[3, 3]] and batch["targets"].tolist() == [[IGNORE, IGNORE]]
    assert batch["position_ids"].tolist() == [[0, 1]]


# ------------------------------------------------------------------------------------------------------ order


@QUICK
@given(lengths=lengths_list, batch=st.integers(1, 9), epoch=st.integers(0, 3))
def test_grouping_is_a_permutation(lengths, batch, epoch):
    order = packing.grouped(lengths, 5, epoch, batch)
    assert sorted(order) == list(range(len(lengths)))
    assert order == packing.grouped(lengths, 5, epoch, batch)


def test_grouping_saves_padding_and_stays_random():
    lengths = [2 + (i * 7919) % 500 for i in range(4000)]

    def padding(order):
        batches = [[lengths[i] for i in order[b : b + 8]] for b in range(0, 4000, 8)]
        return sum(8 * max(batch) - sum(batch) for batch in batches) / sum(lengths)

    order = packing.grouped(lengths, 0, 0, 8)
    assert padding(order) < 0.05 < 0.5 < padding(packing.permutation(4000, 0, 0))
    assert order != packing.grouped(lengths, 0, 1, 8) and order != packing.grouped(lengths, 1, 0, 8)
    thirds = [sum(lengths[i] for i in order[k : k + 1000]) for k in (0, 1000, 2000, 3000)]
    assert max(thirds) < 1.2 * min(thirds)


def test_what_is_left_over_is_not_always_the_longest():
    lengths = list(range(2, 45))
    left = {lengths[packing.grouped(lengths, 0, epoch, 6)[-1]] for epoch in range(8)}
    assert len(left) > 3 and min(left) < 40


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 64), min_size=1, max_size=60),
    world=st.integers(1, 4),
    split=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    packed=st.booleans(),
    group=st.booleans(),
)
def test_an_epoch_has_every_sample_once_over_all_ranks(lengths, world, split, packed, group):
    config = SimpleNamespace(
        packing=packed, group_by_length=group, context_length=64, seed=3, batch_size=split[0],
        gradient_accumulation_steps=split[1],
    )  # fmt: skip
    plans = [packing.plan(lengths, config, epoch=2, rank=rank, world=world) for rank in range(world)]
    seen = [i for plan in plans for step in plan for micro in step for row in micro for i in row]
    assert sorted(seen) == list(range(len(lengths)))
    rows = len(packing.rows_of_epoch(lengths, config, 2))
    assert {len(plan) for plan in plans} == {data.steps_per_epoch(rows, *split, world)}
    for steps in zip(*plans, strict=True):
        assert len({len(micros) for micros in steps}) == 1
    assert plans[0] == packing.plan(lengths, config, epoch=2, rank=0, world=world)
    if not packed and not group:
        alone = data.steps(
            len(lengths), seed=3, epoch=2, batch_size=split[0], accumulation=split[1], rank=0, world=world
        )
        assert plans[0] == [[[[i] for i in micro] for micro in step] for step in alone]


@pytest.mark.parametrize("available", [False, True])
def test_what_is_sent_lies_in_pinned_memory(monkeypatch, available):
    """Where there is an accelerator, and all of it; what is sent is the same, of documents as well."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    samples = tiny.samples(6)
    for batch in (packing.collate(samples, 0), packing.collate_packed([samples[:4], samples[4:]], 0)):
        wanted, count = packing.arguments(batch, "cpu")
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
        made, same = packing.prepared(batch)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        flat = [t for value in made.values() for t in (value if isinstance(value, tuple) else [value])]
        assert [id(t) for t in flat] == [id(t) for t in pinned] if available else not pinned
        assert same == count == len(wanted["labels"]) and made.keys() == wanted.keys()
        assert len(wanted.get("documents", "no")) == 2  # a group and the way back: () would show nothing
        torch.testing.assert_close(packing.sent(made, "cpu"), wanted, rtol=0, atol=0)
        pinned.clear()
