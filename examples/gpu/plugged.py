"""Weights of an engine that takes them by a plug-in of dray's: vLLM's or SGLang's, in this process or behind HTTP."""
import time

import dray


class Weights(dray.steps.Weights):
    """As role.weights gives them: the engine takes what is wanted, at once. tensors: (name, tensor) of the checkpoint.
    engine: handshake(told) tells it what is published, take(version, newer) has it take a version, and is the report."""

    def __init__(self, role, engine, tensors):
        if role.rules.kept > 1:
            raise ValueError(f"--engine: a schedule that keeps one version expected, found {role.config['schedule']}")
        self._role, self._rules, self.version, self.report, self._ahead = role, role.rules, -1, None, None
        self._subscribers, self._engine = [], engine
        self._told = {"tensors": [[name, str(tensor.dtype).rpartition(".")[2], list(tensor.shape)]
                                  for name, tensor in tensors], "group": role.group, "timeout": role.timeout}
        self.again()

    def again(self):
        """The engine has started, maybe anew: it holds no version."""
        self._engine.handshake(self._told)

    def prefetch(self, version):
        """The plug-ins have none."""

    @property
    def ready(self):
        return self.newest()

    def update(self, wanted):
        began = time.monotonic()
        with dray.trace.span("weights update", wanted, "transfer"):
            self.report = self._engine.take(wanted, newer=not self._rules.exact)
        self.version = self.report["version"]
        self._role.report("engine_update", role=self._role.group, version=self.version, bytes=self.report["bytes"],
                          seconds=self.report["total_seconds"], wait_seconds=self.report["wait_seconds"],
                          pause_seconds=time.monotonic() - began - self.report["wait_seconds"])
        return self.report
