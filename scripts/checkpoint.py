"""Models on disk: finding the folder, checking it, reading single rows of its tensors, writing tensors."""
import contextlib
import hashlib
import json
import math
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

from scripts.flags import UserError, refuse

INDEX = "model.safetensors.index.json"
GGUF = ".gguf"
SAVED_FILE_BYTES = 2 * 2**30  # a model is written in files of at most this size
# torch's names of dtypes -> safetensors' names and bytes per element.
FLOATS = ("float64", "float32", "float16", "bfloat16")
STORED = {"float64": ("F64", 8), "int64": ("I64", 8), "float32": ("F32", 4), "int32": ("I32", 4),
          "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int16": ("I16", 2), "int8": ("I8", 1),
          "uint8": ("U8", 1), "bool": ("BOOL", 1)}
# What a model folder has beside weights and config.json.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
              "*.model", "*.tiktoken", "chat_template*", "*.jinja", "additional_chat_templates",
              "generation_config.json", "*processor_config.json", "*.py")
# Tensors that a class's checkpoints have under another name than the model, as transformers renames them.
RENAMED = {"GPTNeoXForCausalLM": (r"^embed_out\.", "lm_head.")}
# What old checkpoints carry that is no weight: RoPE's frequencies, GPT-NeoX's causal masks.
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")


def is_hub_id(name: str) -> bool:
    """Whether a model name is a hub id rather than a folder or a GGUF file: there is no such path, and it has
    the form of an id."""
    path = Path(name)
    return not path.exists() and name.count("/") <= 1 and not name.startswith((".", "/", "~")) \
        and path.suffix != GGUF


def is_ready(name: str | None) -> bool:
    """Whether a model name is a folder: nothing has to be downloaded or converted first."""
    return name is not None and not is_hub_id(name) and Path(name).suffix != GGUF


def weight_files(folder: Path, stem: str = "model") -> list[str]:
    """Names of a folder's safetensors files: `stem`.safetensors, or those of its index. Raises UserError for
    an index that is no such thing."""
    index = folder / f"{stem}.safetensors.index.json"
    if not index.is_file():
        return [f"{stem}.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not a safetensors index ({error!r})") from error


def check_folder(name: str | None, flag: str = "--model_name") -> list[str]:
    """Problems of a local model folder or GGUF file, from file names and config.json. A hub id is looked up
    later."""
    from scripts import from_gguf, prequantized
    if name is None or is_hub_id(name):
        return []
    folder = Path(name).expanduser()
    if folder.suffix == GGUF and not folder.is_dir():
        return from_gguf.check(folder, flag)
    if not folder.is_dir():
        return [f"{flag} {name}: no such folder"]
    if not (folder / "config.json").is_file():
        return [f"{flag} {name}: no config.json in it, so this is no Hugging Face model folder"]
    if not (folder / INDEX).is_file() and not (folder / "model.safetensors").is_file():
        if any(folder.glob("*.bin")):
            return [f"{flag} {name}: only .bin weights, and pickles are not read; use safetensors"]
        if files := sorted(folder.glob(f"*{GGUF}")):
            return [f"{flag} {name}: no safetensors, but GGUF; give the file: {flag} {files[0]}"]
        return [f"{flag} {name}: neither model.safetensors nor {INDEX} in it"]
    try:
        missing = [file for file in weight_files(folder) if not (folder / file).is_file()]
        refused = prequantized.problem(read_json(folder / "config.json"))
    except UserError as error:
        return [f"{flag} {error}"]
    return [f"{flag} {name}: {file} is missing, though {INDEX} names it" for file in missing] + \
        ([f"{flag} {name}: {refused}"] if refused else [])


def check_writable(name: str | None, flag: str) -> list[str]:
    """Whether a folder can be made or written into, found out without leaving anything behind."""
    if not name:
        return []
    folder = Path(name).expanduser()
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        return [f"{flag} {name}: {existing} is a file; name a folder"]
    try:
        tempfile.TemporaryDirectory(prefix=".qshard-", dir=existing).cleanup()
    except OSError as error:
        return [f"{flag} {name}: {existing} is not writable ({error.strerror}); choose another folder"]
    return []


def check_file(name: str | None, flag: str) -> list[str]:
    """Whether a file can be written: its folder must be there."""
    if not name:
        return []
    path = Path(name).expanduser()
    if path.is_dir():
        return [f"{flag} {name}: is a folder; name a file"]
    if not path.parent.is_dir():
        return [f"{flag} {name}: there is no folder {path.parent}; make it first, or choose another"]
    return check_writable(str(path.parent), flag)


def check_output(name: str, overwrite: bool) -> list[str]:
    """Whether the output folder can be written, and is empty where it must be."""
    if problems := check_writable(name, "--output_dir"):
        return problems
    folder = Path(name).expanduser()
    if name and not overwrite and folder.is_dir() and any(folder.iterdir()):
        return [f"--output_dir {name}: not empty; choose another, or pass --overwrite_output_dir true"]
    return []


def find_folder(name: str | None) -> Path:
    """The model's folder: the given one, one in the hub cache (downloaded if need be), one made of a GGUF
    file, or the embedded default."""
    if name is None:
        from scripts import demo
        try:
            return demo.model_folder(progress=print)
        except RuntimeError as error:
            raise UserError(str(error)) from error
    path = Path(name).expanduser()
    if path.suffix == GGUF and path.is_file():
        from scripts import from_gguf
        return from_gguf.folder_of(path, print)
    if not is_hub_id(name):
        return path
    from huggingface_hub import snapshot_download
    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt", "*.py"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # gated, misspelt, offline: a dozen types, all with a readable first line
        reason = str(error).strip().splitlines()[0].removeprefix("Got: ")
        raise UserError(f"--model_name {name}: no such folder here, and the hub gave: {reason}; "
                        f"a folder with config.json and *.safetensors does as well") from error
    if problems := check_folder(str(folder)):
        raise UserError(problems[0])
    return folder


def fingerprint(folder: Path) -> str:
    """A hash of the configuration and of the weight files' names and sizes: cheap, and tells models apart."""
    parts = [(folder / "config.json").read_bytes()]
    parts += [f"{p.name}:{p.stat().st_size}".encode() for p in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises UserError, with the file's name, where there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def open_model(name: str, flag: str, plain: bool = True) -> tuple[Path, "Checkpoint", dict]:
    """Folder, tensors and config.json of a model that `flag` names. Raises UserError where files are missing
    or unreadable, and where `plain` for weights that are quantised already; otherwise those are dequantised
    on reading, and config.json is that of the plain model."""
    from scripts import prequantized
    if problems := check_folder(name, flag):
        raise UserError(problems[0])
    try:
        folder = find_folder(name)
    except UserError as error:
        raise UserError(str(error).replace("--model_name", flag, 1)) from error
    stored, config = prequantized.open_weights(folder), read_json(folder / "config.json")
    if stored.unreadable:
        raise UserError(f"{flag} {name}: " + "; ".join(stored.unreadable))
    if config.pop("quantization_config", None) and plain:
        raise UserError(f"{flag} {name}: its weights are quantised already; use the model they came from")
    return folder, stored, config


def new_positions(layers: int, count: int) -> list[int]:
    """Indices, in the expanded model, of `count` blocks added to `layers`: one after every group of
    layers // count. 32 and 3 give 10, 21, 32."""
    group = layers // count
    return [k * group + k - 1 for k in range(1, count + 1)]


def new_blocks(folder: Path) -> list[int]:
    """Indices of the blocks that block expansion added to a model: from llama_pro.json, or from a folder name
    that ends in blk_exp-OLD-NEW, two layer counts. Raises UserError where neither says so."""
    if (folder / "llama_pro.json").is_file():
        found = read_json(folder / "llama_pro.json").get("new_blocks")
        if not isinstance(found, list) or not found or not all(type(index) is int for index in found):
            raise UserError(f"{folder / 'llama_pro.json'}: new_blocks is no list of block numbers")
        return found
    named = re.search(r"blk_exp-(\d+)-(\d+)$", folder.absolute().name)
    old, new = map(int, named.groups()) if named else (0, 0)
    if not 0 < old < new <= 2 * old:
        raise UserError(f"{folder}: no expanded model: it has no llama_pro.json, and its name does not end "
                        "in blk_exp-OLD-NEW; scripts/block_expansion.py makes one")
    return new_positions(old, new - old)


@dataclass
class Slot:
    """A tensor of the checkpoint and the place in the model it goes to."""
    names: list[str]  # more than one where parameters are tied
    module: Any
    attribute: str
    shape: tuple[int, ...]  # of a stack (scripts/experts.py) one expert's matrix
    expert: int | None = None
    count: int = 1  # experts

    @property
    def quantized(self) -> bool:
        return self.attribute == "weight" and hasattr(self.module, "quantizer")

    @property
    def rows(self) -> int:
        """Rows of the parameter that this is: of a plain stack, whose rows are experts, one."""
        return 1 if self.expert is not None and not self.quantized else self.shape[0]


def find_slots(model) -> list[Slot]:
    """A slot for each base parameter. Called before adapters are attached: they rename modules, but keep the
    objects."""
    slots: dict[tuple, Slot] = {}
    for prefix, module in model.named_modules():
        quantized = hasattr(module, "quantizer")
        for name, parameter in module._parameters.items():
            if parameter is None or (quantized and name not in ("weight", "bias")):
                continue
            packed = quantized and name == "weight"
            shape = (module.out_features, module.in_features) if packed else tuple(parameter.shape)
            whole, count = f"{prefix}.{name}".lstrip("."), None
            if packed and hasattr(module, "count"):
                whole, count = prefix, module.count
            elif parameter.ndim == 3 and hasattr(module, "is_transposed"):
                count, *shape = shape
            for expert in (None,) if count is None else range(count):
                slot = Slot([], module, name, tuple(shape), expert, count or 1)
                slot = slots.setdefault((parameter, expert), slot)
                slot.names.append(whole if expert is None else f"{whole}.{expert}")
    return list(slots.values())


def renaming(folder: Path) -> tuple[str, str] | None:
    """(pattern, replacement) that gives the tensors of a folder the names that the model has for them."""
    file = folder / "config.json"
    classes = read_json(file).get("architectures") if file.is_file() else None
    return next((RENAMED[name] for name in classes or () if name in RENAMED), None)


class PartRows(dict):
    """{part of a quantised weight: the rows of it that a rank keeps}."""


class Checkpoint:
    """The tensors of a folder of safetensors, by the model's names. Reads no more than the rows that are
    asked for.

    Subclasses (scripts/prequantized.py) give plain weights for what is stored otherwise: they change `shape`
    and `dtype`, hide what belongs to a weight, and read it in `read`.
    """
    note = ""  # for people, where weights are not read as they are

    def __init__(self, folder: Path, stem: str = "model"):
        self.folder, self.bytes_read = folder, 0
        self.file: dict[str, str] = {}
        self.shape: dict[str, tuple[int, ...]] = {}
        self.dtype: dict[str, str] = {}  # as torch names them, where it has a name
        self.unreadable: list[str] = []  # files, for people, one line each
        self.hidden: dict[str, str] = {}  # tensors that belong to others -> their files
        self.rows_before: dict[str, int] = {}  # of tensors that got more rows
        self.means: dict = {}
        self.pieces: dict[str, list] = {}  # name under which `define` made something else readable -> what
        self.misfits: list[str] = []  # what `define` found wrong, for people
        self.handles: dict = {}
        self.renaming, self.stored_as = renaming(folder), {}  # {name: name in the file}
        for file in weight_files(folder, stem):
            try:
                self._read_header(file)
            except Exception as error:  # safetensors raises a type of its own, missing files OSError
                self.unreadable.append(f"{file}: cannot be read ({error})")

    @property
    def problems(self) -> list[str]:
        """Unreadable files, and tensors that are no plain weights."""
        return self.unreadable + self.misfits + [
            f"{name}: stored as {dtype}; only floating-point weights are read"
            for name, dtype in self.dtype.items() if dtype not in FLOATS and not COMPUTED.search(name)]

    def _handle(self, file: str):
        from safetensors import safe_open
        if file not in self.handles:
            self.handles[file] = safe_open(self.folder / file, framework="pt")
        return self.handles[file]

    def _read_header(self, file: str) -> None:
        handle, names = self._handle(file), {stored: name for name, (stored, _) in STORED.items()}
        for stored in handle.keys():
            name = re.sub(*self.renaming, stored) if self.renaming else stored
            self.stored_as[name], part = stored, handle.get_slice(stored)
            self.file[name], self.shape[name], dtype = file, tuple(part.get_shape()), part.get_dtype()
            self.dtype[name] = names.get(dtype, dtype)

    def hide(self, name: str) -> bool:
        """Takes a tensor out of the names, for `stored` alone; whether it is there."""
        if name not in self.file:
            return name in self.hidden
        self.hidden[name] = self.file.pop(name)
        del self.shape[name], self.dtype[name]
        return True

    def stored(self, name: str, low: int = 0, high: int | None = None):
        """Rows of a tensor, or all of it, as they are in the file."""
        handle, own = self._handle(self.hidden.get(name) or self.file[name]), self.stored_as[name]
        found = handle.get_tensor(own) if high is None else handle.get_slice(own)[low:high]
        size = found.nbytes  # first: several threads read
        self.bytes_read += size
        return found

    read = stored

    def grow(self, name: str, rows: int) -> None:
        """Gives a tensor more rows, each the mean of those it has."""
        self.rows_before[name] = self.shape[name][0]
        self.shape[name] = (rows, *self.shape[name][1:])

    def notes(self) -> list[str]:
        """What people should know of how this is read."""
        grown = [f"{name}: {before} rows, now {self.shape[name][0]}, new ones start as the mean"
                 for name, before in self.rows_before.items()]
        return [self.note] * bool(self.note) + grown

    def mean(self, name: str):
        """(1, ...) the mean of the rows that are stored, summed in fp64 and by pieces: the same for all."""
        if name not in self.means:
            rows, total = self.rows_before[name], 0.0
            for low in range(0, rows, 4096):
                piece = self.read(name, low, min(rows, low + 4096))
                total, dtype = total + piece.double().sum(0, keepdim=True), piece.dtype
            self.means[name] = (total / rows).to(dtype)  # type: ignore[attr-defined]
        return self.means[name]

    def define(self, name: str, pieces: list) -> None:
        """Makes the rows of `pieces` (tensors, or matrices of stacked ones; scripts/experts.py), one piece
        below the other, readable as `name`."""
        shapes = [self.shape[p.name] if p.expert is None else self.shape[p.name][1:] for p in pieces]
        if len({tuple(shape[1:]) for shape in shapes}) > 1:
            self.misfits.append(f"{', '.join(p.name for p in pieces)}: have shapes {shapes}, which do not "
                                 "go below one another")
        self.pieces[name] = pieces
        self.shape[name] = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        self.file[name], self.dtype[name] = self.file[pieces[0].name], self.dtype[pieces[0].name]

    def rows(self, name: str, low: int, high: int):
        """Rows [low, high) of a tensor, in the checkpoint's dtype."""
        import torch
        if low >= high:
            return torch.empty(0, *self.shape[name][1:])
        if name in self.pieces:
            return torch.cat([self._rows(p, *span) for p, *span in self._within(name, low, high)])
        before = self.rows_before.get(name, high)
        found = self.read(name, low, min(high, before)) if low < before else None
        if high <= before:
            return found
        new = self.mean(name).repeat(high - max(low, before), *[1] * (len(self.shape[name]) - 1))
        return new if found is None else torch.cat([found, new])

    def spans(self, name: str) -> Iterator[tuple]:
        """(piece, low, high): which rows of a defined name are each piece's."""
        low = 0
        for piece in self.pieces[name]:
            high = low + self.shape[piece.name][0 if piece.expert is None else 1]
            yield piece, low, high
            low = high

    def _within(self, name: str, low: int, high: int) -> Iterator[tuple]:
        """(piece, low, high): rows of pieces that together are rows [low, high) of a defined name."""
        for piece, first, last in self.spans(name):
            if max(low, first) < min(high, last):
                yield piece, max(low, first) - first, min(high, last) - first

    def names_of(self, name: str) -> list[str]:
        """The tensors in the files that a name stands for."""
        return [piece.name for piece in self.pieces[name]] if name in self.pieces else [name]

    def _rows(self, piece, low: int, high: int):
        if piece.expert is None:
            return self.rows(piece.name, low, high)
        return self.read_matrix(piece.name, piece.expert, low, high)

    def read_matrix(self, name: str, index: int, low: int, high: int):
        """Rows of one matrix of a stack of them."""
        found = self._handle(self.file[name]).get_slice(self.stored_as[name])[index, low:high]
        size = found.nbytes  # first: several threads read
        self.bytes_read += size
        return found

    def tensor(self, name: str):
        """A whole tensor, in the checkpoint's dtype."""
        return self.rows(name, 0, self.shape[name][0]) if any(self.shape[name][:1]) else self.stored(name)

    def quantizer(self, kind: type, config):
        """The quantiser of kind `kind` for this model's linears."""
        return kind(config)

    def holds(self, recipe: dict) -> bool:
        """Whether weights quantised by this recipe are what is stored."""
        return False

    def kept_plain(self, model) -> set:
        """Linears that stay as they are under a quantiser: those that a quantised folder left plain."""
        return set()

    def part_rows(self, name: str, quantizer, limits: Callable) -> PartRows | None:
        """{part: rows [low, high) = limits(its rows)} of a weight that is stored just as `quantizer` would,
        or None: it is to be quantised."""

    def match(self, slots: list[Slot]) -> dict[str, Slot]:
        """Name -> slot, file by file. Raises UserError naming all that is missing, unexpected, misshapen,
        unreadable."""
        matched, problems = {}, list(self.problems)
        for slot in slots:
            name = next((name for name in slot.names if name in self.shape), None)
            if name is None:
                problems.append(f"{slot.names[0]}: missing")
            elif self.shape[name] != slot.shape:
                problems.append(f"{name}: has shape {self.shape[name]}, the model wants {slot.shape}")
            else:
                matched[name] = slot
        known = {name for slot in slots for name in slot.names}
        known |= {piece.name for name in matched for piece in self.pieces.get(name, ())}
        problems += [f"{name}: not in the model" for name in self.shape
                     if name not in known and not COMPUTED.search(name)]
        problems = self.unreadable or problems  # all that is in such a file would be missing
        refuse(problems, f"{self.folder} does not fit the model:", most=8)
        return dict(sorted(matched.items(), key=lambda item: self.file[item[0]]))

    def close(self, file: str) -> None:
        """Lets go of a file and its mapped pages."""
        self.handles.pop(file, None)


def write_json(path: Path, content: dict) -> None:
    """Written beside and renamed: a reader sees the old file or the new one, never half of one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def split_by_size(sizes: dict[str, int]) -> list[list[str]]:
    """Names in order, cut into runs of at most SAVED_FILE_BYTES (a larger tensor is a run of its own)."""
    files, filled = [[]], 0
    for name, size in sizes.items():
        if files[-1] and filled + size > SAVED_FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


class Entry(NamedTuple):
    """A tensor to write: its dtype as torch names it, its shape, and a callable that gives it in its turn."""
    dtype: str
    shape: tuple[int, ...]
    make: Callable

    @property
    def bytes(self) -> int:
        return STORED[self.dtype][1] * math.prod(self.shape)


def aligned(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Larger dtypes first, so that each tensor lies aligned in the file."""
    return dict(sorted(entries.items(), key=lambda item: -STORED[item[1].dtype][1]))


def header(entries: dict[str, Entry], metadata: dict[str, str]) -> bytes:
    """The first bytes of a safetensors file: the length of what follows (8 bytes, little-endian), then names,
    dtypes, shapes and offsets as JSON, padded with spaces to a multiple of 8."""
    content, end = {"__metadata__": {"format": "pt"} | metadata}, 0
    for name, entry in entries.items():
        start, end = end, end + entry.bytes
        content[name] = dict(dtype=STORED[entry.dtype][0], shape=entry.shape, data_offsets=(start, end))
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def made_bytes(name: str, entry: Entry):
    """Makes a tensor and gives its memory. Raises ValueError if it is not what the header says."""
    import torch
    tensor = entry.make().detach().cpu().contiguous()
    if (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{entry.dtype}", tuple(entry.shape)):
        raise ValueError(f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, announced as {entry.dtype} "
                         f"{tuple(entry.shape)}")
    return tensor.view(-1).view(torch.uint8).numpy()


def write_pieces(entries: dict[str, Entry], write: Callable, metadata: dict[str, str] | None = None,
                 advance=lambda: None) -> None:
    """Calls `write` with the bytes of a safetensors file, tensor by tensor: one is made, written and dropped
    before the next. Calls `advance` after each."""
    entries = aligned(entries)
    write(header(entries, metadata or {}))
    for name, entry in entries.items():
        write(made_bytes(name, entry))
        advance()


def write_part(path: Path, entries: dict[str, Entry], main: bool = True, advance=lambda: None) -> None:
    """Writes PATH.part, a safetensors file, tensor by tensor. Calls `advance` after each.

    Where `main` is false the tensors are made, since that may be collective, but nothing is written. On an
    error the part is removed. Raises UserError for a dtype that is not in STORED.
    """
    if unknown := [f"{name}: {entry.dtype}" for name, entry in entries.items() if entry.dtype not in STORED]:
        raise UserError(f"no plain weights: {', '.join(unknown[:8])}")
    part = path.with_name(path.name + ".part")
    if not main:
        for entry in aligned(entries).values():
            entry.make()
        return
    try:
        with part.open("wb") as file:
            write_pieces(entries, file.write, advance=advance)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_index(folder: Path, stem: str, files: dict[str, dict[str, Entry]]) -> None:
    """The index of several files, and none for one."""
    if len(files) > 1:
        where = {name: file for file, entries in files.items() for name in entries}
        size = sum(entry.bytes for entries in files.values() for entry in entries.values())
        write_json(folder / f"{stem}.safetensors.index.json",
                   dict(metadata=dict(total_size=size), weight_map=where))


def write_tensors(folder: Path, stem: str, parameters: dict, main: bool) -> None:
    """Writes {name: sharded parameter or Entry} as safetensors, with an index where there are several files.

    Every rank calls this (gathering is collective); only the `main` one writes, and it holds one whole tensor
    at a time. Files appear under their names only when all of them are complete.
    """
    entries = {name: p if isinstance(p, Entry) else
               Entry(str(p.dtype).removeprefix("torch."), tuple(p.shape),
                     lambda p=p: p.detach().full_tensor()) for name, p in parameters.items()}
    runs = split_by_size({name: entry.bytes for name, entry in entries.items()})
    parts = [""] if len(runs) == 1 else [f"-{n:05}-of-{len(runs):05}" for n in range(1, len(runs) + 1)]
    files = {f"{stem}{part}.safetensors": {name: entries[name] for name in names}
             for part, names in zip(parts, runs)}
    for file, chosen in files.items():
        write_part(folder / file, chosen, main)
    if main:
        for file in files:
            (folder / f"{file}.part").replace(folder / file)
        write_index(folder, stem, files)


def write_model(folder: Path, files: dict[str, dict[str, Entry]],
                stored_as: dict[str, str] | None = None) -> None:
    """The weights of a model folder, under a progress bar on a terminal; a single file takes the usual name.
    `stored_as`: names in files that differ from the model's. Not collective."""
    from tqdm import tqdm
    stored_as = stored_as or {}
    files = {file: {stored_as.get(name, name): entry for name, entry in entries.items()}
             for file, entries in files.items()}
    if len(files) == 1:
        files = {"model.safetensors": next(iter(files.values()))}
    with tqdm(total=sum(map(len, files.values())), unit="tensor", desc="writing", leave=False,
              disable=None) as bar:
        for file, entries in files.items():
            write_part(folder / file, entries, advance=bar.update)
            (folder / f"{file}.part").replace(folder / file)
    write_index(folder, "model", files)


def copy_companions(source: Path, folder: Path) -> None:
    """Tokenizer, chat templates, generation configuration and code of a model; what is there stays."""
    for path in sorted({path for pattern in COMPANIONS for path in source.glob(pattern)}):
        if (folder / path.name).exists():
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)


def check_new_folder(name: str) -> Path:
    """The folder that --output_dir names. Raises UserError if it is not empty or cannot be written."""
    folder = Path(name).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--output_dir {name}: not empty; choose another")
    if problems := check_output(name, overwrite=True):
        raise UserError(problems[0])
    return folder


@contextlib.contextmanager
def staged(name: str) -> Iterator[Path]:
    """A folder to fill inside the new folder `name`. Its files move up at the end, config.json as the last;
    after an error nothing of it is left."""
    folder = check_new_folder(name)
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".qshard-", dir=folder))
    try:
        yield stage
        for path in sorted(stage.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if not existed and not any(folder.iterdir()):
            folder.rmdir()
