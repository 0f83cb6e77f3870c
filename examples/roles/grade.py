"""A grader: rewards, advantages, and the score of each evaluation. `dray run examples/roles/job.yaml` starts two."""
import numpy as np

import dray
from text import decode


def right(batch, answer, response):
    texts = [decode(tokens) for tokens in batch.list(response)]
    return np.array([text == wanted for text, wanted in zip(texts, batch.list(answer))], np.float32)


with dray.Role() as role:
    samples = role.config["rollout"]["samples"]
    # An evaluation is graded in one piece, so that its mean is of all its prompts.
    rows = {task: 8 * samples for task in role.tasks}
    rows["score"] = role.config["eval"]["prompts"]
    for batch in role.batches(count=rows, policy="group", up_to=False):
        if batch.task == "reward":
            batch.set("reward", right(batch, "answer", "response"))
        elif batch.task == "advantage":  # reward - the group's mean
            rewards = batch["reward"][0].reshape(-1, samples)
            batch.set("advantage", (rewards - rewards.mean(1, keepdims=True)).reshape(-1))
        else:
            found = right(batch, "eval_answer", "eval_response")
            batch.set("eval_reward", found)
            role.report("eval", step=int(batch.tag("step")[0]), version=int(batch.tag("version")[0]),
                        accuracy=found.mean(), prompts=batch.rows,
                        response_length_mean=np.mean([len(r) for r in batch.list("eval_response")]))
