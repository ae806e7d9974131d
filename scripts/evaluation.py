"""Measuring the model while it is trained: the exact loss on other examples, and answers to look at."""
import torch

from scripts import data


@torch.no_grad()
def mean_loss(training, samples, pad: int) -> tuple[float, int]:
    """(loss, supervised tokens) of all `samples`: the mean over tokens, whatever the batches and ranks."""
    config, runtime, module = training.config, training.runtime, training.model.module.eval()
    total, count = 0.0, 0
    for (micro,) in data.steps(len(samples), seed=0, epoch=0, batch_size=config.batch_size, accumulation=1,
                               rank=runtime.rank, world=runtime.world):
        batch, supervised = data.arguments(data.collate([samples[i] for i in micro], pad), runtime.device)
        with training.scope():
            total += module(**batch).item()
        count += supervised
    module.train()
    total, count = runtime.gather(total, count).sum(0).tolist()
    return total / max(1, count), int(count)


@torch.no_grad()
def answers(training, samples, tokenizer, number: int, longest: int = 48):
    """(prompt, greedy answer) of the first samples. All ranks compute the same: gathering weights takes all.
    """
    module, device = training.model.module.eval(), training.runtime.device
    for i in range(min(number, len(samples))):
        ids, labels = samples[i]
        start = next(t for t, label in enumerate(labels) if label != data.IGNORE)
        ids = list(ids[:start])
        while len(ids) < start + longest and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            with training.scope():
                last = torch.tensor([len(ids) - 1], device=device)
                best = int(module(torch.tensor([ids], device=device), last).argmax())
                ids.append(int(training.runtime.gather(best)[0, 0]))  # unequal cards may differ in one
        yield tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:], skip_special_tokens=True)
    module.train()


def run(training, held, metrics, step: int, epoch: int) -> None:
    """Measures the loss on the held-out examples, and shows what the model answers to some, if asked for."""
    loss, tokens = mean_loss(training, held.eval, held.pad)
    metrics.evaluated(step=step, epoch=epoch, eval_loss=loss, eval_supervised_tokens=tokens)
    for prompt, answer in answers(training, held.eval, held.tokenizer, training.config.eval_generate):
        metrics.show(f"--- {prompt}\n>>> {answer}")
    metrics.go_on()
