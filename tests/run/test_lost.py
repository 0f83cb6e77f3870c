"""A prompt that kills whoever works on it is trained by nobody, is listed, and is the only one that a pass over the
data lacks."""
import re

from lineage import *

CURSED = json.loads((work / "train.jsonl").read_text().splitlines()[9])["prompt"]
(work / "grader.py").write_text(f"""
import json, os, sys
for line in sys.stdin:
    if json.loads(line)["prompt"] == {CURSED!r}:
        os.kill(os.getpid(), 9)
    print(0, flush=True)
""")
SETTINGS = {"sync": [], "async": ["schedule=async"]}
for schedule, settings in SETTINGS.items():
    if schedule not in known_schedules():
        continue
    folder = work / schedule
    settings = settings + ["reward.rule=command", f"reward.command={sys.executable} {work / 'grader.py'}",
                           "queue.max_attempts=2"]
    done = recorded(folder, *DATA, *words(settings))
    check(done.returncode == 0, f"{schedule}: {done.stderr}")
    prompts = collections.Counter(row[3] for rows in lineage(folder, STEPS).values() for row in rows)
    cursed = tuple([257, *CURSED.encode()])
    lost = {(line["partition"], row[0]) for line in lines(folder) if line["task"] == "rollout"
            for row in line["rows"] if tuple(row[2]) == cursed}
    check(len(lost) == SAMPLES, f"{schedule}: samples of {CURSED}: {lost}")
    check(cursed not in prompts, f"{schedule}: samples of {CURSED} were trained")
    wrong = {prompt: times for prompt, times in prompts.items() if times % SAMPLES}
    check(not wrong and sum(prompts.values()) == STEPS * BATCH, f"{schedule}: samples of {wrong}")
    check(len(prompts) == STEPS * PROMPTS - 1, f"{schedule}: {len(prompts)} prompts were trained")
    listed = re.findall(r"^(step-\d+): \d+ samples from (\d+) on were lost \(reward", "".join(
        log.read_text() for log in (folder / "logs").glob("desk*")), re.M)
    # Twice where the desk died of the next one before its replacement was in the queue.
    check({(partition, int(slot)) for partition, slot in listed} == {min(lost)}, f"{schedule}: listed {listed}, not {lost}")
finish()
