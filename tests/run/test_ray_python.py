"""dray.ray's processes without Ray: their output is whatever bytes they write. With Ray itself: tests/frameworks/ray_real."""
import os
import sys
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
