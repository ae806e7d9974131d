"""Tiny random models and a tiny tokenizer, as ordinary Hugging Face folders."""

from pathlib import Path

SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
    max_position_embeddings=512,
)
MODELS = {
    "llama": ("llama", {}),
    "llama-one": ("llama", dict(num_hidden_layers=1)),
    "llama-tied": ("llama", dict(tie_word_embeddings=True)),
    "llama-odd": (
        "llama",
        dict(intermediate_size=192, num_attention_heads=2, num_key_value_heads=1, vocab_size=301),
    ),
    "llama-in96": ("llama", dict(hidden_size=96, num_attention_heads=4)),
    "qwen2": ("qwen2", {}),  # biases on q, k, v
    "gemma2": ("gemma2", dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=32)),  # soft caps, tied
    "mixtral": ("mixtral", dict(num_local_experts=4)),
    # sliding windows are shorter than the tests' texts
    "llama3": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
    ),
    "mistral": ("mistral", dict(sliding_window=8)),
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),  # q and k norms
    "gemma3": (  # tied, q and k norms, two RoPEs
        "gemma3_text",
        dict(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "phi3": ("phi3", dict(sliding_window=8)),  # fused qkv, gate and up
    "phi4": (  # as Phi-4-mini: rotates three quarters of a head, RoPE with a factor per frequency, tied
        "phi3",
        dict(
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                long_factor=[2.0] * 6,
                original_max_position_embeddings=256,
            ),
            original_max_position_embeddings=256,
        ),
    ),
    "olmo2": ("olmo2", {}),  # norms after attention and MLP, none before; q and k norms
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0])),  # tied, a block without RoPE
    "granite": (  # four multipliers
        "granite",
        dict(
            logits_scaling=4.0, embedding_multiplier=6.0, residual_multiplier=0.5, attention_multiplier=0.2
        ),
    ),
    "gpt_neox": ("gpt_neox", {}),  # fused qkv, biases, parallel, head stored as embed_out
    "falcon": (  # as Falcon-40B: linears of its own class, parallel, grouped keys, biases
        "falcon",
        dict(bias=True, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=128),
    ),
    "falcon-7b": ("falcon", dict(ffn_hidden_size=128)),  # one norm for attention and MLP, one key head
    "falcon-rw": (  # ALiBi, attention before MLP
        "falcon",
        dict(ffn_hidden_size=128, alibi=True, parallel_attn=False, bias=True, multi_query=False),
    ),
    "starcoder2": ("starcoder2", dict(sliding_window=8)),  # tied, biases, LayerNorm
    "cohere": ("cohere", dict(logit_scale=0.25, use_qk_norm=True)),  # tied, parallel, norms of two dimensions
    "cohere2": (
        "cohere2",
        dict(
            logit_scale=0.25,
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "mixtral-balanced": (
        "mixtral",
        dict(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5),
    ),
    "qwen3-moe": (  # the second block is dense
        "qwen3_moe",
        dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[1], head_dim=16),
    ),
    "gpt-oss": (  # transposed, with biases, gate and up interleaved
        "gpt_oss",
        dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=16, intermediate_size=64),
    ),
}
TEXTS = [
    "Name a fruit that is yellow.",
    "A banana is yellow.",
    "What is two plus two?",
    "Two plus two is four.",
    "Below is an instruction that describes a task.",
    "### Instruction:",
    "### Response:",
    "### Input:",
]


def tokenizer():
    """A byte-level BPE of 300 entries; <s> and </s> are 0 and 1, nothing is added by itself, pad is eos."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def model(name: str):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, **SIZES | dict(bos_token_id=0, eos_token_id=1, pad_token_id=1) | changes
    )
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in made.parameters():  # norms of ones and biases of zeros would hide mistakes
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1) * 0.5, std=0.1)
    return made


def save_model(name: str, folder: str, **kwargs) -> None:
    model(name).save_pretrained(folder, **kwargs)
    tokenizer().save_pretrained(folder)


def save_expanded(source: str, target: str) -> None:
    """The model with a new block after each of its two."""
    from scripts import block_expansion

    block_expansion.main(model_name=source, output_dir=target, expansion_rate=1.0)


def samples(count: int, seed: int = 0, longest: int = 24, vocabulary: int = 300) -> list:
    """Random token sequences of unequal length with unequal numbers of supervised tokens."""
    import random
    from scripts.data import Sample

    rng, made = random.Random(seed), []
    for _ in range(count):
        length = rng.randint(6, longest)
        ids = [rng.randrange(2, vocabulary) for _ in range(length)]
        start = rng.randint(1, length - 1)
        made.append(Sample(ids, [-100] * start + ids[start:]))
    return made


def write_alpaca(path: Path, count: int = 12) -> Path:
    import json

    rows = [
        dict(instruction=f"What is {n} plus one?", input="", output=f"It is {n + 1}.") for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
