"""Draws the metrics of one or more training runs to one PNG: loss, learning rate, gradient norm, throughput.

    python scripts/plot_metrics.py OUT [OUT2 ...] [--output FILE.png]
"""
import itertools
import json
import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.checkpoint import check_file
from scripts.flags import Refused, UserError, run_script

# Column of metrics.jsonl -> title of its panel.
PANELS = {"loss": "loss per supervised token", "lr": "learning rate", "grad_norm": "gradient norm",
          "tokens_per_second": "tokens per second"}
LONG = 100  # rows from which on a smoothed line is drawn over the raw one
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#e69f00", "#555555")  # Okabe-Ito


def row_of(line: str) -> dict | None:
    """A line of metrics.jsonl; None where it is not one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def read(folder: str) -> list[dict]:
    """Rows of a run, in order of steps. Raises UserError where there are none; an unfinished last line
    is left out."""
    file = Path(folder) / "metrics.jsonl"
    if not Path(folder).exists():
        raise UserError(f"{folder}: no such folder")
    if not file.exists():
        raise UserError(f"{folder}: no metrics.jsonl in it; name the --output_dir of a run")
    rows = [row_of(line) for line in file.read_text().splitlines()]
    if None in rows[:-1]:
        raise UserError(f"{file}: line {rows.index(None) + 1} is no row of metrics")
    rows = [row for row in rows if row]
    if not any("loss" in row for row in rows):
        raise UserError(f"{file}: no step is in it yet")
    return sorted(rows, key=lambda row: row["step"])


def smooth(values: list[float], width: int) -> list[float]:
    """Centred moving average over `width` values (odd), fewer near both ends: it does not lag behind."""
    sums = [0.0, *itertools.accumulate(values)]
    reach = [min(width // 2, i, len(values) - 1 - i) for i in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]


def column(rows: list[dict], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the rows that have the column."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def draw_run(axes: dict, rows: list[dict], color: str, label: str) -> None:
    for name, panel in axes.items():
        steps, values = column(rows, name)
        long = len(values) >= LONG and name != "lr"
        marker = "o" if len(values) == 1 else None
        panel.plot(steps, values, color=color, alpha=0.3 if long else 1, linewidth=0.8 if long else 1.6,
                   marker=marker, label=None if long else label)
        if long:
            smoothed = smooth(values, len(values) // 20 | 1)
            panel.plot(steps, smoothed, color=color, linewidth=1.8, label=label)
    steps, values = column(rows, "eval_loss")
    if steps:
        axes["loss"].plot(steps, values, color=color, linestyle="--", marker="o", markersize=4, linewidth=1.2,
                          label=f"{label}, held out")


def draw(runs: dict[str, list[dict]], output: str) -> None:
    """One PNG on a white ground of its own, so that it reads the same in dark viewers."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained", facecolor="white")
    axes = dict(zip(PANELS, figure.subplots(2, 2).flat))
    for number, (label, rows) in enumerate(runs.items()):
        draw_run(axes, rows, COLORS[number % len(COLORS)], label)
    for name, panel in axes.items():
        panel.set(title=PANELS[name], xlabel="step", facecolor="white")
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.get_major_locator().set_params(integer=True)
    for name in ("grad_norm", "tokens_per_second"):
        axes[name].set_ylim(bottom=0)
    if len(runs) > 1 or len(axes["loss"].lines) > 1:
        axes["loss"].legend(frameon=False)
    figure.savefig(output)


def main(
    folders: Annotated[str, dict(nargs="+")],  # output folders of runs
    output: str = "metrics.png",  # file to draw to
):
    "Draw loss, learning rate, gradient norm and throughput of runs to one PNG."
    try:
        if Path(output).suffix != ".png":
            raise UserError(f"--output {output}: must end in .png")
        if problems := check_file(output, "--output"):
            raise UserError(problems[0])
        draw({folder: read(folder) for folder in folders}, output)
    except (UserError, OSError) as error:
        raise Refused("plot_metrics.py", error) from None
    print(f"metrics of {', '.join(folders)}: {output}")


if __name__ == "__main__":
    run_script(main)
