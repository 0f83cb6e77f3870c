"""What the engine's Python tests share: models made by transformers, and the helper program."""

import json
import os
import subprocess
import tempfile

from begin import needs, rng, scale as SCALE, seed as SEED

with needs:
    import torch
    import transformers
    from safetensors.torch import load_file

HELPER = os.path.join(os.environ["DRAY_BUILD_DIR"], "engine_helper_engine")

torch.set_num_threads(1)
torch.manual_seed(SEED)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM,
              transformers.LlamaForTokenClassification),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM,
              transformers.Qwen2ForTokenClassification),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM,
              transformers.Qwen3ForTokenClassification),
}


def make_model(family, value=False, **changes):
    """A random model of the family, for the next token or (value) for one number a token. Biases and
    norms are made random too: their defaults would hide them."""
    sizes = dict(vocab_size=259, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
                 num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
                 tie_word_embeddings=False, pad_token_id=None, bos_token_id=None,
                 eos_token_id=None)
    if family == "qwen3":
        sizes["head_dim"] = 16
    sizes.update(changes)
    config, model, scorer = FAMILIES[family]
    if value:
        sizes["num_labels"], model = 1, scorer
    made = model(config(**sizes, attn_implementation="eager")).float().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.15)
    return made


def load(folder):
    with open(f"{folder}/config.json") as file:
        value = "TokenClassification" in json.load(file)["architectures"][0]
    kind = (transformers.AutoModelForTokenClassification if value
            else transformers.AutoModelForCausalLM)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def save(model, folder, dtype=torch.float32, **options):
    """Saves the model in dtype and returns it as a reader in float32 sees it."""
    model.to(dtype).save_pretrained(folder, **options)
    return load(folder)


def call(request, fails=False):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(request, file)
        file.flush()
        # the helper frees nothing before it ends
        environment = dict(os.environ, ASAN_OPTIONS="detect_leaks=0")
        done = subprocess.run([HELPER, file.name], stdout=subprocess.PIPE, text=True,
                              timeout=120, env=environment)
    answer = json.loads(done.stdout) if done.stdout else {"error": f"status {done.returncode}"}
    if ("error" in answer) != fails:
        raise AssertionError(f"seed {SEED}: {request.get('do')}: {str(answer)[:500]}")
    return answer


def random_tokens(count, vocabulary=259):
    return [rng.randrange(vocabulary) for _ in range(count)]


def random_rows(rows, vocabulary=259, prompt=(1, 9), response=(0, 7)):
    return ([random_tokens(rng.randint(*prompt), vocabulary) for _ in range(rows)],
            [random_tokens(rng.randint(*response), vocabulary) for _ in range(rows)])


def logits_of(model, tokens):
    return model(torch.tensor([tokens])).logits[0]


def response_logprobs(model, prompts, responses, temperature=1.0):
    """Log-probs and entropies of all response tokens, row after row, with gradients."""
    logprobs, entropies = [], []
    for prompt, response in zip(prompts, responses):
        if not response:
            continue
        z = logits_of(model, prompt + response)[len(prompt) - 1:-1] / temperature
        log_softmax = torch.log_softmax(z, -1)
        logprobs.append(log_softmax.gather(1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def response_values(model, prompts, responses):
    """A value model's number for each state that a response token is chosen in, with gradients."""
    return torch.cat([logits_of(model, prompt + response)[len(prompt) - 1:-1, 0]
                      for prompt, response in zip(prompts, responses)])


AGGREGATES = ("token", "sample", "length")  # dray__aggregate


def random_mask(responses):
    """Which response tokens the model made: all, or runs of some, and in one row of eight none."""
    if rng.random() < 0.3:
        return [1] * sum(map(len, responses))
    return [made for r in responses for share in [rng.choice([0.6, 0.9, 1, 0.6, 0.9, 1, 1, 0])]
            for made in (int(rng.random() < share) for _ in r)]


def random_policy(prompts, responses, logprobs, **changes):
    """A batch off policy enough that every bound works, with every term switched on."""
    rows, count = len(prompts), len(logprobs)
    noise = lambda size: size * torch.randn(count)
    # of a batch of mixed versions: each row's policy was another distance away
    old = logprobs + noise(0.3)
    apart = torch.cat([torch.full((len(r),), rng.choice([0.0, 0.1, 0.5])) for r in responses])
    batch = {"loss": "policy", "prompts": prompts, "responses": responses,
             "advantages": torch.randn(rows).tolist(), "old": old.tolist(),
             "ref": (logprobs + noise(0.5)).tolist(),
             "behaviour": (old + apart * torch.randn(count)).tolist(),
             "decoupled": rng.random() < 0.5, "truncate": rng.choice([0, 0.9, 1.2]),
             "aggregate": rng.randrange(3), "length": 11.0,
             "masked": [rng.random() < 0.25 for _ in range(rows)], "mask": random_mask(responses),
             "clip_low": 0.15, "clip_high": 0.25, "dual_clip": rng.choice([0, 1.1, 1.3]),
             "kl": 0.3, "entropy": 0.2}
    batch.update(changes)
    return batch


def policy_loss(batch, logprobs, entropies):
    """The sum that policy.h states, written with what PyTorch has; what it is divided by; and what
    statistics should say. The computation has the dtype of logprobs."""
    tensor = lambda key: torch.tensor(batch[key], dtype=logprobs.dtype)
    lengths = torch.tensor([len(r) for r in batch["responses"]])
    masked = torch.tensor(batch.get("masked", [False] * len(lengths)))
    made = torch.tensor(batch.get("mask", [1] * len(logprobs))).bool()
    counts = ~masked.repeat_interleave(lengths) & made
    advantages = tensor("advantages")
    if not batch.get("token_advantages"):
        advantages = advantages.repeat_interleave(lengths)
    old = tensor("old") if "old" in batch else logprobs.detach()
    ratio = (logprobs - old).exp()
    behaviour = (old - tensor("behaviour")).exp() if "behaviour" in batch else torch.ones_like(old)
    weight = torch.ones_like(old)
    if batch.get("decoupled") or batch.get("truncate"):
        weight = behaviour.clamp(max=batch.get("truncate") or float("inf"))
    bounded = ratio.clamp(1 - batch.get("clip_low", 0.2), 1 + batch.get("clip_high", 0.2))
    term = torch.minimum(ratio * advantages, bounded * advantages)
    dual = torch.zeros_like(counts)
    if batch.get("dual_clip"):
        floor = batch["dual_clip"] * advantages
        dual = (advantages < 0) & (floor > term)
        term = torch.where(advantages < 0, torch.maximum(term, floor), term)
    loss = -term * weight
    mean = lambda of: of[counts].double().mean().item() if counts.any() else 0.0
    most = lambda of: of[counts].max().item() if counts.any() else 0.0
    stats = {"entropy": mean(entropies), "ratio_mean": mean(ratio), "ratio_max": most(ratio),
             "clip_fraction": mean(bounded * advantages < ratio * advantages),
             "dual_clip_fraction": mean(dual), "behaviour_mean": mean(behaviour),
             "behaviour_square": mean(behaviour ** 2), "behaviour_max": most(behaviour),
             "truncated_fraction": mean(behaviour > (batch.get("truncate") or float("inf")))}
    if "ref" in batch:
        difference = tensor("ref") - logprobs
        k3 = difference.exp() - difference - 1
        loss = loss + batch.get("kl", 0) * k3
        stats["kl"] = mean(k3)
    loss = loss - batch.get("entropy", 0) * entropies
    return *aggregated(batch, loss), stats


def aggregated(batch, loss):
    """The sum over the tokens that count, and what it is divided by."""
    lengths = torch.tensor([len(r) for r in batch["responses"]])
    masked = torch.tensor(batch.get("masked", [False] * len(lengths)))
    made = torch.tensor(batch.get("mask", [1] * len(loss))).bool()
    counts = ~masked.repeat_interleave(lengths) & made
    how = AGGREGATES[batch.get("aggregate", 0)]
    own = torch.tensor([part.sum().item() for part in made.split(lengths.tolist())])
    if how == "sample":
        loss = loss / own.clamp(min=1).repeat_interleave(lengths)
    divisor = {"token": counts.sum().item(), "sample": ((own > 0) & ~masked).sum().item(),
               "length": len(lengths) * batch.get("length", 0)}[how]
    return (loss * counts).sum(), divisor


def random_values(prompts, responses, values, **changes):
    """A batch for a value model, whose values have gone on since they were written."""
    noise = lambda size: size * torch.randn(len(values))
    batch = {"loss": "value", "prompts": prompts, "responses": responses,
             "values": (values + noise(0.3)).tolist(), "returns": (values + noise(0.6)).tolist(),
             "masked": [rng.random() < 0.25 for _ in prompts], "mask": random_mask(responses),
             "aggregate": rng.randrange(3), "length": 11.0, "clip": rng.choice([0, 0.1, 0.3])}
    batch.update(changes)
    return batch


def value_loss(batch, values):
    """The sum that value.h states, what it is divided by, and how many tokens were clipped."""
    tensor = lambda key: torch.tensor(batch[key], dtype=values.dtype)
    loss = (values - tensor("returns")) ** 2
    clipped = torch.zeros_like(values)
    if batch["clip"]:
        bounded = torch.clamp(values, tensor("values") - batch["clip"],
                              tensor("values") + batch["clip"])
        other = (bounded - tensor("returns")) ** 2
        clipped = (other > loss).to(values.dtype)
        loss = torch.max(loss, other)
    count, _ = aggregated({**batch, "aggregate": 0}, clipped)
    return *aggregated(batch, loss / 2), count.item()


def expect_close(what, found, expected, tolerance):
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: shape {found.shape}, expected {expected.shape}")
    worst = (found - expected).abs().max().item() if found.numel() else 0.0
    if not worst < tolerance:
        raise AssertionError(f"seed {SEED}: {what}: differs by {worst}, allowed {tolerance}")


def main(tests):
    print(f"seed {SEED}")
    for test in tests:
        test()
        print(f"ok {test.__name__}", flush=True)
