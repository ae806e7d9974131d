"""Which samples are trained on when, and the tensors they become: order, steps, packing, batches.

Everything here is a function of lengths, seed, epoch and the split into ranks, so every rank works it out for
itself, and a run resumes at any step by leaving out the steps before it.
"""
from __future__ import annotations

import random

from scripts.tokens import IGNORE, Sample

MEGABATCH = 50  # batches among which lengths are sorted: alike inside one batch, still varied over the epoch


# ------------------------------------------------------------------------------------------------------ order

def permutation(n: int, seed: int, epoch: int) -> list[int]:
    """The numbers below n in the order of this epoch."""
    rng = random.Random(f"{seed},{epoch}")
    return sorted(range(n), key=lambda _: rng.random())


def grouped(lengths: list[int], seed: int, epoch: int, batch: int) -> list[int]:
    """A permutation in which every `batch` neighbours, counted from the start, are of similar length.

    The few left over at the end, less than a batch, are drawn before the sorting, so that they are not
    always the longest.
    """
    order = permutation(len(lengths), seed, epoch)
    whole = len(order) // batch * batch
    batches = []
    for start in range(0, whole, batch * MEGABATCH):
        alike = sorted(order[start:min(whole, start + batch * MEGABATCH)], key=lambda i: lengths[i])
        batches += [alike[first:first + batch] for first in range(0, len(alike), batch)]
    random.Random(f"{seed},{epoch},batches").shuffle(batches)
    return [i for chosen in batches for i in chosen] + order[whole:]


def steps_per_epoch(n: int, batch_size: int, accumulation: int, world: int) -> int:
    """Number of optimiser steps that `n` samples make; the last one may be smaller."""
    return -(-n // (batch_size * accumulation * world))


def steps(n: int, *, seed: int, epoch: int, batch_size: int, accumulation: int, rank: int, world: int,
          order: list[int] | None = None) -> list[list[list[int]]]:
    """For each optimiser step of an epoch, this rank's micro-batches as lists of sample indices, some empty.

    A step takes the next batch_size * accumulation * world samples of one permutation (`order`, if given),
    which depends on seed and epoch only: for the same product, every split into ranks and micro-batches
    trains on the same samples per step. All ranks have equally many micro-batches in a step, since each is a
    round of collectives.
    """
    order = permutation(n, seed, epoch) if order is None else order
    window, across = batch_size * accumulation * world, batch_size * world
    plan = []
    for start in range(0, n, window):
        chosen = order[start:start + window]
        own = (m + rank * batch_size for m in range(0, len(chosen), across))
        plan.append([chosen[first:first + batch_size] for first in own])
    return plan


# ---------------------------------------------------------------------------------------------------- packing

def pack(lengths: list[int], capacity: int, order: list[int] | None = None) -> list[list[int]]:
    """Rows of sample indices with at most `capacity` tokens each: best fit, longest sample first.

    `order` decides among samples of one length, so epochs pack differently while the number of rows, and
    with it that of steps, depends on the lengths alone.
    """
    order = range(len(lengths)) if order is None else order
    if longest := [n for n in lengths if n > capacity]:
        raise ValueError(f"a sample of {max(longest)} tokens does not fit into {capacity}")
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the room that is left in them
    rooms = 0  # bit r is set where with_room[r] has a row
    for i in sorted(order, key=lambda i: -lengths[i]):
        enough = rooms >> lengths[i]
        if enough:
            room = lengths[i] + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            rooms &= ~(0 if with_room[room] else 1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(i)
        with_room[room - lengths[i]].append(row)
        rooms |= 1 << (room - lengths[i])
    return rows


def rows_of_epoch(lengths: list[int], config, epoch: int) -> list[list[int]]:
    """What batches are made of: the samples of each packed row, or, without packing, each sample alone."""
    if config.packing:
        return pack(lengths, config.context_length, permutation(len(lengths), config.seed, epoch))
    return [[i] for i in range(len(lengths))]


def plan(lengths: list[int], config, *, epoch: int, rank: int, world: int) -> list[list[list[list[int]]]]:
    """For each optimiser step of an epoch, this rank's micro-batches, as lists of rows of sample indices."""
    rows, order = rows_of_epoch(lengths, config, epoch), None
    split = dict(batch_size=config.batch_size, accumulation=config.gradient_accumulation_steps, world=world)
    if config.group_by_length:
        totals = [sum(lengths[i] for i in row) for row in rows]
        order = grouped(totals, config.seed, epoch, config.batch_size * world)
    chosen = steps(len(rows), seed=config.seed, epoch=epoch, rank=rank, order=order, **split)
    return [[[rows[r] for r in micro] for micro in step] for step in chosen]


# ---------------------------------------------------------------------------------------------------- batches

def pad_id(tokenizer) -> int:
    """The id to pad with: any will do, since padding is masked by length; the tokenizer is left as it is."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def collate(samples: list[Sample], pad_id: int) -> dict:
    """`input_ids` and `targets`, int64 of (rows, longest), padded on the right; targets are shifted labels,
    `real` (bool) is false on padding.

    `targets[:, t]` is what position t must predict, the label of token t + 1, or -100. No samples give one
    row of two masked tokens, with which a rank that ran out of data still takes part in the collectives.
    """
    batch = collate_packed([[sample] for sample in samples], pad_id)
    return {name: batch[name] for name in ("input_ids", "targets", "real")}


def collate_packed(rows: list[list[Sample]], pad_id: int) -> dict:
    """As `collate`, with the samples of each row one behind the other, and their `position_ids`.

    Positions start at 0 for each sample, and once more where padding begins: a token may look at what stands
    in its row from the last 0 on. The last token of a sample predicts nothing, so none is predicted from the
    sample before it.
    """
    import torch
    rows = rows or [[Sample([pad_id, pad_id], [IGNORE, IGNORE])]]
    longest = max(sum(len(sample.ids) for sample in row) for row in rows)
    batch = {"input_ids": [], "targets": [], "position_ids": [], "real": []}
    for row in rows:
        padding = longest - sum(len(sample.ids) for sample in row)
        batch["input_ids"].append([i for sample in row for i in sample.ids] + [pad_id] * padding)
        targets = [label for sample in row for label in (*sample.labels[1:], IGNORE)]
        batch["targets"].append(targets + [IGNORE] * padding)
        sizes = [*(len(sample.ids) for sample in row), padding]
        batch["position_ids"].append([t for size in sizes for t in range(size)])
        batch["real"].append([True] * (longest - padding) + [False] * padding)
    return {name: torch.tensor(values) for name, values in batch.items()}


def prepared(batch: dict) -> tuple[dict, int]:
    """A collated batch -> the model's arguments, on the host, and the number of supervised tokens.

    The supervised positions (flat) and their labels are picked out here, on the host, and so are the
    documents of packed rows, so that no shape on the device depends on a value there. Where there is an
    accelerator they lie in pinned memory: from there alone they are sent beside the computation.
    """
    import torch

    from scripts import attention
    targets = batch["targets"].flatten()
    positions = (targets != IGNORE).nonzero().flatten()
    made = {name: tensor for name, tensor in batch.items() if name != "targets"}
    made |= dict(positions=positions, labels=targets[positions])
    if "position_ids" in batch:
        made["documents"] = attention.documents(batch["position_ids"])
    if torch.accelerator.is_available():
        made = _each(made, lambda tensor: tensor.pin_memory())
    return made, len(positions)


def sent(made: dict, device) -> dict:
    """Arguments on the host -> those on `device`."""
    return _each(made, lambda tensor: tensor.to(device, non_blocking=True))


def arguments(batch: dict, device) -> tuple[dict, int]:
    """A collated batch -> the model's arguments on `device`, and the number of supervised tokens."""
    made, count = prepared(batch)
    return sent(made, device), count


def _each(made: dict, change) -> dict:
    """`change` of every tensor; "documents" are a tuple of them."""
    return {name: tuple(map(change, value)) if isinstance(value, tuple) else change(value)
            for name, value in made.items()}
