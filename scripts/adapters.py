"""Adapters on a model: which linears get one, attaching them (PEFT's or our own), how they start, their names
in files."""
import functools
import hashlib
import math
from typing import Callable

import torch
import torch.nn as nn

from scripts.dora import DoRALinear
from scripts.flags import UserError
from scripts.lora import LoRALinear


def find_targets(model: nn.Module, blocks: nn.ModuleList, wanted: str, kept=frozenset(),
                 bare=frozenset()) -> list[str]:
    """Name endings of the linears that get an adapter: `all` of the blocks, PEFT's `default`, or a list of
    endings; never one of the `kept` modules, which are trained in full, or of the `bare` ones. Raises
    UserError where one matches nothing."""
    free, full = {}, {}
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear) and module not in bare:
            (full if module in kept else free)[name.split(".")[-1]] = None
    linears, full = list(free), [name for name in full if name not in free]
    if not linears and not full:
        raise UserError(f"{model.config.model_type}: its blocks have no linears for an adapter; "
                        "use --train_type full")
    if full and not linears:
        raise UserError("--modules_to_save leaves no linear of the blocks to the adapter; "
                        "--train_type full trains all of them")
    if wanted == "all":
        return linears
    if wanted == "default":
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as defaults
        kind = model.config.model_type
        if kind not in defaults:
            raise UserError(f"--lora_target_modules default: PEFT has none for {kind}; use all")
        return [name for name in defaults[kind] if name in linears]
    names = [name.strip() for name in wanted.split(",")]
    if both := [name for name in names if name in full]:
        raise UserError(f"--lora_target_modules {wanted}: {', '.join(both)} is trained in full already, by "
                        "--modules_to_save; it gets no adapter")
    if unmatched := [name for name in names if name not in linears]:
        raise UserError(f"--lora_target_modules {wanted}: {', '.join(unmatched)} matches nothing; "
                        f"there are {', '.join(linears)}")
    return names


def lora_config(config, targets: list[str], base: str | None = None, saved: list[str] = (), tied=False,
                parameters: list[str] = ()):
    """PEFT's description of the adapter: what it is attached with, and what is saved beside its weights.
    `saved`: modules trained in full; `tied`: embedding and head among them are one; `parameters`: endings of
    experts' stacked weights."""
    from peft import LoraConfig
    return LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
                      use_dora=config.type.adapter == "dora", use_rslora=config.use_rslora,
                      target_modules=targets, task_type="CAUSAL_LM", base_model_name_or_path=base,
                      target_parameters=list(parameters) or None,
                      modules_to_save=list(saved) or None, ensure_weight_tying=tied)


def attach_peft(model: nn.Module, config, targets: list[str], kept=frozenset()) -> None:
    from peft import inject_adapter_in_model
    settings = lora_config(config, targets)
    settings.exclude_modules = {name for name, module in model.named_modules() if module in kept} or None
    inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)


def scaling(alpha: float, rank: int, rslora: bool) -> float:
    """What B A is multiplied by: alpha / r, or alpha / sqrt(r) for rsLoRA."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def wrap(kind: type, model: nn.Module, config, targets: list[str], kept=frozenset()) -> None:
    """Puts a `kind` around every linear whose name ends in one of `targets`, but for the `kept` ones."""
    scale = scaling(config.lora_alpha, config.lora_rank, config.use_rslora)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in targets and isinstance(child, nn.Linear) and child not in kept:
                setattr(parent, name, kind(child, config.lora_rank, scale, config.lora_dropout))


ADAPTERS: dict[str, Callable] = {
    "peft": attach_peft,
    "custom": functools.partial(wrap, LoRALinear),
    "dora": functools.partial(wrap, DoRALinear),
}


def plain_name(name: str) -> str:
    """A parameter's name without the adapter's own name, 'default', which PEFT's modules carry and its files
    do not."""
    return name.replace(".default.", ".")


def saved_name(name: str) -> str:
    """A parameter's name in a PEFT file."""
    return "base_model.model." + plain_name(name)


def is_own(name: str) -> bool:
    """Whether a trained parameter is the adapter's, and no weight of the base's."""
    return any(part.startswith("lora_") for part in name.split("."))


def initial(name: str, shape, seed: int) -> torch.Tensor:
    """LoRA's start: A uniform as PEFT's default, B zero. Drawn whole from (seed, name), so that the same
    adapter starts the same at every world size and in both implementations."""
    whole = torch.zeros(shape)
    if "lora_A" in name:
        digest = hashlib.sha256(f"{seed}/{plain_name(name)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    return whole
