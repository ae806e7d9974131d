"""What is trained: parameters of a full run by name patterns (--trainable, --freeze), modules in full beside
an adapter (--train_embeddings, --modules_to_save), and what a result's files hold of them."""
import fnmatch
import functools
import re
from pathlib import Path
from typing import Iterable

import torch.nn as nn

from scripts import adapters, experts
from scripts.checkpoint import Entry, find_slots
from scripts.flags import UserError, closest, refuse
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
    refuse(problems)
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

def as_stored(module: nn.Module, source: Path, dtype, main: bool, frozen: bool = True) -> dict:
    """{name: trained parameter, or Entry of a frozen one}, read from the base again: in memory it may be
    rounded. All in `dtype`; only the `main` rank reads. Names and shapes are those of the base's files: of
    experts, the layout that the base has. `frozen` false leaves frozen ones out."""
    stored, named, slots = open_weights(source), {}, find_slots(module)
    experts.translate(stored, slots, module.stored_names)
    title = str(dtype).removeprefix("torch.")

    def entry(name: str) -> Entry:
        make = (lambda: stored.tensor(name).to(dtype)) if main else (lambda: None)
        return Entry(title, stored.shape[name], make)
    for slot in slots:
        parameter = getattr(slot.module, slot.attribute)
        there = next(name for name in slot.names if name in stored.shape)
        if not parameter.requires_grad:
            named |= {name: entry(name) for name in stored.names_of(there) if frozen}
        elif slot.expert is None or stored.pieces[there][0].expert is not None:
            whole = slot.names[0] if there not in stored.pieces else stored.pieces[there][0].name
            named[whole] = parameter
        else:
            for piece, low, high in stored.spans(there):
                make = functools.partial(experts.whole_rows, parameter, slot.expert, low, high)
                named[piece.name] = Entry(title, stored.shape[piece.name], make)
    return {stored.stored_as.get(name, name): value for name, value in named.items()}


def contents(module: nn.Module, config, source: Path, main: bool) -> dict:
    """{name in the result's files: parameter or Entry}. A tied parameter that is trained beside an adapter
    comes under each of its names, as PEFT wants it."""
    if config.type.adapter:
        return {adapters.saved_name(name): p for name, p in all_names(module).items() if p.requires_grad}
    if config.type.new_blocks:
        return as_stored(module, source, config.numbers.trained, main, frozen=False)
    return as_stored(module, source, config.numbers.trained, main)
