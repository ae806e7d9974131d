"""What is trained: parameters of a full run by name patterns (--trainable, --freeze), modules in full beside
an adapter (--train_embeddings, --modules_to_save), and what a result's files hold of them."""
import fnmatch
import re
from pathlib import Path
from typing import Iterable

import torch.nn as nn

from scripts import adapters
from scripts.checkpoint import Entry
from scripts.flags import UserError, closest
from scripts.prequantized import open_weights


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def near(wanted: str, known: Iterable[str]) -> str:
    return closest(wanted, sorted(known), 3).strip() or "no name is like it"


# ------------------------------------------------------------------------------------ parameters, by patterns

def all_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter}; a tied parameter comes under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def matches(pattern: str, names: Iterable[str]) -> set[str]:
    """The names in which a pattern matches a run of whole dotted parts: `norm` is in model.norm.weight, but
    not in model.layers.0.input_layernorm.weight, where *norm* is.

    A part such as 0-3 stands for each of 0 to 3. The last of them must be there: who freezes layers.0-40 of
    30 is thinking of another model.
    """
    part = re.search(r"(?<![^.])(\d+)-(\d+)(?![^.])", pattern)
    if part is None:
        return {name for name in names if fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")}
    low, high = map(int, part.groups())
    found: set[str] = set()
    for number in range(high, low - 1, -1):
        found |= matches(f"{pattern[:part.start()]}{number}{pattern[part.end():]}", names)
        if not found:
            break
    return found


def pieces(names: Iterable[str]) -> set[str]:
    """All that a pattern without * could have been."""
    every = [name.split(".") for name in names]
    return {".".join(parts[low:high]) for parts in every
            for low in range(len(parts)) for high in range(low + 1, len(parts) + 1)}


def find(patterns: str, known: dict[str, nn.Parameter], flag: str) -> set[nn.Parameter]:
    """Parameters under a name that one of the patterns matches. Raises UserError for patterns that match
    none."""
    found = {pattern: matches(pattern, known) for pattern in split(patterns)}
    problems = [f"{flag} {pattern}: matches no parameter; {near(pattern.strip('*.'), pieces(known))}"
                for pattern, names in found.items() if not names]
    if problems:
        raise UserError("\n  ".join(problems))
    return {known[name] for names in found.values() for name in names}


def choose(model: nn.Module, config) -> None:
    """requires_grad as --trainable says (without it everything) and then --freeze. Raises UserError where
    nothing is left."""
    known = all_names(model)
    if config.trainable:
        model.requires_grad_(False)
    for parameter in find(config.trainable, known, "--trainable"):
        parameter.requires_grad_()
    for parameter in find(config.freeze, known, "--freeze"):
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in known.values()):
        raise UserError(f"--freeze {config.freeze}: nothing is left to train")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if config.add_tokens and not all(p.requires_grad for end in ends for p in end.parameters()):
        raise UserError(f"--add_tokens {config.add_tokens}: new tokens must be trained, so --trainable and "
                        "--freeze must leave embedding and head trained")


# --------------------------------------------------------------------------------- modules, beside an adapter

def saves(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def by_ending(modules: dict[str, nn.Module], ending: str) -> list[str]:
    """Names that end so, as PEFT reads modules_to_save: `norm` is the end of input_layernorm, too. Raises
    UserError where there is none with weights, or one that PEFT cannot keep."""
    flag = f"--modules_to_save {ending}"
    found = [name for name in modules if name and name.endswith(ending)]
    if not found:
        known = {end for name in modules for end in (name, name.split(".")[-1])}
        raise UserError(f"{flag}: matches no module; {near(ending, known)}")
    if not (found := [name for name in found if saves(modules[name])]):
        raise UserError(f"{flag}: has no weights")
    if lists := [name for name in found if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict))]:
        raise UserError(f"{flag}: {lists[0]} is a list of modules; name what is in it")
    return found


def find_saved(model: nn.Module, config) -> dict[str, nn.Module]:
    """{name: module} to train in full beside the adapter. One that shares a parameter with them (a tied head
    or embedding) is one of them. Raises UserError where a name matches nothing or one module is inside
    another."""
    modules = dict(model.named_modules())
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    ends = ends if config.train_embeddings or config.add_tokens else []
    found = {name for name, module in modules.items() if any(module is end for end in ends)}
    for ending in split(config.modules_to_save):
        found.update(by_ending(modules, ending))
    shared = {parameter for name in found for parameter in modules[name].parameters()}
    inside = tuple(f"{name}." for name in found)
    found |= {name for name, module in modules.items() if not name.startswith(inside)
              and any(parameter in shared for parameter in module._parameters.values())}
    if nested := [name for name in sorted(found) if name.startswith(inside)]:
        raise UserError(f"--modules_to_save {config.modules_to_save}: {nested[0]} is inside another of them")
    return {name: module for name, module in modules.items() if name in found}


def written_names(model: nn.Module, saved: Iterable[str]) -> list[str]:
    """modules_to_save for adapter_config.json: last parts of the names, or whole names where PEFT, which goes
    by endings, would take more modules than these."""
    short = sorted({name.split(".")[-1] for name in saved})
    taken = {name for name, module in model.named_modules() if name.endswith(tuple(short)) and saves(module)}
    return short if taken == set(saved) else sorted(saved)


# ------------------------------------------------------------------------------------------------------ files

def whole_model(module: nn.Module, source: Path, dtype, main: bool) -> dict:
    """{name: trained parameter, or Entry of a frozen one}, read from the base again: in memory it may be
    rounded. All in `dtype`; only the `main` rank reads."""
    stored, named, names = open_weights(source), {}, {}
    for name, parameter in all_names(module).items():
        names.setdefault(parameter, []).append(name)

    def entry(name: str) -> Entry:
        make = (lambda: stored.tensor(name).to(dtype)) if main else (lambda: None)
        return Entry(str(dtype).removeprefix("torch."), stored.shape[name], make)
    for parameter, known in names.items():
        known_there = next((name for name in known if name in stored.shape), None)
        name = stored.stored_as.get(known[0], known[0])
        named[name] = parameter if parameter.requires_grad else entry(known_there)
    return named


def contents(module: nn.Module, config, source: Path, main: bool) -> dict:
    """{name in the result's files: parameter or Entry}. A tied parameter that is trained beside an adapter
    comes under each of its names, as PEFT wants it."""
    if config.type.adapter:
        return {adapters.saved_name(name): p for name, p in all_names(module).items() if p.requires_grad}
    if config.type.new_blocks:
        return {name: p for name, p in module.named_parameters() if p.requires_grad}
    return whole_model(module, source, config.numbers.trained, main)
