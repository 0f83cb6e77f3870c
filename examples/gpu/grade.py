"""A grader for models that nobody can teach anything, because their weights are random: the share of even tokens."""
import numpy as np

import dray

with dray.Role() as role:
    for batch in role.batches():
        found = [np.mean(response % 2 == 0) for response in batch.list(
            "response" if batch.task == "reward" else "eval_response")]
        batch.set("reward" if batch.task == "reward" else "eval_reward", np.array(found, np.float32))
        if batch.task == "score":
            role.report("eval", step=int(batch.tag("step")[0]), version=int(batch.tag("version")[0]),
                        accuracy=np.mean(found), prompts=batch.rows, response_length_mean=1)
