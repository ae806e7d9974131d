"""Mixtures of experts (Shazeer et al., arXiv:1701.06538) as transformers 5 keeps them: a block's experts are
one module, their matrices lie stacked in 3-D parameters ("stacks") of (experts, rows, columns).

Here a stack is quantised expert by expert, trained through low-rank factors (--lora_experts, PEFT's
target_parameters), and found in checkpoints of either layout: stacked, or a tensor per expert and projection,
as hubs have them. Routers stay as they are.
"""
import re
import sys
import types
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from scripts import adapters
from scripts.flags import UserError
from scripts.quantize import product_dtype


# -------------------------------------------------------------------------------------------------- discovery

def is_experts(module: nn.Module) -> bool:
    """Whether transformers' use_experts_implementation marked this module's class."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def stacks(module: nn.Module) -> list[str]:
    """Names of an experts module's stacks, in the order in which PEFT wraps them."""
    plain = [name for name, p in module._parameters.items() if p is not None and p.ndim == 3]
    return plain or [name for name, child in module._modules.items() if isinstance(child, QuantStack)]


def find(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if is_experts(m)}


def routers(model: nn.Module) -> set[nn.Module]:
    """Linears beside experts that choose or weight them: with an output per expert, or a single one."""
    found = set()
    for parent in model.modules():
        sizes = {1, *(len(getattr(m, n)) for m in parent.children() if is_experts(m) for n in stacks(m))}
        for child in (parent.children() if len(sizes) > 1 else ()):
            found |= {m for m in child.modules() if isinstance(m, nn.Linear) and m.out_features in sizes}
    return found


def renamed_by_peft(model: nn.Module) -> set[str]:
    """Names of linears which PEFT, reading an adapter of this model, takes for an experts' older layout."""
    if not find(model):
        return set()
    from peft.utils import transformers_weight_conversion as peft
    kind = peft._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    return set(peft._MOE_TARGET_MODULE_MAPPING.get(kind, ()))


def without_adapter(model: nn.Module, wanted: str) -> set[nn.Module]:
    """Linears that get no adapter: routers, and what PEFT would load as something else. Raises UserError
    where --lora_target_modules names one of the latter."""
    names = renamed_by_peft(model)
    if asked := sorted(names & {part.strip() for part in wanted.split(",")}):
        raise UserError(f"--lora_target_modules {', '.join(asked)}: in {model.config.model_type} models PEFT "
                        "takes these names for the experts'; --lora_experts true trains those")
    linears = {m for n, m in model.named_modules()
               if isinstance(m, nn.Linear) and n.split(".")[-1] in names}
    return linears | routers(model)


# ------------------------------------------------------------------------------------------- quantised stacks

class QuantStack(nn.Module):
    """A frozen stack, each expert's (rows, columns) matrix quantised by itself. Parts are uint8 parameters as
    a FrozenQuantLinear's, expert behind expert along the first dimension, which FSDP shards."""

    def __init__(self, stack: nn.Parameter, quantizer):
        super().__init__()
        self.count, self.out_features, self.in_features = stack.shape
        self.quantizer = quantizer
        for name, (rows, *width) in quantizer.shapes(self.out_features, self.in_features).items():
            part = torch.empty(self.count * rows, *width, dtype=torch.uint8, device=stack.device)
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def __len__(self) -> int:
        return self.count

    def dequantize(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """(rows, columns) of one expert."""
        parts = {name: part.unflatten(0, (self.count, -1))[expert] for name, part in self._parameters.items()}
        shape = (self.out_features, self.in_features)
        return self.quantizer.dequantize(types.SimpleNamespace(**parts), shape, dtype)


class _DequantExperts(torch.autograd.Function):
    """Rows of x, sorted by expert, times their expert's matrix. Keeps the stack, not its matrices: one exists
    at a time, those of experts without rows never."""

    @staticmethod
    def forward(ctx, x, stack, counts, transposed):
        ctx.stack, ctx.counts, ctx.transposed, ctx.dtype = stack, counts, transposed, x.dtype
        return _DequantExperts.product(x.to(product_dtype(x)), stack, counts, not transposed)

    @staticmethod
    def backward(ctx, grad):
        back = _DequantExperts.product(grad, ctx.stack, ctx.counts, ctx.transposed)
        return back.to(ctx.dtype), None, None, None

    @staticmethod
    def product(x, stack, counts, turned):
        """x W^T if `turned`, otherwise x W."""
        y = x.new_empty(len(x), stack.out_features if turned else stack.in_features)
        for expert, (rows, out) in enumerate(zip(x.split(counts), y.split(counts))):
            if len(rows):
                matrix = stack.dequantize(expert, x.dtype)
                torch.mm(rows, matrix.T if turned else matrix, out=out)
        return y


def quantize(blocks, quantizer, kept=frozenset()) -> dict[str, str]:
    """Puts a QuantStack in place of every stack of the blocks that is not in a `kept` module. Returns {stack:
    why it cannot be} instead where one cannot."""
    found = [(n, m) for block in blocks for n, m in find(block).items() if m not in kept]
    problems = {f"{n}.{s}": quantizer.problem(*getattr(m, s).shape[1:]) for n, m in found for s in stacks(m)}
    problems |= {n: "experts with a norm of their own are not known" for n, m in found
                 if m.has_post_expert_norm}
    if refused := {name: why for name, why in problems.items() if why}:
        return refused
    for _, module in found:
        for name in stacks(module):
            stack = QuantStack(getattr(module, name), quantizer)
            delattr(module, name)
            setattr(module, name, stack)
        route(module)
    return {}


# ---------------------------------------------------------------------------------------------------- forward

def rows_per_expert(ids: torch.Tensor, count: int) -> list[int]:
    """How many rows each expert has, on the host: what allows to have one expert's matrix at a time, where
    transformers' grouped_mm, which waits for nothing, needs a block's whole stack in 16 bits. Tensors without
    values (torch's fake ones) are taken to be routed evenly."""
    from torch._subclasses.fake_tensor import FakeTensor
    if isinstance(ids, FakeTensor) or ids.is_meta:
        return [len(ids) * (e + 1) // count - len(ids) * e // count for e in range(count)]
    return torch.bincount(ids, minlength=count).tolist()


def times_stack(x: torch.Tensor, stack, counts: list[int], transposed: bool) -> torch.Tensor:
    """Rows of x, sorted by expert, times the expert's matrix, (out, in) or if `transposed` (in, out)."""
    if isinstance(stack, QuantStack):
        return _DequantExperts.apply(x, stack, counts, transposed)
    pairs = zip(x.split(counts), stack.unbind())
    return torch.cat([rows @ matrix if transposed else F.linear(rows, matrix) for rows, matrix in pairs])


def project(self, name: str, x: torch.Tensor, counts: list[int], ids: torch.Tensor) -> torch.Tensor:
    """One projection of every expert, with its bias and its adapter. `ids`: the expert of each row."""
    y = times_stack(x, getattr(self, name), counts, self.is_transposed)
    if self.has_bias:
        y = y + getattr(self, f"{name}_bias")[ids].to(y.dtype)
    adapter = self.adapters.get(name)
    return y if adapter is None else (y + adapter.delta(x, counts)).to(y.dtype)


def routed(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
    """What transformers' experts compute: hidden (tokens, width) through the experts of top_k_index (tokens,
    k), weighted and summed."""
    k = top_k_index.shape[-1]
    ids, order = top_k_index.reshape(-1).sort(stable=True)
    counts = rows_per_expert(ids, self.num_experts)
    y = project(self, "gate_up_proj" if self.has_gate else "up_proj", hidden[order // k], counts, ids)
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y = project(self, "down_proj", y, counts, ids) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    return y[order.argsort()].unflatten(0, (-1, k)).sum(1).to(hidden.dtype)


def route(module: nn.Module) -> None:
    """Gives an experts module the forward above."""
    module.adapters = {}  # stack -> ExpertLoRA, beside the module's children, since those wrap it
    module.forward = types.MethodType(routed, module)


# ------------------------------------------------------------------------------------------------------- LoRA

class Factor(nn.Module):
    """A trained factor of all experts. No nn.Linear: nothing is multiplied with it whole."""

    def __init__(self, *shape: int, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device=device))


class ExpertLoRA(nn.Module):
    """LoRA on one stack, in PEFT's names and shapes (its ParamWrapper): around the experts module, one inside
    the other where there are several stacks; lora_A (experts * r, in) expert by expert, lora_B (out, r *
    experts) with the experts of each of the r columns beside one another."""

    def __init__(self, base_layer: nn.Module, experts: nn.Module, name: str, rank: int, scaling: float):
        super().__init__()
        stack = getattr(experts, name)
        quantized = isinstance(stack, QuantStack)
        matrix = (stack.out_features, stack.in_features) if quantized else stack.shape[1:]
        rows, columns = matrix[::-1] if experts.is_transposed else matrix
        device = (stack.weight if quantized else stack).device
        self.base_layer, self.count, self.rank, self.scaling = base_layer, len(stack), rank, scaling
        self.lora_A = Factor(self.count * rank, columns, device=device)
        self.lora_B = Factor(rows, rank * self.count, device=device)
        experts.adapters[name] = self

    def forward(self, *args):
        return self.base_layer(*args)

    def delta(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """s B A x of each row's expert."""
        first, second = factors(self.lora_A.weight, self.lora_B.weight, self.count)
        halves = [F.linear(rows, a) for rows, a in zip(x.to(first.dtype).split(counts), first.unbind())]
        return torch.cat([F.linear(h, b) for h, b in zip(halves, second.unbind())]) * self.scaling


def factors(a: torch.Tensor, b: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (experts, r, in) and B (experts, out, r) of PEFT's flat lora_A and lora_B."""
    return a.unflatten(0, (count, -1)), b.unflatten(1, (-1, count)).permute(2, 0, 1).contiguous()


def check(model: nn.Module, config, kept=frozenset()) -> None:
    """Raises UserError for what cannot be done with a mixture of experts. `kept`: modules that are trained in
    full beside an adapter."""
    if any(is_experts(module) for module in kept):
        raise UserError(f"--modules_to_save {config.modules_to_save}: experts cannot be trained in full "
                        "beside an adapter; use --lora_experts true, or --train_type full")
    if config.reentrant_checkpointing and config.use_gradient_checkpointing and auxiliary_loss(model):
        raise UserError("--reentrant_checkpointing true: gives router logits no gradient, and config.json "
                        "asks for the auxiliary loss on them (output_router_logits); leave the flag out")


def attach(model: nn.Module, config, kept=frozenset()) -> list[str]:
    """Wraps the experts that are not `kept` in LoRA. Returns the endings of the stacks' names, PEFT's
    target_parameters."""
    found, targets = {n: m for n, m in find(model).items() if m not in kept}, set()
    if not found:
        raise UserError(f"--lora_experts: {model.config.model_type} has no experts in stacked parameters")
    scaling = adapters.scaling(config.lora_alpha, config.lora_rank, config.use_rslora)
    for name, experts in found.items():
        if experts.has_post_expert_norm:
            raise UserError(f"--lora_experts: {name} has a norm of its own, which is not known here")
        if not hasattr(experts, "adapters"):
            route(experts)
        parent, _, ending = name.rpartition(".")
        for stack in stacks(experts):
            wrapped = getattr(model.get_submodule(parent), ending)
            new = ExpertLoRA(wrapped, experts, stack, config.lora_rank, scaling)
            setattr(model.get_submodule(parent), ending, new)
            targets.add(f"{ending}.{stack}")
    return sorted(targets)


# --------------------------------------------------------------------------------------------- auxiliary loss

def auxiliary_loss(model: nn.Module):
    """Function of (router logits of all blocks, mask of real tokens), coefficient included, where the
    configuration asks for the loss that balances experts (Fedus et al., arXiv:2101.03961, eq. 4 to 6),
    otherwise None.

    It is transformers' own over a micro-batch without its padding, and counts as the micro-batch's share of
    the step's supervised tokens: with one micro-batch the loss is transformers', with several their average.
    """
    config = model.config
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if function is None or not getattr(config, "output_router_logits", False):
        return None
    count = getattr(config, "num_experts", None) or config.num_local_experts

    def balance(logits, real):
        return config.router_aux_loss_coef * function(logits, count, config.num_experts_per_tok, real)
    return balance


# ------------------------------------------------------------------------------------------------- checkpoint

def whole_rows(stack: nn.Parameter, expert: int, low: int, high: int) -> torch.Tensor:
    """Rows [low, high) of an expert's matrix in a stack whose experts FSDP shards, on every rank: one sends,
    so that nobody holds the stack. Collective."""
    mesh, local = stack.device_mesh, stack.detach().to_local()
    group = mesh.get_group(mesh.ndim - 1)
    owner, index = divmod(expert, -(-len(stack) // dist.get_world_size(group)))
    mine = owner == dist.get_rank(group)
    rows = local[index, low:high].contiguous() if mine else local.new_empty(high - low, stack.shape[2])
    dist.broadcast(rows, dist.get_global_rank(group, owner), group=group)
    return rows


class Piece(NamedTuple):
    """Where rows of a model's tensor lie in a checkpoint: a tensor, or matrix `expert` of one."""
    name: str
    expert: int | None = None


class Names:
    """transformers' table of what checkpoints call a model's tensors (transformers.conversion_mapping)."""

    def __init__(self, model: nn.Module):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
        table = get_model_conversion_mapping(model, add_legacy=False)
        self.renamings = [row for row in table if isinstance(row, WeightRenaming)]
        self.converters = [row for row in table if isinstance(row, WeightConverter)]

    def convert(self, stored: str) -> tuple[str, int | None, int, int]:
        """(name in the model, expert, number among the tensors that are joined there by rows, how many those
        are) of a checkpoint's tensor. What needs other operations keeps its name, which the model lacks."""
        from transformers.core_model_loading import apply_converters, apply_renamings
        renamed = apply_renamings(stored, self.renamings)
        for row in self.converters:
            name, pattern = apply_converters(renamed, [row])
            if pattern is None:
                continue
            kinds = [(type(op).__name__, op.dim) for op in row.operations if hasattr(op, "dim")]
            match = re.search(pattern.replace("*.", r"(\d+)\."), renamed)
            joined = [("MergeModulelist", 0), ("Concatenate", 1)][:len(row.operations)]
            if kinds != joined or match is None:
                return stored, None, 0, 1
            return name, int(match[1]), row.source_patterns.index(pattern), len(row.source_patterns)
        return renamed, None, 0, 1


def translate(stored, slots: list, names: Names) -> None:
    """Lets a checkpoint be read under the model's names: what transformers renames, and each expert's matrix
    of a stack as STACK.EXPERT, from a stacked tensor or from the expert's own."""
    wanted = {name for slot in slots for name in slot.names}
    stacked = {slot.names[0].rpartition(".")[0]: slot.count for slot in slots if slot.expert is not None}
    parts: dict[str, dict[int, Piece]] = {}
    sizes: dict[str, int] = {}
    for raw in [name for name in stored.shape if name not in wanted]:
        name, expert, number, size = (raw, None, 0, 1) if raw in stacked else names.convert(raw)
        if name in stacked and expert is None and stored.shape[raw][0] == stacked[name]:
            for each in range(stacked[name]):
                stored.define(f"{name}.{each}", [Piece(raw, each)])
        elif name in wanted:
            stored.define(name, [Piece(raw)])
        elif f"{name}.{expert}" in wanted:
            parts.setdefault(f"{name}.{expert}", {})[number] = Piece(raw)
            sizes[f"{name}.{expert}"] = size
    for name, found in parts.items():
        if len(found) == sizes[name]:
            stored.define(name, [found[number] for number in range(sizes[name])])


# ---------------------------------------------------------------------------------------------------- merging

class Stacks:
    """The stacks of a model folder, and which of their rows each of its tensors has."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM
        from scripts import models, prequantized, vocabulary
        from scripts.checkpoint import find_slots
        config = models.read_config(folder, None, False)
        vocabulary.make_room(config, folder)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        self.stored, slots = prequantized.open_weights(folder), find_slots(self.model)
        translate(self.stored, slots, Names(self.model))
        self.places: dict[str, list[tuple]] = {}  # tensor -> (stack, expert, its rows low to high, piece)
        for name in [slot.names[0] for slot in slots if slot.expert is not None]:
            stack, _, expert = name.rpartition(".")
            for piece, low, high in (self.stored.spans(name) if name in self.stored.pieces else ()):
                self.places.setdefault(piece.name, []).append((stack, int(expert), low, high, piece))

    def made(self, tensor: str, matrix) -> torch.Tensor:
        """A tensor of the files of the rows of matrix(stack, expert): (rows, columns) of the model's."""
        rows = [matrix(stack, expert)[low:high] for stack, expert, low, high, _ in self.places[tensor]]
        return rows[0] if self.places[tensor][0][-1].expert is None else torch.stack(rows)

    def adapters(self, modules: dict, targets: list[str]) -> dict[str, dict]:
        """{stack: its parts}, taken out of an adapter's {module: parts}, in which PEFT's wrappers are named
        from the outermost, that of the last stack, inwards. Raises UserError where they are not there."""
        found = {}
        for name, experts in find(self.model).items():
            wrapped = [f"{name}.{s}" for s in stacks(experts) if f".{name}.{s}".endswith(
                tuple(f".{target}" for target in targets))]
            for depth, stack in enumerate(reversed(wrapped)):
                found[stack] = modules.pop(name + ".base_layer" * depth, {})
        lacking = [stack for stack, parts in found.items() if set(parts) != {"A", "B"}]
        if lacking or not found:
            raise UserError(f"target_parameters of adapter_config.json without tensors in the adapter: "
                            f"{', '.join(lacking) if found else targets}")
        return found

    def delta(self, stack: str, expert: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """B A of one expert, as the model has the matrix; from PEFT's flat factors."""
        experts = self.model.get_submodule(stack.rpartition(".")[0])
        first, second = factors(a, b, len(getattr(experts, stack.rpartition(".")[2])))
        product = second[expert] @ first[expert]
        return product.T if experts.is_transposed else product
