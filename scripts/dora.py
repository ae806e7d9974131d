"""DoRA (Liu et al., arXiv:2402.09353): y = m (W x + s B A x) / ||W + s B A|| per output row, the norm held
constant in backward. PEFT's mathematics and names, over a plain or a quantised base; the norm costs
rank-sized products instead of a dense B A:

    ||w + s b A||^2 = ||w||^2 + 2 s (A w) . b + s^2 b (A A^T) b^T        for a row w of W and its row b of B

||w||^2 never changes and is kept. A w comes out of the same product as W x: A's rows ride along as more
tokens.
"""
import torch
import torch.nn as nn

from scripts.lora import LoRALinear

TINY = 1e-6  # the norm of a row of zeros: its output is then zero, not infinite


class DoRALinear(LoRALinear):
    """LoRALinear with trained magnitudes (out,), which start as the row norms of the base's weight."""

    def __init__(self, base_layer: nn.Linear, rank: int, scaling: float, dropout: float):
        super().__init__(base_layer, rank, scaling, dropout)
        rows, device = base_layer.out_features, base_layer.weight.device
        self.lora_magnitude_vector = nn.Parameter(torch.empty(rows, device=device))
        # ||w||^2 in fp32, as bytes: FSDP shards it like any parameter, and no precision policy rounds it.
        squares = torch.empty(rows, 4, dtype=torch.uint8, device=device)
        self.base_squares = nn.Parameter(squares, requires_grad=False)

    def row_squares(self) -> torch.Tensor:
        """(out,) fp32: ||w||^2 of the base's rows, from the dequantised weight where it is quantised."""
        base = self.base_layer
        weight = base.dequantize(torch.float32) if hasattr(base, "quantizer") else base.weight.float()
        return weight.square().sum(1)

    @torch.no_grad()
    def norm(self, crossed: torch.Tensor) -> torch.Tensor:
        """(out,) fp32: ||W + s B A|| by row; `crossed` is W A^T, (out, r)."""
        A, B, s = self.lora_A.weight.float(), self.lora_B.weight.float(), self.scaling
        base = self.base_squares.view(torch.float32).flatten()
        mixed, own = (crossed.float() * B).sum(1), ((B @ (A @ A.T)) * B).sum(1)
        return (base + 2 * s * mixed + s * s * own).clamp(min=0).sqrt()

    def forward(self, x):
        A, bias, rows = self.lora_A.weight, self.base_layer.bias, x.numel() // x.shape[-1]
        both = self.base_layer(torch.cat([x.reshape(rows, -1), A.detach().to(x.dtype)]))
        y, crossed = both[:rows].view(*x.shape[:-1], -1), both[rows:].T
        if bias is not None:
            crossed = crossed - bias.to(y.dtype)[:, None]
        m = self.lora_magnitude_vector
        # Rounded as m is, so that at the start the quotient is exactly one.
        ratio = m / self.norm(crossed).to(m.dtype).clamp(min=TINY)
        dropped = self.dropout(x.to(A.dtype))
        same = isinstance(self.dropout, nn.Identity) or not self.training
        product = y if same else self.base_layer(dropped)
        product = product if bias is None else product - bias.to(y.dtype)
        delta = self.lora_B(self.lora_A(dropped)) * self.scaling
        return (y + (ratio - 1) * product + ratio * delta).to(y.dtype)
