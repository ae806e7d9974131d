"""Training data: from a name or a path to samples, and a look at what will be trained on.

    python scripts/data.py --dataset data.jsonl --model_name MODEL      # counts, lengths, marked samples

sources (here) --> rows --formats.py--> texts and what to supervise --tokens.py--> samples
--packing.py--> order, steps, tensors. `prepare` is the one entry; whatever a user can get wrong raises
`DataError`, whose message names the place and the remedy.
"""
from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts import packing, tokens
from scripts.checkpoint import check_file
from scripts.flags import Refused, UserError, quiet, run_script, to_bool
from scripts.formats import EXTENSIONS, FORMATS, READERS, DataError, Renderer, check, extension  # noqa: F401
from scripts.formats import numbered, read, render  # noqa: F401
from scripts.packing import arguments, collate, collate_packed, pad_id, plan, prepared  # noqa: F401
from scripts.packing import sent, steps, steps_per_epoch  # noqa: F401
from scripts.tokens import IGNORE, Counts, Sample, Samples, chat_ids, prompt_ids, tokenize  # noqa: F401

# ---------------------------------------------------------------------------------------------- the one entry

def prepare(config, tokenizer, dataset: str | None = None) -> tuple[Samples, Counts]:
    """The samples of `config.dataset` (or of `dataset`, then without the limit --dataset_samples).

    Tokens are kept on disk per source, so only the first start with the same rows and settings makes them.
    Raises DataError for anything wrong with names, files, rows and tokenizer, and if nothing is left.
    """
    tokens.check_tokenizer(tokenizer)
    sources = parse_sources(config.dataset if dataset is None else dataset)
    limit = _checked_limit(config.dataset_samples) if dataset is None else None
    tables = [_table(source.name, config, tokenizer, limit) for source in sources]
    samples = Samples(tables, _weighted([len(table.cut) for table in tables], sources, config.seed))
    if not len(samples):
        raise tokens.nothing_left(samples.counts(), config.context_length)
    return samples, samples.counts()


def split(samples: Samples, fraction: float, seed: int) -> tuple[Samples, ...]:
    """(rest, held out): a seeded choice of `fraction` of the samples, at least one, is held out."""
    number = max(1, round(len(samples) * fraction))
    if number >= len(samples):
        raise DataError(f"--eval_fraction {fraction} of {len(samples)} samples leaves none to train on")
    out = np.zeros(len(samples), bool)
    out[packing.permutation(len(samples), seed, -1)[:number]] = True
    parts = np.split(out, np.cumsum([len(rows) for rows in samples.chosen])[:-1])
    return tuple(Samples(samples.tables, [rows[mask == side] for rows, mask in zip(samples.chosen, parts)])
                 for side in (False, True))


@dataclass
class Held:
    """What a run trains on, and measures its loss on if asked to."""
    tokenizer: object
    train: Samples
    counts: Counts
    eval: Samples | None
    sources: tuple[str, ...] = ()  # of `train`, as they were named

    def __post_init__(self):
        self.pad, self.lengths = pad_id(self.tokenizer), self.train.lengths

    def places(self, numbers: list[int], most: int = 32) -> str:
        """Where samples that are trained on stand in their sources: "lines 3, 17 of my.jsonl"."""
        found: dict[int, list[int]] = {}
        for which, row in map(self.train.find, numbers[:most]):
            found.setdefault(which, []).append(int(self.train.tables[which].rows[row]))
        texts = [f"{self.train.tables[which].facts['counted']}{'s' * (len(rows) > 1)} "
                 f"{', '.join(map(str, sorted(rows)))} of {self.sources[which]}"
                 for which, rows in sorted(found.items())]
        return "; ".join(texts) + (f"; and {len(numbers) - most} more" if numbers[most:] else "")

    def collate(self, rows: list[list[int]], packed: bool, flat: bool = False) -> dict:
        """Rows of sample numbers -> tensors; packed ones with the position ids that keep samples apart.
        `flat`: all samples in one row, so that nothing is padded."""
        if flat and len({sum(self.lengths[i] for i in row) for row in rows}) > 1:
            return collate_packed([[self.train[i] for row in rows for i in row]], self.pad)
        if packed:
            return collate_packed([[self.train[i] for i in row] for row in rows], self.pad)
        return collate([self.train[i] for row in rows for i in row], self.pad)


def load_all(config, model_folder: Path) -> Held:
    """Tokenizer and samples of a configuration. Raises DataError for anything wrong with either."""
    from scripts import vocabulary
    tokenizer = vocabulary.tokenizer(model_folder, config.add_tokens, config.trust_remote_code)
    held_out = None
    samples, counts = prepare(config, tokenizer)
    if config.eval_dataset is not None:
        held_out, _ = prepare(config, tokenizer, config.eval_dataset)
    elif config.eval_fraction:
        samples, held_out = split(samples, config.eval_fraction, config.seed)
        counts = samples.counts()
    for part in (samples, held_out):
        vocabulary.check_ids(part, tokenizer, model_folder, config.add_tokens,
                             config.trust_remote_code)
    sources = tuple(source.name for source in parse_sources(config.dataset))
    return Held(tokenizer, samples, counts, held_out, sources)


def _table(name: str, config, tokenizer, limit: int | None) -> tokens.Table:
    """The tokens of one source: those on disk, or new ones."""
    if name == "alpaca_sample" and limit is None:
        limit = ALPACA_SAMPLE
    rows = open_source(name)
    settings = dict(dataset_format=config.dataset_format, columns=config.dataset_columns,
                    chat_template=config.chat_template, train_on=config.train_on)
    fitting = dict(context_length=config.context_length, truncation=config.truncation,
                   skip_bad_rows=config.skip_bad_rows)

    def make() -> tokens.Table:
        renderer = Renderer(tokenizer, **settings)
        table = tokens.build(islice(rows.each(), limit), renderer, tokenizer, **fitting)
        if not len(table.cut) + table.facts["dropped"]:
            raise DataError(f"{name} is empty; it needs at least one row")
        return table
    return tokens.cached(tokens.cache_key(tokenizer, rows=rows.key, limit=limit, **settings, **fitting), make)


def _weighted(sizes: list[int], sources: list[Source], seed: int) -> list[np.ndarray]:
    """The rows taken of each source: all of that with the largest weight, of the others their share."""
    largest, chosen = max(source.weight for source in sources), []
    for number, (size, source) in enumerate(zip(sizes, sources)):
        take = round(size * source.weight / largest)
        chosen.append(np.array(sorted(packing.permutation(size, seed, -1 - number)[:take]), np.int64))
    return chosen


def _checked_limit(samples: int | None) -> int | None:
    if samples is not None and samples < 1:
        raise DataError(f"the number of samples is {samples}; it must be at least 1")
    return samples


def load(dataset: str, samples: int | None = None) -> list[dict]:
    """The first `samples` rows (None: all) of a source in alpaca form, as dicts, for generation.

    Raises DataError for an unknown name, a missing, empty or malformed file, and a bad row.
    """
    limit, rows = _checked_limit(samples), []
    for place, row in islice(open_source(dataset).each(), limit):
        try:
            if isinstance(row, DataError):
                raise row
            rows.append(check(row, "alpaca"))
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
    if not rows:
        raise DataError(f"{dataset} is empty; it needs at least one row")
    return rows


# ---------------------------------------------------------------------------------------------------- sources

ALPACA_SAMPLE = 512  # rows of alpaca_sample where --dataset_samples says nothing


def _demo() -> list[dict]:
    """Question and table to SQL: see scripts/demo.py."""
    from scripts import demo
    return demo.examples("train")


def _dummy() -> list[dict]:
    """256 additions of two-digit numbers, all about equally long, for smoke tests and timings."""
    return [{"instruction": f"What is {10 + i % 40} plus {10 + i // 8}?", "output": str(20 + i % 40 + i // 8)}
            for i in range(256)]


SOURCES: dict[str, Any] = {
    "demo": _demo,
    "dummy": _dummy,
    "alpaca": "yahma/alpaca-cleaned:train",
    "alpaca_sample": "yahma/alpaca-cleaned:train",
    "guanaco": "timdettmers/openassistant-guanaco:train",
    "sql": "knowrohit07/know_sql:validation",  # the only split it has
    "orca_math": "microsoft/orca-math-word-problems-200k:train",
}


class Source(NamedTuple):
    name: str
    weight: float


class Rows(NamedTuple):
    """The rows of a source. `each` yields (place, row), the row being a DataError where it cannot be read."""
    key: str  # another one when the content is another
    each: Callable[[], Iterator[tuple[str, object]]]


def parse_sources(text: str) -> list[Source]:
    """The sources of "a.jsonl=0.7,b.jsonl=0.3", each of which exists as far as can be told from here.

    Weights say how much of each is taken, relative to the largest: here all of a and 3/7 of b.
    """
    parts = [text] if text in SOURCES or Path(text).exists() else [part.strip() for part in text.split(",")]
    sources = []
    for part in parts:
        found = None if part in SOURCES or Path(part).exists() else re.fullmatch(r"(.+)=([^=/]*)", part)
        name, weight = (found[1], found[2]) if found else (part, "1")
        try:
            sources.append(Source(name, float(weight)))
        except ValueError:
            raise DataError(f"dataset {part!r}: the weight {weight!r} is not a number") from None
        if not 0 < sources[-1].weight < float("inf"):
            raise DataError(f"dataset {part!r}: a weight must be above 0")
        _kind(name)
    return sources


def _kind(name: str) -> str:
    """"built in", "file", "folder" or "hub"; DataError for what is none of them."""
    spec = SOURCES.get(name, name)
    if not isinstance(spec, str):
        return "built in"
    path, (base, _, _) = Path(spec).expanduser(), _parts(spec)
    if path.is_file():
        if extension(path) not in READERS:
            raise DataError(f"{path} has an unknown extension; convert it to {EXTENSIONS}")
        if not path.stat().st_size:
            raise DataError(f"{path} is empty; it needs at least one row")
        return "file"
    if base and Path(base).expanduser().is_dir():
        saved = Path(base).expanduser()
        if not any((saved / file).is_file() for file in ("state.json", "dataset_dict.json")):
            raise DataError(f"{base} is neither a file nor a folder that `datasets` saved; "
                            "name one file in it")
        return "folder"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and extension(Path(base)) not in READERS:
        return "hub"
    raise DataError(_not_found(path))


def _parts(spec: str) -> tuple[str | None, ...]:
    """(id or folder, split, revision) of "id:split@revision"."""
    found = re.fullmatch(r"([^:@]*)(?::([^@]+))?(?:@(.+))?", spec)
    return found.groups() if found else ("", None, None)


def _not_found(path: Path) -> str:
    known = [*SOURCES, *(str(path.parent / file.name) for file in path.parent.glob("*")
                         if extension(file) in READERS)]
    close = difflib.get_close_matches(str(path), known, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return (f"dataset {str(path)!r} is neither a file nor a built-in set ({', '.join(SOURCES)}), nor a hub "
            f"dataset (owner/name); files end in {EXTENSIONS}{meant}")


def open_source(name: str) -> Rows:
    """The rows of one source, none of them read yet."""
    kind, spec = _kind(name), SOURCES.get(name, name)
    if kind == "built in":
        rows = spec()
        return Rows(json.dumps(rows), lambda: numbered([rows], f"{name}, "))
    if kind != "file":
        return _arrow(spec, kind)
    path = Path(spec).expanduser()
    with path.open("rb") as file:
        return Rows(f"{path.suffixes} {hashlib.file_digest(file, 'sha256').hexdigest()}", lambda: read(path))


def _arrow(spec: str, kind: str) -> Rows:
    """A folder saved by `datasets`, or a dataset of the hub; the rows stay in files."""
    import datasets
    base, split, revision = _parts(spec)
    try:
        if kind == "folder":
            found = datasets.load_from_disk(str(Path(base).expanduser()))
        else:
            found = datasets.load_dataset(base, split=split or "train", revision=revision)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"dataset {spec}: {reason}; a hub dataset is written owner/name[:split][@revision]"
                        ) from None
    if isinstance(found, datasets.DatasetDict):
        if (split or "train") not in found:
            raise DataError(f"{base} has the splits {', '.join(found)}; choose one with {base}:SPLIT")
        found = found[split or "train"]
    elif kind == "folder" and split:
        raise DataError(f"{base} is one dataset without splits; leave out :{split}")
    batches = found.with_format("arrow")
    return Rows(f"arrow {found._fingerprint}",
                lambda: numbered((batch.to_pylist() for batch in batches.iter(1000)), f"{spec}, "))


# ------------------------------------------------------------------------------- a look at what is trained on

def describe(samples: Samples, counts: Counts, config) -> list[str]:
    """The counts, and how the lengths are spread, as lines of text."""
    lengths, kept = np.array(samples.lengths), counts.kept
    rows = packing.pack(samples.lengths, config.context_length)
    full = 100 * counts.total_tokens / (len(rows) * config.context_length)
    lines = [f"kept {kept:,} samples ({counts.truncated:,} cut), dropped {counts.dropped:,}, "
             f"skipped {counts.skipped:,} bad rows",
             *(f"first skipped: {text}" for text in samples.problems),
             f"tokens {counts.total_tokens:,}, supervised {counts.supervised_tokens:,}: "
             f"{counts.supervised_tokens / kept:.1f} of {counts.total_tokens / kept:.1f} per sample",
             f"packed: {len(rows):,} rows of {config.context_length:,}, {full:.1f}% of positions used",
             "tokens per sample"]
    edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, 11).astype(int))
    numbers, _ = np.histogram(lengths, bins=edges)
    for number, low, high in zip(numbers, edges, edges[1:] - 1):
        bar = "#" * -(-40 * int(number) // int(numbers.max()))
        lines.append(f"{low:>8,} to {high:>6,} {number:>9,} {bar}".rstrip())
    return lines


def marked(sample: Sample, tokenizer, color: bool) -> str:
    """The text of a sample with its supervised parts in green, or between brackets."""
    begin, end = ("\033[32m", "\033[0m") if color else ("\u27e6", "\u27e7")
    parts = []
    for supervised, run in groupby(zip(*sample), key=lambda pair: pair[1] != IGNORE):
        text = tokenizer.decode([i for i, _ in run])
        parts.append(begin + text + end if supervised else text)
    return "".join(parts)


def draw(lengths: list[int], file: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("--png needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    axes.hist(lengths, bins=50)
    axes.set(xlabel="tokens", ylabel="samples", title="Tokens per sample")
    figure.savefig(file)


def look(config, show: int, png: str) -> None:
    """Print what `config` trains on."""
    from transformers import AutoTokenizer

    from scripts import demo
    from scripts.checkpoint import find_folder
    with quiet():
        try:
            name = config.model_name or demo.model_folder()
            name = find_folder(str(name)) if str(name).endswith(".gguf") else name
            tokenizer = AutoTokenizer.from_pretrained(name)
            samples, counts = prepare(config, tokenizer)
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(str(error).splitlines()[0]) from None
    print("\n".join(describe(samples, counts, config)))
    if png:
        draw(samples.lengths, png)
        print(f"histogram: {png}")
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for i in packing.permutation(len(samples), config.seed, 0)[:show]:
        print(f"\n--- sample {i + 1}, {samples.lengths[i]} tokens\n{marked(samples[i], tokenizer, color)}")


def main(
    dataset: str = "demo",  # name, file, folder saved by `datasets`, or hub id[:split][@revision]; a=1,b=0.5
    model_name: str = "",  # folder or hub id of the model whose tokenizer to use; default: the demo's
    dataset_samples: int = 0,  # only the first rows of each source; 0: all
    dataset_format: str = "auto",  # auto, or one of the formats in scripts/formats.py
    dataset_columns: str = "",  # field=column,field=column
    chat_template: to_bool = False,  # render every format with the tokenizer's chat template
    train_on: str = "completions",  # completions, all or last
    truncation: str = "right",  # right, left_prompt or drop
    context_length: int = 512,  # longest sample, in tokens
    skip_bad_rows: to_bool = False,  # count unusable rows and go on
    seed: int = 42,  # of order and weights
    show: int = 3,  # how many samples to print, supervised tokens in green or between brackets
    png: str = "",  # file to draw the lengths to
):
    "Show what will be trained on: counts, a histogram of lengths, and some samples."
    flags = SimpleNamespace(**{**locals(), "dataset_samples": dataset_samples or None})
    try:
        if problems := check_file(png, "--png"):
            raise DataError(problems[0])
        look(flags, show, png)
    except UserError as error:
        raise Refused("data.py", error) from None


if __name__ == "__main__":
    run_script(main)
