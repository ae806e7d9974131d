"""torch.profiler around the training loop: traces for Perfetto, tables of operators, stacks, memory over
time. Nothing is made, and a step calls an empty function, while --profile is off."""
import contextlib
import gzip
import itertools
import json
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.flags import UserError, option


@dataclass(frozen=True)
class Flags:
    profile: bool = option(False, "profile some steps with torch.profiler")
    profiling_output: str | None = option(None, "where to; without it <output_dir>/profile")
    export_trace: bool = option(True, "write traces, to open in ui.perfetto.dev")
    with_stack: bool = option(False, "record source lines, and write stacks for flame graphs")
    with_shapes: bool = option(False, "record shapes of the operators' inputs")
    export_memory_timeline: bool = option(False, "memory over time: a snapshot for pytorch.org/memory_viz; "
                                                 "on a CPU a plot")
    profiling_wait_steps: int = option(2, "steps of a cycle that pass first", low=0)
    profiling_warmup_steps: int = option(1, "then steps that are profiled and thrown away", low=0)
    profiling_active_steps: int = option(2, "then steps that are recorded", low=1)
    profiling_repeat: int = option(1, "cycles; 0: one every --profiling_frequency steps, to the end", low=0)
    profiling_frequency: int = option(10, "steps of a cycle where --profiling_repeat is 0", low=1)
    profile_memory: bool = option(False, "log memory after each phase of the first three steps")


NEED_PROFILE = ("profiling_output", "with_stack", "with_shapes", "export_memory_timeline")


def wait_steps(config) -> int:
    """Steps of a cycle before its warm-up."""
    if config.profiling_repeat:
        return config.profiling_wait_steps
    return config.profiling_frequency - config.profiling_warmup_steps - config.profiling_active_steps


def problems(config) -> list[str]:
    """What is wrong with a combination of these flags; messages for people."""
    if not config.profile:
        given = [name for name in NEED_PROFILE if getattr(config, name) != getattr(Flags, name)]
        return [f"--{name} goes with --profile true" for name in given]
    if wait_steps(config) < 0:
        return [f"--profiling_frequency {config.profiling_frequency}: must be at least "
                f"--profiling_warmup_steps + --profiling_active_steps"]
    idle = wait_steps(config) + config.profiling_warmup_steps
    if 0 < config.max_steps <= idle:
        return [f"--max_steps {config.max_steps}: profiling records from step {idle + 1} on; lower "
                f"--profiling_wait_steps or --profiling_warmup_steps"]
    return []


def output(config) -> Path:
    """The folder of what is recorded."""
    return Path(config.profiling_output or Path(config.output_dir) / "profile")


def recordable(device=None):
    """The memory module (torch.cuda.memory, say) of the device or the accelerator at hand, where it can
    record allocations; else None."""
    memory = getattr(torch.get_device_module(device), "memory", None)
    return memory if hasattr(memory, "_record_memory_history") else None


def explained(error: BaseException, config, rank: int) -> BaseException:
    """An error of a lack of memory as a UserError that says what to do, every other one as it is. Where
    allocations were recorded, the snapshot of them is written first."""
    kinds, text = (torch.OutOfMemoryError, MemoryError), str(error)
    said = re.search("(?i)out of memory|can't allocate memory", text) and not isinstance(error, UserError)
    if not isinstance(error, kinds) and not said:
        return error
    what, memory, note = ". ".join(text.split("\n")[0].split(". ")[:2]), recordable(), ""
    if memory and (config.profile_memory or config.export_memory_timeline):
        file = output(config) / f"rank{rank}_out_of_memory.pickle"
        with contextlib.suppress(OSError, RuntimeError):
            file.parent.mkdir(parents=True, exist_ok=True)
            memory._dump_snapshot(str(file))
            note = f"; {file} (for pytorch.org/memory_viz) has what was allocated"
    return UserError(f"rank {rank} is out of memory ({what or type(error).__name__}): the same flags with "
                     f"--plan say what needs it and which flags would save it{note}")


def draw_memory(trace: str, file: str) -> None:
    """Plots what the allocations in a trace add up to: bytes allocated since recording began, over time."""
    from matplotlib.figure import Figure
    with gzip.open(trace, "rt") as text:
        events = [event for event in json.load(text)["traceEvents"] if event.get("name") == "[memory]"]
    points = sorted((event["ts"], event["args"]["Total Allocated"]) for event in events)
    figure = Figure(figsize=(10, 4), layout="tight")
    axes = figure.subplots()
    times, sizes = [(ts - points[0][0]) / 1e3 for ts, _ in points], [size / 2**20 for _, size in points]
    axes.step(times, sizes, where="post")
    axes.set(xlabel="ms", ylabel="MiB", title="Memory allocated since recording began")
    axes.grid(alpha=0.3)
    figure.savefig(file)


class Recorder:
    """Files of one rank: <output>/step-<last step of the cycle>/rank<n>_*."""

    def __init__(self, config, runtime, done: int):
        self.config, self.rank, self.main, self.step = config, runtime.rank, runtime.main, done
        self.folder = output(config)
        self.order = f"self_{runtime.device.type}_time_total"
        self.memory = recordable(runtime.device) if config.export_memory_timeline else None
        self.plot = config.export_memory_timeline and not self.memory

    def keep_history(self, enabled: str | None) -> None:
        """From "all" to None the accelerator's allocations are recorded, with stacks."""
        if self.memory:
            self.memory._record_memory_history(enabled=enabled)

    def ready(self, profile) -> None:
        """Writes a cycle that has just ended; training goes on where that fails."""
        from scripts.logs import say
        folder = self.folder / f"step-{self.step}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.write(profile, str(folder / f"rank{self.rank}"))
        except OSError as error:
            say("profile", f"rank {self.rank} could not write it: {error}")
        if self.main:
            say("profile", str(folder))

    def write(self, profile, stem: str) -> None:
        config, trace = self.config, f"{stem}_trace.json.gz"
        averages = profile.key_averages(group_by_input_shape=config.with_shapes)
        Path(f"{stem}_key_averages.txt").write_text(averages.table(sort_by=self.order, row_limit=50))
        if config.export_trace or self.plot:
            profile.export_chrome_trace(trace)
        if config.with_stack:
            profile.export_stacks(f"{stem}_stacks.txt", self.order)
        if self.memory:
            self.memory._dump_snapshot(f"{stem}_memory_snapshot.pickle")
        if self.plot:
            draw_memory(trace, f"{stem}_memory.png")
        if not config.export_trace:
            Path(trace).unlink(missing_ok=True)


@contextlib.contextmanager
def profiler(config, runtime, done: int = 0):
    """A function to call at the start of each optimiser step. `done`: steps before the first; ProfilerStep#n
    in a trace is the run's step n. A cycle that the end of training cuts short is written as well."""
    if not config.profile:
        yield lambda: None
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports every start and stop
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # of a cycle, once they are written
    recorder, first = Recorder(config, runtime, done), done + 1
    cycle = torch.profiler.schedule(wait=wait_steps(config), warmup=config.profiling_warmup_steps,
                                    active=config.profiling_active_steps, repeat=config.profiling_repeat)
    detail = torch._C._profiler._ExperimentalConfig(verbose=True) if config.with_stack else None
    profile = torch.profiler.profile(
        schedule=lambda step: cycle(max(0, step - first)), on_trace_ready=recorder.ready,
        with_stack=config.with_stack, record_shapes=config.with_shapes, profile_memory=recorder.plot,
        experimental_config=detail)  # without it the file of stacks stays empty
    profile.step_num = first
    moves = itertools.chain([profile.start], itertools.repeat(profile.step))

    def tick():
        next(moves)()
        recorder.step += 1
    recorder.keep_history("all")
    try:
        yield tick
    except BaseException:
        profile.on_trace_ready = None  # the error is what matters now
        raise
    finally:
        if recorder.step > done:
            profile.stop()
    recorder.keep_history(None)  # after an error it stays, for `explained`
