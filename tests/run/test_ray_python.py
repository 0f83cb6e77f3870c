"""dray.ray's processes without Ray: their output is whatever bytes they write, and one that is starting can be stopped.
With Ray itself: tests/frameworks/ray_real."""
import os
import signal
import sys
import threading
import time
import types

from begin import needs  # finds the package

with needs:
    import numpy  # noqa: F401


def module(name, **names):
    sys.modules[name] = made = types.ModuleType(name)
    vars(made).update(names)


node = types.SimpleNamespace(get_node_id=lambda: "0123456789abcdef")
module("ray", remote=lambda *of, **_: of[0] if of else lambda kind: kind, get_runtime_context=lambda: node)
module("ray.util")
module("ray.util.placement_group", placement_group=None, remove_placement_group=None)
module("ray.util.scheduling_strategies", NodeAffinitySchedulingStrategy=None, PlacementGroupSchedulingStrategy=None)
import dray.ray  # noqa: E402

os.environ["PYTHONPATH"] = os.path.join(os.environ["DRAY_SOURCE_DIR"], "python")  # of the process that it starts

# The last line of a log, cut within a character: the status is told all the same, and the run is started again by it.
says = "import sys; sys.stdout.buffer.write(b'cut \\xe2\\x82\\nlast\\n'); sys.exit(3)"
status, last = dray.ray._Process([sys.executable, "-c", says]).wait()
assert status == 3 and last == ["cut \ufffd", "last"], (status, last)

# A wish to stop that comes while a dead run is started again is for the process that is starting.
sys.modules["ray.util"].get_node_ip_address = lambda: "127.0.0.1"
dray.ray.ray.util = sys.modules["ray.util"]
dray.ray.program = lambda: "dray"


class Started:
    """A process of the run: the first one dies, and the second one ends when it is asked to."""
    all = []

    def __init__(self, *_):
        self.signals = []
        Started.all.append(self)
        if len(Started.all) == 2:
            stop = threading.Thread(target=home.stop)
            stop.start()
            stop.join(0.2)  # it waits for this start, or came before it

    def wait(self):
        deadline = time.monotonic() + 5
        while self is not Started.all[0] and not self.signals and time.monotonic() < deadline:
            time.sleep(0.01)
        return (130 if self.signals else 1), ["its last line"]

    def signal(self, number):
        self.signals.append(number)


real, dray.ray._Process = dray.ray._Process, Started
home = dray.ray.Run("job.yaml", [], "/nowhere", 1)
assert home.run() == 130 and [process.signals for process in Started.all] == [[], [signal.SIGINT]], Started.all
assert home.run() == 130 and len(Started.all) == 2, "a run that was stopped is started again"
dray.ray._Process = real
