"""Adapters on a model: which linears get one, attaching them (PEFT's or our own), how they start, their names
in files."""
import hashlib
import math

import torch
import torch.nn as nn

from scripts.flags import UserError


def find_targets(model: nn.Module, blocks: nn.ModuleList, wanted: str) -> list[str]:
    """Name endings of the linears that get an adapter: `all` of the blocks, PEFT's `default`, or a list of
    endings. Raises UserError where one matches nothing."""
    names = [name.split(".")[-1] for name, m in blocks.named_modules() if isinstance(m, nn.Linear)]
    linears = list(dict.fromkeys(names))
    if wanted == "all":
        return linears
    if wanted == "default":
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as defaults
        kind = model.config.model_type
        if kind not in defaults:
            raise UserError(f"--lora_target_modules default: PEFT has none for {kind}; use all")
        return list(defaults[kind])
    names = [name.strip() for name in wanted.split(",")]
    if unmatched := [name for name in names if name not in linears]:
        raise UserError(f"--lora_target_modules {wanted}: {', '.join(unmatched)} matches nothing; "
                        f"there are {', '.join(linears)}")
    return names


def lora_config(config, targets: list[str], base: str | None = None):
    """PEFT's description of the adapter: what it is attached with, and what is saved beside its weights."""
    from peft import LoraConfig
    return LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
                      use_dora=config.type.adapter == "dora", use_rslora=config.use_rslora,
                      target_modules=targets, task_type="CAUSAL_LM", base_model_name_or_path=base)


def attach_peft(model: nn.Module, config, targets: list[str]) -> None:
    from peft import inject_adapter_in_model
    inject_adapter_in_model(lora_config(config, targets), model, low_cpu_mem_usage=True)


def wrap(model: nn.Module, config, targets: list[str], kind: type) -> None:
    """Puts a `kind` around every linear whose name ends in one of `targets`."""
    scaling = config.lora_alpha / (math.sqrt(config.lora_rank) if config.use_rslora else config.lora_rank)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(parent, name, kind(child, config.lora_rank, scaling, config.lora_dropout))


def attach_custom(model: nn.Module, config, targets: list[str]) -> None:
    from scripts.lora import LoRALinear
    wrap(model, config, targets, LoRALinear)


def attach_dora(model: nn.Module, config, targets: list[str]) -> None:
    from scripts.dora import DoRALinear
    wrap(model, config, targets, DoRALinear)


ADAPTERS = {"peft": attach_peft, "custom": attach_custom, "dora": attach_dora}


def plain_name(name: str) -> str:
    """A parameter's name without the adapter's own name, 'default', which PEFT's modules carry and its files
    do not."""
    return name.replace(".default.", ".")


def saved_name(name: str) -> str:
    """A parameter's name in a PEFT file."""
    return "base_model.model." + plain_name(name)


def initial(name: str, shape, seed: int) -> torch.Tensor:
    """LoRA's start: A uniform as PEFT's default, B zero. Drawn whole from (seed, name), so that the same
    adapter starts the same at every world size and in both implementations."""
    whole = torch.zeros(shape)
    if "lora_A" in name:
        digest = hashlib.sha256(f"{seed}/{plain_name(name)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    return whole
