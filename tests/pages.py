"""README.md and docs/*.md: what they say together, their links and their commands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(path.read_text() for path in FILES)


def section(title: str) -> str:
    """What stands under a heading of the second level, whichever page has it."""
    (_, found) = TEXT.split(f"\n## {title}\n")
    return re.split(r"^##? ", found, maxsplit=1, flags=re.M)[0]


def blocks(language: str) -> list[str]:
    return [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.S | re.M) if kind == language]


def shell_lines() -> list[str]:
    """The lines of the shell blocks, continued ones joined."""
    return "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()


def links() -> list[tuple[Path, str]]:
    """(page, what it links to in this repository)."""
    found = [
        (path, link)
        for path in FILES
        for link in re.findall(r"\]\(([^)#\s]+)|^\[\w+\]: (\S+)", path.read_text(), re.M)
    ]
    return [(path, one or other) for path, (one, other) in found if "://" not in one + other]
