"""The clock job: responses are as long as another implementation draws them, work takes its time, and
versions, updates and checkpoints are real."""
import os
import pathlib
import subprocess
import sys

import yaml

from jobs import PATIENCE, PROGRAM, check, check_nothing_left, finish, rows, work

SOURCE = pathlib.Path(os.environ["DRAY_SOURCE_DIR"])
sys.path.insert(0, str(SOURCE / "bench"))
import clock  # noqa: E402


def run(name, *settings):
    line = [PROGRAM, "run", str(SOURCE / "examples/clock.yaml"), "--out", str(work / name)]
    for setting in settings:
        line += ["--set", setting]
    done = subprocess.run(line, cwd=work, capture_output=True, text=True, timeout=PATIENCE)
    check_nothing_left(work / name)
    return done


done = run("drawn", "steps=6", "seed=7", "clock.tokens=12", "clock.variation=0.4",
           "clock.correlation=0.7", "clock.tail=20", "clock.tail_share=0.1", "clock.token_seconds=1e-3",
           "clock.log_prob_seconds=1e-4", "clock.reward_seconds=1e-4")
check(done.returncode == 0, f"the clock job ends with {done.returncode}: {done.stderr}")
job = yaml.safe_load((work / "drawn" / "config.yaml").read_text())
made = rows(work / "drawn")
for row in made[1:]:
    drawn = [clock.length(job, row["step"], slot) for slot in range(32)]
    mean = row["response_length_mean"] * 32
    check(abs(mean - sum(drawn)) < 1e-6, f"step {row['step']}: {mean} tokens, drawn {drawn}")
    check(row["weight_version"] == row["step"] - 1 and row["update_bytes"] > 0, f"no update: {row}")
    # The step begins when the one before is reported, and samples wait for its weights.
    least = clock.rollout_seconds(job, row["step"])
    check(row["step_seconds"] > least - 0.025, f"{row['step_seconds']} s, slept {least} s")
check(len({row["response_length_mean"] for row in made[1:]}) > 1, "lengths do not vary")
check((work / "drawn" / "checkpoints" / "step-000006" / "config.json").exists(), "no checkpoint")

done = run("refused", "warmup.max_steps=10")
check(done.returncode == 2 and "expected 0 with clock.enabled" in done.stderr, done.stderr)
check(not (work / "refused").exists(), "a job that is refused leaves a folder")

finish()
