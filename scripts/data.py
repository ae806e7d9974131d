"""Training data: from a name or a path to rows, token ids, loss masks and batches.

rows (alpaca dicts) --render--> prompt, response --tokenize--> Sample(ids, labels) --steps--> which when
--collate--> tensors. Whatever a user can get wrong raises `DataError`, whose message names the place and
the remedy.
"""
from __future__ import annotations

import difflib
import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

IGNORE = -100  # label of a token that is not supervised: what torch's cross-entropy ignores by default


class DataError(ValueError):
    """Something the user can put right; the message is one sentence for them."""


# ---------------------------------------------------------------------------------------- sources and formats

def load(dataset: str, samples: int | None = None) -> list[dict]:
    """The first `samples` rows (None: all) of a built-in set or of a file, as alpaca dicts.

    Raises DataError for an unknown name, a missing, empty or malformed file, and a bad row.
    """
    if samples is not None and samples < 1:
        raise DataError(f"the number of samples is {samples}; it must be at least 1")
    source = SOURCES.get(dataset)
    return (source() if source else _read(Path(dataset).expanduser()))[:samples]


def _demo() -> list[dict]:
    """Question and table to SQL: see scripts/demo.py."""
    from scripts import demo
    return demo.examples("train")


def _dummy() -> list[dict]:
    """256 additions of two-digit numbers, all about equally long, for smoke tests and timings."""
    return [{"instruction": f"What is {10 + i % 40} plus {10 + i // 8}?", "output": str(20 + i % 40 + i // 8)}
            for i in range(256)]


SOURCES: dict[str, Callable[[], list[dict]]] = {"demo": _demo, "dummy": _dummy}


def _read(path: Path) -> list[dict]:
    """The checked rows of a file, by the reader that its extension names."""
    reader = FORMATS.get(path.suffix.lower())
    if not path.is_file():
        raise DataError(_not_found(path))
    if reader is None:
        raise DataError(f"{path} has an unknown extension; convert it to {' or '.join(FORMATS)}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # drops the mark that Windows editors put in front
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    rows = [_checked(row, f"{path}, {place}") for place, row in reader(path, text)]
    if not rows:
        raise DataError(f"{path} is empty; it needs at least one row")
    return rows


def _not_found(path: Path) -> str:
    known = [*SOURCES, *(str(path.parent / file.name) for file in path.parent.glob("*.json*"))]
    close = difflib.get_close_matches(str(path), known, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return (f"dataset {str(path)!r} is neither a file nor a built-in set ({', '.join(SOURCES)}); "
            f"files end in {' or '.join(FORMATS)}{meant}")


def _json(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """("row N", value) for each element of a JSON list."""
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; if it has one object per line, name it .jsonl" if error.msg == "Extra data" else ""
        raise DataError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}){hint}") from None
    if not isinstance(rows, list):
        raise DataError(f"{path} holds one {type(rows).__name__}; "
                        "it must be a list of objects: [{...}, {...}]")
    yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _jsonl(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """("line N", value) for each line that is not blank."""
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also cuts inside strings
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not valid JSON ({error.msg}); "
                            "each line must be one object") from None


FORMATS: dict[str, Callable[[Path, str], Iterator[tuple[str, object]]]] = {".json": _json, ".jsonl": _jsonl}


def _checked(row: object, place: str) -> dict:
    """`row` if it is an alpaca object of strings; an absent or null "input" is fine."""
    if not isinstance(row, dict):
        raise DataError(f'{place}: a row must be an object with "instruction" and "output", '
                        f'not {type(row).__name__}')
    for key in ("instruction", "output"):
        if key not in row:
            raise DataError(f'{place}: "{key}" is missing; the row has {", ".join(row) or "no fields"}')
    for key in ("instruction", "input", "output"):
        value = row.get(key, "")
        if not isinstance(value, str) and not (key == "input" and value is None):
            raise DataError(f'{place}: "{key}" must be a string, not {type(value).__name__}')
    return row


# ---------------------------------------------------------------------------------------------------- prompts

# Neither may end in a space: " x" is usually one token, so a prompt that keeps the space for itself ends in a
# token that the model never saw before an answer.
PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n")
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n")


def render(example: dict) -> tuple[str, str]:
    """(prompt, response) of one alpaca row; the text to train on is their concatenation."""
    template = PROMPT_WITH_INPUT if example.get("input") else PROMPT
    return template.format_map(example), example["output"]


# ------------------------------------------------------------------------------------------- tokens and masks

class Sample(NamedTuple):
    """One text. `labels[t]` is `ids[t]` where the token is supervised, else -100; not yet shifted."""
    ids: list[int]
    labels: list[int]


class Counts(NamedTuple):
    """What became of the rows: kept (some of them truncated) or dropped, and the tokens that were kept."""
    kept: int
    truncated: int
    dropped: int
    supervised_tokens: int
    total_tokens: int


def tokenize(rows: list[dict], tokenizer, context_length: int) -> tuple[list[Sample], Counts]:
    """Samples of at most `context_length` tokens, cut on the right, with the response and one EOS supervised.

    A sample whose response is cut away altogether is dropped. Raises DataError if none is left, and for a
    tokenizer that has no offsets or no EOS.
    """
    _check_tokenizer(tokenizer)
    samples, truncated = [], 0
    for start in range(0, len(rows), 1024):  # in pieces: offsets take far more memory than the ids
        for sample in _encode([render(row) for row in rows[start:start + 1024]], tokenizer):
            cut = Sample(sample.ids[:context_length], sample.labels[:context_length])
            if _supervised(cut):
                samples.append(cut)
                truncated += len(cut.ids) < len(sample.ids)
    if not samples:
        raise DataError(f"none of the {len(rows)} rows has any of its response within {context_length} "
                        "tokens; raise --context_length or shorten the prompts")
    return samples, Counts(len(samples), truncated, len(rows) - len(samples),
                           sum(map(_supervised, samples)), sum(len(sample.ids) for sample in samples))


def _check_tokenizer(tokenizer) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{type(tokenizer).__name__} is not a fast tokenizer, and only those say where each "
                        "token stands in the text; use a model folder that has a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token, so the model could not learn to stop; "
                        "set eos_token in its tokenizer_config.json")


def _supervised(sample: Sample) -> int:
    """Number of tokens that are predicted: the first of a text never is."""
    return sum(label != IGNORE for label in sample.labels[1:])


def _encode(pairs: list[tuple[str, str]], tokenizer) -> Iterator[Sample]:
    """Each text is tokenised whole and masked by positions: prompt and response apart can give other ids.

    A token that straddles the boundary carries part of the response and is supervised.
    """
    encoded = tokenizer([prompt + response for prompt, response in pairs], return_offsets_mapping=True,
                        return_attention_mask=False, return_token_type_ids=False, verbose=False)
    for (prompt, _), ids, offsets in zip(pairs, encoded["input_ids"], encoded["offset_mapping"]):
        labels = [i if end > len(prompt) else IGNORE for i, (_, end) in zip(ids, offsets)]
        first, last = _bounds(ids, tokenizer)
        eos = tokenizer.eos_token_id
        yield Sample(ids[first:last] + [eos], labels[first:last] + [eos])


def _bounds(ids: list[int], tokenizer) -> tuple[int, int]:
    """`ids[first:last]` has at most one BOS in front and no EOS behind, whoever wrote them there."""
    first, last = 0, len(ids)
    while last and ids[last - 1] == tokenizer.eos_token_id:
        last -= 1
    while first + 1 < last and ids[first] == ids[first + 1] == tokenizer.bos_token_id:
        first += 1
    return first, last


def prompt_ids(prompt: str, tokenizer) -> list[int]:
    """The ids to generate from: as in training, with the tokenizer's BOS if it has one and without an EOS."""
    ids = tokenizer(prompt, verbose=False)["input_ids"]
    first, last = _bounds(ids, tokenizer)
    return ids[first:last]


# ------------------------------------------------------------------------------------------------------ order

def steps_per_epoch(n: int, batch_size: int, accumulation: int, world: int) -> int:
    """Number of optimiser steps that `n` samples make; the last one may be smaller."""
    return -(-n // (batch_size * accumulation * world))


def steps(n: int, *, seed: int, epoch: int, batch_size: int, accumulation: int, rank: int,
          world: int) -> list[list[list[int]]]:
    """For each optimiser step of an epoch, this rank's micro-batches as lists of sample indices, some empty.

    A step takes the next batch_size * accumulation * world samples of one permutation, which depends on seed
    and epoch only: for the same product, every split into ranks and micro-batches trains on the same samples
    per step. All ranks have equally many micro-batches in a step, since each is a round of collectives.
    """
    rng = random.Random(f"{seed},{epoch}")
    order = sorted(range(n), key=lambda _: rng.random())
    window, across = batch_size * accumulation * world, batch_size * world
    plan = []
    for start in range(0, n, window):
        chosen = order[start:start + window]
        own = (m + rank * batch_size for m in range(0, len(chosen), across))
        plan.append([chosen[first:first + batch_size] for first in own])
    return plan


# ---------------------------------------------------------------------------------------------------- batches

def pad_id(tokenizer) -> int:
    """The id to pad with: any will do, since padding is masked by length; the tokenizer is left as it is."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def collate(samples: list[Sample], pad_id: int) -> dict:
    """`input_ids` and `targets`, int64 of (rows, longest), padded on the right; targets are shifted labels.

    `targets[:, t]` is what position t must predict, the label of token t + 1, or -100. No samples give one
    row of two masked tokens, with which a rank that ran out of data still takes part in the collectives.
    """
    import torch
    samples = samples or [Sample([pad_id, pad_id], [IGNORE, IGNORE])]
    longest = max(len(sample.ids) for sample in samples)
    ids = [sample.ids + [pad_id] * (longest - len(sample.ids)) for sample in samples]
    targets = [sample.labels[1:] + [IGNORE] * (longest - len(sample.labels) + 1) for sample in samples]
    return {"input_ids": torch.tensor(ids), "targets": torch.tensor(targets)}


# ----------------------------------------------------------------------------------- what every script shares

def kebab_flags(argv: list[str]) -> list[str]:
    """argv with `--flag_name` written `--flag-name`, the one spelling that fastcore's parser knows."""
    def fix(word: str) -> str:
        name, equals, value = word.partition("=")
        return name.replace("_", "-") + equals + value if word.startswith("--") else word
    return [fix(word) for word in argv]


@contextmanager
def quiet():
    """Without the warnings and loading bars of the libraries, which drown the few lines that matter."""
    from transformers.utils import logging as bars
    shown, level = bars.is_progress_bar_enabled(), logging.root.manager.disable
    logging.disable(logging.WARNING)
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if shown:
            bars.enable_progress_bar()
