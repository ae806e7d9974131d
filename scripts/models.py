"""What a model's structure says, and what it is asked to be: the decoder blocks, which linears can be
replaced, what happens to logits, which attention fits, RoPE for longer texts, code of its own.

Nothing here goes by the names of models but the table MODELS, for what the structure does not say. To add a
model that is refused, add the row that the message asks for.
"""
import contextlib
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from scripts import attention
from scripts.flags import UserError


@dataclass(frozen=True)
class Row:
    blocks: str | None = None  # names of the blocks, where no ModuleList holds them: model.stage_*
    logits: Callable | None = None  # config -> function of the head's output, where loss.py knows none


MODELS: dict[str, Row] = {  # by the model_type of config.json
    # Granite divides by a number of this name.
    "hyperclovax": Row(logits=lambda config: lambda logits: logits * config.logits_scaling),
    "falcon_h1": Row(logits=lambda config: lambda logits: logits * config.lm_head_multiplier),
}


# -------------------------------------------------------------------------------------------------- structure

def row(config) -> Row:
    return MODELS.get(getattr(config, "model_type", None), Row())


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks: what the model's row says, or the list of modules that holds most of the
    parameters. Raises UserError where that is not the greater part of all but embedding and head."""
    kind = model.config.model_type
    if pattern := row(model.config).blocks:
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        if found := [m for name, m in model.named_modules() if wanted.fullmatch(name)]:
            return nn.ModuleList(found)
        raise UserError(f"{kind}: no module is called {pattern}, as MODELS in scripts/models.py says")
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    held = {blocks: sum(p.numel() for p in blocks.parameters()) for blocks in lists}
    best = max(held, key=held.get, default=None)
    ends = {p for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None
            for p in m.parameters()}
    if best is None or 2 * held[best] < sum(p.numel() for p in model.parameters() if p not in ends):
        parts = ", ".join(name for name, _ in model.base_model.named_children())
        raise UserError(f"{kind} ({type(model).__name__}): no repeated decoder block found in it; add a row "
                        f'to MODELS in scripts/models.py: "{kind}": Row(blocks="NAME.OF.BLOCKS_*"). '
                        f"Its modules: {parts}")
    return best


def parts(block: nn.Module) -> list[nn.Module]:
    """A block's attention and MLP: those of its children that hold matrices."""
    return [child for child in block.children() if any(p.ndim > 1 for p in child.parameters())]


@functools.cache
def is_plain(kind: type[Any]) -> bool:
    """Whether modules of this class compute x W^T + b and nothing else, found out on a trial weight: Falcon's
    linears are a class of their own."""
    if kind is nn.Linear or not issubclass(kind, nn.Linear):
        return kind is nn.Linear
    trial, x = nn.utils.skip_init(nn.Linear, 4, 3), torch.linspace(-1, 2, 8).view(2, 4)
    with torch.no_grad():
        trial.weight.copy_(torch.linspace(-1, 1, 12).view(3, 4))
        trial.bias.copy_(torch.linspace(1, 2, 3))
        try:
            return torch.allclose(kind.forward(trial, x), F.linear(x, trial.weight, trial.bias), atol=1e-6)
        except Exception:  # it needs what a plain linear has not
            return False


def structure(model: nn.Module, blocks: list[nn.Module], quantized: int) -> dict:
    """For people and run.json, of the blocks: their names and class, their linears, what is not quantised,
    and which share of their parameters is; `quantized` is the number of those."""
    names, first = {module: name for name, module in model.named_modules()}, blocks[0]
    linears = [name for name, m in first.named_modules() if isinstance(m, nn.Linear)]
    rest = [name for name, p in first.named_parameters() if p.dtype != torch.uint8] if quantized else []
    plain = sum(p.numel() for block in blocks for p in block.parameters() if p.dtype != torch.uint8)
    return dict(blocks=re.sub(r"\d+$", "*", names[first]), kind=type(first).__name__, linears=linears,
                not_quantized=rest, share=quantized / (quantized + plain))


# ----------------------------------------------------------------------------------------------------- logits

class Outputs(SimpleNamespace):
    """Stands for what a decoder returns: attributes that nobody set are None."""

    def __getattr__(self, name):
        return None

    def __getitem__(self, index):
        return (self.last_hidden_state,)[index]


def check_logits(model: nn.Module, transform: Callable) -> None:
    """Raises UserError unless the model's own forward makes of hidden states what the fused loss does: the
    head's product, and `transform` of it. Tried with stand-ins for decoder and head, on a few numbers."""
    base, head, kind = model.base_model, model.get_output_embeddings(), model.config.model_type
    if base is model or head is None:
        raise UserError(f"{kind} ({type(model).__name__}): no decoder and head found in it; its class lacks "
                        f"base_model_prefix or get_output_embeddings")
    hidden = torch.linspace(-1, 1, 3 * head.in_features).view(1, 3, -1)
    raw, seen = torch.linspace(-60, 60, 24).view(1, 3, 8), []
    base.forward = lambda *args, **kwargs: Outputs(last_hidden_state=hidden)
    head.forward = lambda given: seen.append(given) or raw.clone()
    try:
        with torch.no_grad():
            found = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
        right = torch.allclose(found, transform(raw), rtol=1e-3) and torch.allclose(seen[0], hidden)
        reason = "its own forward does something else to hidden states or logits"
    except Exception as error:  # models' own code fails in ways of its own
        right, reason = False, f"its own forward gives no logits on a trial: {error!r}"
    finally:
        del base.forward, head.forward
    if not right:
        raise UserError(f"{kind} ({type(model).__name__}): the loss here would not be the model's: {reason}; "
                        f'add a row to MODELS in scripts/models.py: "{kind}": Row(logits=...)')


# -------------------------------------------------------------------------------------------------- attention

def choose_attention(model: nn.Module, flags, accelerators: int) -> None:
    """Sets the attention that --attn_implementation auto stands for: eager where attention scores are capped,
    which SDPA leaves out; FlashAttention 2 where the package is there and can be used; SDPA document by
    document where that is all that the layers do, and no graph is to hold it; else what transformers chose
    (SDPA, or eager for models that do not have it)."""
    if flags.attn_implementation != "auto":
        return
    config, compute, usual = model.config, flags.numbers.compute, "flash_attention_2"
    listed = getattr(model, "_compatible_flash_implementations", None)
    flash = (accelerators and compute.itemsize == 2 and getattr(model, "_supports_flash_attn", False)
             and (not listed or usual in listed) and not getattr(config, "alibi", False)
             and importlib.util.find_spec("flash_attn") is not None)
    chosen = "eager" if getattr(config, "attn_logit_softcapping", None) else usual if flash else None
    if chosen and chosen != config._attn_implementation:
        model.set_attn_implementation(chosen)
    elif not chosen and not flags.compile and attention.suits(model):
        attention.use(model)


# ------------------------------------------------------------------------------------------------------- RoPE

# What a type needs beside its factor. The others of transformers are not for training here: `dynamic` goes by
# the longest text of a batch, `longrope` needs a list of factors that were searched for.
ROPE_TYPES = {"linear": {}, "yarn": {}, "llama3": dict(low_freq_factor=1.0, high_freq_factor=4.0)}


def parse_rope(text: str) -> tuple[str, float]:
    """linear:4 -> its type and factor. Raises UserError."""
    kind, _, factor = text.partition(":")
    try:
        value = float(factor)
    except ValueError:
        value = 0.0
    if kind not in ROPE_TYPES or not 1 < value < float("inf"):
        raise UserError(f"--rope_scaling {text}: wanted TYPE:FACTOR, such as yarn:4; the types are "
                        f"{', '.join(ROPE_TYPES)}, the factor is above 1")
    return kind, value


def scale_rope(config, text: str) -> None:
    """Changes RoPE's parameters in a transformers configuration for texts `factor` times as long as those the
    model was made for. Where layers differ (Gemma 3), those of full attention are changed, as transformers
    does."""
    kind, factor = parse_rope(text)
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or getattr(config, "alibi", False):
        raise UserError(f"--rope_scaling {text}: {config.model_type} has no RoPE")
    nested = config.nested_rope_parameter_keys(parameters)
    changed = [key for key in nested if key == "full_attention"] or nested
    olds = [parameters[key] for key in changed if parameters[key]] if nested else [parameters]
    length = olds[0].get("original_max_position_embeddings") or \
        getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    for old in olds:
        kept = {name: old[name] for name in ("rope_theta", "partial_rotary_factor") if name in old}
        old.clear()
        old.update(kept, rope_type=kind, factor=factor, **ROPE_TYPES[kind])
        if kind != "linear":
            old["original_max_position_embeddings"] = length
    config.max_position_embeddings = int(length * factor)
    config.validate_rope()


def rope_of(config) -> dict:
    """What --rope_scaling changes in a config.json."""
    return {name: getattr(config, name) for name in ("rope_parameters", "max_position_embeddings")}


# ---------------------------------------------------------------------------------------------- configuration

@contextlib.contextmanager
def validated():
    """Makes a ValueError of what transformers finds wrong with the values of a config.json, without its
    warnings: they come several times, and before the one message that counts."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.utils import logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except StrictDataclassError as error:
        raise ValueError(str(error).strip().splitlines()[-1].strip()) from error
    finally:
        logging.set_verbosity(level)


def read_config(folder: Path, rope_scaling: str | None, trust_remote_code: bool):
    """The configuration that transformers reads, with RoPE as wanted. Raises ValueError for a bad one."""
    from transformers import AutoConfig
    with validated():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if rope_scaling:
        scale_rope(config, rope_scaling)
    return config


def problem(error: Exception, folder: Path, attention: str) -> str:
    """Why transformers cannot build a model, and which flag helps."""
    text = repr(error) if isinstance(error, KeyError) else str(error).strip() or repr(error)
    reason = text.splitlines()[0]
    if "trust_remote_code" in str(error) or "custom code" in reason:
        return (f"{folder}: this model needs its own code, the .py files in its folder, which would run with "
                f"all your rights; if you trust where they come from, pass --trust_remote_code true")
    if attention != "auto" and "attention" in reason.lower():
        return f"--attn_implementation {attention}: {reason.split('. ')[0]}; auto takes one that it has"
    return f"{folder}: transformers cannot build this model from its config.json: {reason}"
