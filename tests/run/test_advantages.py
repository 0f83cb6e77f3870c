"""Advantages are those of the papers' formulas, written with PyTorch in float64, for random rewards."""
import json
import os
import subprocess

from begin import needs, rng, scale as SCALE, seed as SEED

with needs:
    import torch

HELPER = os.path.join(os.environ["DRAY_BUILD_DIR"], "run_helper_advantages")
torch.manual_seed(SEED)
print(f"seed {SEED}")


def gae(case, rewards, counts):
    """Equation 16 as it stands: the sum of discounted residuals, not the recursion."""
    values = torch.tensor(case["values"], dtype=torch.float32).double()
    discount = case["gamma"] * case["lambda"]
    made = torch.tensor(case["mask"] or [1] * len(values)).bool()
    advantages = []
    for row, (own, counting) in enumerate(zip(values.split(case["lengths"]),
                                              made.split(case["lengths"]))):
        steps = own[counting]  # what a tool wrote is no step
        after = torch.cat([steps[1:], torch.zeros(1, dtype=torch.float64)])[:len(steps)]
        gained = torch.zeros_like(steps)
        gained[-1:] = rewards[row]
        residuals = gained + case["gamma"] * after - steps
        powers = discount ** torch.arange(len(steps), dtype=torch.float64)
        of_row = torch.zeros_like(own)
        of_row[counting] = torch.stack([(powers[:len(steps) - t] * residuals[t:]).sum()
                                        for t in range(len(steps))] or [torch.zeros(())]).double()[
                                            :len(steps)] * counts[row]
        advantages.append(of_row)
    advantages = torch.cat(advantages)
    return torch.cat([advantages, advantages + values])


def oracle(case):
    rewards = torch.tensor(case["rewards"], dtype=torch.float32).double()
    counts = ~torch.tensor(case["excluded"] or [False] * len(rewards))
    lengths = torch.tensor(case["lengths"])
    if case["method"] == "gae":
        return gae(case, rewards, counts)
    if case["method"] == "reinforce++":  # every token of the batch has its response's reward
        tokens = rewards.repeat_interleave(lengths)[counts.repeat_interleave(lengths)]
        if not len(tokens):
            return torch.zeros_like(rewards)
        whitened = (rewards - tokens.mean()) / (tokens.var(correction=0) + 1e-8).sqrt()
        return torch.where(counts, whitened, 0)
    out = torch.zeros_like(rewards)
    for first in range(0, len(rewards), case["group"]):
        for i in range(first, first + case["group"]):
            group = [j for j in range(first, first + case["group"]) if counts[j]]
            others = [j for j in group if j != i] if case["method"] == "rloo" else group
            if counts[i] and others:
                out[i] = rewards[i] - rewards[others].mean()
                if case["divide"]:
                    out[i] /= rewards[group].std(correction=0) + 1e-6
    return out


def random_case(method, divide, excluded):
    group = rng.randint(2, 6)
    rows = group * rng.randint(1, 5)
    kinds = [lambda: float(rng.random() < 0.5), lambda: rng.gauss(0, 3), lambda: 1.0]
    kind = rng.choice(kinds)
    return {"method": method, "group": group, "divide": divide,
            "rewards": [kind() for _ in range(rows)],
            "lengths": [rng.randint(1, 30) for _ in range(rows)],
            "excluded": [rng.random() < 0.4 for _ in range(rows)] if excluded else None}


cases = [random_case(method, divide and method != "reinforce++", excluded)
         for method in ("grpo", "rloo", "reinforce++") for divide in (False, True)
         for excluded in (False, True) for _ in range(20 * SCALE)]
# all the same, all excluded, all but one excluded
for method in ("grpo", "rloo", "reinforce++"):
    for rewards, excluded in (([1.0] * 4, None), ([1.0, 0.0] * 2, [True] * 4),
                              ([1.0, 0.0] * 2, [True, True, False, True])):
        cases.append({"method": method, "group": 4, "divide": False, "rewards": rewards,
                      "lengths": [3] * 4, "excluded": excluded})

for gamma, discount in ((1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0)):
    for excluded, masked in ((False, False), (True, False), (False, True)):
        case = random_case("gae", False, excluded)
        count = sum(case["lengths"])
        cases.append(case | {"values": [rng.gauss(0, 2) for _ in range(count)], "gamma": gamma,
                             "lambda": discount,
                             "mask": [rng.randint(0, 1) for _ in range(count)] if masked else None})

done = subprocess.run([HELPER], input="\n".join(map(json.dumps, cases)), text=True,
                      stdout=subprocess.PIPE, timeout=60, check=True)
answers = [json.loads(line) for line in done.stdout.splitlines()]
assert len(answers) == len(cases), (len(answers), len(cases))
for case, answer in zip(cases, answers):
    expected = oracle(case)
    found = torch.tensor(answer, dtype=torch.float64)
    off = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    assert off < 1e-6, f"seed {SEED}: {case}: {answer}, expected {expected.tolist()}"
    hidden = [a for a, left_out in zip(answer, case["excluded"] or []) if left_out]
    assert case["method"] == "gae" or not any(hidden), f"seed {SEED}: {case}: {answer}"
print(f"ok {len(cases)} cases")
