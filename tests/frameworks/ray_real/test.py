"""dray.ray in Ray's own cluster of three nodes in one machine: a job whose roles are Python programs. A node is removed
in the middle, and another one added; the run goes on, and every step trains its samples, none twice; its rewards are those of
an undisturbed run, but where samples were lost with the node, and other prompts took their places, as the run says. And what is
refused."""
import collections
import json
import os
import pathlib
import re
import sys
import threading
import time

WORK = pathlib.Path(os.environ["DRAY_WORK"])
STEPS, BATCH = 30, 16
os.environ.update(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
                  PYTHONPATH=os.pathsep.join(filter(None, [str(WORK), os.environ.get("PYTHONPATH")])))

import ray
from ray.cluster_utils import Cluster

import dray.ray

# What it answers depends on the prompt and the weights' version alone, so that two runs can be compared.
(WORK / "rollout.py").write_text("""
import time
import dray, numpy, torch

with dray.Role() as role:
    weights = role.weights(torch.nn.ParameterDict({"weight": torch.zeros(3)}))
    for batch in role.batches():
        if weights.take(batch) is None:
            continue
        time.sleep(0.01)
        name = "response" if batch.task == "rollout" else "eval_response"
        batch.set(name, [numpy.array([int(numpy.sum(p)) % 50, 5], numpy.int32) for p in batch.list(
            "prompt" if batch.task == "rollout" else "eval_prompt")])
        if batch.task == "rollout":
            batch.set("rollout_log_prob", [numpy.full(2, -1, numpy.float32)] * batch.rows)
        batch.set_tag("version", [weights.version] * batch.rows)
        batch.set_tag("tokens", [8] * batch.rows)
""")
(WORK / "grade.py").write_text("""
import dray, numpy

with dray.Role() as role:
    for batch in role.batches(columns=["response"] if role.tasks == ["reward"] else []):
        if batch.task == "reward":
            batch.set("reward", numpy.array([r[0] / 50 for r in batch.list("response")], numpy.float32))
        elif batch.task == "score":
            batch.set("eval_reward", numpy.array([r[0] / 50 for r in batch.list("eval_response")], numpy.float32))
        else:
            reward = batch.list("reward")
            batch.set("advantage", numpy.array(reward, numpy.float32).reshape(-1))
""")
(WORK / "train.py").write_text("""
import json, os
import numpy, torch
import dray

model = torch.nn.ParameterDict({"weight": torch.zeros(3)})
with dray.Role() as role:
    role.restore(model)
    for step in role.steps(role.publisher(model, snapshot=True), ["prompt", "response", "reward"], save=role.saver(model)):
        rewards, rows = [], []
        for batch in step:
            rewards += [float(r) for r in numpy.asarray(batch["reward"].tolist()).reshape(-1)]
            rows += [(batch.partition, [int(t) for t in p], [int(t) for t in r])
                     for p, r in zip(batch.list("prompt"), batch.list("response"))]
        with torch.no_grad():
            model["weight"] += sum(sorted(rewards)) / len(rewards)
        with open(os.environ["TRAINED"], "a") as file:
            file.write(json.dumps([step.number, rows, float(model["weight"][0])]) + "\\n")
        step.report(loss=0.0, reward_mean=sum(rewards) / len(rewards))
""")
PYTHON = f"exec {sys.executable}"
JOB = WORK / "job.yaml"
JOB.write_text(f"""
name: under-ray
steps: {STEPS}
schedule: sync
model: {{hidden_size: 16, intermediate_size: 32, layers: 1, heads: 2, kv_heads: 2, max_positions: 32}}
data: {{digits: 2}}
warmup: {{max_steps: 0}}
rollout: {{prompts: 4, samples: 4, max_new_tokens: 4, micro_batch: 4}}
reference: {{enabled: false}}
actor: {{optimiser_steps: 1, micro_batch: 4, old_log_prob: rollout}}
eval: {{every: 0, prompts: 4}}
checkpoint: {{every: 5}}
queue: {{max_attempts: 20}}
tasks:
  - {{name: advantage, needs: [reward]}}
  - {{name: rollout, writes: [response, rollout_log_prob]}}
  - {{name: actor, needs: [prompt, response, rollout_log_prob, reward, advantage]}}
roles:
  - {{name: driver, tasks: [driver]}}
  - {{name: rollout, tasks: [rollout, eval], command: {PYTHON} rollout.py, cwd: ., instances: 2}}
  - {{name: trainer, tasks: [actor], command: {PYTHON} train.py, cwd: .}}
  - {{name: grader, tasks: [reward, score, advantage], command: {PYTHON} grade.py, cwd: .}}
""")


def rows(folder):
    try:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []


def trained(name):
    """step -> (samples, the weight after it), each step once: what was trained before a resume counts as not trained."""
    found = {}
    for line in (WORK / f"{name}.trained").read_text().splitlines():
        step, samples, weight = json.loads(line)
        found[step] = ([json.dumps(sample) for sample in samples], weight)
    return found


def done(name):
    """The steps that were trained by now."""
    try:
        return len(trained(name))
    except (OSError, ValueError):
        return 0


def replaced(name):
    """The steps of which samples were lost with what held them."""
    events = [json.loads(line) for line in (WORK / name / "events.jsonl").read_text().splitlines()]
    return {int(found[1]) for event in events if event["event"] == "lost"
            for found in [re.match(r"step-(\d+): \d+ samples .* were lost .*: replaced by prompt", event["message"])] if found}


def check(name):
    steps = trained(name)
    assert sorted(steps) == list(range(1, STEPS + 1)), sorted(steps)
    assert all(len(samples) == BATCH for samples, _ in steps.values()), {k: len(v[0]) for k, v in steps.items()}
    for samples, _ in steps.values():  # four of each prompt, whatever died
        counts = collections.Counter(samples)
        assert all(n % 4 == 0 for n in counts.values()), counts
    found = rows(WORK / name)
    assert [row["step"] for row in found] == list(range(STEPS + 1)), found[-1]
    assert all(row["samples"] == BATCH for row in found[1:])
    rewards = [row["reward_mean"] for row in found[1:]]
    for number, (samples, _) in steps.items():  # what is answered is the prompt's own
        of = [json.loads(sample) for sample in samples]
        assert all(response == [sum(prompt) % 50, 5] for _, prompt, response in of), (number, of)
        assert abs(rewards[number - 1] - sum(response[0] for *_, response in of) / 50 / BATCH) < 1e-6, number
    assert abs(steps[STEPS][1] - sum(rewards)) < 1e-4, (steps[STEPS], rewards)
    return rewards


def go(name, *settings):
    return dray.ray.run(str(JOB), [*settings, f"roles.trainer.env=[TRAINED={WORK}/{name}.trained]"], str(WORK / name),
                        resources={"trainer": {"home": 1}, "rollout": {"fast": 1}, "grader": {"home": 1}})


def main():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"home": 4}})
    far = [cluster.add_node(num_cpus=2, resources={"fast": 1}) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        go("whole")
        whole = check("whole")
        failed = []

        def body():
            try:
                go("broken")
            except Exception as error:  # said below, in the main thread
                failed.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        deadline = time.monotonic() + 400
        while done("broken") < 5 and thread.is_alive():
            assert time.monotonic() < deadline, "no step in 240 s"
            time.sleep(0.05)
        cluster.remove_node(far[1], allow_graceful=False)
        at = done("broken")
        assert at < STEPS - 5, "the run was over before the node was removed"
        while done("broken") < at + 3 and thread.is_alive():
            time.sleep(0.05)
        cluster.add_node(num_cpus=2, resources={"fast": 1})
        thread.join(300)
        assert not thread.is_alive(), "the run hangs"
        assert not failed, failed[0]
        broken = check("broken")
        lost = replaced("broken")
        assert not replaced("whole") and len(lost) <= 2, lost  # those that were under way
        differ = [n for n, one, other in zip(range(1, STEPS + 1), whole, broken) if one != other]
        assert set(differ) <= lost, (differ, lost, whole, broken)
        for settings, why in ((["roles.rollout.ranks=x"], "ranks"), (["steps=0"], "steps")):
            try:
                go("refused", *settings)
            except ValueError as error:
                assert why in str(error), error
            else:
                raise AssertionError(f"{settings} was taken")
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(f"{STEPS} steps under Ray, twice: a node removed after step {at} and one added; "
          f"rewards are those of the undisturbed run{f', but of step {min(lost)}, whose samples were lost with it' if lost else ''}")


main()
