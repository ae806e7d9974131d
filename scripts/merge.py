"""Merge what a run trained into its base: the result is a plain Hugging Face folder, with no adapter.

    python scripts/merge.py --adapter OUT --output_dir MERGED
    python scripts/merge.py --adapter OUT --output_dir MERGED --merge_base dequantized --dtype bf16

OUT is what train.py wrote: a PEFT folder (LoRA, rsLoRA, DoRA) or trained Llama-Pro blocks. W + s B A, and for
DoRA its rows scaled to the trained magnitudes, are computed in fp32, tensor by tensor, and rounded once.
Modules that were trained in full (modules_to_save) take the place of the base's.

An adapter that was trained over a quantised base has learned to live with the rounding of that base. It can
be merged into the base's own weights (`original`, usually the better model) or into the weights as the run
saw them (`dequantized`: the model that was trained, up to the rounding of the merged weights).
"""
from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts.block_expansion import find_blocks, layer_count
from scripts.checkpoint import (Checkpoint, Entry, check_new_folder, copy_companions, fingerprint, new_blocks,
                                find_slots, open_model, read_json, staged, write_json, write_model)
from scripts.flags import Refused, UserError, quiet, refuse, run_script

MERGE_BASES = ("original", "dequantized")
DTYPES = {"keep": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Options of adapter_config.json under which an adapter is more, or something else, than W + s B A.
UNSUPPORTED = ("rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias",
               "layer_replication", "trainable_token_indices", "use_qalora",
               "alora_invocation_tokens", "use_bdlora", "velora_config", "arrow_config", "kasa_config",
               "monteclora_config")
# Heads and embeddings, which may be tied.
ENDS = ("lm_head", "embed_out", "embed_tokens", "wte", "embed_in", "word_embeddings")
PLAIN_STARTS = ("gaussian", "orthogonal", "eva")  # other named starts (PiSSA and such) change the base
NEVER_QUANTIZED = re.compile(r"norm|^ln_|^gate$|^router$|^shared_expert_gate$|^wg$")  # norms, MoE routers


@dataclass
class Base:
    """The model that is merged into."""
    name: str
    folder: Path
    stored: Checkpoint
    config: dict

    def blocks(self) -> list[dict[str, str]]:
        """The decoder blocks: {name inside the block: whole name} each."""
        return find_blocks(self.stored.file, layer_count(self.config.get("text_config") or self.config)[1])[1]

    @cached_property
    def stacks(self):
        """Stacked weights of experts; None where the configuration speaks of no experts."""
        from scripts.experts import Stacks
        with quiet():
            return Stacks(self.folder) if any("expert" in key for key in self.config) else None


@dataclass
class Change:
    """What a result does to its base: tensor name -> function of the base's tensor, in fp32, to the new one.
    `facts` go into merge.json."""
    functions: dict[str, Callable]
    facts: dict
    added: dict[str, str] = field(default_factory=dict)  # new tensor -> the base's that it is a function of
    config: dict = field(default_factory=dict)  # changes of config.json
    shapes: dict[str, tuple] = field(default_factory=dict)  # of tensors that have more rows than the base's


# ------------------------------------------------------------------------------------------------ LoRA, DoRA

def read_modules(stored: Checkpoint, saved: dict[str, str]) -> dict[str, dict[str, str]]:
    """{module of the base: {"A", "B" or "magnitude": tensor of the adapter}}. Raises UserError for tensors of
    any other kind that are not `saved` whole."""
    kinds = {"lora_A.weight": "A", "lora_B.weight": "B", "lora_magnitude_vector": "magnitude",
             "lora_magnitude_vector.weight": "magnitude"}
    modules: dict[str, dict[str, str]] = {}
    strange = []
    for name in stored.file:
        match = re.fullmatch(rf"base_model\.model\.(.+)\.({'|'.join(map(re.escape, kinds))})", name)
        if match:
            modules.setdefault(match[1], {})[kinds[match[2]]] = name
        elif name not in saved.values():
            strange.append(name)
    refuse(strange, "the adapter has tensors that are neither LoRA's nor DoRA's, nor of its modules_to_save:",
           most=8)
    return modules


def check_config(config: dict, run: dict | None, file: Path) -> None:
    """Raises UserError for an adapter that is no plain LoRA or DoRA, or that run.json describes otherwise."""
    if config.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type is {config.get('peft_type')}; only LORA can be merged")
    used = [f"{option} {config[option]}" for option in UNSUPPORTED if config.get(option)]
    used += [f"bias {config['bias']}"] if config.get("bias", "none") != "none" else []
    start = config.get("init_lora_weights")
    used += [f"init_lora_weights {start}"] if isinstance(start, str) and start not in PLAIN_STARTS else []
    if used:
        raise UserError(f"{file}: {', '.join(used)}: cannot be merged here")
    for flag, option in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        said = (run or {}).get("config", {}).get(flag, config.get(option))
        if said != config.get(option):
            raise UserError(f"run.json and adapter_config.json differ: {flag} {said}, {option} "
                            f"{config.get(option)}; they are not of the same run")


def check_modules(modules: dict, adapter: Checkpoint, base: Checkpoint, config: dict) -> None:
    """Raises UserError, with the names, where a module lacks a part or a shape does not fit: A is (r, in),
    B (out, r), the magnitude (out,), the base's weight (out, in)."""
    parts, problems = {"A", "B"} | ({"magnitude"} if config.get("use_dora") else set()), []
    for module, found in modules.items():
        if set(found) != parts:
            problems.append(f"{module}: has {', '.join(sorted(found))}, wanted {', '.join(sorted(parts))}")
            continue
        shape = base.shape.get(f"{module}.weight")
        if shape is None:
            problems.append(f"{module}: {base.folder} has no {module}.weight")
            continue
        wanted = dict(A=(config["r"], *shape[1:]), B=(shape[0], config["r"]), magnitude=(shape[0],))
        problems += [f"{found[part]}: has shape {adapter.shape[found[part]]}, wanted {wanted[part]}"
                     for part in sorted(parts) if adapter.shape[found[part]] != wanted[part]]
    refuse(problems, "the adapter does not fit the base:", most=8)


def check_targets(modules, base: Base, config: dict) -> None:
    """Raises UserError where a target of adapter_config.json has no tensors, in all blocks or in some.
    `modules`: those with an adapter and those trained in full."""
    targets = config.get("target_modules")
    if not isinstance(targets, list):  # a pattern: which modules it is about is only known to PEFT
        return
    lacking = [name for name in targets if not any(("." + m).endswith("." + name) for m in modules)]
    if not lacking and not config.get("layers_to_transform") and not config.get("exclude_modules"):
        weights = [name.removesuffix(".weight") for block in base.blocks() for name in block.values()
                   if name.endswith(".weight") and ".experts." not in name]
        lacking = [name for name in weights
                   if name not in modules and ("." + name).endswith(tuple("." + t for t in targets))]
    refuse(lacking, "targets of adapter_config.json without tensors in the adapter:", most=8)


def check_tied(modules: dict, base: Base) -> None:
    """Raises UserError for an adapter on one of two tied weights: merged, it would change both."""
    ends = [m for m in modules if m.split(".")[-1] in ENDS]
    if ends:
        from transformers import AutoConfig
        if getattr(AutoConfig.from_pretrained(base.folder), "tie_word_embeddings", False):
            raise UserError(f"{', '.join(ends)}: tied with another weight of the base, which a merge would "
                            "change as well")


def merge_linear(adapter: Checkpoint, parts: dict[str, str], scaling: float, weight):
    """fp32 (out, in) -> W + s B A; for DoRA each row of that, scaled to the row's magnitude."""
    a, b = (adapter.tensor(parts[part]).to(weight.dtype) for part in "AB")
    weight = weight.addmm(b, a, alpha=scaling)
    if "magnitude" in parts:
        weight *= (adapter.tensor(parts["magnitude"]).to(weight.dtype) / weight.norm(dim=1)).view(-1, 1)
    return weight


def merge_experts(adapter: Checkpoint, base: Base, found: dict, scaling: float) -> dict[str, Callable]:
    """{tensor of the base: function} for stacked experts' weights with an adapter: each W + s B A."""
    def merged(tensor: str, weight):
        def delta(stack: str, expert: int):
            parts = (adapter.tensor(found[stack][part]).to(weight.dtype) for part in "AB")
            return base.stacks.delta(stack, expert, *parts)
        return weight + scaling * base.stacks.made(tensor, delta)
    return {tensor: partial(merged, tensor) for tensor, places in base.stacks.places.items()
            if places[0][0] in found}


# -------------------------------------------------------------------------- modules that were trained in full

def tied_names(folder: Path) -> list[list[str]]:
    """Names that are one parameter, group by group, in the model that transformers builds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    except Exception as error:  # models refuse configurations with exceptions of every type
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"{folder}: transformers cannot build this model: {reason}") from error
    model.tie_weights()
    return [slot.names for slot in find_slots(model) if len(slot.names) > 1]


def of_modules(tensor: str, endings) -> bool:
    """Whether a tensor is in a module whose name ends in one of `endings`, which is how PEFT reads them."""
    parts = tensor.split(".")
    return any(".".join(parts[:k]).endswith(tuple(endings)) for k in range(1, len(parts)))


def longer(shape: tuple, before: tuple, base: Base) -> bool:
    """Whether a tensor has a row for every token of the base's vocabulary, and further ones: --add_tokens."""
    rows = (base.config.get("text_config") or base.config).get("vocab_size")
    return shape[1:] == before[1:] and shape[0] > before[0] == rows


def read_saved(adapter: Checkpoint, config: dict, base: Base, ties: list[list[str]]) -> dict[str, str]:
    """{tensor of the model: tensor of the adapter that takes its place}. Raises UserError where they are not
    just those of modules_to_save, or do not fit. PEFT names one of tied modules and stores both."""
    endings = config.get("modules_to_save") or []
    tied = {name for names in ties if any(of_modules(name, endings) for name in names) for name in names}
    own = {name.removeprefix("base_model.model."): name for name in adapter.file if ".lora_" not in name}
    saved = {name: own[name] for name in own if name in tied or of_modules(name, endings)}
    like = {name: next((n for n in names if n in base.stored.shape), name)
            for names in ties for name in names}
    problems = [f"{ending}: of modules_to_save, but without tensors" for ending in endings
                if not any(of_modules(name, [ending]) for name in saved)]
    problems += [f"{name}: of modules_to_save, but missing" for name in base.stored.shape
                 if name not in saved and of_modules(name, endings)]
    for name, tensor in saved.items():
        has, wanted = adapter.shape[tensor], base.stored.shape.get(like.get(name, name))
        fits = has == wanted or wanted and longer(has, wanted, base)
        problems += [] if fits else [f"{tensor}: has shape {has}, wanted {wanted}"]
    refuse(problems, "the adapter does not fit the base:", most=8)
    return saved


def exchange(saved: dict[str, str], adapter: Checkpoint, base: Base, ties: list[list[str]]) -> Change:
    """Trained modules in the place of the base's. Tied weights stay one where the adapter has the same for
    each of them; otherwise each becomes a tensor of its own and the configuration says so, as PEFT does."""
    def new(name: str, weight):
        return adapter.tensor(saved[name]).to(weight.dtype)
    change = Change({name: partial(new, name) for name in saved}, {})
    grown = {name: adapter.shape[tensor] for name, tensor in saved.items()
             if adapter.shape[tensor] != base.stored.shape.get(name, adapter.shape[tensor])}
    if grown:
        change.shapes, change.config["vocab_size"] = grown, max(shape[0] for shape in grown.values())
    for names in ties:
        stored = next((name for name in names if name in base.stored.shape), None)
        if stored is None or not any(name in saved for name in names):
            continue
        first, *others = (adapter.tensor(saved[name]) if name in saved else base.stored.tensor(stored)
                          for name in names)
        if all(first.float().equal(other.float()) for other in others):
            one = change.functions[next(name for name in names if name in saved)]
            change.functions |= {name: one for name in names}
            change.shapes |= {name: tuple(first.shape) for name in names if grown}
        else:
            change.added |= {name: stored for name in names if name not in base.stored.shape}
            change.config["tie_word_embeddings"] = False
    return change


def read_adapter(folder: Path, run: dict | None, base: Base) -> Change:
    from scripts import adapters
    file, adapter = folder / "adapter_config.json", Checkpoint(folder, "adapter_model")
    if adapter.unreadable:
        raise UserError(f"{folder}: " + "; ".join(adapter.unreadable))
    config = read_json(file)
    check_config(config, run, file)
    ties = tied_names(base.folder) if config.get("modules_to_save") else []
    saved = read_saved(adapter, config, base, ties)
    modules, targets = read_modules(adapter, saved), config.get("target_parameters")
    if targets and not base.stacks:
        raise UserError(f"{file}: target_parameters {targets}: the base has no experts")
    stacked = base.stacks.adapters(modules, targets) if targets else {}
    check_modules(modules, adapter, base.stored, config)
    check_targets({*modules, *(name.rpartition(".")[0] for name in saved)}, base, config)
    check_tied(modules, base)
    scaling = adapters.scaling(config["lora_alpha"], config["r"], config.get("use_rslora", False))
    facts = dict(kind="dora" if config.get("use_dora") else "lora", r=config["r"],
                 lora_alpha=config["lora_alpha"], use_rslora=bool(config.get("use_rslora")), scaling=scaling,
                 targets=sorted({module.split(".")[-1] for module in modules}), linears=len(modules),
                 stacks=len(stacked),
                 modules_to_save=sorted({name.rpartition(".")[0] for name in saved}))
    change = exchange(saved, adapter, base, ties)
    change.functions |= {f"{module}.weight": partial(merge_linear, adapter, parts, scaling)
                         for module, parts in modules.items()}
    change.functions |= merge_experts(adapter, base, stacked, scaling) if stacked else {}
    change.facts |= facts
    return change


# ------------------------------------------------------------------------------------------ Llama-Pro blocks

def read_blocks(folder: Path, run: dict | None, base: Base) -> Change:
    """Trained blocks take the place of the base's. Raises UserError unless they are just its new blocks."""
    trained, new = Checkpoint(folder, "blocks"), new_blocks(base.folder)
    if trained.unreadable:
        raise UserError(f"{folder}: " + "; ".join(trained.unreadable))
    blocks = base.blocks()
    wanted = {name for index in new if index < len(blocks) for name in blocks[index].values()}
    problems = [f"{name}: missing" for name in sorted(wanted - set(trained.file))]
    problems += [f"{name}: not in the base's new blocks {new}" for name in trained.file if name not in wanted]
    shapes = {name: (trained.shape[name], base.stored.shape[name]) for name in trained.file if name in wanted}
    problems += [f"{name}: has shape {has}, wanted {want}" for name, (has, want) in shapes.items()
                 if has != want]
    refuse(problems, "the trained blocks do not fit the base:", most=8)
    functions = {name: lambda weight, name=name: trained.tensor(name).to(weight.dtype) for name in wanted}
    return Change(functions, dict(kind="llama_pro", blocks=new, scaling=None, r=None, targets=[]))


# -------------------------------------------------------------------------------------------- quantised base

def dequantized(weight, recipe: dict):
    """A plain (out, in) weight -> fp32, after quantising it as `recipe` says and back: what the run computed
    with. Quantises in the weight's own dtype, as the run did."""
    import torch
    if recipe["name"] == "nf4":
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
        packed, state = quantize_4bit(weight.contiguous(), blocksize=recipe.get("block", 64),
                                      compress_statistics=True, quant_type="nf4")
        state.dtype = torch.float32
        return dequantize_4bit(packed, state)
    if recipe["name"] == "hqq":
        from hqq.core.quantize import Quantizer
        bits, dtype = recipe["n_bits"], getattr(torch, recipe.get("dtype", "float32"))
        packed, meta = Quantizer.quantize(weight, nbits=bits, group_size=recipe["group_size"], axis=1,
                                          round_zero=bits == 4, device=str(weight.device))
        meta |= dict(scale=meta["scale"].to(dtype), zero=meta["zero"].to(dtype), compute_dtype=dtype)
        return Quantizer.dequantize(packed, meta).float()
    if recipe["name"] == "int8":
        from bitsandbytes.functional import create_linear_map, dequantize_blockwise, quantize_blockwise
        codes, state = quantize_blockwise(weight, create_linear_map(True, 8), blocksize=recipe["block"])
        return dequantize_blockwise(codes, state).float()
    raise UserError(f"run.json names a quantiser that is not known here: {recipe['name']}")


def find_recipes(run: dict | None, folder: Path) -> dict:
    """How the run quantised its base: recipes of "linears" and "ends" (embedding and head), None where it did
    not. Raises UserError, with the reason, where there is no saying."""
    if run is None:
        reason = f"{folder} has no run.json, which says how the base was quantised"
    elif "quantizer" not in run.get("model", {}):
        reason = "run.json does not say how the base was quantised"
    else:
        found = dict(linears=run["model"]["quantizer"], ends=run["model"].get("end_quantizer"))
        if any(found.values()):
            return found
        reason = "the run's base was not quantised, so there is nothing but the original weights"
    raise UserError(f"--merge_base dequantized: {reason}; use --merge_base original")


def quantized_names(base: Base) -> set[str]:
    """The weights that a run quantises: of the blocks' linears, without MoE routers. (And without Llama-Pro's
    new blocks; but what is trained there takes the place of the base's whole tensor.)"""
    experts = set(base.stacks.places) if base.stacks else set()
    linears = {name for block in base.blocks() for inner, name in block.items()
               if name.endswith(".weight") and len(base.stored.shape[name]) == 2
               and not NEVER_QUANTIZED.search(inner.split(".")[-2])}
    return linears | experts


def recipes_by_name(base: Base, recipes: dict) -> dict[str, dict]:
    """{weight that the run quantised: recipe}; without those that the base's files have just so."""
    linears, ends = recipes.get("linears"), recipes.get("ends")
    found = {} if linears is None or base.stored.holds(linears) else \
        dict.fromkeys(quantized_names(base), linears)
    names = [name for name in base.stored.shape if name.endswith(".weight") and name.split(".")[-2] in ENDS]
    return found | (dict.fromkeys(names, ends) if ends else {})


# --------------------------------------------------------------------------------------------------- merging

READERS = {"adapter_config.json": read_adapter, "blocks.safetensors": read_blocks,
           "blocks.safetensors.index.json": read_blocks}


def find_reader(folder: Path) -> Callable:
    """What reads this result. Raises UserError for a folder that holds none, or a whole model."""
    if not folder.is_dir():
        raise UserError(f"--adapter {folder}: no such folder; it takes the output folder of a training run")
    for file, reader in READERS.items():
        if (folder / file).is_file():
            return reader
    if (folder / "config.json").is_file():
        raise UserError(f"--adapter {folder}: already a whole model, there is nothing to merge")
    raise UserError(f"--adapter {folder}: none of {', '.join(READERS)} in it; pass the folder in which a run "
                    "saved its final result")


def find_base(name: str, reader: Callable, folder: Path, run: dict | None) -> Base:
    """--base, or the model that the result names. Raises UserError where run.json has another fingerprint.
    """
    flag, recorded = "--base", (run or {}).get("model", {})
    if not name:
        if reader is read_adapter:
            file = folder / "adapter_config.json"
            name = read_json(file).get("base_model_name_or_path")
        else:
            file, name = folder / "run.json", recorded.get("folder")
        flag = f"{file} names the base"
        if not name:
            raise UserError(f"{file} does not name the base; pass --base FOLDER_OR_ID")
    try:
        base = Base(name, *open_model(name, flag, plain=False))
    except UserError as error:
        raise UserError(f"{error}; pass --base FOLDER_OR_ID" if flag != "--base" else str(error)) from error
    wanted, found = recorded.get("fingerprint"), fingerprint(base.folder)
    if wanted and wanted != found:
        raise UserError(f"{name} is not the base of this run: its fingerprint (of config.json and of the "
                        f"weight files' names and sizes) is {found}, run.json has {wanted}")
    return base


def merged_tensor(base: Base, name: str, function: Callable | None, recipe: dict | None, dtype: str):
    """One tensor of the result, in `dtype`. Raises UserError where it is not finite, such as beyond fp16."""
    import torch
    tensor = base.stored.tensor(name)
    if recipe is None and function is None and dtype == base.stored.dtype[name]:
        return tensor
    if recipe and base.stacks and name in base.stacks.places:  # an expert's matrix is quantised as one
        reader = base.stacks.stored
        wide = base.stacks.made(name, lambda s, e: dequantized(reader.tensor(f"{s}.{e}"), recipe))
    else:
        wide = dequantized(tensor, recipe) if recipe else tensor
    wide = wide.to(torch.promote_types(tensor.dtype, torch.float32))
    done = (function(wide) if function else wide).to(getattr(torch, dtype))
    if not done.isfinite().all() and tensor.isfinite().all():
        raise UserError(f"{name}: has values that are not finite after merging, in {dtype}")
    return done


def plan(base: Base, change: Change, recipes: dict, dtype: str | None) -> dict[str, dict[str, Entry]]:
    """{file: {name: entry}} of the merged model, split as the base's."""
    stored, quantized = base.stored, recipes_by_name(base, recipes)
    files: dict[str, dict[str, Entry]] = {file: {} for file in sorted(set(stored.file.values()))}
    for name, source in ({name: name for name in stored.file} | change.added).items():
        target = dtype if dtype and "float" in stored.dtype[source] else stored.dtype[source]
        make = partial(merged_tensor, base, source, change.functions.get(name),
                       quantized.get(name), target)
        shape = change.shapes.get(name, stored.shape[source])
        files[stored.file[source]][name] = Entry(target, shape, make)
    return files


def with_values(config: dict, values: dict) -> dict:
    """config.json with other values, also in its parts (text_config); vocab_size only where one stands."""
    if not values:
        return config
    given, here = values, "vocab_size" in config
    values = {key: value for key, value in given.items() if key != "vocab_size" or here}
    config = {key: with_values(value, given) if isinstance(value, dict) and "model_type" in value else value
              for key, value in config.items() if key != "torch_dtype" or "dtype" not in values}
    return config | values


def merge(adapter: str, output_dir: str, base: str = "", merge_base: str = "original",
          dtype: str = "keep") -> dict:
    """Writes the merged model folder. Returns what merge.json in it says. Raises UserError for anything that
    a person can mend; then nothing is left behind."""
    check_new_folder(output_dir)
    folder = Path(adapter).expanduser().absolute()
    reader = find_reader(folder)
    run = read_json(folder / "run.json") if (folder / "run.json").is_file() else None
    recipes = find_recipes(run, folder) if merge_base == "dequantized" else {}
    found = find_base(base, reader, folder, run)
    change = reader(folder, run, found)
    facts = dict(adapter=str(folder), base=found.name, base_fingerprint=fingerprint(found.folder),
                 merge_base=merge_base, quantizer=recipes.get("linears"), dtype=dtype, **change.facts)
    files = plan(found, change, recipes, DTYPES[dtype])
    with staged(output_dir) as stage:
        write_model(stage, files, found.stored.stored_as)
        if (folder / "tokenizer_config.json").is_file():
            copy_companions(folder, stage)
        copy_companions(found.folder, stage)
        write_json(stage / "merge.json", facts)
        named = dict(dtype=DTYPES[dtype]) if DTYPES[dtype] else {}
        rope = (run or {}).get("model", {}).get("rope") or {}  # what --rope_scaling changed
        rope |= dict(rope_scaling=None) if rope and "rope_scaling" in found.config else {}
        write_json(stage / "config.json", with_values(found.config, change.config | named | rope))
    return facts


# ---------------------------------------------------------------------------------------------- command line

def main(
    adapter: str = "output",  # output folder of a training run: an adapter or trained Llama-Pro blocks
    output_dir: str = "",  # new folder for the merged model
    base: str = "",  # base model; default: the one that the result names
    merge_base: str = "original",  # weights to merge into: original, or dequantized (as the run saw them)
    dtype: str = "keep",  # of the merged weights: keep (the base's), bf16, fp16 or fp32
):
    "Merge an adapter, or trained Llama-Pro blocks, into the base: a plain model folder."
    try:
        for flag, value, choices in (("merge_base", merge_base, MERGE_BASES), ("dtype", dtype, DTYPES)):
            if value not in choices:
                raise UserError(f"--{flag} {value}: choose from {', '.join(choices)}")
        if not output_dir:
            raise UserError("pass --output_dir FOLDER")
        facts = merge(adapter, output_dir, base, merge_base, dtype)
    except (UserError, OSError) as error:
        raise Refused("merge.py", error) from None
    what = f"blocks {facts['blocks']}" if "blocks" in facts else f"{facts['linears']} linears, " \
        f"r {facts['r']}, scaling {facts['scaling']:g}" + \
        "".join(f", {name} in full" for name in facts["modules_to_save"][:4])
    print(f"merged {facts['kind']} ({what}) into the {merge_base} weights of {facts['base']}: {output_dir}")


if __name__ == "__main__":
    run_script(main)
