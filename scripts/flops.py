"""How many floating-point operations training takes, and how many a device can do: together the share of the
peak, MFU (model FLOPs utilisation; Chowdhery et al., PaLM, arXiv:2204.02311, appendix B). What is computed
twice (blocks under gradient checkpointing, dequantised weights) counts once.
"""
import torch
import torch.nn as nn

# FLOP/s of one device in bf16 (V100, T4: fp16), accumulated in fp32, without sparsity. Sources: the vendors'
# data sheets, and for RTX cards the appendices of NVIDIA's GA102, Ada and RTX Blackwell architecture papers.
# A device is the first row whose words are all in its name; with a word of OTHERS it is another card.
PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12,
    "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "A40": 149.7e12, "A30": 165e12, "A10": 125e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "V100 PCIe": 112e12, "V100": 125e12, "T4": 65e12,
    "RTX A6000": 154.8e12, "RTX 6000 Ada": 364.2e12, "RTX 3090": 71e12, "RTX 4090": 165.2e12,
    "RTX 5090": 209.5e12, "MI300X": 1307e12,
}
OTHERS = {"ti", "d", "super", "laptop", "mobile", "mig", "max"}


def peak(name: str) -> float | None:
    """Dense 16-bit FLOP/s of the device of that name; None where it is not known."""
    words = set(name.lower().replace("-", " ").split())
    fitting = [flops for known, flops in PEAKS.items() if words.issuperset(known.lower().split())]
    return fitting[0] if fitting and not words & OTHERS else None


def device_peak(device) -> float | None:
    """The peak of this process's device; None on a CPU."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return peak(name(device)) if name else None


def weights(block: nn.Module, config) -> list[tuple[float, bool]]:
    """(elements that a token is multiplied with, whether they are trained) of each matrix of a block:
    linears, quantised or not, and what lies in one parameter for all experts, of which a token meets a few.
    """
    found = []
    for module in block.modules():
        if isinstance(module, nn.Linear):
            trained = any(p.requires_grad and p.ndim > 1 for p in module.parameters(recurse=False))
            found.append((module.in_features * module.out_features, trained))
            continue
        for elements, experts, trained in stacked(module):
            met = getattr(config, "num_experts_per_tok", None) or experts
            found.append((elements * met / experts, trained))
    return found


def stacked(module: nn.Module) -> list[tuple[int, int, bool]]:
    """(elements, experts, whether they are trained) of what lies directly in a module for several experts."""
    if hasattr(module, "count") and hasattr(module, "quantizer"):
        return [(module.count * module.in_features * module.out_features, module.count, False)]
    if hasattr(module, "count") and hasattr(module, "lora_A"):
        return [(p.numel(), module.count, True) for p in (module.lora_A.weight, module.lora_B.weight)]
    return [(p.numel(), len(p), p.requires_grad) for p in module.parameters(recurse=False) if p.ndim == 3]


def per_token(model: nn.Module, blocks) -> dict[str, float]:
    """FLOPs of a training step, forward and backward, of a model whose parameters have their whole shapes:

        step = token * tokens + supervised * supervised tokens + attention * (sum of squared lengths)

    A matrix of n elements takes 2n forward; backward takes 2n for the gradient of its input, from the first
    block that holds something trained upwards, and 2n for its own where it is trained. `supervised` is the
    head, which only supervised positions reach. Attention takes 4 * heads * head size per pair of positions
    forward and twice that backward; as in PaLM the causal half is not taken off. Left out, being small:
    norms, activations, rotary embedding, softmax, the loss, DoRA's norms, routers of experts. Counted,
    though adapters over a frozen embedding do not need it: the first block's gradient at q, k and v.
    """
    config, head = model.config, model.get_output_embeddings()
    heads, width = getattr(config, "num_attention_heads", None) or 1, head.in_features
    size = getattr(config, "head_dim", None) or width // heads
    pair, token, attention = 4 * heads * size, 0.0, 0.0
    reached = model.get_input_embeddings().weight.requires_grad
    for block in blocks:
        reached = reached or any(p.requires_grad for p in block.parameters())
        token += sum(n * (2 + 2 * reached + 2 * trained) for n, trained in weights(block, config))
        attention += pair * (1 + 2 * reached)
    supervised = head.weight.numel() * (2 + 2 * reached + 2 * head.weight.requires_grad)
    return dict(token=token, supervised=float(supervised), attention=attention)


def of_step(per: dict[str, float], tokens: int, supervised: int, length: float) -> float:
    """FLOPs of a step; `per` from per_token. The sum of squared lengths is taken as tokens times the mean
    `length` of an example: a little low where lengths differ."""
    return (per["token"] + per["attention"] * length) * tokens + per["supervised"] * supervised
