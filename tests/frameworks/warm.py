"""Processes that begin with everything imported: a framework's import takes longer than what a test has it do. Warm imports the
modules in a process of its own, once, which then forks for each script that is to be run."""
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback


class Warm:
    """modules: imported at once, in this order, by a new process. environment: which they are imported with. None: a fork of
    this process, which must not have threads yet."""

    def __init__(self, modules=None, **environment):
        ours, theirs = socket.socketpair()
        if modules is None:
            self._maker = os.fork()
            if self._maker == 0:
                ours.close()
                _serve(theirs)
        else:
            self._maker = subprocess.Popen([sys.executable, __file__, str(theirs.fileno()), *modules], pass_fds=[theirs.fileno()],
                                           env={**os.environ, **environment}).pid
        theirs.close()
        self._ours, self._there = ours, ours.makefile("rw")

    def start(self, script, *arguments, out=None, **environment):
        """The pid of a process that runs a script. out: the file that it prints into; None: ours."""
        return self._ask(start=[str(script), *map(str, arguments)], out=out and str(out), environment={**os.environ, **environment})

    def wait(self, pid):
        """Its exit status, as subprocess has it."""
        return self._ask(wait=pid)

    def kill(self, pid):
        """Ends it, and returns when it has ended."""
        return self._ask(kill=pid)

    def _ask(self, **what):
        print(json.dumps(what), file=self._there, flush=True)
        said = json.loads(self._there.readline())
        if "failure" in said:
            raise RuntimeError(said["failure"])
        return said["value"]

    def close(self):
        """What was started goes on."""
        self._there.close()
        self._ours.close()
        os.waitpid(self._maker, 0)


def _run(start, out, environment):
    if out:
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, status = start, 1
    sys.path.insert(0, os.path.dirname(start[0]))
    try:
        runpy.run_path(start[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(there):
    """Does what the other end asks for, until it is closed."""
    ended = {}

    def wait(pid):
        if pid not in ended:
            ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return ended[pid]

    talk = there.makefile("rw")
    for line in talk:
        what = json.loads(line)
        try:
            if "start" in what:
                value = os.fork()
                if value == 0:
                    os.close(there.fileno())
                    _run(what["start"], what["out"], what["environment"])
            else:
                if "kill" in what and what["kill"] not in ended:
                    os.kill(what["kill"], signal.SIGKILL)
                value = wait(what.get("kill") or what["wait"])
            said = {"value": value}
        except OSError as failure:
            said = {"failure": str(failure)}
        print(json.dumps(said), file=talk, flush=True)
    os._exit(0)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
