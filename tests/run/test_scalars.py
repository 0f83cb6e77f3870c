"""One number a row has one form: what the loop's C code writes and what numpy's and torch's arrays of
(rows,) are lie in one column, and each reads what the other wrote."""
import os
import subprocess
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.environ["DRAY_SOURCE_DIR"], "tests/queue"))
from python_fixture import coordinator, dray, refused  # noqa: E402

HELPER = os.path.join(os.environ["DRAY_BUILD_DIR"], "run_helper_scalars")


def in_c(task, *arguments):
    return subprocess.run([HELPER, *arguments], env=dict(os.environ, DRAY_TASK=task),
                          capture_output=True, text=True, timeout=60)


def grade(queue, rewards):
    with queue.claim("reward", len(rewards)) as batch:
        batch.set("reward", rewards)


with coordinator(), dray.Queue(tasks={"reward": (["prompt"], ["reward"]), "show": (["reward"], []),
                                      "train": (["reward"], [])}) as queue:
    queue.insert({"prompt": ["p"] * 8}, "step-1", seal=True)
    done = in_c("reward", "write", "3")
    assert done.returncode == 0, done.stderr
    grade(queue, np.array([10, 11, 12], np.float32))
    try:
        import torch
        grade(queue, torch.tensor([13., 14.]))
    except ImportError:
        grade(queue, np.array([13, 14], np.float32))
    expected = [0.5, 1.5, 2.5, 10, 11, 12, 13, 14]
    with queue.claim("train", 8) as batch:
        values, offsets = batch["reward"]
        assert offsets is None and values.shape == (8,), values.shape
        assert values.tolist() == expected and batch.list("reward") == expected
    done = in_c("show", "read", "8")
    assert [float(line) for line in done.stdout.split()] == expected, done.stdout + done.stderr

    # Another form is refused with both, and with the task that writes it.
    queue.insert({"prompt": ["p"]}, "step-2")
    message = refused("ESHAPE", grade, queue, np.ones((1, 1), np.float32))
    assert message == "task reward: column reward: rows of F32 [] expected, found F32 [1]", message
    message = refused("ESHAPE", grade, queue, [np.ones((2, 3), np.float32)])
    assert message.endswith("rows of F32 [] expected, found F32 [?, 3]"), message
    message = refused("EDTYPE", grade, queue, ["good"])
    assert message.endswith("rows of F32 [] expected, found U8 [?] strings"), message

with coordinator(), dray.Queue(tasks={"reward": (["prompt"], ["reward"]),
                                      "show": (["reward"], [])}) as queue:
    queue.insert({"prompt": ["p"]}, "step-1")
    grade(queue, np.ones((1, 1), np.float32))
    done = in_c("show", "read", "1")
    assert done.returncode == 1 and "one number a row (shape []), found 1 dimension" in done.stderr, done
print("ok")
