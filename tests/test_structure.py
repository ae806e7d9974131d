"""What keeps the code readable, held by machine: sizes, no work at import, one place for every flag, README
and docs/ in step."""

import ast
import dataclasses
import importlib
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import pages
import train

ROOT = Path(train.__file__).parent
FILES = [ROOT / "train.py", *sorted((ROOT / "scripts").glob("*.py"))]
README = (ROOT / "README.md").read_text()
BY_HAND = [path for path in pages.FILES if path.name != "support.md"]
WRITTEN = "".join(path.read_text() for path in BY_HAND)


def functions(path: Path) -> dict[str, int]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return {node.name: node.end_lineno - node.lineno + 1 for node in found}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_sizes(path):
    sizes = functions(path)
    assert max(sizes.values()) <= 60, max(sizes, key=sizes.get)
    assert statistics.median(sizes.values()) < 15
    assert not [n for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 110]


def test_train_stays_one_sitting():
    assert len((ROOT / "train.py").read_text().splitlines()) <= 1050


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_work_at_import(path):
    """Top level: imports, definitions, constants, and the line that finds `scripts`."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in ast.parse(path.read_text()).body:
        text = ast.unparse(node)
        fine = (
            isinstance(node, allowed) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        )
        assert fine or text.startswith(("if __name__ ==", "sys.path.insert(")), text


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_left_overs(path):
    text = path.read_text()
    assert not re.search(
        r"TODO|FIXME|XXX|breakpoint\(\)|^\s*# *(?:if|for|return|import|def|print)\b.*[:)]$", text, re.M
    )


def test_device_differences_stand_in_the_runtime_section():
    text = (ROOT / "train.py").read_text()
    below = text[text.index("- loss\n") :]
    assert not re.search(r"cuda|is_cuda|\.type == .cpu", below)


def test_every_flag_is_used_and_train_types_are_never_tested_by_name():
    text = (ROOT / "train.py").read_text() + "".join(p.read_text() for p in FILES[1:])
    for spec in dataclasses.fields(train.Config):
        assert re.search(rf"(?:config|self)\.{spec.name}\b", text), f"--{spec.name} does nothing"
    body = (ROOT / "train.py").read_text().split("runtime\n", 1)[1]
    assert not re.search(r"train_type\s*(?:==|!=|in\b)", body)


def commands() -> list[list[str]]:
    """The argument lists of all `python train.py` and torchrun lines."""
    found = [re.search(r"(?:^|\s)train\.py(.*)$", line) for line in pages.shell_lines()]
    return [shlex.split(match.group(1), comments=True) for match in found if match]


def test_readme_commands_parse():
    assert len(commands()) >= 3
    for argv in commands():
        train.parse(argv)


def test_readme_script_commands_parse():
    """The commands of the other scripts, with the parser those scripts use."""
    from fastcore.script import anno_parser

    from scripts.flags import kebab

    found = [re.search(r"scripts/(\w+)\.py(.*)$", line) for line in pages.shell_lines()]
    assert len(found := [match for match in found if match]) >= 5
    for match in found:
        main = importlib.import_module(f"scripts.{match.group(1)}").main
        anno_parser(main).parse_args(kebab(shlex.split(match.group(2), comments=True)))


def test_hub_commands_parse():
    lines = [line for line in pages.shell_lines() if line.startswith("hf ")]
    assert lines
    for line in lines:
        command = [str(Path(sys.executable).with_name("hf")), *shlex.split(line)[1:], "--help"]
        assert subprocess.run(command, capture_output=True).returncode == 0, line


def test_every_other_command_is_of_a_known_file():
    """Lines that are neither of train.py nor of scripts/: their files exist, and pytest's words select tests."""
    known = r"(python|torchrun|srun) .*(train|scripts/\w+)\.py|(trl/bin/)?pip install|python -m venv|hf upload|scancel|ruff check|mypy|git clone|cd "
    for line in pages.shell_lines():
        if not line or line.startswith("#") or re.match(known, line):
            continue
        files = re.findall(r"[\w/.-]+\.(?:py|sh)|\.ci/run", line)
        assert files and all((ROOT / file).is_file() for file in files), line


def test_python_examples_compile():
    assert pages.blocks("python")
    for text in pages.blocks("python"):
        compile(text, "README", "exec")


def test_links_lead_somewhere():
    missing = [(page.name, link) for page, link in pages.links() if not (page.parent / link).exists()]
    assert len(pages.links()) > 20 and not missing


def test_every_page_and_script_can_be_found_from_readme():
    linked = {link for page, link in pages.links() if page.name == "README.md"}
    assert not {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - linked
    table = (ROOT / "docs" / "code.md").read_text()
    assert not [path.name for path in (ROOT / "scripts").glob("*.py") if not re.search(rf"[`/]{path.name}`", table)]


def test_readme_is_short_and_prose_is_wrapped():
    assert len(README.splitlines()) <= 250
    prose = re.compile(r"^```.*?^```|^\|.*?$", re.S | re.M)
    for path in BY_HAND:
        lines = prose.sub("", path.read_text()).splitlines()
        assert not [line for line in lines if len(line) > 132], path


def test_readmes_figures_stand_where_they_were_measured_or_planned():
    pattern = r"\d+\.\d+(?= \|| GiB| to 1)|\d+/60|\d+ MiB"
    measured = "".join((ROOT / "docs" / name).read_text() for name in ("measured.md", "memory.md"))
    found = re.findall(pattern, README)
    assert len(found) > 20 and not [figure for figure in found if figure not in measured]


def test_pages_name_everything_on_the_tables():
    optim = train.optim
    for table in (train.TRAIN_TYPES, train.PRECISIONS, train.SHARDINGS, optim.OPTIMIZERS, optim.SCHEDULES):
        missing = [name for name in table if f"`{name}`" not in WRITTEN]
        assert not missing


def test_requirements_are_pinned_with_a_reason():
    lines = [
        line
        for path in (ROOT / "requirements.txt", ROOT / "requirements-dev.txt")
        for line in path.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.match(r"[\w-]+==\S+\s+# .{8,}", line) for line in lines)
