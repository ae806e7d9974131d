"""Models on disk: finding the folder, checking it, reading single rows of its tensors, writing tensors."""
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.flags import UserError

INDEX = "model.safetensors.index.json"
SAVED_FILE_BYTES = 2 * 2**30  # a model is written in files of this size: no more of it is held at once


def is_hub_id(name: str) -> bool:
    """Whether a model name is a hub id rather than a folder: there is no such folder, and it has the form of
    an id."""
    return not Path(name).exists() and name.count("/") <= 1 and not name.startswith((".", "/", "~"))


def weight_files(folder: Path) -> list[str]:
    """Names of a model folder's safetensors files. Raises UserError for an index that is no such thing."""
    if not (folder / INDEX).is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX}: not a safetensors index ({error!r})") from error


def check_folder(name: str | None) -> list[str]:
    """Problems of a local model folder, from its file names alone. A hub id is looked up later."""
    if name is None or is_hub_id(name):
        return []
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return [f"--model_name {name}: no such folder"]
    if not (folder / "config.json").is_file():
        return [f"--model_name {name}: no config.json in it, so this is no Hugging Face model folder"]
    if not (folder / INDEX).is_file() and not (folder / "model.safetensors").is_file():
        if any(folder.glob("*.bin")):
            return [f"--model_name {name}: only .bin weights, and pickles are not read; use safetensors"]
        return [f"--model_name {name}: neither model.safetensors nor {INDEX} in it"]
    try:
        missing = [file for file in weight_files(folder) if not (folder / file).is_file()]
    except UserError as error:
        return [f"--model_name {error}"]
    return [f"--model_name {name}: {file} is missing, though {INDEX} names it" for file in missing]


def check_output(name: str, overwrite: bool) -> list[str]:
    """Whether the output folder can be written, found out without leaving anything behind."""
    folder = Path(name).expanduser()
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        return [f"--output_dir {name}: {existing} is a file"]
    try:
        tempfile.TemporaryDirectory(prefix=".qshard-", dir=existing).cleanup()
    except OSError as error:
        return [f"--output_dir {name}: {existing} is not writable ({error.strerror})"]
    if existing == folder and any(folder.iterdir()) and not overwrite:
        return [f"--output_dir {name}: not empty; choose another or pass --overwrite_output_dir true"]
    return []


def find_folder(name: str | None, say=print) -> Path:
    """The model's folder: the given one, one in the hub cache (downloaded if need be), or the embedded
    default."""
    if name is None:
        from scripts import demo
        try:
            return demo.model_folder(progress=say)
        except RuntimeError as error:
            raise UserError(str(error)) from error
    if not is_hub_id(name):
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download
    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # gated, misspelt, offline: a dozen types, all with a readable first line
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--model_name {name}: no such folder here, and the hub gave: {reason}") from error
    if problems := check_folder(str(folder)):
        raise UserError(problems[0])
    return folder


def fingerprint(folder: Path) -> str:
    """A hash of the configuration and of the weight files' names and sizes: cheap, and tells models apart."""
    parts = [(folder / "config.json").read_bytes()]
    parts += [f"{p.name}:{p.stat().st_size}".encode() for p in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]


@dataclass
class Slot:
    """A tensor of the checkpoint and the place in the model it goes to."""
    names: list[str]  # more than one where parameters are tied
    module: object
    attribute: str
    shape: tuple[int, ...]

    @property
    def quantized(self) -> bool:
        return self.attribute == "weight" and hasattr(self.module, "quantizer")


def find_slots(model) -> list[Slot]:
    """A slot for each base parameter. Called before adapters are attached: they rename modules, but keep the
    objects."""
    slots: dict[object, Slot] = {}
    for prefix, module in model.named_modules():
        quantized = hasattr(module, "quantizer")
        for name, parameter in module._parameters.items():
            if parameter is None or (quantized and name not in ("weight", "bias")):
                continue
            packed = quantized and name == "weight"
            shape = (module.out_features, module.in_features) if packed else tuple(parameter.shape)
            slot = slots.setdefault(parameter, Slot([], module, name, shape))
            slot.names.append(f"{prefix}.{name}".lstrip("."))
    return list(slots.values())


class Checkpoint:
    """The tensors of a folder of safetensors, by name. Reads no more than the rows that are asked for."""

    def __init__(self, folder: Path):
        self.folder, self.bytes_read = folder, 0
        self.file: dict[str, str] = {}
        self.shape: dict[str, tuple[int, ...]] = {}
        self.problems: list[str] = []  # for people, one line each
        self.handles: dict = {}
        for file in weight_files(folder):
            try:
                self._read_header(file)
            except Exception as error:  # safetensors raises a type of its own, missing files OSError
                self.problems.append(f"{file}: cannot be read ({error})")

    def _handle(self, file: str):
        from safetensors import safe_open
        if file not in self.handles:
            self.handles[file] = safe_open(self.folder / file, framework="pt")
        return self.handles[file]

    def _read_header(self, file: str) -> None:
        handle = self._handle(file)
        for name in handle.keys():
            part = handle.get_slice(name)
            self.file[name], self.shape[name], dtype = file, tuple(part.get_shape()), part.get_dtype()
            if dtype not in ("F64", "F32", "F16", "BF16"):
                self.problems.append(f"{name}: stored as {dtype}; only floating-point weights are read")

    def rows(self, name: str, low: int, high: int):
        """Rows [low, high) of a tensor, in the checkpoint's dtype."""
        import torch
        if low >= high:
            return torch.empty(0, *self.shape[name][1:])
        found = self._handle(self.file[name]).get_slice(name)[low:high]
        self.bytes_read += found.numel() * found.element_size()
        return found

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
        # Old checkpoints carry RoPE's frequencies, which are computed from the configuration.
        problems += [f"{name}: not in the model" for name in self.shape
                     if name not in known and not name.endswith("rotary_emb.inv_freq")]
        if problems:
            more = [f"... and {len(problems) - 8} more"] if len(problems) > 8 else []
            raise UserError("\n  ".join([f"{self.folder} does not fit the model:", *problems[:8], *more]))
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


def write_tensors(folder: Path, stem: str, parameters: dict, main: bool) -> None:
    """Writes {name: sharded parameter} as safetensors, with an index where there are several files.

    Every rank calls this (gathering is collective); only the `main` one holds and writes, one file's tensors
    at a time. Files appear under their names only when all of them are complete.
    """
    from safetensors.torch import save_file
    sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
    runs, where = split_by_size(sizes), {}
    for number, names in enumerate(runs, 1):
        part = "" if len(runs) == 1 else f"-{number:05}-of-{len(runs):05}"
        file = f"{stem}{part}.safetensors"
        tensors = {}
        for name in names:
            whole = parameters[name].detach().full_tensor()
            if main:
                tensors[name], where[name] = whole.cpu().contiguous(), file
        if main:
            save_file(tensors, folder / f"{file}.part", metadata={"format": "pt"})
    for file in dict.fromkeys(where.values()):
        (folder / f"{file}.part").replace(folder / file)
    if main and len(runs) > 1:
        index = dict(metadata=dict(total_size=sum(sizes.values())), weight_map=where)
        write_json(folder / f"{stem}.safetensors.index.json", index)
