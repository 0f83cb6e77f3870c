"""What the tests of roles that fall silent share: a grader of one's own that hangs. Used by the tests beside it."""
from jobs import *

PATIENT = 3 * (8 if "asan" in PROGRAM or "tsan" in PROGRAM else 1)
WAIT = ["--set", f"limits.wait_seconds={PATIENT}"]

GRADER = """
import os, sys, time
import dray, numpy
with dray.Role() as role:
    for batch in role.batches():
        if batch.task == "reward" and int(batch.tag("step")[0]) == 2 and 5 in batch.slots:
            HANGS
        batch.set("reward" if batch.task == "reward" else "eval_reward", numpy.zeros(batch.rows, numpy.float32))
        if batch.task == "score":
            role.report("eval", step=int(batch.tag("step")[0]), version=0, accuracy=0, prompts=batch.rows,
                        response_length_mean=1)
"""
ROLES = """
roles:
  - {name: engine, tasks: [rollout, eval]}
  - {name: trainer, tasks: [old_log_prob, actor]}
  - {name: desk, tasks: [driver, reference, advantage]}
  - {name: grader, tasks: [reward, score], command: exec PYTHON grader.py, env: [PYTHONPATH=SOURCE/python]}
""".replace("PYTHON ", sys.executable + " ").replace("SOURCE", os.environ["DRAY_SOURCE_DIR"])
(work / "own.yaml").write_text(TINY + ROLES)


def own(name, hangs, *arguments):
    (work / "grader.py").write_text(GRADER.replace("HANGS", hangs))
    begun = time.monotonic()
    done = run(work / name, "--set", "eval.micro_batch=12", *arguments, job=work / "own.yaml")
    return done, time.monotonic() - begun
