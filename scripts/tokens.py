"""Texts to token ids, loss masks and counts; kept on disk, so that the next start has nothing left to do.

rows --Renderer--> Text --encode--> ids, mask --fit--> Table of flat arrays --Samples--> what train.py indexes
"""
from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scripts import formats
from scripts.formats import DataError, Text

IGNORE = -100  # label of a token that is not supervised: what torch's cross-entropy ignores by default
TRUNCATIONS = ("right", "left_prompt", "drop")
PIECE = 2048  # texts per call of the tokenizer, which spreads them over the cores; offsets take much memory


class Sample(NamedTuple):
    """One text. `labels[t]` is `ids[t]` where the token is supervised, else -100; not yet shifted."""
    ids: list[int]
    labels: list[int]


class Counts(NamedTuple):
    """What became of the rows: kept (some of them truncated), dropped as too long or without a supervised
    token, or skipped as unusable; and the tokens that were kept."""
    kept: int
    truncated: int
    dropped: int
    supervised_tokens: int
    total_tokens: int
    skipped: int = 0


class Table(NamedTuple):
    """Tokenised rows, one behind the other; row i is [offsets[i]:offsets[i + 1]] of ids and supervised."""
    ids: np.ndarray  # int32
    supervised: np.ndarray  # uint8
    offsets: np.ndarray  # int64
    cut: np.ndarray  # uint8, one per row: was longer
    rows: np.ndarray  # int64: the number of each in its source, as messages count them
    facts: dict  # rows dropped and skipped, the first problem met; what is counted ("line" of a file, "row")

    def supervised_per_row(self) -> np.ndarray:
        """Tokens of each row that are predicted: the first of a text never is."""
        if not len(self.cut):
            return np.zeros(0, np.int64)
        starts = self.offsets[:-1]
        return np.add.reduceat(self.supervised, starts, dtype=np.int64) - self.supervised[starts]


class Samples(Sequence):
    """The samples of one or more tables, made when they are asked for."""

    def __init__(self, tables: list[Table], chosen: list[np.ndarray] | None = None):
        """`chosen`: which rows of each table, in order; None: all."""
        self.tables = tables
        self.chosen = chosen or [np.arange(len(table.cut)) for table in tables]
        self._starts = np.cumsum([0, *map(len, self.chosen)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        which, row = self.find(i)
        table = self.tables[which]
        ids = table.ids[table.offsets[row]:table.offsets[row + 1]]
        mask = table.supervised[table.offsets[row]:table.offsets[row + 1]]
        return Sample(ids.tolist(), np.where(mask, ids, IGNORE).tolist())

    def find(self, i: int) -> tuple[int, int]:
        """(which table, which of its rows) sample i is."""
        i = range(len(self))[i]
        which = int(np.searchsorted(self._starts, i, side="right")) - 1
        return which, int(self.chosen[which][i - self._starts[which]])

    def __repr__(self) -> str:
        return f"Samples({len(self)} texts, fingerprint {self.fingerprint})"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [int(n) for table, rows in zip(self.tables, self.chosen) for n in np.diff(table.offsets)[rows]]

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in the same order, wherever they come from."""
        digest = hashlib.sha256(np.array(self.lengths, "<i8"))
        for table, rows in zip(self.tables, self.chosen):
            whole = len(rows) == len(table.cut)
            for array, kind in ((table.ids, "<i4"), (table.supervised, "u1")):
                pieces = [array] if whole else (array[table.offsets[r]:table.offsets[r + 1]] for r in rows)
                for piece in pieces:
                    digest.update(np.ascontiguousarray(piece, kind))
        return digest.hexdigest()[:16]

    @property
    def problems(self) -> list[str]:
        """The first row that was skipped of each source, and why."""
        return [table.facts["problem"] for table in self.tables if table.facts["problem"]]

    def counts(self) -> Counts:
        pairs = list(zip(self.tables, self.chosen))
        return Counts(
            kept=len(self), truncated=int(sum(table.cut[rows].sum() for table, rows in pairs)),
            dropped=sum(table.facts["dropped"] for table in self.tables),
            supervised_tokens=int(sum(table.supervised_per_row()[rows].sum() for table, rows in pairs)),
            total_tokens=sum(self.lengths), skipped=sum(table.facts["skipped"] for table in self.tables))


# --------------------------------------------------------------------------------------------- chat templates

# Some templates write today's date into the system prompt. The same rows must give the same tokens on every
# day, so these get one fixed day: that which Llama 3's template itself falls back to.
FIXED_DAY = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro %}"


class ChatTemplate:
    """A tokenizer's chat template, and where in its output the assistant speaks.

    Where a turn ends is found by rendering once more with a mark behind every answer; where it starts, by
    rendering what comes before it as one does to generate. Both are compared with the text: a template that
    changes earlier text when the conversation goes on is refused, not guessed at.
    """

    def __init__(self, tokenizer):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError("the tokenizer has no chat template, which chat data need; use the model's "
                            "instruct version, or put a chat_template.jinja into its folder")
        self.template, self.tokenizer = tokenizer.get_chat_template(), tokenizer
        if "strftime_now" in self.template:
            self.template = FIXED_DAY + self.template
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        ordered = sorted(tokens, key=lambda token: (-len(token), token))
        self.closing = re.compile(r"\s*(" + ("|".join(map(re.escape, ordered)) or "(?!)") + ")")

    def render(self, messages: list[dict], prompt: bool = False) -> str:
        """The text of a conversation, with the opening of an answer behind it if `prompt`."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, chat_template=self.template, add_generation_prompt=prompt)
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise DataError(f"the chat template refuses the conversation: {reason[-1]}") from None

    def text(self, messages: list[dict], train_on: str) -> Text:
        """The rendered conversation; of each supervised turn all that the model must say and its end."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if train_on == "all":
            text = self.render(messages)
            closed = any(text.rstrip().endswith(match[1]) for match in self.closing.finditer(text))
            return Text(text, [(0, len(text))], open=not closed, bare=False)
        if not answers:
            return Text(self.render(messages), [], open=False, bare=False)
        messages = messages[:answers[-1] + 1]  # what comes after the last answer teaches nothing
        text = self.render(messages)
        contents = self._content_ends(messages, answers, text)
        end = self.closing.match(text, contents[-1])
        spans = []
        for i, content in list(zip(answers, contents))[-1 if train_on == "last" else 0:]:
            closing = self.closing.match(text, content)
            closed = end and closing and closing[1] == end[1]  # else it opens the next turn
            spans.append((self._start(messages, i, content, text), closing.end() if closed else content))
        return Text(text if end else text[:contents[-1]], spans, open=not end, bare=False)

    def _content_ends(self, messages: list[dict], answers: list[int], text: str) -> list[int]:
        """Where in `text` the words of each answer end."""
        mark = next(c for c in map(chr, range(0xE000, 0xF8FF)) if c not in text)
        for keep in (str, str.rstrip):  # templates that strip an answer no longer see its end
            marked = [dict(m, content=keep(m["content"]) + mark) if i in answers else m
                      for i, m in enumerate(messages)]
            pieces = self.render(marked).split(mark)
            if "".join(pieces) == text and len(pieces) == len(answers) + 1:
                return list(accumulate(map(len, pieces[:-1])))
        raise DataError("the chat template does not write every answer exactly once as it is, "
                        "so what to train on cannot be told from the rest")

    def _start(self, messages: list[dict], i: int, content_end: int, text: str) -> int:
        """Where the model takes over for answer `i`: behind all that it is given to generate from."""
        words = messages[i]["content"].strip()
        last = len(text[:content_end].rstrip())
        content = last - len(words) if text.endswith(words, 0, last) else last
        if i == 0:  # no template has to accept an empty conversation
            return content
        before = self.render(messages[:i], prompt=True)
        if not text.startswith(before):
            raise DataError("the chat template changes earlier text when the conversation goes on (message "
                            f"{i + 1}), so one text cannot show every answer what the model sees when it "
                            "gives it; use --train_on last, or another template")
        ignores_prompt = text[len(before):content].strip() and before == self.render(messages[:i])
        return content if ignores_prompt else len(before)


# ----------------------------------------------------------------------------------------------- tokenising

def build(rows: Iterable[tuple[str, object]], render: Callable[[dict], Text], tokenizer,
          context_length: int, truncation: str = "right", skip_bad_rows: bool = False) -> Table:
    """The table of (place, row) pairs; a row may be the DataError that reading it gave.

    The first bad row raises DataError with its place, unless `skip_bad_rows`.
    """
    check_tokenizer(tokenizer)
    if truncation not in TRUNCATIONS:
        raise DataError(f"truncation {truncation!r} is none of {', '.join(TRUNCATIONS)}")
    facts: dict = {"dropped": 0, "skipped": 0, "problem": "", "counted": ""}
    fitted = []
    texts = _texts(rows, render, facts if skip_bad_rows else None)
    while piece := list(islice(texts, PIECE)):
        places, rendered = zip(*piece)
        facts["counted"] = places[0].rpartition(" ")[0].rpartition(" ")[2]
        found = [_fit(*pair, context_length, truncation, tokenizer.bos_token_id)
                 for pair in _encode(rendered, tokenizer)]
        kept = [(*pair, int(place.rpartition(" ")[2])) for place, pair in zip(places, found)
                if pair and pair[1][1:].any()]
        facts["dropped"] += len(found) - len(kept)
        fitted.append(_joined(kept))
    if not fitted and facts["skipped"]:
        raise DataError(f"all {facts['skipped']} rows were skipped; the first: {facts['problem']}")
    return _table(fitted, facts)


def _texts(rows, render, skipped: dict | None) -> Iterator[tuple[str, Text]]:
    """(place, text) of the rows. Bad ones are counted in `skipped`, or raise DataError if it is None."""
    for place, row in rows:
        try:
            if isinstance(row, DataError):
                raise row
            yield place, render(row)
        except DataError as error:
            problem = f"{place}: {error}"
            if skipped is None:
                raise DataError(problem) from None
            skipped.update(skipped=skipped["skipped"] + 1, problem=skipped["problem"] or problem)


def _encode(texts: Sequence[Text], tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, mask) of each text, tokenised whole and masked by positions: the parts by themselves can give
    other ids. A token that reaches from a prompt into an answer carries part of the answer and is supervised.
    """
    encoded = tokenizer([text.text for text in texts], add_special_tokens=texts[0].bare, verbose=False,
                        return_offsets_mapping=True, return_attention_mask=False, return_token_type_ids=False)
    eos = tokenizer.eos_token_id
    for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"]):
        first, last = bounds(ids, tokenizer) if text.bare else (0, len(ids))
        ends = np.array([end for _, end in offsets[first:last]], np.int64)
        mask = np.zeros(last - first, bool)
        for start, stop in text.spans:
            mask |= (ends > start) & (ends <= stop)
        tail = [eos] if text.open else []
        yield np.array(ids[first:last] + tail, np.int32), np.append(mask, np.ones(len(tail), bool))


def _fit(ids, mask, context_length: int, truncation: str, bos: int | None):
    """(ids, mask, whether they were cut), or None for a text that is dropped because it is too long."""
    excess = len(ids) - context_length
    if excess <= 0:
        return ids, mask, False
    if truncation == "drop":
        return None
    if truncation == "left_prompt" and mask.any():
        spare = min(excess, max(0, int(mask.argmax()) - 1))  # the first answer needs a token to come from
        head = int(ids[0] == bos)
        ids, mask = (np.concatenate([a[:head], a[head + spare:]]) for a in (ids, mask))
    return ids[:context_length], mask[:context_length], True


def _joined(kept: list) -> tuple[np.ndarray, ...]:
    """ids, mask, lengths, cut and row numbers of many texts."""
    ids = np.concatenate([ids for ids, *_ in kept] or [np.zeros(0, np.int32)])
    mask = np.concatenate([mask for _, mask, *_ in kept] or [np.zeros(0, bool)])
    lengths = np.array([len(ids) for ids, *_ in kept], np.int64)
    cut = np.array([cut for *_, cut, _ in kept], bool)
    return ids, mask, lengths, cut, np.array([row for *_, row in kept], np.int64)


def _table(fitted: list[tuple], facts: dict) -> Table:
    ids, mask, lengths, cut, rows = zip(*(fitted or [_joined([])]))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    return Table(np.concatenate(ids), np.concatenate(mask).view(np.uint8), offsets.astype(np.int64),
                 np.concatenate(cut).astype(np.uint8), np.concatenate(rows), facts)


def tokenize(rows: list[dict], tokenizer, context_length: int) -> tuple[Samples, Counts]:
    """Samples of alpaca rows, at most `context_length` tokens long, cut on the right, with the response and
    one EOS supervised. Raises DataError if none is left, and for a tokenizer without offsets or EOS."""
    places = ((f"row {number}", row) for number, row in enumerate(rows, 1))
    samples = Samples([build(places, formats.alpaca, tokenizer, context_length)])
    if not len(samples):
        raise nothing_left(samples.counts(), context_length)
    return samples, samples.counts()


def nothing_left(counts: Counts, context_length: int) -> DataError:
    return DataError(f"none of the {counts.dropped} rows has any of its response within {context_length} "
                     "tokens; raise --context_length or shorten the prompts")


def check_tokenizer(tokenizer) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{type(tokenizer).__name__} is not a fast tokenizer, and only those say where each "
                        "token stands in the text; use a model folder that has a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token, so the model could not learn to stop; "
                        "set eos_token in its tokenizer_config.json")


def bounds(ids: list[int], tokenizer) -> tuple[int, int]:
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
    first, last = bounds(ids, tokenizer)
    return ids[first:last]


def chat_ids(messages: list[dict], tokenizer) -> list[int]:
    """The ids to generate the next answer of a conversation from, as in training with the chat template."""
    text = ChatTemplate(tokenizer).render(messages, prompt=True)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


# ---------------------------------------------------------------------------------------------------- on disk

def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/qshard/tokens`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qshard" / "tokens"


def cache_key(tokenizer, **settings) -> str:
    """Changes with the tokenizer, its template, any setting, the libraries, and the code of this step."""
    code = [Path(file).read_bytes() for file in (__file__, formats.__file__)]
    parts = [*code, tokenizer.backend_tokenizer.to_str().encode(),
             repr((tokenizer.chat_template, tokenizer.bos_token_id, tokenizer.eos_token_id)).encode(),
             version("tokenizers").encode(), version("transformers").encode(),
             json.dumps(settings, sort_keys=True).encode()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def cached(key: str, make: Callable[[], Table]) -> Table:
    """The table kept under `key`, else a new one. One process makes it while the others wait for the file."""
    from filelock import FileLock
    path = cache_folder() / f"{key}.safetensors"
    if table := read_table(path):
        return table
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
    except OSError:  # a home that cannot be written to
        return make()
    try:
        if table := read_table(path):
            return table
        table = make()
        return write_table(path, table) and read_table(path) or table
    finally:
        lock.release()


def write_table(path: Path, table: Table) -> bool:
    """Whether it could be written. It appears under its name when it is complete, or not at all."""
    from safetensors.numpy import save_file
    if not len(table.cut):
        return False
    arrays = {name: np.ascontiguousarray(array) for name, array in table._asdict().items() if name != "facts"}
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        try:
            save_file(arrays, beside, metadata={"facts": json.dumps(table.facts)})
            os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)
    except OSError:
        return False
    return True


def read_table(path: Path) -> Table | None:
    """The table with its arrays mapped from the file, not read; None if there is no whole one."""
    kinds = {"I32": np.int32, "U8": np.uint8, "I64": np.int64}
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        facts = json.loads(header.pop("__metadata__")["facts"])
        arrays = {name: np.memmap(path, kinds[spec["dtype"]], "r", 8 + size + spec["data_offsets"][0],
                                  tuple(spec["shape"])) for name, spec in header.items()}
        return Table(**arrays, facts=facts)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return None
