#!/bin/sh
# python.sh: prints the path of a Python that can make the environment of the test oracles (3.10 or
# newer, with venv and ensurepip); exit 1 when there is none.
for name in python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.10; do
    "$name" -c '
import ensurepip, sys, venv
if sys.version_info < (3, 10):
    sys.exit(1)
print(sys.executable)' 2>/dev/null && exit 0
done
echo 'no Python 3.10 or newer with venv' >&2
exit 1
