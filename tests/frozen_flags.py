"""The command line as people use it: tests/flags.txt has a line for each flag, with its type, default and choices.

    python tests/frozen_flags.py        # writes it anew
"""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
FILE = ROOT / "tests" / "flags.txt"
REGENERATE = "then run: python tests/frozen_flags.py"


def lines(config: type) -> list[str]:
    """`name type default`, and the choices where a flag has some; by name."""
    from scripts.flags import type_of

    found = []
    for spec in dataclasses.fields(config):
        optional = " or nothing" * (spec.default is None)
        choices = f" from {', '.join(sorted(map(str, spec.metadata['choices'])))}" if spec.metadata["choices"] else ""
        found.append(f"{spec.name} {type_of(spec).__name__}{optional} {spec.default!r}{choices}")
    return sorted(found)


def compared(old: list[str], new: list[str]) -> str:
    """What has changed and what to do about it; nothing where nothing has."""
    gone, come = ([x for x in one if x not in other] for one, other in ((old, new), (new, old)))
    said = [f"- {x}" for x in gone] + [f"+ {x}" for x in come]
    if gone:
        said += ["a flag that was removed or changed breaks people's commands, flag files and resumes: keep the old "
                 f"spelling or default working, or say in CHANGELOG.md what to write instead; {REGENERATE}"]
    elif come:
        said += [f"new flags may come: name them in CHANGELOG.md; {REGENERATE}"]
    return "\n".join(said)


def main() -> None:
    import train

    FILE.write_text("".join(line + "\n" for line in lines(train.Config)))


if __name__ == "__main__":
    main()
