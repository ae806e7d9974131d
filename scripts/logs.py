"""What a person sees of a run: a few lines before, a bar or lines or Weights & Biases during, a summary
after, and the rows of metrics.jsonl. Add a logger: one class, one row of LOGGERS."""
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from scripts.flags import UserError


def say(label: str, text: str) -> None:
    """One line of the run's report: a label of up to eight letters, and the rest."""
    print(f"{label:<8}{text}", flush=True)


def host_peak() -> int:
    """Bytes: the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_memory() -> int:
    """Bytes of private host memory in use now; memory-mapped files (the checkpoint) are not counted."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return host_peak()
    resident, shared = (int(n) for n in pages.read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def host_free(processes: int) -> int:
    """Bytes of host memory that are free, page cache included, for each of so many processes."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return found[0] // processes if found else 2**62


def describe(row: dict) -> str:
    """One row of metrics.jsonl in a line."""
    return (f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  norm {row['grad_norm']:.2f}  "
            f"{row['tokens_per_second']:.0f} tok/s  {row['peak_memory_bytes'] / 2**30:.2f} GiB")


class StdoutLog:
    """One line per step. `every` seconds may pass without one, the first and last step always get theirs."""

    def __init__(self, config, total: int, run: dict, every: float = 0.0):
        self.total, self.every, self.last, self.start = total, every, 0.0, time.monotonic()

    def write(self, row: dict) -> None:
        now, step = time.monotonic(), row["step"]
        if now - self.last >= self.every or step in (1, self.total):
            self.last = now
            left = (now - self.start) / step * (self.total - step)
            print(f"step {step}/{self.total}  {describe(row)}  {left:.0f} s left", flush=True)

    def show(self, text: str) -> None:
        print(text, flush=True)

    def evaluated(self, row: dict) -> None:
        self.show(f"step {row['step']}/{self.total}  eval loss {row['eval_loss']:.4f}, perplexity "
                  f"{row['eval_perplexity']:.3f} over {row['eval_supervised_tokens']} tokens")

    def close(self) -> None:
        pass


class TqdmLog(StdoutLog):
    """A bar on a terminal; where there is none, a line every ten seconds, so that log files stay readable."""

    def __init__(self, config, total: int, run: dict):
        from tqdm import tqdm
        super().__init__(config, total, run)
        self.lines = None if sys.stderr.isatty() else StdoutLog(config, total, run, every=10)
        self.bar = tqdm(total=total, unit="step", disable=self.lines is not None, dynamic_ncols=True,
                        bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}  {remaining} left")

    def write(self, row: dict) -> None:
        self.bar.set_description_str(describe(row), refresh=False)
        self.bar.update()
        if self.lines:
            self.lines.write(row)

    def show(self, text: str) -> None:
        self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


class WandbLog(TqdmLog):
    """Weights & Biases, beside the bar."""

    def __init__(self, config, total: int, run: dict):
        import wandb
        super().__init__(config, total, run)
        self.run = wandb.init(project=config.project_name, name=config.name, group=config.group,
                              entity=config.entity, dir=config.output_dir, config=run)

    def write(self, row: dict) -> None:
        super().write(row)
        self.run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def evaluated(self, row: dict) -> None:
        super().evaluated(row)
        self.run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def close(self) -> None:
        super().close()
        self.run.finish()


LOGGERS = {"tqdm": TqdmLog, "stdout": StdoutLog, "wandb": WandbLog}


class Metrics:
    """metrics.jsonl, one object per optimiser step, and what the person watches. Made on every rank; all add
    up, and only rank 0 writes."""

    def __init__(self, config, runtime, total: int, run: dict):
        self.runtime, self.rows, self.clock, self.sink = runtime, [], time.perf_counter(), None
        if runtime.main:
            self.file = open(Path(config.output_dir) / "metrics.jsonl", "w", buffering=1)
            self.sink = LOGGERS[config.log_to](config, total, run)

    def record(self, loss, norm, tokens: int, supervised: int, **row) -> None:
        """Adds the row of a step from this rank's summed `loss` and `tokens`, the global gradient `norm` and
        number of `supervised` tokens. Raises UserError, on every rank, where the loss is not finite."""
        every = self.runtime.gather(loss.item(), tokens, host_memory(), self.runtime.peak_memory())
        loss, tokens, host, _ = every.sum(0).tolist()
        now = time.perf_counter()
        row |= dict(loss=loss / max(1, supervised), grad_norm=norm.item(), tokens=int(tokens),
                    supervised_tokens=supervised, tokens_per_second=tokens / (now - self.clock),
                    peak_memory_bytes=int(every[:, 3].max()), host_memory_bytes=int(host))
        self.clock = now
        self.rows.append(row)
        if self.sink:
            self.file.write(json.dumps(row) + "\n")
            self.sink.write(row)
        if not math.isfinite(loss):
            bad = [str(rank) for rank, value in enumerate(every[:, 0].tolist()) if not math.isfinite(value)]
            raise UserError(f"step {row['step']}: the loss is {loss} (rank {', '.join(bad)}), so nothing is "
                            f"saved; a smaller --lr or --precision mp_bf16 may help")

    def evaluated(self, eval_loss: float, **row) -> None:
        """Adds the row of an evaluation."""
        row |= dict(eval_loss=eval_loss, eval_perplexity=math.exp(min(eval_loss, 700)))
        if self.sink:
            self.file.write(json.dumps(row) + "\n")
            self.sink.evaluated(row)

    def show(self, text: str) -> None:
        """Lines beside the bar."""
        if self.sink:
            self.sink.show(text)

    def close(self) -> None:
        if self.sink:
            self.sink.close()
            self.file.close()

    def summary(self, seconds: float) -> dict:
        """The run in a few numbers, for run.json and the last lines."""
        tokens = sum(row["tokens"] for row in self.rows)
        return dict(seconds=round(seconds, 1), steps=len(self.rows), tokens=tokens,
                    tokens_per_second=round(tokens / seconds, 1), loss_first=self.rows[0]["loss"],
                    loss_last=self.rows[-1]["loss"],
                    peak_memory_bytes=max(row["peak_memory_bytes"] for row in self.rows))


def introduce(config, facts: dict, folder: Path, held, runtime, total: int) -> None:
    """What is about to happen, in a few lines. `facts`: what train.build found out about the model."""
    share, trained = facts["quantized_parameters"] / facts["parameters"], facts["trained_parameters"]
    stored = f", {share:.1%} of them quantised to {facts['bits']:.2f} bits" if share else ""
    say("model", f"{folder.name} ({facts['architecture']}): {facts['blocks']} blocks, "
                 f"{facts['parameters'] / 1e6:.1f} M parameters{stored}")
    on = f", rank {config.lora_rank} on {', '.join(facts['targets'])}" if facts["targets"] else ""
    part = trained / facts["parameters"]
    say("train", f"{config.train_type}: {trained / 1e6:.2f} M parameters ({part:.2%}){on}")
    counts = held.counts
    supervised, length = counts.supervised_tokens / counts.kept, counts.total_tokens / counts.kept
    kept = f"{counts.kept} examples ({counts.truncated} cut), {counts.dropped} dropped"
    say("data", f"{config.dataset}: {kept}, {supervised:.1f} of {length:.1f} tokens supervised each")
    if held.eval:
        say("eval", f"{config.eval_dataset or config.eval_fraction}: {len(held.eval)} examples")
    examples = f"{config.batch_size} x {config.gradient_accumulation_steps} x {runtime.world}"
    say("run", f"{runtime.world} process(es) on {runtime.device.type}, {config.sharding_strategy}, "
               f"{config.precision}; {total} steps of {examples} examples")
    say("output", config.output_dir)
    for unit in facts["units"] if config.verbose else ():
        say("unit", unit)


def finish(config, summary: dict) -> None:
    """What came out, and the command that tries it."""
    losses = f"{summary['loss_first']:.3f} -> {summary['loss_last']:.3f}"
    say("done", f"{summary['steps']} steps in {summary['seconds']:.0f} s, loss {losses}, "
                f"{summary['tokens_per_second']:.0f} tokens/s, "
                f"peak {summary['peak_memory_bytes'] / 2**30:.2f} GiB per process")
    if not config.save_model:
        return
    result = config.output_dir
    if config.type.new_blocks:
        result += "-merged"
        say("merge", f"python scripts/merge.py --adapter {config.output_dir} --output_dir {result}")
    command, prompt = f"python scripts/generate.py --adapter {result}", '--prompt "..."'
    if config.dataset == "demo":
        from scripts import demo
        row = demo.examples("held_out", 1)[0]
        prompt = f'--prompt "{row["instruction"]}" --input "{row["input"]}"'
        say("score", f"{command} --eval {config.output_dir}/held_out.jsonl")
    say("try", f"{command} {prompt}")


def git_commit() -> str | None:
    """The commit this script stands at, if it stands in a git checkout that has one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "-q", "HEAD"]
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
