"""Models from the libraries alone, which the project's are compared with."""

import torch


def plain_base(folder: str, base: str, new_blocks: list[int], plain: tuple = ()):
    """transformers' own model: plain, over bitsandbytes' Linear4bit, or with the weights that hqq's Quantizer
    gives. Linears whose names end in one of `plain` stay as they are."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    kept = ["lm_head", *(f"model.layers.{number}" for number in new_blocks), *plain]
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=kept,
    )
    extra = dict(quantization_config=nf4) if base == "nf4" else {}
    config = AutoConfig.from_pretrained(folder)
    # SDPA would leave out the cap on scores, and the sinks
    attention = "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, **extra
    )
    if base == "hqq":
        for name, linear in model.model.layers.named_modules():
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
