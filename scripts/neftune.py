"""NEFTune (Jain et al., arXiv:2310.05914): uniform noise on embedded tokens while training, up to
alpha / sqrt(L d) in size, for a document of L tokens of width d."""
import torch
import torch.nn as nn


def document_lengths(positions: torch.Tensor) -> torch.Tensor:
    """(rows, length) positions that start again at 0 with each document -> for every token the length of its
    document, int64, same shape. Reads no value on the host."""
    document = (positions == 0).flatten().cumsum(0)
    count = document.new_zeros(len(document) + 1).scatter_add_(0, document, torch.ones_like(document))
    return count[document].view(positions.shape)


def add_noise(model: nn.Module, alpha: float) -> None:
    """Hooks on the embedding, which keep parameter names as they are. Documents of one
    row count their own tokens, as the paper's; a padded row its whole length, as in transformers and TRL."""
    seen = {}

    def remember(module, args, kwargs):
        seen["positions"] = kwargs.get("position_ids")

    def noise(module, args, output):
        if not module.training:
            return output
        positions, (length, width) = seen.get("positions"), output.shape[-2:]
        if positions is not None:
            length = document_lengths(positions).unsqueeze(-1)
        drawn = torch.empty_like(output, dtype=torch.float32).uniform_(-1, 1)
        return output + (drawn * alpha / (length * width) ** 0.5).to(output.dtype)
    model.base_model.register_forward_pre_hook(remember, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(noise)
