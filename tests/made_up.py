"""A made-up architecture whose code comes with its folder: blocks that no list holds, logits that are scaled by a
number that nobody else calls so, blocks that are called with their input by name."""

from pathlib import Path

import tiny

CODE = '''
import torch
import torch.nn as nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class MadeUpConfig(PreTrainedConfig):
    model_type = "made_up"

    def __init__(self, width=64, vocab_size=300, odd_scale=2.0, **kwargs):
        self.width, self.vocab_size, self.odd_scale = width, vocab_size, odd_scale
        super().__init__(**kwargs)


class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix, self.up, self.down = (nn.Linear(a * width, b * width) for a, b in ((1, 1), (1, 2), (2, 1)))

    def forward(self, hidden):
        mean = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        hidden = hidden + self.mix(mean.to(hidden.dtype))
        return hidden + self.down(self.up(hidden).relu())


class MadeUp(PreTrainedModel):
    config_class = MadeUpConfig
    base_model_prefix = "model"

    def _init_weights(self, module):
        pass


class Decoder(MadeUp):
    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.width)
        for number in range(3):
            setattr(self, f"stage_{number}", Stage(config.width))
        self.post_init()

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, use_cache=None, **kwargs):
        hidden = self.table(input_ids)
        for number in range(3):
            hidden = getattr(self, f"stage_{number}")(hidden=hidden)
        return BaseModelOutput(last_hidden_state=hidden)


class MadeUpForCausalLM(MadeUp):
    def __init__(self, config):
        super().__init__(config)
        self.model = Decoder(config)
        self.out = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.table

    def get_output_embeddings(self):
        return self.out

    def forward(self, input_ids, attention_mask=None, **kwargs):
        hidden = self.model(input_ids).last_hidden_state
        return CausalLMOutput(logits=self.out(hidden) / self.config.odd_scale)
'''
AUTO = dict(AutoConfig="made_up.MadeUpConfig", AutoModelForCausalLM="made_up.MadeUpForCausalLM")


def load(folder: Path):
    """The model as a user of the folder gets it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")


def save(folder: Path) -> Path:
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(exist_ok=True)
    (folder / "made_up.py").write_text(CODE)
    said = dict(model_type="made_up", auto_map=AUTO, architectures=["MadeUpForCausalLM"], odd_scale=2.0)
    (folder / "config.json").write_text(json.dumps(said | dict(width=64, vocab_size=300)))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    tensors = {name: torch.randn_like(p) * 0.1 for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.tokenizer().save_pretrained(folder)
    return folder
