"""examples/gpu on CPUs: samples that several versions made, in pieces, also of an engine that is asked to end, have the
log-probs that the recorded versions' weights give; forced lengths; the next version is prefetched; turns on one device.
soak_gpu_job has the run that learns."""
from gpu_jobs import *

ROLLOUT = "exec python3 rollout.py"
# Decay changes the weights, as an untrained model has no rewards to learn from.
COMMON = dict(warmup__max_steps=0, rollout__prompts=4, rollout__samples=4, actor__optimiser_steps=1, actor__weight_decay=1,
              actor__lr=0.01, actor__warmup_steps=0, eval__prompts=8, eval__every=2, checkpoint__every=1,
              checkpoint__keep=100)


def ended(process, folder, what):
    out, errors = process.communicate(timeout=PATIENCE)
    check(process.returncode == 0, f"{what}: status {process.returncode}: {out}{errors}")
    check_nothing_left(folder)
    return out


# ---- async: versions in the middle of responses, pieces, an engine that is asked to end --------------
folder, job = work / "pieces", looked_at()
process = start(folder, *settings(**COMMON, steps=6, rollout__max_new_tokens=24, rollout__partial_tokens=9,
                                  roles__rollout__instances=2,
                                  roles__rollout__command=f"{ROLLOUT} --slots 4"), job=job)
if reached(folder, 2, process):
    found = ranks_of(folder, "rollout")
    os.kill(found["1"][0], signal.SIGTERM)
ended(process, folder, "pieces")
found = samples(folder)
check(len({(s["step"], s["slot"]) for s in found}) >= 6 * 16, f"pieces: {len(found)} samples")
check(all(s["versions"] == sorted(s["versions"]) and len(s["versions"]) == len(s["response"]) for s in found), "versions")
check(mixed(found), "pieces: no sample of two versions")
plain, continued = gaps(folder, found)
print(f"log-probs: {plain:.2e}, of {len(mixed(found))} continued responses {continued:.2e}")
check(plain < 1e-4 and continued < 1e-4, f"log-probs differ by {plain} and {continued}")
check(all(row["staleness_max"] <= 1 for row in rows(folder)), f"pieces: {rows(folder)}")

# ---- versions that rows ask for ----------------------------------------------------------------------
ASK = """
import numpy as np
import dray

once = {(4, 2)}  # asks for a version that is gone, until a new sample takes the place of the lost one
with dray.Role() as role:
    for batch in role.batches():
        rows = [(int(step), int(slot)) for step, slot in zip(batch.tag("step"), batch.slots)]
        batch.set_tag("exactly", [0 if row in once else row[0] - 1 if row[1] % 4 == 0 else -1 for row in rows])
        batch.set_tag("at_least", [row[0] - 1 if row[1] % 4 == 1 else -1 for row in rows])
        batch.set("asked", np.ones(len(rows), np.int32))
        once -= set(rows)
"""
(work / "ask.py").write_text(ASK)
text = job.read_text().replace("tasks:", "tasks:\n  - {name: ask, needs: [prompt], writes: [asked]}\n"
                               "  - {name: rollout, needs: [prompt, asked]}", 1)
asking = work / "asking.yaml"
asking.write_text(text + f"  - {{name: ask, tasks: [ask], command: exec python3 {work / 'ask.py'}}}\n")
folder = work / "asked"
process = start(folder, *settings(**COMMON, steps=5, rollout__max_new_tokens=16,
                                  roles__rollout__command=f"{ROLLOUT} --slots 4"), job=asking)
ended(process, folder, "asked")
found = samples(folder)
check(len({(s["step"], s["slot"]) for s in found}) >= 5 * 16, f"asked: {len(found)} samples")
for s in found:
    if s["slot"] % 4 == 0:
        check(set(s["versions"]) == {s["step"] - 1}, f"asked: exactly {s['step'] - 1}: {s['versions']}")
    elif s["slot"] % 4 == 1:
        check(min(s["versions"]) >= s["step"] - 1, f"asked: {s['step'] - 1} at least: {s['versions']}")
check(any(s["slot"] % 4 > 1 and min(s["versions"]) < s["step"] - 1 for s in found), "asked: all samples are of the newest versions")
check("version 0 expected, engines take" in (folder / "events.jsonl").read_text(), "asked: nobody was told of version 0")
check(max(gaps(folder, found)) < 1e-4, "asked: log-probs")

# ---- one_step_async: forced lengths, prefetched versions ---------------------------------------------
LENGTHS = [3, 11, 7, 2, 19]
(work / "lengths.txt").write_text("# five\n" + "\n".join(map(str, LENGTHS)) + "\n")
folder = work / "ahead"
process = start(folder, *settings(**COMMON, schedule="one_step_async", staleness=0, update="boundary", steps=5,
                                  rollout__max_new_tokens=16, roles__trainer__ranks=2,
                                  roles__rollout__command=f"{ROLLOUT} --slots 8 --lengths {work / 'lengths.txt'}"), job=job)
ended(process, folder, "ahead")
found = samples(folder)
check(len(found) == 5 * 16, f"ahead: {len(found)} samples")
for s in found:
    wanted = min(16, LENGTHS[((s["step"] - 1) * 16 + s["slot"]) % 5])
    check(len(s["response"]) == wanted, f"ahead: step {s['step']}, slot {s['slot']}: {wanted} tokens, not {len(s['response'])}")
    check(set(s["versions"]) == {max(0, s["step"] - 2)}, f"ahead: step {s['step']}: versions {s['versions']}")
check(max(gaps(folder, found)) < 1e-4, "ahead: log-probs")
check('"weights commit"' in (folder / "trace.json").read_text(), "ahead: nothing was prefetched")

# Its trace is one for simulate: lengths as they were forced, versions as they were published.
kept = sorted([int(word) for word in line.split()] for path in folder.glob("trace/rollout*.lengths")
              for line in path.read_text().splitlines())
check([(step, slot, tokens) for step, slot, _, tokens, _, _ in kept] ==
      sorted((s["step"], s["slot"], len(s["response"])) for s in found), f"ahead: lengths {kept}")
check(all(0 < prompt < 64 and begin < end for _, _, prompt, _, begin, end in kept), f"ahead: lengths {kept}")
said = subprocess.run([PROGRAM, "simulate", str(job), "--trace", str(folder), "--json", *words(
    [f"{key.replace('__', '.')}={value}" for key, value in {**COMMON, "schedule": "one_step_async", "staleness": 0,
     "update": "boundary", "steps": 5, "rollout.max_new_tokens": 16}.items()])], capture_output=True, text=True)
check(said.returncode == 0, f"ahead: simulate: {said.stderr}")
if said.returncode == 0:
    predicted = json.loads(said.stdout)
    took = [row["step_seconds"] for row in rows(folder)[2:]]
    print(f"simulate: {predicted['step_seconds']['mean']:.3f} s a step, took {sum(took) / len(took):.3f}")
    check(predicted["staleness_mean"]["mean"] == 1 and not predicted["estimated"], f"ahead: simulate: {said.stdout}")

# ---- sync in turns on one device ---------------------------------------------------------------------
folder = work / "turns"
process = start(folder, *settings(**COMMON, schedule="sync", staleness=0, update="boundary", steps=3,
                                  roles__trainer__devices="cpu:0", roles__rollout__devices="cpu:0"), job=job)
ended(process, folder, "turns")
check_samples(folder, 3, 16)
check(max(gaps(folder, samples(folder))) < 1e-4, "turns: log-probs")
finish()
