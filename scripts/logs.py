"""What a person sees of a run: a few lines before, a bar, lines, Weights & Biases or TensorBoard during, a
summary after, and the rows of metrics.jsonl. Add a logger: one class, one row of LOGGERS."""
import dataclasses
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from scripts import flops, memory
from scripts.flags import UserError, option

LOG_TO = ("tqdm", "stdout", "wandb", "tensorboard")


@dataclass(frozen=True)
class Flags:
    log_to: str = option("tqdm", "a progress bar, a line per step, Weights & Biases, or TensorBoard", LOG_TO)
    project_name: str = option("qshard", "wandb project")
    name: str | None = option(None, "wandb run name")
    group: str | None = option(None, "wandb group")
    entity: str | None = option(None, "wandb entity")
    verbose: bool = option(False, "print what was found in the model as well: blocks, linears, FSDP units")


WIDTH = 80  # columns of a terminal; files and pipes get whole lines
TOGETHER = "\xa0"  # a space at which no line is folded


def line(text: str) -> None:
    """Prints it, above a bar if one is drawn."""
    tqdm = sys.modules.get("tqdm")
    (tqdm.tqdm.write if tqdm else print)(text)
    sys.stdout.flush()


def say(label: str, text: str) -> None:
    """One line of the run's report: a label of up to eight letters, and the rest; on a terminal folded."""
    if sys.stdout.isatty():
        text = textwrap.fill(text, WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    line(f"{label:<8}" + text.replace("\n", "\n" + " " * 8).replace(TOGETHER, " "))


def say_command(label: str, *parts: str) -> None:
    """A command to copy. On a terminal it is folded between its parts, as the shell allows."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < WIDTH - 10 or not sys.stdout.isatty():
            lines[-1] += " " + part
        else:
            lines += ["  " + part]
    print(f"{label:<8}" + (" \\\n" + " " * 8).join(lines), flush=True)


def wandb_ready() -> bool:
    """Whether Weights & Biases can start: offline or off, a server of one's own, or with an API key in the
    environment or in ~/.netrc, where `wandb login` puts it."""
    import netrc
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or \
            {"WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"} & set(os.environ):
        return True
    try:
        found = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return found.authenticators("api.wandb.ai") is not None


def describe(row: dict, room: int = WIDTH) -> str:
    """One row of metrics.jsonl in a line of at most `room` columns: what does not fit is left out, the least
    telling first; metrics.jsonl has all."""
    parts = dict(loss=f"loss {row['loss']:.4f}", lr=f"lr {row['lr']:.2e}",
                 norm=f"norm {row['grad_norm']:.2f}", speed=f"{row['tokens_per_second']:.0f} tok/s",
                 mfu=f"MFU {row['mfu']:.1%}" if "mfu" in row else "",
                 memory=f"{row['peak_memory_bytes'] / 2**30:.2f} GiB")
    for spare in ("", "memory", "lr", "mfu", "norm", "speed"):
        parts.pop(spare, None)
        line = "  ".join(filter(None, parts.values()))
        if len(line) <= room:
            break
    return line


class StdoutLog:
    """One line per step. `every` seconds may pass without one, the first and last step always get theirs.
    `done`: steps of an earlier part of this run; `state`: what state() gave then."""

    def __init__(self, config, total: int, run: dict, done: int, state: dict, every: float = 0.0):
        self.total, self.done, self.every, self.last = total, done, every, 0.0
        self.start = time.monotonic()

    def write(self, row: dict) -> None:
        now, step = time.monotonic(), row["step"]
        if now - self.last >= self.every or step in (self.done + 1, self.total):
            self.last = now
            left = (now - self.start) / (step - self.done) * (self.total - step)
            begin, end = f"step {step}/{self.total}  ", f"  {left:.0f} s left"
            print(begin + describe(row, WIDTH - len(begin) - len(end)) + end, flush=True)

    def show(self, text: str) -> None:
        print(text, flush=True)

    def evaluated(self, row: dict) -> None:
        self.show(f"step {row['step']}/{self.total}  eval loss {row['eval_loss']:.4f}, perplexity "
                  f"{row['eval_perplexity']:.3f} over {row['eval_supervised_tokens']} tokens")

    def state(self) -> dict:
        """What a later part of this run needs to go on; everything before is on disk."""
        return {}

    def close(self) -> None:
        pass


class TqdmLog(StdoutLog):
    """A bar on a terminal; where there is none, a line every ten seconds, so that log files stay readable."""

    def __init__(self, config, total: int, run: dict, done: int, state: dict):
        from tqdm import tqdm
        super().__init__(config, total, run, done, state)
        bar = sys.stderr.isatty()
        self.lines = None if bar else StdoutLog(config, total, run, done, state, every=10)
        self.bar = tqdm(total=total, initial=done, unit="step", disable=not bar, dynamic_ncols=True,
                        bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}  {remaining} left")

    def write(self, row: dict) -> None:
        room = shutil.get_terminal_size().columns - 2 * len(str(self.total)) - 28  # a bar of ten, time left
        self.bar.set_description_str(describe(row, room), refresh=False)
        self.bar.update()
        if self.lines:
            self.lines.write(row)

    def show(self, text: str) -> None:
        self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


class WandbLog(TqdmLog):
    """Weights & Biases, beside the bar. A resumed run keeps its id and goes on in the same charts."""

    def __init__(self, config, total: int, run: dict, done: int, state: dict):
        import wandb
        super().__init__(config, total, run, done, state)
        known = state.get("wandb_id")
        self.run = wandb.init(project=config.project_name, name=config.name, group=config.group,
                              entity=config.entity, dir=config.output_dir, config=run, id=known,
                              resume="allow" if known else None)

    def write(self, row: dict) -> None:
        super().write(row)
        self.run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def evaluated(self, row: dict) -> None:
        super().evaluated(row)
        self.run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def state(self) -> dict:
        return dict(wandb_id=self.run.id)

    def close(self) -> None:
        super().close()
        self.run.finish()


class TensorBoardLog(TqdmLog):
    """Event files in <output_dir>/tensorboard, beside the bar. Steps that an earlier part of the run wrote
    after the one it is resumed from are hidden."""

    def __init__(self, config, total: int, run: dict, done: int, state: dict):
        from torch.utils.tensorboard import SummaryWriter
        super().__init__(config, total, run, done, state)
        self.writer = SummaryWriter(str(Path(config.output_dir) / "tensorboard"), purge_step=done + 1)
        text = "\n".join("    " + line for line in json.dumps(run, indent=2, default=str).splitlines())
        self.writer.add_text("run", text, done + 1)

    def scalars(self, row: dict) -> None:
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(name, value, row["step"])

    def write(self, row: dict) -> None:
        super().write(row)
        self.scalars(row)

    def evaluated(self, row: dict) -> None:
        super().evaluated(row)
        self.scalars(row)

    def state(self) -> dict:
        self.writer.flush()
        return {}

    def close(self) -> None:
        super().close()
        self.writer.close()


LOGGERS = dict(zip(LOG_TO, (TqdmLog, StdoutLog, WandbLog, TensorBoardLog)))


def to_json(row: dict) -> str:
    """JSON has no NaN and no infinity: null."""
    return json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                       for key, value in row.items()})


def keep_rows(file: Path, done: int) -> list[dict]:
    """Leaves in metrics.jsonl the rows of the first `done` steps, and returns them. Later ones will come
    again, and a line that a dying process left unfinished goes. The new file replaces the old in one go."""
    rows = []
    for line in file.read_text().splitlines() if done and file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    rows = [{key: math.nan if value is None else value for key, value in row.items()}
            for row in rows if row["step"] <= done]
    fresh = file.with_name(file.name + ".new")
    fresh.write_text("".join(to_json(row) + "\n" for row in rows))
    fresh.replace(file)
    return rows


class Metrics:
    """metrics.jsonl, one object per optimiser step, and what the person watches. Made on every rank; all add
    up, and only rank 0 writes. A run that goes on after `done` steps keeps their rows; `logger_state` is then
    what state() gave. `run` is what run.json says before the summary."""

    def __init__(self, config, runtime, total: int, run: dict, done=0, logger_state: dict | None = None):
        self.runtime, self.done, self.clock, self.sink = runtime, done, time.perf_counter(), None
        self.rows, self.evals, self.made, self.memory, self.config = [], [], 0, {}, config
        self.in_a_row = self.left_out = 0  # steps that were not finite
        self.retried, self.warned = runtime.retries(), False  # those of loading cost no step anything
        self.waited = 0.0  # seconds of this step in which its batches were not there yet
        self.watch = runtime.phase if config.profile_memory else None
        self.peak = flops.device_peak(runtime.device) if config.numbers.compute.itemsize == 2 else None
        self.run = run
        if runtime.main:
            file = Path(config.output_dir) / "metrics.jsonl"
            kept = keep_rows(file, done)
            self.rows = [row for row in kept if "eval_loss" not in row]
            self.evals = [row for row in kept if "eval_loss" in row]
            self.file = open(file, "a", buffering=1)
            self.sink = LOGGERS[config.log_to](config, total, run, done, logger_state or {})

    def record(self, loss, norm, tokens: int, supervised: int, **row) -> None:
        """Adds the row of a step from this rank's summed `loss` and `tokens`, the global gradient `norm` and
        number of `supervised` tokens. Raises UserError as `judge` does."""
        every = self.runtime.gather(loss.item(), tokens, memory.host(), self.runtime.peak_memory(),
                                    self.waited, self.runtime.retries() - self.retried)
        loss, tokens, host, *_ = every.sum(0).tolist()
        seconds = time.perf_counter() - self.clock
        row |= dict(loss=loss / max(1, supervised), grad_norm=norm.item(), tokens=int(tokens),
                    supervised_tokens=supervised, peak_memory_bytes=int(every[:, 3].max()),
                    host_memory_bytes=int(host), seconds=seconds, data_seconds=float(every[:, 4].max()))
        row |= self.throughput(row, seconds) | self.moments()
        self.clock, self.waited, self.made = self.clock + seconds, 0.0, self.made + 1
        self.rows.append(row)
        if self.sink:
            self.file.write(to_json(row) + "\n")
            self.sink.write(row)
        self.warn(row["step"], every[:, 5].tolist())
        self.judge(row, every[:, 0].tolist())

    def waiting(self, batches):
        """The same, noting how long each was waited for."""
        ended = object()
        while True:
            start = time.perf_counter()
            found = next(batches, ended)
            if found is ended:
                return
            self.waited += time.perf_counter() - start
            yield found

    def go_on(self) -> None:
        """The next step begins here: what was done since the last one (evaluation, saving) is none of it."""
        self.clock = time.perf_counter()

    def warn(self, step: int, retries: list[float]) -> None:
        """One note when the allocator of a rank had to empty its cache; `retries`: of each rank, so far."""
        if max(retries) and not self.warned:
            rank, self.warned = retries.index(max(retries)), True
            self.show(f"note    step {step}: rank {rank} emptied its allocator's cache {max(retries):.0f} "
                      "times, which is slow: memory is nearly full; --plan names cheaper settings")

    def judge(self, row: dict, losses: list[float]) -> None:
        """Raises UserError, on every rank, where loss or gradient are not finite: unless loss scaling or
        --skip_nonfinite_steps left the step out. `losses` are those of the ranks."""
        step, loss, norm, config = row["step"], row["loss"], row["grad_norm"], self.config
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return
        bad = ", ".join(str(rank) for rank, value in enumerate(losses) if not math.isfinite(value))
        what = f"the loss is {loss} (rank {bad})" if bad else f"the gradient is {norm}, the loss {loss:.4g}"
        self.in_a_row += 1
        if not bad and config.numbers.scaler and self.in_a_row < 30:  # 30 halvings are no search any more
            return
        self.left_out += 1
        if not math.isfinite(norm) and self.left_out <= config.skip_nonfinite_steps:
            self.show(f"step {step}: {what}; left out ({self.left_out} of {config.skip_nonfinite_steps})")
            return
        raise UserError(f"step {step}: {what}, so nothing of it is saved; a smaller --lr or --precision "
                        f"mp_bf16 may help, --skip_nonfinite_steps leaves single steps out")

    def throughput(self, row: dict, seconds: float) -> dict[str, float]:
        """Of a step of all ranks: tokens and supervised tokens per second, share of the devices' peak."""
        tokens, supervised = row["tokens"], row["supervised_tokens"]
        found = dict(tokens_per_second=tokens / seconds, supervised_tokens_per_second=supervised / seconds)
        if self.peak:
            length = self.run["data"]["total_tokens"] / self.run["data"]["kept"]
            work = flops.of_step(self.run["model"]["flops"], tokens, supervised, length)
            found["mfu"] = work / (seconds * self.runtime.world * self.peak)
        return found

    def moments(self) -> dict[str, int]:
        """Memory at the phases of the first steps; {} when that is over or not wanted."""
        found = self.watch.take(self.runtime) if self.watch else {}
        self.memory |= {name: max(value, self.memory.get(name, 0)) for name, value in found.items()}
        return found

    def evaluated(self, eval_loss: float, **row) -> None:
        """Adds the row of an evaluation."""
        row |= dict(eval_loss=eval_loss, eval_perplexity=math.exp(min(eval_loss, 700)))
        self.evals.append(row)
        if self.sink:
            self.file.write(to_json(row) + "\n")
            self.sink.evaluated(row)

    def state(self) -> dict:
        """For a checkpoint: what `logger_state` of the run that goes on from here must be. Plain JSON."""
        return self.sink.state() if self.sink else {}

    def show(self, text: str) -> None:
        """Lines beside the bar."""
        if self.sink:
            self.sink.show(text)

    def close(self) -> None:
        if self.sink:
            self.sink.close()
            self.file.close()

    def summary(self, seconds: float) -> dict:
        """The run in a few numbers, for run.json and the last lines; of rank 0, steps before `done` included,
        but for `seconds` and the throughput, which are those of this part."""
        mine = self.rows[-self.made:] if self.made else []
        recent = sum(row["tokens"] for row in mine)
        tokens = sum(row["tokens"] for row in self.rows)
        found = dict(seconds=round(seconds, 1), steps=len(self.rows), tokens=tokens,
                     tokens_per_second=round(recent / seconds, 1))
        if self.rows:  # not where a run went on, elsewhere, from its last step
            found |= dict(loss_first=self.rows[0]["loss"], loss_last=self.rows[-1]["loss"],
                          peak_memory_bytes=max(row["peak_memory_bytes"] for row in self.rows))
        found |= dict(resumed_at=self.done) if self.done else {}
        for name in ("tokens_per_second", "mfu") if mine else ():
            if values := [row[name] for row in mine[1:] or mine if name in row]:  # the first is slow
                found["median_" + name] = statistics.median(values)
        found |= dict(first_step_seconds=mine[0]["seconds"]) if mine else {}
        if self.evals:
            lowest = min(self.evals, key=lambda row: (math.isnan(row["eval_loss"]), row["eval_loss"]))
            found |= dict(eval_loss_first=self.evals[0]["eval_loss"],
                          eval_loss_last=self.evals[-1]["eval_loss"],
                          eval_loss_lowest=lowest["eval_loss"], eval_lowest_step=lowest["step"])
        return found | (dict(memory=self.memory) if self.memory else {})


def introduce(config, facts: dict, folder: Path, held, runtime, total: int) -> None:
    """What is about to happen, in a few lines. `facts`: what train.build found out about the model."""
    share, trained = facts["quantized_parameters"] / facts["parameters"], facts["trained_parameters"]
    stored = f", {share:.1%} of them quantised to {facts['bits']:.2f} bits" if share else ""
    say("model", f"{folder.name} ({facts['architecture']}): {facts['blocks']} blocks, "
                 f"{facts['parameters'] / 1e6:.1f} M parameters{stored}")
    for note in facts["notes"]:
        say("note", note)
    targets = facts["targets"] + facts["target_parameters"]
    on = f", rank {config.lora_rank} on {', '.join(targets)}" if targets else ""
    on += f"; {', '.join(facts['modules_to_save'])} in full" if facts["modules_to_save"] else ""
    part = trained / facts["parameters"]
    say("train", f"{config.train_type}: {trained / 1e6:.2f} M parameters ({part:.2%}){on}")
    counts = held.counts
    supervised, length = counts.supervised_tokens / counts.kept, counts.total_tokens / counts.kept
    say("data", f"{config.dataset}: {counts.kept} examples of {length:.1f} tokens, {supervised:.1f} of them "
                f"supervised; {counts.truncated} cut, {counts.dropped} dropped")
    if held.eval:
        say("eval", f"{config.eval_dataset or config.eval_fraction}: {len(held.eval)} examples")
    each, more = config.batch_size, config.gradient_accumulation_steps
    parts = f"{each} per process" + (f" x {more} micro-batches" if more > 1 else "")
    say("run", f"{runtime.world} process{'es' * (runtime.world > 1)} on {runtime.device.type}, "
               f"{config.sharding_strategy}, {config.precision}; {total} steps of "
               f"{each * more * runtime.world} examples ({parts})")
    say("output", config.output_dir)
    if changed := changed_flags(config):
        say("flags", kept_together(changed))
    for text in cautions(config, facts, folder, max(held.lengths)):
        say("note", text)
    if config.verbose:
        show_structure(facts)


def kept_together(parts: list[str]) -> str:
    """In one line that `say` folds between the parts only."""
    return " ".join(part.replace(" ", TOGETHER) for part in parts)


def changed_flags(config) -> list[str]:
    """The flags that are not at their defaults, each as it would be typed."""
    pairs = [(spec, getattr(config, spec.name)) for spec in dataclasses.fields(config)]
    texts = {spec.name: str(value).lower() if isinstance(value, bool) else str(value)
             for spec, value in pairs if value != spec.default}
    return [f"--{name} {shlex.quote(text)}" for name, text in texts.items()]


def cautions(config, facts: dict, folder: Path, longest: int) -> list[str]:
    """What may go wrong with this model and these flags, though nothing forbids it."""
    from scripts.checkpoint import read_json
    base, texts = read_json(folder / "config.json"), []
    if longest > (facts["positions"] or longest):
        texts.append(f"the model was made for {facts['positions']} positions, the longest row has {longest}; "
                     "see --rope_scaling")
    if str(config.numbers.compute) == "torch.float16" and \
            "bfloat16" in (base.get("dtype"), base.get("torch_dtype")):
        texts.append("the model was made in bf16, whose activations may be too large for fp16; losses that "
                     "are not finite stop the run (--precision mp_bf16 has no such limit)")
    return texts


def show_structure(facts: dict) -> None:
    """What was discovered of the model's structure."""
    parts = facts["structure"]
    share = f", {parts['share']:.2%} of their parameters quantised" if parts["share"] else ""
    say("blocks", f"{parts['blocks']}: {facts['blocks']} x {parts['kind']}{share}")
    say("linears", ", ".join(parts["linears"]))
    if parts["not_quantized"]:
        say("plain", ", ".join(parts["not_quantized"]))
    for unit in facts["units"]:
        say("unit", unit)


def finish(config, summary: dict) -> None:
    """What came out, and the command that tries it."""
    done = summary["steps"] - summary.get("resumed_at", 0)
    made = f" ({done} of them now)" if done < summary["steps"] else ""
    speed = f", {summary['tokens_per_second']:.0f} tokens/s" if done else ""
    if summary["steps"]:
        losses = f"{summary['loss_first']:.3f} -> {summary['loss_last']:.3f}"
        say("done", f"{summary['steps']} steps{made} in {summary['seconds']:.0f} s, loss {losses}, "
                    f"{summary['tokens']} tokens{speed}, peak {summary['peak_memory_bytes'] / 2**30:.2f} GiB "
                    "per process")
    else:
        say("done", "no step was left to make")
    if "first_step_seconds" in summary:
        share = f", MFU {summary['median_mfu']:.1%}" if "median_mfu" in summary else ""
        say("speed", f"{summary['median_tokens_per_second']:.0f} tokens/s{share} in a median step; the first "
                     f"took {summary['first_step_seconds']:.1f} s")
    if "eval_loss_last" in summary:
        first, last, lowest = (summary[f"eval_loss_{which}"] for which in ("first", "last", "lowest"))
        say("eval", f"loss {first:.3f} -> {last:.3f}, lowest {lowest:.3f} at step "
                    f"{summary['eval_lowest_step']}")
    for name, value in summary.get("memory", {}).items():
        say("memory", f"{name.removeprefix('memory/').replace('_', ' '):<34}{value / 2**30:8.3f} GiB")
    if not config.save_model:
        return
    result = config.output_dir
    kind = "new blocks" if config.type.new_blocks else "adapter" if config.type.adapter else "model"
    say("saved", f"{kind} and tokenizer in {result}, with metrics.jsonl and run.json")
    if config.type.new_blocks:
        result += "-merged"
        say_command("merge", "python scripts/merge.py", f"--adapter {config.output_dir}",
                    f"--output_dir {result}")
    command, prompt = ("python scripts/generate.py", f"--adapter {result}"), ['--prompt "..."']
    if config.dataset == "demo":
        from scripts import demo
        row = demo.examples("held_out", 1)[0]
        prompt = [f'--prompt "{row["instruction"]}"', f'--input "{row["input"]}"']
        say_command("score", *command, f"--eval {config.output_dir}/held_out.jsonl")
    say_command("try", *command, *prompt)


def git_commit() -> str | None:
    """The commit this script stands at, if it stands in a git checkout that has one; with "-dirty" where
    files of it were edited since."""
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]  # never a tag's name
    command = ["git", "-C", str(Path(__file__).parent), *describe]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return found.stdout.strip() or None


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers of a run depend on."""
    from importlib.metadata import PackageNotFoundError, version
    found = {}
    for name in ("torch", "transformers", "bitsandbytes", "peft", "hqq", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found
