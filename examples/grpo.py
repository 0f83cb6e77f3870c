"""GRPO over dray's queue and weights, with a model of transformers': three processes, one terminal.

    pip install . torch transformers numpy tqdm
    python3 examples/grpo.py [--steps 150]

The task: repeat the prompt's first token. The rollout claims prompts and generates with the newest version, the grader
claims whole groups, and the trainer, this process, iterates over what is graded: samples of step k + 1 are made while
step k is trained. A model of one's own takes the place of make_model's, a reward that of `grade`."""
import argparse

import dray
import numpy as np
import torch
import torch.multiprocessing as mp
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

PROMPTS, SAMPLES, PROMPT, RESPONSE, VOCAB = 16, 8, 4, 4, 16  # a step's prompts, a group's samples, tokens
CLIP, LR = 0.2, 2e-3
TASKS = {
    "rollout": (["prompt"], ["response", "log_prob"]),
    "reward": (["prompt", "response"], ["reward", "advantage"]),
    "train": (["prompt", "response", "log_prob", "reward", "advantage"], []),
}


def make_model():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None))


def log_probs(model, prompts, responses):
    """Of the responses' tokens, at temperature 1."""
    logits = model(input_ids=torch.cat([prompts, responses], 1)).logits[:, PROMPT - 1:-1]
    return logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]


def grade(prompts, responses):
    """A reward a response: the share of its tokens that are the prompt's first."""
    return (responses == prompts[:, :1]).float().mean(1)


def rollout():
    model = make_model().eval().requires_grad_(False)
    with dray.Queue("grpo", tasks=TASKS) as queue, dray.Subscriber(model) as weights:
        weights.update()
        while True:
            try:
                claim = queue.claim("rollout", PROMPTS * SAMPLES // 2, up_to=True, framework="torch")
            except dray.DrayError as error:
                if error.name == "EEND":
                    return
                raise
            with claim as batch:
                prompts = batch["prompt"]
                weights.update()
                made = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
                                      min_new_tokens=RESPONSE, max_new_tokens=RESPONSE, top_k=0, top_p=1.0)
                responses = made[:, PROMPT:]
                batch.set("response", responses)
                batch.set("log_prob", log_probs(model, prompts, responses))


def grader():
    with dray.Queue("grpo", tasks=TASKS) as queue:
        while True:
            try:
                claim = queue.claim("reward", SAMPLES, policy="group", framework="torch")
            except dray.DrayError as error:
                if error.name == "EEND":
                    return
                raise
            with claim as batch:
                rewards = grade(batch["prompt"], batch["response"]).reshape(-1, SAMPLES)
                advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
                batch.set("reward", rewards.reshape(-1))
                batch.set("advantage", advantages.reshape(-1))


def train(steps):
    rng, model = np.random.default_rng(0), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    publisher = dray.Publisher(model)
    publisher.attach(optimizer)  # its step waits until nobody reads the version before
    publisher.publish(1)

    def prompts(step):
        queue.insert({"prompt": rng.integers(0, VOCAB, (PROMPTS, PROMPT))}, f"step-{step}", rows=PROMPTS * SAMPLES,
                     group_size=SAMPLES, once_per_group=True, seal=True)

    with publisher, dray.Queue("grpo", tasks=TASKS) as queue:
        prompts(1)
        shown = tqdm(range(1, steps + 1))
        for step in shown:
            if step < steps:
                prompts(step + 1)
            rewards = []
            with dray.StreamDataLoader("train", TASKS["train"][0], PROMPTS * SAMPLES // 4, queue="grpo",
                                       partition=f"step-{step}", framework="torch") as loader:
                for batch in loader:  # four of them, as soon as each is there
                    new = log_probs(model, batch["prompt"], batch["response"])
                    ratio, advantage = (new - batch["log_prob"]).exp(), batch["advantage"][:, None]
                    loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
                    (loss / 4).backward()
                    rewards.append(batch["reward"].mean().item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(step + 1)
            queue.clear(f"step-{step}")
            shown.set_postfix(reward=f"{np.mean(rewards):.3f}")
        queue.end()
    return np.mean(rewards)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    with dray.serve():
        others = [mp.get_context("spawn").Process(target=role, daemon=True) for role in (rollout, grader)]
        for process in others:
            process.start()
        reward = train(steps)
        for process in others:
            process.join()
    print(f"mean reward of the last step: {reward:.3f}")


if __name__ == "__main__":
    main()
