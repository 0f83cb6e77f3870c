"""What a new model learns before there is anything to reward: right answers of the demo, until one sample in ten is right."""
import random

import torch

from text import BEGIN, END, encode, held_out


def answers(rng, count, digits):
    """Prompts and right answers; none is held out."""
    found = []
    while len(found) < count:
        number = rng.randrange(10 ** digits)
        if not held_out(number):
            text = f"{number:0{digits}d}"
            found.append(([BEGIN] + encode(text + "="), encode(text[::-1]) + [END]))
    return [prompt for prompt, _ in found], [answer for _, answer in found]


def probability(model, prompts, responses, log_probs):
    """Of the right answer, on average: what samples would get."""
    with torch.no_grad():
        found, there = log_probs(model, prompts, responses)
        return float((found * there).sum(1).exp().mean())


def warm_up(role, model, log_probs):
    """The same on all ranks: the seed is the job's, and nothing is shared out. Its optimiser is forgotten."""
    settings, digits = role.config["warmup"], role.config["data"]["digits"]
    rng = random.Random(role.config["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0)
    probe = answers(rng, 256, digits)
    for step in range(settings["max_steps"] + 1):
        if step % settings["check_every"] == 0:
            reward = probability(model, *probe, log_probs)
            role.report("warmup", warmup_step=step, reward_mean=reward, done=reward >= settings["reward"])
            if reward >= settings["reward"]:
                return reward
        found, there = log_probs(model, *answers(rng, settings["batch"], digits))
        (-(found * there).sum() / there.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        optimizer.zero_grad()
    if settings["max_steps"]:
        raise RuntimeError(f"warmup: reward {reward:.3f} after {step} steps, {settings['reward']} wanted")
    return reward
