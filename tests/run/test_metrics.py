"""dray.metrics follows a metrics.jsonl that grows, that a resumed run has cut, and that has grown again since."""
import json
import pathlib
import tempfile

import begin  # noqa: F401
from dray import metrics


class Seen:
    def __init__(self):
        self.rows = []

    def row(self, step, values):
        self.rows.append((step, values["loss"]))

    def flush(self):
        pass


def line(step, loss):
    return json.dumps({"step": step, "loss": loss}) + "\n"


def replace(path, text):
    """As the supervisor does it when a run is resumed."""
    path.with_name("partial").write_text(text)
    path.with_name("partial").rename(path)


with tempfile.TemporaryDirectory(prefix="dray-metrics-") as folder:
    path, seen = pathlib.Path(folder) / "metrics.jsonl", Seen()
    follower = metrics.Follower(folder, [seen])
    assert follower.look() == 0
    path.write_text("".join(line(step, 1) for step in range(4)) + line(4, 1)[:-5])
    assert follower.look() == 4 and follower.look() == 0
    with path.open("a") as file:
        file.write(line(4, 1)[-5:])
    assert follower.look() == 1
    # The resumed run goes on from step 2. Between two looks it has written more than there was before, in longer lines.
    kept = "".join(line(step, 1) for step in range(3))
    replace(path, kept + "".join(line(step, 2.125) for step in range(3, 9)))
    assert path.stat().st_size > sum(len(line(step, 1)) for step in range(5))
    assert follower.look() == 4, seen.rows
    # In lines of the same length.
    replace(path, kept + "".join(line(step, 3.125) for step in range(3, 11)))
    assert follower.look() == 2, seen.rows
    # It is empty, and then shorter than before.
    replace(path, "")
    assert follower.look() == 0 and follower.look() == 0
    replace(path, kept)
    assert follower.look() == 0
    with path.open("a") as file:
        file.write("".join(line(step, 4) for step in range(3, 12)))
    assert follower.look() == 1, seen.rows
    assert seen.rows == [(step, 1) for step in range(5)] + [(step, 2.125) for step in range(5, 9)] + [
        (9, 3.125), (10, 3.125), (11, 4)], seen.rows
print("ok")
