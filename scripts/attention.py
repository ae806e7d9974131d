"""Attention inside documents only: what stands in a row one behind the other is cut into documents again, and
those of similar length go through causal scaled_dot_product_attention together. No mask exists, nothing is
computed between documents, and rows of unequal examples need no padding.
"""
import torch

from scripts.flags import UserError

NAME, SHORTEST = "documents", 32  # documents up to that many tokens are one group
LAYERS = {"full_attention", "sliding_attention"}  # layers that look at nothing but tokens before them


def suits(model) -> bool:
    """Whether this is all that a model's layers do: others (chunks, recurrences, caps on scores) need masks
    or more."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    common = getattr(model, "_supports_attention_backend", False)  # calls what transformers registers
    return bool(common) and model.config._attn_implementation == "sdpa" and kinds <= LAYERS


def use(model) -> None:
    """Gives the model, built with sdpa, this attention. As it is not registered for masks, transformers makes
    none."""
    from transformers import AttentionInterface
    AttentionInterface.register(NAME, attend)
    model.config._attn_implementation = NAME


def used(model) -> bool:
    return model.config._attn_implementation == NAME


def documents(position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(rows, length) positions, on the host, that start again with each document -> a tensor (documents,
    longest) of flat positions for each group of documents of similar length, the shorter ones filled up with
    what follows them; and last the place of every position in the groups' elements. () where rows are
    single documents."""
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero().flatten()
    if len(starts) == len(position_ids):
        return ()
    lengths = torch.diff(starts, append=starts.new_tensor([len(flat)]))
    steps = (2 * lengths.clamp(min=SHORTEST).log2()).ceil()  # two groups to a doubling
    groups, place, done = [], torch.empty_like(flat), 0
    for step in steps.unique():
        first, length = starts[steps == step], lengths[steps == step]
        offsets = torch.arange(int(length.max()))
        index, real = first[:, None] + offsets, offsets < length[:, None]
        place[index[real]] = done + real.flatten().nonzero().flatten()
        groups.append(index.clamp(max=len(flat) - 1))
        done += index.numel()
    return *groups, place


def attend(module, query, key, value, attention_mask, documents=None, sliding_window=None, **kwargs):
    """An attention function of transformers': query (rows, heads, length, size), key and value with as many
    or fewer heads -> (rows, length, heads, size) and no weights. `documents` of () are whole rows. Raises
    UserError for a model that does not hand them on or makes masks or biases of its own."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa
    if documents is None or attention_mask is not None or kwargs.get("position_bias") is not None:
        name = type(module).__name__
        raise UserError(f"{name} cannot attend inside documents: use --attn_implementation sdpa")
    if not documents:
        mask = window(query.shape[2], sliding_window, query.device)
        return sdpa(module, query, key, value, mask, **kwargs)
    *groups, place = documents
    flat, found = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)], []
    for index in groups:
        q, k, v = (t.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2) for t in flat)
        mask = window(index.shape[1], sliding_window, query.device)
        found.append(sdpa(module, q, k, v, mask, **kwargs)[0].flatten(0, 1))
    whole = torch.cat(found).index_select(0, place)
    return whole.unflatten(0, (query.shape[0], query.shape[2])), None


def window(length: int, size: int | None, device) -> torch.Tensor | None:
    """The mask of a sliding window of `size` tokens; None where causality is all there is."""
    if size is None or length <= size:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return ((distance >= 0) & (distance < size))[None, None]
