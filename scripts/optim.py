"""Optimiser state by name, for checkpoints."""


def state_tensors(optimizer, named: dict) -> dict:
    return {f"{key}.{name}": value for name, p in named.items() for key, value in optimizer.state[p].items()
            if value is not None}


def allocate_state(optimizer, named: dict, keys: set[str]) -> None:
    import torch
    for p in named.values():
        for key in keys:
            optimizer.state[p][key] = torch.zeros(()) if key == "step" else torch.zeros_like(p)
