"""Roles in Python that compute next to nothing: a trainer of a model of three numbers, and a rollout whose samples no
weights make. Used by the tests beside it."""
import importlib.util

from jobs import *

if not importlib.util.find_spec("torch"):
    print("torch is missing")
    shutil.rmtree(work)
    sys.exit(77)

os.environ["PYTHONPATH"] = os.environ["DRAY_SOURCE_DIR"] + "/python"

# KILL: the step in which it dies, with samples in its hands.
(work / "trainer.py").write_text("""
import os, signal
import torch
import dray

model = torch.nn.Linear(2, 1)
with dray.Role() as role:
    role.restore(model)
    for step in role.steps(role.publisher(model, snapshot=True), ["response", "reward"], save=role.saver(model)):
        for batch in step:
            if os.environ.get("KILL") == str(step.number):
                os.kill(os.getpid(), signal.SIGKILL)
        step.report(loss=0.0, reward_mean=0.0)
""")
ANSWER = """
import dray, numpy


def answer(batch, version):
    def column(value, dtype):
        return [numpy.full(2, value, dtype) for _ in range(batch.rows)]

    if batch.task == "eval":
        batch.set("eval_response", column(5, numpy.int32))
    else:
        batch.set("response", column(5, numpy.int32))
        batch.set("rollout_log_prob", column(-1, numpy.float32))
        batch.set("response_version", column(version, numpy.int32))
    batch.set_tag("version", [version] * batch.rows)
    batch.set_tag("tokens", [8] * batch.rows)
"""
TRAINER = f", command: exec {sys.executable} trainer.py"


def job_with(name, rollout, trainer=TRAINER):
    """A job of these programs; trainer "": the built-in one."""
    (work / f"{name}.py").write_text(ANSWER + rollout)
    job = work / f"{name}{'' if trainer else '-built-in'}.yaml"
    job.write_text(TINY + f"""
tasks:
  - {{name: actor, needs: [prompt, response, rollout_log_prob, response_version, reward, advantage]}}
roles:
  - {{name: rollout, tasks: [rollout, eval], command: exec {sys.executable} {name}.py}}
  - {{name: trainer, tasks: [actor]{trainer}}}
  - {{name: desk, tasks: [driver, reward, advantage]}}
""")
    return job
