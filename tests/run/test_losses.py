"""Each loss, advantage and reward setting trains otherwise than the default, and says so in the metrics.
That what it computes is right is shown by tests/engine/test_losses.py and test_advantages.py."""
from jobs import *

# Rewards of random tokens: how long they are as JSON; large steps, so that ratios leave their bounds.
BASE = ["steps=2", "eval.prompts=4", "rollout.max_new_tokens=24", "reward.rule=command",
        'reward.command=while read -r line; do echo "${#line}"; done', "actor.lr=0.05",
        "actor.kl=0.1", "actor.warmup_steps=0", "actor.grad_norm=0"]
LENGTH = "{rule: command, command: 'while read -r line; do echo \"${#line}\"; done'"


def trained(name, *settings, base=BASE):
    words = [word for setting in [*base, *settings] for word in ("--set", setting)]
    folder = work / name
    done = run(folder, *words)
    check(done.returncode == 0, f"{name}: {done.stderr}")
    return folder, rows(folder)[1:] if done.returncode == 0 else []


def optimizer(folder):
    state = folder / "checkpoints/step-000002/optimizer"
    check(state.is_dir(), f"no {state}")
    return state


plain, table = trained("plain")
for row in table:
    check(row["staleness_tokens"] == [row["tokens"]] and row["staleness_mean"] == 0, f"{row}")
    check(row["optimiser_steps_behind_max"] == 1, f"two steps a batch: {row}")
    check(0 < row["optimiser_steps_behind_mean"] < 1, f"behind: {row}")
    check(row["clip_fraction"] > 0 and row["dual_clip_fraction"] == 0, f"clipped: {row}")
    check(row["truncated_fraction"] == 0 and abs(row["behaviour_ratio_mean"] - 1) < 1e-4, f"{row}")
    check(0.9999 < row["behaviour_ratio_ess"] <= 1 + 1e-9, f"effective samples: {row}")
    check(0.5 < row["cut_fraction"] <= 1, f"random tokens rarely end: {row}")

SETTINGS = {
    "decoupled": ["actor.loss=decoupled"],
    "truncated": ["actor.truncate=1"],
    "rollout": ["actor.old_log_prob=rollout"],
    "clip-high": ["actor.clip_high=1"],
    "dual-clip": ["actor.dual_clip=1.01"],
    "entropy": ["actor.entropy=0.1"],
    "sample": ["actor.aggregate=sample"],
    "length": ["actor.aggregate=length"],
    "mask": ["actor.overlong=mask"],
    "exclude": ["actor.overlong=exclude"],
    "reinforce": ["advantage.method=reinforce++"],
}
found = {}
for name, settings in SETTINGS.items():
    folder, found[name] = trained(name, *settings)
    check(not same_folder(optimizer(folder), optimizer(plain)), f"{name} changes nothing")

for row in found["truncated"]:
    check(0 < row["truncated_fraction"] < 1, f"weights of rounding, cut at 1: {row}")
for row in found["dual-clip"]:
    check(row["dual_clip_fraction"] > 0, f"dual clip: {row}")
for row in found["rollout"]:
    check(row["rollout_gap_mean"] is None and row["behaviour_ratio_mean"] == 1, f"{row}")
    check("old_log_prob" not in row["seconds"], f"old_log_prob ran: {row}")
check(found["clip-high"][0]["clip_fraction"] < table[0]["clip_fraction"], "a wider clip")

# Several rewards: the sum of all, times their weights; a weight of 0 measures.
folder, several = trained(
    "several", f"rewards=[{{name: right}}, {LENGTH}, name: long, weight: 0.5}}, "
    f"{LENGTH}, name: seen, weight: 0}}]", base=[b for b in BASE if not b.startswith("reward.")])
for row, alone in zip(several, table):
    means = row["rewards"]
    check(means.keys() == {"right", "long", "seen"} and means["long"] == means["seen"], f"{row}")
    check(abs(row["reward_mean"] - means["right"] - 0.5 * means["long"]) < 1e-5, f"sum: {row}")
check(several and abs(several[0]["rewards"]["long"] - table[0]["reward_mean"]) < 1e-5,
      "the first step's rewards are those of the same samples")
finish()
