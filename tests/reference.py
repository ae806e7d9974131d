"""Models from the libraries alone, which the project's are compared with."""

import torch

BLOCKS = {"gpt_neox": "gpt_neox.layers", "falcon": "transformer.h"}  # where they are not model.layers


def quantize_the_rest(blocks, new_blocks: list[int], plain: tuple) -> None:
    """bitsandbytes' Linear4bit for the linears that are of a class of their own (Falcon's): transformers leaves
    them as they are, without a word."""
    import bitsandbytes as bnb

    for name, linear in list(blocks.named_modules()):
        kept = any(f".{part}." in f".model.layers.{name}." for part in plain)
        kept = kept or name and int(name.split(".")[0]) in new_blocks
        if kept or not isinstance(linear, torch.nn.Linear) or isinstance(linear, bnb.nn.Linear4bit):
            continue
        bias = linear.bias is not None
        own = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias, torch.float32, compress_statistics=True, quant_type="nf4"
        )
        own.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=own
        )
        own.bias = linear.bias
        parent, _, leaf = name.rpartition(".")
        setattr(blocks.get_submodule(parent), leaf, own.to("cpu").requires_grad_(False))


def plain_base(folder: str, base: str, new_blocks: list[int], plain: tuple = ()):
    """transformers' own model: plain, over bitsandbytes' Linear4bit, or with the weights that hqq's Quantizer
    gives. Linears whose names end in one of `plain` stay as they are."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    config = AutoConfig.from_pretrained(folder)
    blocks = BLOCKS.get(config.model_type, "model.layers")
    kept = ["lm_head", *(f"{blocks}.{number}" for number in new_blocks), *plain]
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=kept,
    )
    extra = dict(quantization_config=nf4) if base == "nf4" else {}
    # SDPA would leave out the cap on scores, and the sinks
    attention = "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, **extra
    )
    if base == "nf4":
        quantize_the_rest(model.get_submodule(blocks), new_blocks, plain)
    if base == "hqq":
        for name, linear in model.get_submodule(blocks).named_modules():
            if name.endswith(plain) and plain:
                continue
            if isinstance(linear, torch.nn.Linear) and int(name.split(".")[0]) not in new_blocks:
                copy = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
                copy.weight.data = linear.weight.data.clone()
                own = HQQLinear(
                    copy, BaseQuantizeConfig(4, 64, axis=1), compute_dtype=torch.float32, device="cpu"
                )
                linear.weight.data = own.dequantize().clone()
    return model
