"""--help, --help FLAG, @file and completion: from one table, without torch."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from scripts import flags, usage
from train import UserError, parse

ROOT = Path(train.__file__).parent
NAMES = [spec.name for spec in dataclasses.fields(train.Config)]


def told(config) -> list[tuple]:
    return [(s.name, s.type, s.default, dict(s.metadata)) for s in dataclasses.fields(config)]


def test_the_flags_of_the_source_are_those_of_the_program():
    config, groups = usage.read()
    assert told(config) == told(train.Config) and groups == train.GROUPS


def test_help_tells_every_flag_in_its_group_at_80_columns():
    text = usage.text_for(["--help"])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(text.split())
    for spec in dataclasses.fields(train.Config):
        assert sum(line.startswith(f"  --{spec.name} ") for line in lines) == 1
        assert " ".join(spec.metadata["help"].split()) in words
    assert words.count("(default: ") == len(NAMES)
    places = [text.index(f"\n{title}:\n") for title in train.GROUPS.values()]
    assert places == sorted(places) and len(places) >= 9
    found = usage.grouped(train.Config, train.GROUPS)
    assert "sharding_strategy" in [s.name for s in found["sharding, processes and nodes"]]
    assert sum(map(len, found.values())) == len(NAMES)


def test_help_of_one_flag():
    text = usage.text_for(["--help", "--train-type", "resume"])
    for part in ("--train_type TEXT", "one of: full, lora", "default: qlora", "--resume TEXT", "Long runs"):
        assert part in text
    assert "docs/data.md: Data" in usage.text_for(["--help", "packing"])  # a page without sections
    assert "  --lr " not in text and "must be at least 2" in usage.text_for(["--help=context_length"])
    with pytest.raises(UserError, match="--help train_typ: there is no such flag; did you mean train_type"):
        usage.text_for(["--help", "train_typ"])
    assert usage.text_for(["--batch_size", "3"]) is None


@pytest.mark.parametrize("argv", [["--help"], ["--completion", "bash"], ["--lr", "--help"]])
def test_no_torch_is_imported(argv):
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "--train_type" in done.stdout and "scripts.usage" in imported
    assert not {"torch", "numpy", "transformers", "fastcore"} & imported


def test_a_file_of_flags(tmp_path):
    (tmp_path / "flags.txt").write_text(
        "# a comment\n\nlr: 1e-4   # another\n--batch-size 3\nname: 'a b'\n--packing\n--output_dir=x y\n"
    )
    given = ["--lr", "1", f"@{tmp_path}/flags.txt", "--batch_size", "5"]
    config = parse(given)
    assert (config.lr, config.batch_size, config.name, config.packing) == (1e-4, 5, "a b", True)
    assert config.output_dir == "x y"
    assert flags.expand(given)[2:6] == ["--lr=1e-4", "--batch-size=3", "--name=a b", "--packing"]
    assert flags.expand(["--name=@home"]) == ["--name=@home"]  # no file


def test_the_example_file_is_read():
    config = parse([f"@{ROOT}/scripts/example_flags.txt", "--max_steps", "100"])
    assert (config.train_type, config.packing, config.resume, config.max_steps) == ("qlora", True, "auto", 100)
    assert config.lora_target_modules == "q_proj,k_proj,v_proj,o_proj"


def complete(line: str, shell: str = "bash") -> list[str]:
    """What the shell would offer at the end of the line."""
    words = line.split(" ")
    asked = f"COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}; _qshard; "
    script = usage.completion("bash", train.Config) + asked + 'echo "${COMPREPLY[@]}"'
    return subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()


def test_completion_in_bash():
    assert complete("python train.py --train_ty") == ["--train_type"]
    assert complete("python train.py --train_type cust") == ["custom_lora", "custom_qlora"]
    assert complete("python train.py --train_type = full") == ["full"]
    assert complete("python train.py --packing ") == ["true", "false"]
    assert complete("python train.py --context_length ") == ["512"]
    assert complete("python train.py --model_name ./") == []  # files
    assert complete("python train.py @ scripts/exam") == ["scripts/example_flags.txt"]  # as bash splits it
    assert complete("python train.py @scripts/exam") == ["@scripts/example_flags.txt"]  # as zsh does
    assert complete("python train.py @scripts/none") == []
    assert complete("python other.py --train_ty") == []
    assert {f"--{name}" for name in NAMES} <= set(complete("python train.py --"))
    assert complete("python train.py --help train_ty") == ["train_type"]
    with pytest.raises(UserError, match="--completion fish: choose from bash, zsh"):
        usage.completion("fish", train.Config)


def test_completion_in_zsh():
    """Bash's function, through zsh's bashcompinit; run where there is a zsh."""
    text = usage.completion("zsh", train.Config)
    assert "bashcompinit" in text and text.count("_qshard()") == 1
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-f", "-c", "autoload -U compinit; compinit -u; " + text], check=True)
