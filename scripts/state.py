"""Checkpoints of a run: checkpoint-<step>/ with every rank's own shards and what is needed to go on exactly.

    state.json                   step, schedule, scaler, config, fingerprints of base and data (rank 0)
    rank-00000.safetensors ...   the shards of each rank: trained parameters ("model.<name>"), optimiser state
                                 ("<key>.<name>"), what belongs to one shard only ("<key>@1/2.<name>")
    rank-00000.json ...          size and CRC-32 of that file

The files are in the sharded safetensors layout of torch.distributed.checkpoint, which reads them again, at
any world size. Writing needs no collective: state is copied to the host, a thread writes it, and at the first
step by which all ranks have written the folder gets its name. So a folder that has its name is complete.

Nothing else is needed to go on: order of the data and random numbers are functions of the step.
"""
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from scripts import checkpoint, logs, optim, plan, profiling
from scripts.flags import UserError

IDLE, WRITING, WRITTEN, FAILED = range(4)
# Flags that may change when a run goes on: where, how fast and how watched, not what is computed. What the
# names of model and data stand for is compared by fingerprint, the number of examples of a step as a product.
FREE = {"model_name", "llama_pro_path", "dataset", "skip_bad_rows", "eval_dataset", "eval_steps",
        "eval_generate", "output_dir", "overwrite_output_dir", "save_model", "save_steps", "keep_checkpoints",
        "async_save", "resume", "batch_size", "gradient_accumulation_steps", "world_size",
        "sharding_strategy", "hybrid_shard_size", "attn_implementation", "wrap_policy",
        "prefetch_units", "reshard_last_block",
        "use_gradient_checkpointing", "reentrant_checkpointing", "use_cpu_offload",
        "use_activation_cpu_offload", "compile", "no_sync", "low_memory", "loading_workers", "master_addr",
        "master_port", "timeout_minutes", "error_dir", "skip_nonfinite_steps", "trust_remote_code",
        "deterministic",
        *(spec.name for flags in (logs.Flags, profiling.Flags, plan.Flags)
          for spec in dataclasses.fields(flags))}


# ------------------------------------------------------------------------------------- finding and comparing

def step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def found(output_dir: str | Path) -> list[Path]:
    """The checkpoints of an output folder, newest first."""
    named = (p for p in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name))
    return sorted(named, key=step_of, reverse=True)


def candidates(config) -> list[Path]:
    """Checkpoints that --resume may go on from, the best first; none means a new run."""
    if config.resume == "auto":
        return found(config.output_dir)
    return [Path(config.resume).expanduser()] if config.resume else []


def check(config) -> list[str]:
    """Problems between --resume and the disk, from file names and run.json alone."""
    paths = candidates(config)
    if not config.resume and (old := found(config.output_dir)):
        return [f"--output_dir {config.output_dir}: holds {old[0].name} of an earlier run; --resume auto "
                f"goes on from it; to start anew remove it or choose another folder"]
    if config.resume and config.resume != "auto" and not (paths[0] / "state.json").is_file():
        near = ", ".join(map(str, found(paths[0]) or found(paths[0].parent)))
        return [f"--resume {config.resume}: no checkpoint (no state.json in it)"
                + (f"; there are {near}" if near else "")]
    if config.resume == "auto" and not paths and not config.overwrite_output_dir and is_finished(config):
        return [f"--resume auto: {config.output_dir} holds the result of a run that has ended, and no "
                "checkpoint to go on from; choose another --output_dir, or --overwrite_output_dir true for a "
                "new run there"]
    return []


def is_finished(config) -> bool:
    """Whether the output folder has the summary that a run writes at its end."""
    file = Path(config.output_dir).expanduser() / "run.json"
    try:
        return "summary" in json.loads(file.read_text())
    except (OSError, ValueError):
        return False


def differences(old: dict, config) -> tuple[dict, dict]:
    """{flag: (then, now)} of the flags that alter the mathematics, and of the others that have changed."""
    defaults = {spec.name: spec.default for spec in dataclasses.fields(config)}
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    changed = {name: (old.get(name, defaults[name]), value) for name, value in now.items()
               if old.get(name, defaults[name]) != value}
    free = FREE | ({"num_epochs", "max_steps"} if config.lr_scheduler == "constant" else set())
    return ({name: pair for name, pair in changed.items() if name not in free},
            {name: pair for name, pair in changed.items() if name in free and name != "resume"})


def refusals(saved: dict, config, now: dict) -> list[str]:
    """Why a run cannot go on from the state `saved`; `now`: world_size, model, data as in the new run."""
    problems = [f"--{name} was {then}, is {value}"
                for name, (then, value) in differences(saved["config"], config)[0].items()]
    if saved["model"]["fingerprint"] != now["model"]["fingerprint"]:
        problems.append(f"the base model is another one: it was {saved['model']['folder']}")
    if saved["data"]["fingerprint"] != now["data"]["fingerprint"]:
        problems.append(f"the data are not the same as in --dataset {saved['config']['dataset']} then")
    old, split = saved["config"], dataclasses.asdict(config)
    parts = ["batch_size"] if config.group_by_length else ["batch_size", "gradient_accumulation_steps"]
    then, here = saved["world_size"], now["world_size"]
    for part in parts:
        then, here = then * old[part], here * split[part]
    if then != here:
        problems.append(f"{' x '.join(['processes', *parts])} was {then}, is {here}: set --{parts[-1]} so "
                        f"that it is {then}")
    return problems


def damage(folder: Path, share: int, of: int) -> str | None:
    """What is wrong with a checkpoint; each of `of` readers looks at its `share` of the files."""
    try:
        ranks = json.loads((folder / "state.json").read_text())["world_size"]
        for rank in range(share, ranks, of):
            noted = json.loads((folder / f"rank-{rank:05}.json").read_text())
            path, crc = folder / noted["file"], 0
            if path.stat().st_size != noted["bytes"]:
                return f"{path.name}: {path.stat().st_size} bytes of {noted['bytes']}"
            with path.open("rb") as file:
                while piece := file.read(2**24):
                    crc = zlib.crc32(piece, crc)
            if crc != noted["crc32"]:
                return f"{path.name}: its bytes are not those that were written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def choose(config, runtime, now: dict) -> tuple[Path | None, dict]:
    """The checkpoint to go on from and its state.json; (None, {}) for a new run. Damaged ones are named and
    passed over. Every rank calls this. Raises UserError for a checkpoint of another training."""
    paths = [candidates(config)]
    dist.broadcast_object_list(paths, src=0)
    for path in paths[0]:
        every: list = [None] * runtime.world
        dist.all_gather_object(every, damage(path, runtime.rank, runtime.world))
        if broken := next((text for text in every if text), None):
            if config.resume != "auto":
                raise UserError(f"--resume {path}: damaged ({broken}); --resume auto takes the newest whole "
                                f"one")
            if runtime.main:
                print(f"resume  {path} is damaged and passed over ({broken})", flush=True)
            continue
        saved = json.loads((path / "state.json").read_text())
        if problems := refusals(saved, config, now):
            lines = "\n  ".join(problems)
            raise UserError(f"--resume {path}: this is another training:\n  {lines}\n  give the flags as "
                            f"they were, or start anew in another --output_dir")
        return path, saved
    if paths[0]:
        raise UserError(f"--resume auto: every checkpoint in {config.output_dir} is damaged; remove them to "
                        f"start anew")
    return None, {}


def introduce(config, path: Path | None, saved: dict) -> None:
    """Says from where a run goes on, and what has changed."""
    if path:
        changed = [f"--{name} {then} -> {now}"
                   for name, (then, now) in differences(saved["config"], config)[1].items()]
        print(f"resume  {path}, {saved['step']} steps done" + (f"; changed: {', '.join(changed)}" if changed
                                                              else ""), flush=True)


# ---------------------------------------------------------------------------------------------------- tensors

def tensors(training) -> dict:
    """All tensors of the training state by their names in the checkpoint. Those of which this rank holds the
    only copy (no DTensor, more than a number) carry the number of its shard."""
    trained, mesh = training.model.trained(), training.model.mesh["shard"]
    found = {f"model.{name}": parameter for name, parameter in trained.items()}
    for name, tensor in optim.state_tensors(training.optimizer, trained).items():
        if not isinstance(tensor, DTensor) and tensor.ndim:
            key, _, parameter = name.partition(".")
            name = f"{key}@{mesh.get_local_rank()}/{mesh.size()}.{parameter}"
        if tensor.numel():
            found[name] = tensor
    return dict(sorted(found.items()))


def local_place(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offsets of this rank's part."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def shards(training) -> dict:
    """{name: (this rank's part, its offsets in the whole)}: what this rank has to write. Of parts that
    several ranks hold, the first writes; ranks without rows of a parameter write nothing of it."""
    mesh, mine = training.model.mesh, {}
    if "replicate" in mesh.mesh_dim_names and mesh["replicate"].get_local_rank():
        return mine
    for name, tensor in tensors(training).items():
        if isinstance(tensor, DTensor):
            _, offsets = local_place(tensor)
            tensor = tensor.to_local()
            if tensor.numel():
                mine[name] = tensor.detach(), list(offsets)
        elif tensor.ndim or training.runtime.main:
            mine[name] = tensor.detach(), [0] * tensor.ndim
    return mine


def parted(name: str) -> tuple[str, str, int]:
    """"key@1/2.parameter" -> (key, parameter, 2); 0 where the name carries no shard."""
    key, of, parameter = re.fullmatch(r"([^.@]+)(?:@\d+/(\d+))?\.(.*)", name).groups()
    return key, parameter, int(of or 0)


def load(folder: Path, saved: dict, training) -> None:
    """Fills parameters, optimiser, schedule and scaler from a checkpoint, each rank its own part. Collective.
    Raises UserError where it does not hold what this training needs."""
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    reader = HuggingFaceStorageReader(str(folder))
    stored = set(reader.read_metadata().state_dict_metadata)
    optim.allocate_state(training.optimizer, training.model.trained(), {
        ".".join(parted(name)[:2]) for name in stored if not name.startswith("model.")})
    wanted = tensors(training)
    other_cut = {name: tensor for name, tensor in wanted.items() if name not in stored and parted(name)[2]}
    if missing := set(wanted) - stored - set(other_cut):
        raise UserError(f"--resume {folder}: lacks {', '.join(sorted(missing)[:4])}")
    dcp.load({name: wanted[name] for name in wanted if name in stored}, storage_reader=reader)
    with contextlib.ExitStack() as stack:
        paths = sorted(folder.glob("*.safetensors")) if other_cut else []
        recut([stack.enter_context(safe_open(path, "pt")) for path in paths], other_cut, training)
    training.schedule.load_state_dict(saved["schedule"])
    for group, lr in zip(training.optimizer.param_groups, training.schedule.get_last_lr()):
        group["lr"] = lr
    training.scaler.load_state_dict(saved["scaler"])
    training.step = saved["step"]


def recut(files: list, wanted: dict, training) -> None:
    """Fills states of bitsandbytes' optimisers that were kept for other shards: the rows of all of them are
    put together and cut anew. 8-bit ones, whose blocks go over the flat shard, are rounded again. `files`: of
    the ranks then, open."""
    pieces: dict[tuple, list] = {}
    for file in files:  # in the order of the ranks, and so of the rows
        for name in file.keys():
            pieces.setdefault(parted(name)[:2], []).append((file, name))
    parameters = training.model.trained()
    for name, tensor in wanted.items():
        key, parameter, _ = parted(name)
        if not key.startswith("state"):
            continue  # absmax is made with its codes
        p = parameters[parameter]
        shape, (low, *_) = local_place(p)
        parts = [file.get_tensor(n) for file, n in pieces[key, parameter]]
        if tensor.dtype != torch.uint8:
            tensor.copy_(torch.cat(parts)[low:low + shape[0]])
            continue
        scale = key.replace("state", "absmax")
        scales = [file.get_tensor(n) for file, n in pieces[scale, parameter]]
        firsts = [sum(len(part) for part in parts[:i]) for i in range(len(parts))]
        rows = optim.dequantized(key, list(zip(firsts, parts, scales)), low, low + shape[0])
        codes, absmax = optim.requantized(key, rows)
        tensor.copy_(codes)
        wanted[name.replace(key, scale, 1)].copy_(absmax)


def choose_kernels(deterministic: bool) -> None:
    """--deterministic: in place of kernels that add up in no fixed order those that do, as torch's page on
    reproducibility says; it warns where it has none. Before anything is computed. CPUs give the same bits
    either way."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # read by transformers
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        torch.utils.deterministic.fill_uninitialized_memory = False  # all is written before it is read


def seed_step(seed: int, step: int, rank: int) -> None:
    """Random numbers of a step (dropout, noise) come from its number, so they do not depend on what was
    drawn before."""
    torch.manual_seed(random.Random(f"{seed},{step},{rank}").getrandbits(63))


# ---------------------------------------------------------------------------------------------------- writing

def write_shards(path: Path, shards: dict) -> None:
    """One rank's file and its note. Tensors go to disk one by one; both files are on the disk when this
    returns (fsync)."""
    entries = {name: checkpoint.Entry(str(t.dtype).removeprefix("torch."), tuple(t.shape), lambda t=t: t)
               for name, (t, _) in shards.items()}
    offsets = {name: {"saved_offsets": where} for name, (_, where) in shards.items()}
    crc = 0
    with path.open("wb") as file:
        def write(piece):
            nonlocal crc
            crc = zlib.crc32(piece, crc)
            file.write(piece)
        checkpoint.write_pieces(entries, write, {"DCP_SHARDING_INFO": json.dumps(offsets)})
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    write_durably(path.with_suffix(".json"), dict(file=path.name, bytes=size, crc32=crc))


def write_durably(path: Path, content: dict) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


class Saver:
    """Writes the checkpoints of a run, at most one at a time."""

    def __init__(self, config, runtime, content: dict, logger_state: Callable[[], dict] = dict):
        self.config, self.runtime, self.content, self.logger_state = config, runtime, content, logger_state
        self.newest = None  # rank 0: the step of the newest checkpoint that is there
        self.folder = Path(config.output_dir)
        self.step, self.job, self.staged, self.pool = None, None, {}, ThreadPoolExecutor(1)

    @property
    def status(self) -> int:
        if self.job is None:
            return IDLE
        if not self.job.done():
            return WRITING
        return FAILED if self.job.exception() else WRITTEN

    def part(self) -> Path:
        return self.folder / f".checkpoint-{self.step}.part"

    def stage(self, shards: dict) -> dict:
        """Copies to host memory, which is kept for the next time; the training may go on afterwards."""
        pin = torch.accelerator.is_available()
        for name, (tensor, _) in shards.items():
            if name not in self.staged or self.staged[name].shape != tensor.shape:
                self.staged[name] = torch.empty_like(tensor, device="cpu", pin_memory=pin)
            self.staged[name].copy_(tensor, non_blocking=True)
        if pin:
            torch.accelerator.synchronize()
        return {name: (self.staged[name], offsets) for name, (_, offsets) in shards.items()}

    def start(self, training) -> None:
        """Begins the checkpoint of the step that was made last. Collective where one is still being
        written."""
        self.finish()
        self.step, mine = training.step, shards(training)
        content = self.content | dict(
            step=training.step, world_size=self.runtime.world, logger=self.logger_state(),
            schedule=training.schedule.state_dict(), scaler=training.scaler.state_dict())
        mine = self.stage(mine) if self.config.async_save else mine
        self.job = self.pool.submit(self.write, self.part(), mine, content)
        if not self.config.async_save:
            self.finish()

    def write(self, part: Path, mine: dict, content: dict) -> None:
        part.mkdir(parents=True, exist_ok=True)
        write_shards(part / f"rank-{self.runtime.rank:05}.safetensors", mine)
        if self.runtime.main:
            write_durably(part / "state.json", content)

    def settle(self, statuses: list[int]) -> None:
        """Takes the statuses of all ranks, the same on every rank; names or drops what all have ended
        writing. Collective where a rank failed."""
        if self.job is None or WRITING in statuses:
            return
        error, self.job = self.job.exception(), None
        if FAILED in statuses:
            self.drop(error)
        elif self.runtime.main:
            self.commit()

    def drop(self, error: BaseException | None) -> None:
        texts: list = [None] * self.runtime.world
        dist.all_gather_object(texts, error and f"rank {self.runtime.rank}: {error}")
        if self.runtime.main:
            shutil.rmtree(self.part(), ignore_errors=True)
            last = next(iter(found(self.folder)), None)
            logs.say("save", f"checkpoint-{self.step} failed, training goes on; the last one is {last} "
                             f"({'; '.join(filter(None, texts))})")

    def commit(self) -> None:
        """Gives the folder its name, and removes the oldest beyond --keep_checkpoints."""
        try:
            self.part().rename(self.folder / f"checkpoint-{self.step}")
            self.newest = self.step
            for old in found(self.folder)[self.config.keep_checkpoints:]:
                gone = old.rename(self.folder / f".{old.name}.old")
                self.pool.submit(shutil.rmtree, gone, ignore_errors=True)  # large files take their time
        except OSError as error:
            logs.say("save", f"checkpoint-{self.step}: {error}")

    def finish(self) -> None:
        """Waits until the checkpoint that is being written is there, or is given up. Collective."""
        if self.job is not None:
            self.job.exception()  # waits
            self.settle([int(status) for status in self.runtime.gather(self.status)[:, 0]])


def clean(folder: Path) -> None:
    """Removes what an interrupted run has left: halves of saves, checkpoints on their way out."""
    for path in (*folder.glob(".checkpoint-*.part"), *folder.glob(".checkpoint-*.old")):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path, step: int) -> None:
    """Renames the checkpoints after `step`, damaged or of a run that is given up: the run that now goes on
    from `step` must neither take nor count them."""
    for path in found(folder):
        if step_of(path) > step:
            path.rename(folder / f"set-aside-{int(time.time())}-{path.name}")
