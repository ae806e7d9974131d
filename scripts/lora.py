"""LoRA in a few lines (Hu et al., arXiv:2106.09685): y = base(x) + s B(A(dropout(x))), s = alpha / r, or
alpha / sqrt(r) for rsLoRA (Kalajdzievski, arXiv:2312.03732). Same order of operations and same names as
PEFT's, so that a run with either gives the same numbers and the same files.
"""
import torch.nn as nn


class LoRALinear(nn.Module):
    """Wraps a linear (plain or quantised) of shape (out, in); only lora_A (r, in) and lora_B (out, r) are
    trained."""

    def __init__(self, base_layer: nn.Linear, rank: int, scaling: float, dropout: float):
        super().__init__()
        device = base_layer.weight.device
        self.base_layer, self.scaling = base_layer, scaling
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, device=device)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, device=device)

    def forward(self, x):
        y = self.base_layer(x)
        delta = self.lora_B(self.lora_A(self.dropout(x.to(self.lora_A.weight.dtype))))
        return (y + delta * self.scaling).to(y.dtype)
