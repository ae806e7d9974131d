"""What a person watches during a run: a bar, lines, Weights & Biases. Add a logger: one class, one row of LOGGERS."""
import subprocess
import sys
import time
from pathlib import Path


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

    def close(self) -> None:
        pass


class TqdmLog:
    """A bar on a terminal; where there is none, a line every ten seconds, so that log files stay readable."""

    def __init__(self, config, total: int, run: dict):
        from tqdm import tqdm
        self.lines = None if sys.stderr.isatty() else StdoutLog(config, total, run, every=10)
        self.bar = tqdm(total=total, unit="step", disable=self.lines is not None, dynamic_ncols=True,
                        bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}  {remaining} left")

    def write(self, row: dict) -> None:
        self.bar.set_description_str(describe(row), refresh=False)
        self.bar.update()
        if self.lines:
            self.lines.write(row)

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

    def close(self) -> None:
        super().close()
        self.run.finish()


LOGGERS = {"tqdm": TqdmLog, "stdout": StdoutLog, "wandb": WandbLog}


def git_commit() -> str | None:
    """The commit this script stands at, if it stands in a git checkout that has one."""
    try:
        found = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "-q", "HEAD"],
                               capture_output=True, text=True)
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
