"""What tests of the queue from Python share: a coordinator of their own, and calls that must fail."""
from begin import coordinator  # noqa: F401

import dray


def refused(name, function, *arguments, **more):
    """The message of the DrayError that the call must raise."""
    try:
        function(*arguments, **more)
    except dray.DrayError as error:
        assert error.name == name, (error.name, str(error))
        assert isinstance(error, TimeoutError) == (name == "ETIMEDOUT")
        return str(error)
    raise AssertionError(f"{name} expected")


def wrong(kind, part, function, *arguments, **more):
    """The call must raise `kind`, with `part` in its message."""
    try:
        result = function(*arguments, **more)
    except kind as error:
        assert part in str(error), (part, str(error))
        return
    raise AssertionError(f"{kind} expected ({part}), found {result!r}")
