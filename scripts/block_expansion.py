"""Expand a model with blocks that at first do nothing, for the llama_pro train types (LLaMA Pro: Wu et al.,
arXiv:2401.02415). A copy of a block follows every group of blocks; its output projections are zero, so what
it adds to the residual stream is zero and the expanded model gives the base's logits, bit for bit.

Where a norm follows the projection (Gemma 2 and 3, OLMo 2), the norm's gain is zero instead. It would divide
a projection that is barely more than zero by its own size: the first step, however small, would throw the
block in at full strength.

    python scripts/block_expansion.py --model_name DIR_OR_ID --output_dir EXPANDED --expansion_rate 0.1
    python train.py --train_type llama_pro --llama_pro_path EXPANDED ...

Tensors are copied one by one: memory holds one of them at a time, whatever the size of the model.
"""
from __future__ import annotations

import copy
import math
import re
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
from scripts import checkpoint
from scripts.checkpoint import Entry, new_positions
from scripts.flags import Refused, UserError, quiet, refuse, run_script

# Endings of the modules whose output is added to the residual stream, as models name them.
ATTENTION = ("o_proj", "out_proj", "dense", "wo", "attn.c_proj", "attention.c_proj")
MLP = ("down_proj", "dense_4h_to_h", "fc2", "fc_out", "w2", "mlp.c_proj", "output_linear")
# What stands directly in a block beside attention and MLP, and cannot add to the stream by itself.
OTHERS = re.compile(r"norm|^ln_|^ln\d|^fc1$|^fc_in$")

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Lists that are about something else than layers, whatever their length.
NOT_PER_LAYER = re.compile(r"^architectures$|_token_ids?$|^keys_to_ignore|^suppress_tokens$|_index(?:es)?$")
POSITIONS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")  # a block's own number


# ------------------------------------------------------------------------------------------- blocks in files

def layer_count(config: dict) -> tuple[str, int]:
    """(key, value) of the number of blocks in a config.json."""
    found = next((key for key in LAYER_COUNTS if type(config.get(key)) is int), None)
    if found is None or config[found] < 1:
        raise UserError(f"config.json gives no number of layers; looked for {', '.join(LAYER_COUNTS)}")
    return found, config[found]


def find_blocks(names, layers: int) -> tuple[str, list[dict[str, str]]]:
    """(prefix, blocks) of a checkpoint: block i is {name inside the block: whole name}, and its whole names
    start with PREFIXi, such as model.layers.7. Raises UserError unless there are `layers` of them."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        if match := re.match(r"(|.*?\.)(\d+)\.(.+)", name):
            prefix, index, inner = match.groups()
            found.setdefault(prefix, {}).setdefault(int(index), {})[inner] = name
    fitting = [prefix for prefix, blocks in found.items() if sorted(blocks) == list(range(layers))]
    if len(fitting) != 1:
        seen = ", ".join(f"{prefix}* with {len(blocks)}" for prefix, blocks in found.items()) or "none"
        raise UserError(f"config.json speaks of {layers} layers; numbered blocks among the tensors: {seen}")
    return fitting[0], [found[fitting[0]][index] for index in range(layers)]


def module_of(inner: str) -> str:
    """The module that a tensor of a block belongs to; of MoE experts' 3-D parameters the parameter's name."""
    return re.sub(r"\.(?:weight|bias)$|_bias$", "", inner)


def ends_with(inner: str, endings: tuple[str, ...]) -> bool:
    return ("." + module_of(inner)).endswith(tuple("." + ending for ending in endings))


def output_tensors(inner_names) -> set[str]:
    """The tensors of a block's output projections, biases too. Raises UserError, listing the block's tensors,
    unless attention and MLP have one each and no other part could add to the residual stream."""
    names = sorted(inner_names)
    attention, mlp = ({name for name in names if ends_with(name, kind)} for kind in (ATTENTION, MLP))
    parts = {name.split(".")[0] for name in names}
    known = {name.split(".")[0] for name in attention | mlp}
    strange = sorted(part for part in parts - known if not OTHERS.search(part))
    lacking = [kind for kind, found in (("attention", attention), ("MLP", mlp)) if not found]
    if lacking or strange:
        wrong = " and ".join(f"no {kind} output projection is known" for kind in lacking)
        wrong = wrong or f"what {', '.join(strange)} adds to the residual stream is not known"
        title = f"cannot make a block that does nothing: {wrong}. A block has"
        refuse(names, title)
    return attention | mlp


# --------------------------------------------------------------------------------------------- configuration

def per_layer_lists(config: dict, layers: int) -> dict[str, list]:
    return {key: value for key, value in config.items()
            if isinstance(value, list) and len(value) == layers and not NOT_PER_LAYER.search(key)}


def expand_config(config: dict, complete: dict, origins: list[int]) -> dict:
    """config.json of the expanded model: new block i is like its origin, the original block origins[i].

    `complete` is the configuration with defaults filled in: lists that a model derives from layer numbers
    (Gemma's alternating layer_types) are written out, since numbers change.
    """
    key, layers = layer_count(config)
    lists = per_layer_lists(complete, layers) | per_layer_lists(config, layers)
    longer = {name: [values[i] for i in origins] for name, values in lists.items()}
    return config | {key: len(origins)} | longer


def traits(block) -> dict:
    """How a block is built: types, plain attributes and parameter shapes of its modules."""
    plain = (int, float, str, bool, type(None))
    return {name: (type(module), {k: v for k, v in vars(module).items()
                                  if isinstance(v, plain) and k not in POSITIONS},
                   {k: tuple(p.shape) for k, p in module._parameters.items() if p is not None})
            for name, module in block.named_modules()}


def norms_after(model, block) -> dict[str, str]:
    """{norm: the output projection whose output it gets} of a block, found by a forward pass of the model on
    the meta device; {} where models cannot be run there (some experts, ALiBi)."""
    import torch
    names, made, found = {module: name for name, module in block.named_modules()}, {}, {}
    outputs = {module_of(name) for name in output_tensors(name for name, _ in block.named_parameters())}

    def note(module, args, output):
        name, result = names[module], output[0] if isinstance(output, tuple) else output
        inside = next((o for o in outputs if f"{o}.".startswith(f"{name}.")), None)
        if inside:
            made[id(result)] = inside, result  # kept alive, or another tensor might get its id
        elif args and id(args[0]) in made and module._parameters:
            found[name] = made[id(args[0])][0]
    hooks = [module.register_forward_hook(note) for module in names if module is not block]
    try:
        with torch.no_grad(), torch.device("meta"):
            model(torch.zeros(1, 4, dtype=torch.long), use_cache=False,
                  attention_mask=torch.zeros(1, 1, 4, 4))  # a ready mask: making one looks at values
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return found


def silent_gain(norm, name: str) -> float:
    """What a norm's gain must be for its output to be zero: 0, or -1 where the model adds one to it. Raises
    UserError where it is neither."""
    import torch
    for gain in (0.0, -1.0):
        trial = copy.deepcopy(norm).to_empty(device="cpu")
        with torch.no_grad():
            for kind, parameter in trial.named_parameters():
                parameter.fill_(0.0 if kind == "bias" else gain)
            if not trial(torch.linspace(-1, 1, trial.weight.numel()).expand(1, 1, -1)).any():
                return gain
    raise UserError(f"cannot make a block that does nothing: no gain of its {name} makes the output zero")


def silencing(model, block, stored) -> dict[str, float]:
    """{tensor: what to fill it with} for a block that does nothing; `stored`: the tensors of the block in the
    checkpoint."""
    after = norms_after(model, block)
    filled = {name: 0.0 for name in output_tensors(stored) if module_of(name) not in after.values()}
    for norm in after:
        module = block.get_submodule(norm)
        gain = silent_gain(module, norm)
        filled |= {f"{norm}.{kind}": 0.0 if kind == "bias" else gain for kind in module._parameters}
    return filled


def built_blocks(make_config, layers: int) -> tuple:
    """(configuration, model, blocks) that transformers makes with `layers` layers, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM
    try:
        with quiet(), torch.device("meta"):
            config = make_config()
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # models refuse configurations with exceptions of every type
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"transformers cannot build this model with {layers} layers: {reason}") from error
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers]
    return config, model, max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def checked_config(folder: Path, config: dict, origins: list[int]) -> tuple:
    """(configuration, model, blocks): the expanded configuration, once transformers builds every block from
    it as it builds its origin, and the base on the meta device. Raises UserError where a block's kind depends
    on its number in some other way than by a list."""
    from transformers import AutoConfig
    base, model, before = built_blocks(lambda: AutoConfig.from_pretrained(folder), layer_count(config)[1])
    expanded = expand_config(config, base.to_dict(), origins)
    *_, after = built_blocks(lambda: type(base).from_dict(copy.deepcopy(expanded)), len(origins))
    for position, origin in enumerate(origins):
        if traits(after[position]) != traits(before[origin]):
            raise UserError(f"{config.get('model_type')}: block {position} of the expanded model would not "
                            f"be built like block {origin} of the base, whose weights it gets; some option "
                            "of config.json goes by layer numbers")
    return expanded, model, before


# ------------------------------------------------------------------------------------------------- expanding

def count_new(layers: int, rate: float) -> int:
    """Blocks to add: layers * rate rounded down, but at least one. Raises UserError for a rate that is not
    positive, or that adds more blocks than there are."""
    if not 0 < rate < math.inf:
        raise UserError(f"--expansion_rate {rate}: must be a number greater than 0")
    count = max(1, int(layers * rate))
    if count > layers:
        raise UserError(f"--expansion_rate {rate}: gives {count} new blocks, but the model has {layers}; at "
                        "most one new block goes with each")
    return count


def find_origins(layers: int, new: list[int]) -> list[int]:
    """For each block of the expanded model the original one that it is or copies: the one before it."""
    origins = []
    for position in range(layers + len(new)):
        origins.append(origins[-1] if position in new else position - sum(index < position for index in new))
    return origins


def full(entry: Entry, value: float):
    import torch
    return torch.full(entry.shape, value, dtype=getattr(torch, entry.dtype))


def plan(stored: checkpoint.Checkpoint, layers: int, new: list[int],
         silencing: list[dict[str, float]]) -> dict[str, dict[str, Entry]]:
    """{file: {name: entry}} of the expanded checkpoint, split as the base's: a copy lies with its origin."""
    prefix, blocks = find_blocks(stored.file, layers)
    files: dict[str, dict[str, Entry]] = {file: {} for file in sorted(set(stored.file.values()))}

    def add(name: str, source: str, value: float | None = None) -> None:
        entry = Entry(stored.dtype[source], stored.shape[source], partial(stored.tensor, source))
        entry = entry if value is None else entry._replace(make=partial(full, entry, value))
        files[stored.file[source]][name] = entry

    numbered = {name for block in blocks for name in block.values()}
    for name in stored.file:
        if name not in numbered:
            add(name, name)
    for position, origin in enumerate(find_origins(layers, new)):
        for inner, source in blocks[origin].items():
            value = silencing[origin].get(inner) if position in new else None
            add(f"{prefix}{position}.{inner}", source, value)
    return files


def expand(model_name: str, output_dir: str, expansion_rate: float) -> list[int]:
    """Writes the expanded model folder, with llama_pro.json beside its weights. Returns the new blocks'
    indices. Raises UserError for anything that a person can mend; then nothing is left behind."""
    checkpoint.check_new_folder(output_dir)
    folder, stored, config = checkpoint.open_model(model_name, "--model_name")
    layers = layer_count(config)[1]
    new = new_positions(layers, count_new(layers, expansion_rate))
    blocks = find_blocks(stored.file, layers)[1]
    for block in blocks:
        output_tensors(block)  # those that are not known are named before anything is built
    expanded, model, built = checked_config(folder, config, find_origins(layers, new))
    files = plan(stored, layers, new, [silencing(model, *pair) for pair in zip(built, blocks)])
    base = model_name if checkpoint.is_hub_id(model_name) else str(folder.resolve())
    with checkpoint.staged(output_dir) as stage:
        checkpoint.write_model(stage, files, stored.stored_as)
        checkpoint.copy_companions(folder, stage)
        said = dict(new_blocks=new, base=base, base_fingerprint=checkpoint.fingerprint(folder),
                    original_layers=layers)
        checkpoint.write_json(stage / "llama_pro.json", said)
        checkpoint.write_json(stage / "config.json", expanded)
    return new


# ---------------------------------------------------------------------------------------------- command line

def main(
    model_name: str = "",  # Hugging Face folder or hub id of the model to expand
    output_dir: str = "",  # new folder for the expanded model
    expansion_rate: float = 0.1,  # new blocks per block; at least one block is added
):
    "Expand a model with identity blocks, for the llama_pro train types."
    try:
        if not model_name or not output_dir:
            raise UserError("pass --model_name FOLDER_OR_ID and --output_dir FOLDER")
        new = expand(model_name, output_dir, expansion_rate)
    except (UserError, OSError) as error:
        raise Refused("block_expansion.py", error) from None
    print(f"new blocks {', '.join(map(str, new))} in {output_dir}")
    print(f"train them: python train.py --train_type llama_pro --llama_pro_path {output_dir}")


if __name__ == "__main__":
    run_script(main)
