"""scripts/plot_metrics.py: a PNG from metrics.jsonl, and short messages where there is nothing to draw."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import train
from scripts import plot_metrics

SCRIPT = str(Path(train.__file__).parent / "scripts" / "plot_metrics.py")


def write_run(folder: Path, steps: int, evals: bool = True) -> str:
    folder.mkdir()
    rows = [
        dict(step=s, loss=1 / s + 0.1 * (-1) ** s, lr=1e-4 * s, grad_norm=1.0, tokens_per_second=100.0)
        for s in range(1, steps + 1)
    ]
    rows += [dict(step=steps, eval_loss=0.5)] if evals else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def lines_drawn(monkeypatch, *folders: str) -> dict[str, list]:
    """Title of each panel -> its lines as (label, steps, values), from the figure that was saved."""
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args: kept.append(self))
    plot_metrics.main(folders=list(folders), output="x.png")
    return {
        axes.get_title(): [
            (line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
        ]
        for axes in kept[0].axes
    }


def test_the_command_draws_two_runs(tmp_path):
    runs = [write_run(tmp_path / "a", 150), write_run(tmp_path / "b", 3, evals=False)]
    output = tmp_path / "plot.png"
    done = subprocess.run(
        [sys.executable, SCRIPT, *runs, "--output", str(output)], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    from matplotlib.image import imread

    pixels = imread(output)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 500
    assert (pixels[0, 0] == 1).all()  # a ground of its own, white and opaque
    assert pixels.std() > 0.05


def test_what_is_drawn_is_what_is_in_the_file(tmp_path, monkeypatch):
    a, b = write_run(tmp_path / "a", 150), write_run(tmp_path / "b", 3, evals=False)
    drawn = lines_drawn(monkeypatch, a, b)
    assert set(drawn) == set(plot_metrics.PANELS.values())
    raw, smoothed, held_out, short = drawn["loss per supervised token"]
    assert raw[1] == list(range(1, 151)) and raw[2] == [1 / s + 0.1 * (-1) ** s for s in raw[1]]
    assert smoothed[0] == a and smoothed[1] == raw[1]
    assert held_out == (f"{a}, held out", [150], [0.5])
    assert short[0] == b and short[1] == [1, 2, 3]
    assert [line[0] for line in drawn["learning rate"]] == [a, b]


def test_smoothing():
    """A straight line stays what it is; noise of alternating sign goes; a step is seen where it happens."""
    line = [3.0 * i for i in range(40)]
    assert plot_metrics.smooth(line, 9) == pytest.approx(line)
    noise = [(-1.0) ** i for i in range(40)]
    assert max(map(abs, plot_metrics.smooth(noise, 9)[4:-4])) < 0.12
    step = plot_metrics.smooth([0.0] * 20 + [1.0] * 20, 9)
    assert step[15] == 0 and step[24] == 1 and math.isclose(step[19] + step[20], 1)


def test_an_unfinished_last_line_is_left_out(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a", 5)
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "loss": 0.')
    assert len(plot_metrics.read(folder)) == 6


@pytest.mark.parametrize(
    "content, flags, message",
    [
        (None, [], "no metrics.jsonl in it"),
        ("", [], "no step is in it yet"),
        ('{"step": 1, "eval_loss": 2.0}\n', [], "no step is in it yet"),
        ("nonsense\n{}\n", [], "line 1 is no row of metrics"),
        ("[1]\n{}\n", [], "line 1 is no row of metrics"),
        ('{"step": 1, "loss": 2.0}\n', ["--output", "plot.pdf"], "must end in .png"),
        ('{"step": 1, "loss": 2.0}\n', ["--output", "/no/such/plot.png"], "/no/such/plot.png"),
    ],
)
def test_what_cannot_be_drawn_is_one_message(tmp_path, monkeypatch, content, flags, message):
    (tmp_path / "out").mkdir()
    if content is not None:
        (tmp_path / "out" / "metrics.jsonl").write_text(content)
    output = dict(output=flags[1]) if flags else dict(output=str(tmp_path / "x.png"))
    with pytest.raises(SystemExit) as stopped:
        plot_metrics.main(folders=[str(tmp_path / "out")], **output)
    assert str(stopped.value).startswith("plot_metrics.py: error: ") and message in str(stopped.value)
    assert not (tmp_path / "x.png").exists()


def test_a_folder_that_is_not_there():
    with pytest.raises(SystemExit, match="/no/such: no such folder"):
        plot_metrics.main(folders=["/no/such"])
