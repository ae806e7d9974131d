"""File formats and row formats: from a file to rows, and from a row to the text to train on.

file --read--> row --columns--> fields --check--> row of a known format --plain or chat template--> Text
Adding a format is one row of FORMATS. Whatever a user can get wrong raises `DataError`, whose message names
the place and the remedy.
"""
from __future__ import annotations

import csv
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from scripts.flags import UserError


class DataError(UserError):
    """Something in the data that the user can put right; the message is one sentence for them."""


class Text(NamedTuple):
    """A text and the ranges of its characters that are supervised."""
    text: str
    spans: list[tuple[int, int]]
    open: bool = True  # an EOS must still follow
    bare: bool = True  # without special tokens: the tokenizer puts its BOS in front, if it has one


# ---------------------------------------------------------------------------------------------- file formats

def extension(path: Path) -> str:
    """".jsonl" of a.jsonl and of a.jsonl.gz."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def read(path: Path) -> Iterator[tuple[str, object]]:
    """("FILE, line N", row) for each row of a file, a DataError in place of a row that cannot be read.

    Raises DataError where reading cannot go on.
    """
    packed = path.suffix.lower() == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            yield from ((f"{path}, {place}", row) for place, row in READERS[extension(path)](file))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    except Unreadable as error:
        raise DataError(f"{path}{', ' if str(error).startswith('line ') else ' '}{error}") from None


class Unreadable(Exception):
    """What is wrong inside a file, from "line N: ..." or a verb on."""


def _decoded(data: bytes, line: int) -> str:
    """The text of data that start on this line, without the mark that Windows editors put into files."""
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise Unreadable(f"line {line}: not UTF-8 text ({error.reason}); save the file as UTF-8") from None


def _not_json(error: Exception, before: int = 0) -> Unreadable:
    message = getattr(error, "msg", None) or "nested too deeply" * isinstance(error, RecursionError) or error
    hint = "; if it has one object per line, name it .jsonl" if message == "Extra data" else ""
    return Unreadable(f"line {before + getattr(error, 'lineno', 1)}: not valid JSON ({message}){hint}")


def _json(file: BinaryIO) -> Iterator[tuple[str, object]]:
    """("row N", value) for each element of a JSON list; only the text is held as a whole."""
    text = _decoded(file.read(), 1)
    start = BLANK.match(text).end()
    if start == len(text):
        return
    try:
        if text[start] != "[":
            raise Unreadable(f"holds one {type(json.loads(text)).__name__}; it must be a list of objects: "
                             "[{...}, {...}]")
        yield from ((f"row {number}", row) for number, row in enumerate(_elements(text, start), 1))
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


BLANK = re.compile(r"[ \t\r\n]*")


def _elements(text: str, start: int) -> Iterator[object]:
    """The elements of the JSON list that begins at `start` and ends the text."""
    decoder, at, mark = json.JSONDecoder(), BLANK.match(text, start + 1).end(), ","
    if text[at:at + 1] == "]":
        mark = "]"
    while mark == ",":
        value, at = decoder.raw_decode(text, at)
        yield value
        at = BLANK.match(text, at).end()
        mark = text[at:at + 1]
        at = BLANK.match(text, at + 1).end() if mark == "," else at
    if mark != "]":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    if (rest := BLANK.match(text, at + 1).end()) != len(text):
        raise json.JSONDecodeError("Extra data", text, rest)


def _jsonl(file: BinaryIO) -> Iterator[tuple[str, object]]:
    """("line N", value) for each line that is not blank."""
    for number, line in enumerate(file, 1):  # lines of bytes: those of text also end inside strings
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(_decoded(line, number))
        except (Unreadable, ValueError, RecursionError) as error:
            if not isinstance(error, Unreadable):
                error = _not_json(error)
            yield f"line {number}", DataError(str(error).partition(": ")[2])


def _csv(file: BinaryIO) -> Iterator[tuple[str, object]]:
    """("line N", row) for each row, N being its last line. All values are strings, as they are written."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader((_decoded(line, number) for number, line in enumerate(file, 1)), strict=True)
    try:
        for row in reader:
            missing = [name for name, value in row.items() if value is None]
            if None in row:
                row = DataError("has more fields than the header")
            elif missing:
                row = DataError(f"has fewer fields than the header; missing: {', '.join(missing)}")
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise Unreadable(f"line {reader.reader.line_num}: not valid CSV ({error})") from None


def _parquet(file: BinaryIO) -> Iterator[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet
    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(1000)
        yield from numbered(batch.to_pylist() for batch in batches)
    except pyarrow.ArrowException as error:
        raise Unreadable(f"is not a readable parquet file ({str(error).splitlines()[0]})") from None


def numbered(batches: Iterable[list], prefix: str = "") -> Iterator[tuple[str, object]]:
    rows = (row for batch in batches for row in batch)
    return ((f"{prefix}row {number}", row) for number, row in enumerate(rows, 1))


READERS: dict[str, Callable] = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
EXTENSIONS = ".json, .jsonl, .csv (each also with .gz) or .parquet"


# ---------------------------------------------------------------------------------------------------- prompts

# None may end in a space: " x" is usually one token, so a prompt that keeps the space for itself ends in a
# token that the model never saw before an answer.
PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n")
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n")
QUESTION = "###Question:\n{question}\n###Answer:\n"
QUESTION_WITH_CONTEXT = "###Context:\n{context}\n###Question:\n{question}\n###Answer:\n"
TURN = re.compile(r"### (Human|Assistant):")


def render(example: dict) -> tuple[str, str]:
    """(prompt, response) of one alpaca row; the text to train on is their concatenation."""
    template = PROMPT_WITH_INPUT if example.get("input") else PROMPT
    return template.format_map(example), example["output"]


def _pair(prompt: str, response: str) -> Text:
    return Text(prompt + response, [(len(prompt), len(prompt) + len(response))])


def alpaca(row: dict) -> Text:
    return _pair(*render(row))


def _question(row: dict) -> Text:
    return _pair((QUESTION_WITH_CONTEXT if row.get("context") else QUESTION).format_map(row), row["answer"])


def _completion(row: dict) -> Text:
    return _pair(row["prompt"], row["completion"])


def _whole(row: dict) -> Text:
    return Text(row["text"], [(0, len(row["text"]))])


def _guanaco(row: dict) -> Text:
    """A turn's supervised part starts behind the colon and ends with its last character that is no space."""
    text = row["text"]
    found = list(TURN.finditer(text))
    ends = [len(text[:turn.start()].rstrip()) for turn in found[1:]] + [len(text)]
    return Text(text, [(turn.end(), end) for turn, end in zip(found, ends) if turn[1] == "Assistant"])


# ------------------------------------------------------------------------------------------- as conversations

ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
SHAREGPT_ROLES = {**ROLES, "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
                  "bard": "assistant", "model": "assistant"}


def _asked(question: str, answer: str, context: str | None = None) -> list[dict]:
    content = f"{question}\n\n{context}" if context else question
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _guanaco_turns(row: dict) -> list[dict]:
    _, *parts = TURN.split(row["text"])
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2])]


def _turns(turns: object, role_key: str, text_key: str, roles: dict[str, str]) -> list[dict]:
    """The checked messages of a conversation, with the roles of chat templates."""
    if not isinstance(turns, list) or not turns:
        found = "an empty one" if turns == [] else type(turns).__name__
        raise DataError(f"the conversation must be a list of turns, not {found}")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not {role_key, text_key} <= set(turn):
            raise DataError(f'turn {number} must be an object with "{role_key}" and "{text_key}"')
        role = turn[role_key]
        if not isinstance(role, str) or role not in roles:
            raise DataError(f'turn {number} has the unknown "{role_key}" {role!r}; known: {", ".join(roles)}')
        content = _string(turn[text_key], f'turn {number}, "{text_key}"')
        if roles[role] == "assistant" and not content.strip():
            raise DataError(f"turn {number} is an empty answer")
        messages.append({"role": roles[role], "content": content})
    return messages


# ------------------------------------------------------------------------------------------------ the formats

class Format(NamedTuple):
    """How to recognise a kind of row, and to read it as plain text and as a conversation (None: cannot)."""
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    plain: Callable[[dict], Text] | None
    messages: Callable[[dict], list[dict]] | None
    is_one: Callable[[dict], bool] = lambda row: True


# In the order in which they are tried. The last field that a format needs is the answer, never empty.
FORMATS = {
    "messages": Format(("messages",), (), None,
                       lambda row: _turns(row["messages"], "role", "content", ROLES)),
    "sharegpt": Format(("conversations",), (), None,
                       lambda row: _turns(row["conversations"], "from", "value", SHAREGPT_ROLES)),
    "alpaca": Format(("instruction", "output"), ("input",), alpaca,
                     lambda row: _asked(row["instruction"], row["output"], row.get("input"))),
    "prompt_completion": Format(("prompt", "completion"), (), _completion,
                                lambda row: _asked(row["prompt"], row["completion"])),
    "question_answer": Format(("question", "answer"), ("context",), _question,
                              lambda row: _asked(row["question"], row["answer"], row.get("context"))),
    "guanaco": Format(("text",), (), _guanaco, _guanaco_turns,
                      lambda row: str(row["text"]).lstrip().startswith("### Human:")),
    "text": Format(("text",), (), _whole, None),
}


def detect(row: dict) -> str:
    """The name of the first format whose fields the row has."""
    for name, form in FORMATS.items():
        if all(field in row for field in form.needs) and form.is_one(row):
            return name
    known = "; ".join(f"{name}: {', '.join(form.needs)}" for name, form in FORMATS.items())
    raise DataError(f"no format fits the columns {_names(row)}; known formats are {known}; "
                    "rename columns with --dataset_columns field=column")


def _names(row: dict) -> str:
    return ", ".join(map(str, row)) or "(none)"


def _string(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{what} must be a string, not {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(f"{what} has half of a surrogate pair, which is no character") from None
    return value


def check(row: object, name: str) -> dict:
    """`row` if its fields are those of the format `name`; an absent or null optional field is fine."""
    form = FORMATS[name]
    if not isinstance(row, dict):
        wanted = " and ".join(f'"{field}"' for field in form.needs)
        raise DataError(f"a row must be an object with {wanted}, not {type(row).__name__}")
    for field in form.needs:
        if field not in row:
            raise DataError(f'"{field}" is missing; the row has {_names(row)}')
    if form.plain is None:
        return row
    for field in (*form.needs, *form.may_have):
        if field in form.needs or row.get(field) is not None:
            _string(row[field], f'"{field}"')
    if not row[form.needs[-1]].strip():
        raise DataError(f'"{form.needs[-1]}" is empty; there is nothing to learn from it')
    if name == "guanaco" and "### Assistant:" not in row["text"]:
        raise DataError('"text" has no "### Assistant:" turn')
    return row


def parse_columns(text: str) -> list[tuple[str, ...]]:
    """[(field, column), ...] of "question=instruction,answer=output"."""
    pairs = [tuple(part.strip() for part in pair.split("=")) for pair in text.split(",") if pair.strip()]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise DataError(f"dataset_columns is {text!r}; write field=column,field=column")
    return pairs


def rename(row: dict, pairs: list[tuple[str, ...]]) -> dict:
    """`row` with its columns named as the format's fields. column=field is understood as well."""
    renamed = dict(row)
    for field, column in pairs:
        if column not in row and field in row:
            field, column = column, field
        if column not in row:
            raise DataError(f"dataset_columns names {column!r}, but the columns are {_names(row)}")
        renamed.pop(column, None)
    for field, column in pairs:
        field, column = (field, column) if column in row else (column, field)
        renamed[field] = row[column]
    return renamed


class Renderer:
    """Rows, one after the other, to texts. The first good row decides on the format, unless it is given."""

    def __init__(self, tokenizer, dataset_format="auto", columns="", chat_template=False,
                 train_on="completions"):
        if dataset_format not in ("auto", *FORMATS):
            close = difflib.get_close_matches(dataset_format, FORMATS, 1)
            raise DataError(f"dataset_format {dataset_format!r} is none of auto, {', '.join(FORMATS)}"
                            + (f"; did you mean {close[0]}?" if close else ""))
        if train_on not in ("completions", "all", "last"):
            raise DataError(f"train_on {train_on!r} is none of completions, all, last")
        self.tokenizer, self.columns = tokenizer, parse_columns(columns)
        self.wants_chat, self.train_on, self.chat = chat_template, train_on, None
        self.name = None
        if dataset_format != "auto":
            self._settle(dataset_format)

    def _settle(self, name: str) -> None:
        form = FORMATS[name]
        if form.plain is None or self.wants_chat and form.messages:
            from scripts.tokens import ChatTemplate  # which builds on this file
            self.chat = ChatTemplate(self.tokenizer)
        self.name = name

    def __call__(self, row: object) -> Text:
        if isinstance(row, dict) and self.columns:
            row = rename(row, self.columns)
        if self.name is None:
            if not isinstance(row, dict):
                raise DataError(f"a row must be an object with named fields, not {type(row).__name__}")
            self._settle(detect(row))
        row, form = check(row, self.name), FORMATS[self.name]
        if self.chat:
            return self.chat.text(form.messages(row), self.train_on)
        made = form.plain(row)
        spans = {"completions": made.spans, "last": made.spans[-1:], "all": [(0, len(made.text))]}
        return made._replace(spans=spans[self.train_on])
