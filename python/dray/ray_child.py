"""`python -m dray.ray_child PARENT SIGNAL COMMAND...`: becomes the command, which gets the signal when the process
PARENT is gone, as Ray kills actors without a word. Used by dray.ray."""
import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() == parent:
        os.execv(command[0], command)
