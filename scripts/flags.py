"""Command-line flags from a frozen dataclass: each field is one flag, declared once with `option`; @file
stands for the flags in a file. All problems that flags show by themselves are found together, and unknown
ones get their closest match. Below, how the scripts of scripts/ take theirs, and what they share."""
import argparse
import contextlib
import dataclasses
import difflib
import functools
import inspect
import logging
import math
import re
import sys
import warnings
from pathlib import Path
from typing import Callable, get_args


# What other trainers and adapter libraries call a flag: never taken, only to say which one is meant.
ELSEWHERE = dict(
    learning_rate="lr", weight_decay="wd", optim="optimizer", max_grad_norm="grad_norm", epochs="num_epochs",
    num_train_epochs="num_epochs", steps="max_steps", lr_scheduler_type="lr_scheduler", bf16="precision",
    fp16="precision", per_device_train_batch_size="batch_size", max_length="context_length",
    max_seq_length="context_length", data="dataset", data_path="dataset", base_model="model_name",
    model_name_or_path="model_name", r="lora_rank", lora_r="lora_rank", load_in_4bit="train_type",
    gradient_checkpointing="use_gradient_checkpointing", torch_compile="compile", report_to="log_to",
    resume_from_checkpoint="resume", nproc_per_node="world_size")


class UserError(Exception):
    """Something the person can mend: printed as one message, without a traceback."""


def refuse(problems, title: str = "", most: int | None = None) -> None:
    """Raises UserError with all problems, or the first so many, a line each, where there are any."""
    lines = list(problems)
    if most and len(lines) > most:
        lines[most:] = [f"... and {len(lines) - most} more"]
    if lines:
        raise UserError("\n  ".join([title, *lines] if title else lines))


def option(default, help, choices=None, low=None, above=None, bare=None):
    """One flag: default, help, allowed values, smallest value (`low`) or exclusive lower bound (`above`), and
    its value where none is written (`bare`)."""
    meta = dict(help=help, choices=choices, low=low, above=above, bare=bare)
    return dataclasses.field(default=default, metadata=meta)


def type_of(spec: dataclasses.Field) -> type:
    """The type of a field's values: `int` for both `int` and `int | None`."""
    return next(t for t in (*get_args(spec.type), spec.type) if t is not type(None))


def to_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError
    return text.lower() in ("true", "1", "yes")


def convert(spec: dataclasses.Field, problems: list[str], text: str):
    """The value of one flag. A bad one is noted and replaced by the default, so that the rest is still looked
    at."""
    kind = type_of(spec)
    try:
        return (to_bool if kind is bool else kind)(text)
    except ValueError:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        problems.append(f"--{spec.name} {text}: expected {wanted}")
        return spec.default


def closest(name: str, known, count: int = 1) -> str:
    """Up to `count` of the known names that look like the wanted one."""
    found = difflib.get_close_matches(name, known, count)
    return f"did you mean {', '.join(found)}? " if found else ""


def meant(name: str, names: list[str], count: int = 1) -> str:
    """The same for a flag that there is not: by what others call it, by how it begins, or by its looks."""
    begin = [known for known in names if known.startswith(name + "_")]
    sure = [ELSEWHERE[name]] if ELSEWHERE.get(name) in names else begin if len(begin) == 1 else []
    return f"did you mean {sure[0]}? " if sure else closest(name, names, count)


def make_parser(config: type, problems: list[str]):
    """An argparse parser; scripts/usage.py answers --help."""
    parser = argparse.ArgumentParser(prog="train.py", add_help=False, allow_abbrev=False)
    for spec in dataclasses.fields(config):
        bare = True if type_of(spec) is bool else spec.metadata["bare"]
        extra: dict = {} if bare is None else dict(nargs="?", const=bare)
        parser.add_argument(f"--{spec.name}", default=spec.default,
                            type=functools.partial(convert, spec, problems), **extra)

    def error(message):
        raise UserError("\n  ".join([*problems, message.removeprefix("argument ")]))
    parser.error = error
    return parser


def unknown_flags(rest: list[str], names: list[str]) -> list[str]:
    """Messages for what the parser did not take; the value behind an unknown flag is not reported a second
    time."""
    found = []
    for before, text in zip(["", *rest], rest):
        if text.startswith("--"):
            flag = text.split("=")[0]
            hint = meant(flag[2:], names).replace("mean ", "mean --").rstrip()
            found.append(f"unknown flag {flag}" + (f" ({hint})" if hint else ""))
        elif not before.startswith("--"):
            found.append(f"unexpected argument {text!r}; flags are written --flag value")
    return found


def check_values(config) -> list[str]:
    """Problems of single values: not among the choices, or out of range."""
    problems = []
    for spec in dataclasses.fields(config):
        value, meta = getattr(config, spec.name), spec.metadata
        if value is None:
            continue
        if value == "" != spec.default:
            problems.append(f"--{spec.name} '': has no value; give one, or leave the flag out")
        elif isinstance(value, float) and math.isinf(value):
            problems.append(f"--{spec.name} {value}: must be a finite number")
        elif meta["choices"] and value not in meta["choices"]:
            choices = [str(choice) for choice in meta["choices"]]
            problems.append(f"--{spec.name} {value}: {closest(str(value), choices)}choose from "
                            f"{', '.join(choices)}")
        elif meta["low"] is not None and not value >= meta["low"]:
            problems.append(f"--{spec.name} {value}: must be at least {meta['low']}")
        elif meta["above"] is not None and not value > meta["above"]:
            problems.append(f"--{spec.name} {value}: must be greater than {meta['above']}")
    return problems


def underscored(arg: str) -> str:
    """`--batch-size=4` -> `--batch_size=4`; anything but a flag's name stays as it is."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def lines_of(file: str) -> list[str]:
    """The flags of a file, as arguments: a line is `--flag value`, `flag: value` or a comment (#). Raises
    UserError."""
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"@{file}: {reason}; @ begins the name of a file of flags (write a value that begins "
                        f"with @ as --flag=@...)") from error
    found = []
    for number, line in enumerate(lines, 1):
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        match = re.fullmatch(r"--([\w-]+)(?:(?:\s+|\s*=\s*)(.+))?|([\w-]+):(?:\s+(.+))?", line)
        if line and not match:
            raise UserError(f"@{file}, line {number}: {line!r} is no flag; write `--flag value` or "
                            f"`flag: value`")
        if line:
            name, value = match[1] or match[3], match[2] or match[4]
            quoted = value and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            found.append(f"--{name}" if value is None else f"--{name}={value[1:-1] if quoted else value}")
    return found


def expand(argv: list[str]) -> list[str]:
    """The arguments, with those of its file in the place of each @file."""
    return [part for word in argv for part in (lines_of(word[1:]) if word.startswith("@") else [word])]


def parse_flags(config: type, argv: list[str], aliases: dict[str, dict]):
    """Flags -> (a `config`, the problems found). `aliases` maps other spellings of a flag's values to its
    choices."""
    problems: list[str] = []
    parser = make_parser(config, problems)
    known, rest = parser.parse_known_args([underscored(arg) for arg in expand(argv)])
    for name, spellings in aliases.items():
        value = getattr(known, name)
        setattr(known, name, spellings.get(value, value))
    made, names = config(**vars(known)), [spec.name for spec in dataclasses.fields(config)]
    return made, problems + unknown_flags(rest, names) + check_values(made)


# ------------------------------------------------------------------------------- what the other scripts share

class Refused(SystemExit):
    """Ends a script of scripts/ with exit code 2 and one message on stderr, which is also its str()."""

    def __init__(self, script: str, error: Exception):
        super().__init__(2)
        self.text = f"{script}: error: {error}"
        print(self.text, file=sys.stderr)

    def __str__(self) -> str:
        return self.text


def kebab(argv: list[str]) -> list[str]:
    """argv with `--flag_name` written `--flag-name`, the one spelling that fastcore's parser knows."""
    def fix(word: str) -> str:
        name, equals, value = word.partition("=")
        is_flag = word.startswith("--") and " " not in name  # and no text of several flags
        return name.replace("_", "-") + equals + value if is_flag else word
    return [fix(word) for word in argv]


def run_script(main: Callable) -> None:
    """Calls the `main` of a script of scripts/ with the flags of its command line: its parameters, which
    both --flag_name and --flag-name set, and whose comments are the help."""
    from fastcore.script import anno_parser
    given = vars(anno_parser(main).parse_args(kebab(sys.argv[1:])))
    try:
        main(**{name: given[name] for name in inspect.signature(main).parameters})
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)


@contextlib.contextmanager
def quiet():
    """Without the warnings and loading bars of the libraries, which drown the few lines that matter."""
    from transformers.utils import logging as bars
    shown, level = bars.is_progress_bar_enabled(), logging.root.manager.disable
    logging.disable(logging.WARNING)
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if shown:
            bars.enable_progress_bar()
