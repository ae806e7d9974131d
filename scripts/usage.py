"""What `train.py` says of its flags without importing torch: --help, --help FLAG, --completion bash or zsh.

The flags are those of Config in train.py, read from its source: importing it would take seconds.
"""
import ast
import dataclasses
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

from scripts.flags import UserError, meant, option, type_of

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train.py"
WIDTH = 80
KINDS = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}


# ------------------------------------------------------------------------------------- flags, read as source

class Names(dict):
    """The names at the top of a source file, evaluated when they are asked for: of a table only its keys; a
    class as its definition; a module of `scripts` as its own Names. Nothing of the file is run."""

    def __init__(self, path: Path):
        super().__init__()
        self.nodes: dict[str, object] = {}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                self.nodes[ast.unparse(target)] = node.value
            elif isinstance(node, ast.ClassDef):
                self.nodes[node.name] = node
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scripts"):
                self.nodes |= {name.name: node.module for name in node.names}

    def __missing__(self, name: str):
        node: Any = self.nodes[name]  # KeyError: eval goes on to its globals
        if isinstance(node, str):
            file = ROOT / "scripts" / f"{name if node == 'scripts' else node.partition('.')[2]}.py"
            self[name] = Names(file) if node == "scripts" else Names(file)[name]
        elif isinstance(node, ast.ClassDef):
            self[name] = node
        else:
            self[name] = self.keys_of(node) if isinstance(node, ast.Dict) else self.value(node)
        return self[name]

    def __getattr__(self, name: str):
        return self[name]

    def value(self, node: ast.expr):
        return eval(compile(ast.Expression(node), "<flags>", "eval"), {"option": option}, self)

    def keys_of(self, node: ast.Dict) -> dict:
        """The dict; where its values are no plain ones, its keys."""
        try:
            return ast.literal_eval(node)
        except ValueError:
            return {self.value(key): None for key in node.keys}

    def fields(self, kind: ast.ClassDef) -> dict[str, tuple]:
        """{name: (type, dataclass field)}, those of its bases first, in the order of dataclasses."""
        found = {}
        for base in reversed(kind.bases):
            home = self.value(base.value) if isinstance(base, ast.Attribute) else self
            found |= home.fields(self.value(base))
        return found | {node.target.id: (self.value(node.annotation), self.value(node.value))
                        for node in kind.body
                        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def read() -> tuple[type, dict[str, str]]:
    """(a dataclass with the fields of Config, the groups of --help)."""
    names = Names(SCRIPT)
    fields = [(name, *rest) for name, rest in names.fields(names["Config"]).items()]
    return dataclasses.make_dataclass("Config", fields, frozen=True), names["GROUPS"]


def grouped(config: type, groups: dict[str, str]) -> dict[str, list]:
    """{title: its flags}, in the order of `groups`, which names the first flag of each."""
    found, title = {title: [] for title in groups.values()}, next(iter(groups.values()))
    for spec in dataclasses.fields(config):
        title = groups.get(spec.name, title)
        found[title].append(spec)
    return found


# ----------------------------------------------------------------------------------------------------- --help

def shown(spec) -> str:
    """The default as it is written on the command line."""
    if spec.default in (None, ""):
        return "none"
    return str(spec.default).lower() if type_of(spec) is bool else f"{spec.default}"


def wrap(text: str, indent: int) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent,
                         break_on_hyphens=False, break_long_words=False)


def heading(spec) -> str:
    return f"  --{spec.name} {KINDS[type_of(spec)]}"


def overview(config: type, groups: dict[str, str], description: str) -> str:
    """All flags in groups, each with a sentence and its default."""
    lines = ["usage: train.py [--flag value ...] [@FILE ...]", "", wrap(description, 0), "",
             wrap("@FILE stands for the flags in a file, one per line: `--flag value` or `flag: value`; # "
                  "begins a comment. Of a flag given twice the last counts. --help FLAG tells more of one "
                  "flag. --completion bash (or zsh) prints a completion script for the shell.", 0)]
    for title, specs in grouped(config, groups).items():
        lines += ["", f"{title}:"]
        for spec in specs:
            choices = spec.metadata["choices"]
            text = spec.metadata["help"] + (f": {', '.join(map(str, choices))}" if choices else "")
            lines += [heading(spec), wrap(f"{text} (default: {shown(spec)})", 6)]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """{name: text} of README and docs/*.md, as far as they are there."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(page.relative_to(ROOT)): page.read_text() for page in found if page.exists()}


def sections(name: str, texts: dict[str, str]) -> list[str]:
    """Pages and headings under which a flag is told, most telling first."""
    counts: dict[str, int] = {}
    for page, whole in texts.items():
        parts = re.split(r"^##? +(.+)$", whole, flags=re.M)  # a page may have its title only
        counts |= {f"{page}: {title}": len(re.findall(rf"--{name}\b", text))
                   for title, text in zip(parts[1::2], parts[2::2])}
    return sorted((title for title, count in counts.items() if count), key=lambda title: -counts[title])


def story(spec, title: str, texts: dict[str, str]) -> str:
    """All that is known of one flag."""
    meta = spec.metadata
    limit = [f"at least {meta['low']}"] if meta["low"] is not None else []
    limit += [f"above {meta['above']}"] if meta["above"] is not None else []
    told = sections(spec.name, texts)
    lines = [heading(spec), wrap(meta["help"] + ".", 6),
             *([wrap(f"one of: {', '.join(map(str, meta['choices']))}", 6)] if meta["choices"] else []),
             *[wrap(f"must be {text}", 6) for text in limit],
             *(["      without a value: " + (meta["bare"] or "true")]
               if meta["bare"] or type_of(spec) is bool else []),
             f"      default: {shown(spec)}", f"      group: {title}",
             *([wrap("told in " + "; ".join(told), 6)] if told else [])]
    return "\n".join(lines)


def help_of(words: list[str], config: type, groups: dict[str, str], description: str) -> str:
    """The answer to --help and what follows it. Raises UserError for flags that there are not."""
    wanted = [word.lstrip("-").replace("-", "_").partition("=")[0] for word in words]
    if not wanted:
        return overview(config, groups, description)
    specs = {spec.name: (spec, title) for title, found in grouped(config, groups).items() for spec in found}
    texts = pages()
    for name in wanted:
        if name not in specs:
            raise UserError(f"--help {name}: there is no such flag; {meant(name, list(specs), 3)}"
                            "train.py --help lists all")
    return "\n\n".join(story(*specs[name], texts) for name in wanted)


# ----------------------------------------------------------------------------------------------- --completion

BASH = """# Completion of train.py's flags and their values; now and in ~/.{shell}rc:
#   source <(python train.py --completion {shell})
{before}_qshard() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  COMPREPLY=()
  [[ " ${{COMP_WORDS[*]}} " == *train.py\\ * ]] || return 0
  if [[ "$word" == "=" ]]; then word=""
  elif [[ "$before" == "=" ]]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"
  elif [[ "$before" == "@" || "$word" == @?* ]]; then  # in bash a word ends at @
    local at="" file
    [[ "$word" == @* ]] && at="@"
    for file in "${{word#@}}"*; do [[ -e "$file" ]] && COMPREPLY+=("$at$file"); done
    return 0
  fi
  case "$before" in
{values}
    *) [[ "$word" == -* ]] && COMPREPLY=($(compgen -W "{flags}" -- "$word")) ;;
  esac
  return 0
}}
complete -o bashdefault -o default -F _qshard train.py ./train.py python python3 torchrun
"""
SHELLS = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}


def values_of(spec) -> tuple[str, ...]:
    """What may follow a flag; () where that is any text or a file."""
    if type_of(spec) is bool:
        return ("true", "false")
    number = type_of(spec) in (int, float) and spec.default is not None
    return tuple(map(str, spec.metadata["choices"] or ())) or ((str(spec.default),) if number else ())


def completion(shell: str, config: type) -> str:
    """A script for the shell. Raises UserError for other shells."""
    if shell not in SHELLS:
        raise UserError(f"--completion {shell or '(nothing)'}: choose from {', '.join(SHELLS)}")
    specs = dataclasses.fields(config)
    rows: dict[tuple, list[str]] = {}
    for spec in specs:
        rows.setdefault(values_of(spec), []).append(f"--{spec.name}")
    rows[*(f"{spec.name}" for spec in specs),] = ["--help"]
    rows[tuple(SHELLS)] = ["--completion"]
    values = "\n".join(f"    {'|'.join(names)}) " +
                       (f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"))' if words else "") + " ;;"
                       for words, names in rows.items())
    flags = " ".join([*(f"--{spec.name}" for spec in specs), "--help", "--completion"])
    return BASH.format(shell=shell, before=SHELLS[shell], values=values, flags=flags)


# -------------------------------------------------------------------------------------------------- answers

def text_for(argv: list[str]) -> str | None:
    """What to print for --help or --completion among the arguments; None where neither is."""
    asked = next((word for word in argv if word.partition("=")[0] in ("--help", "-h", "--completion")), None)
    if asked is None:
        return None
    name, equals, first = asked.partition("=")
    after = argv[argv.index(asked) + 1:]
    config, groups = read()
    if name == "--completion":
        return completion(first if equals else (after or [""])[0], config)
    description = ast.get_docstring(ast.parse(SCRIPT.read_text())).split("\n")[0]
    return help_of([first] if equals else after, config, groups, description)


def answer(argv: list[str]) -> None:
    """Prints help or a completion script and ends, where the arguments ask for one."""
    try:
        text = text_for(argv)
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    if text is not None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` is no error
        print(text)
        sys.exit(0)
