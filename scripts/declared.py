#!/usr/bin/env python3
"""declared.py [OUT]: what include/dray/ declares, as Python's ctypes has it: python/dray/_declared.py.

Structs, enums and functions are read from what the C preprocessor ($CC, or cc) makes of the headers.
tests/house/test_headers.py compares sizes and offsets with the compiler's."""
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
HEAD = '''"""The structs, constants and functions of include/dray/: made by scripts/declared.py, not by hand."""
import ctypes as c

CODE = "0 or a negative code, and the error as the last argument"


class Sized(c.Structure):
    """A struct that begins with its own size."""

    def __init__(self, **values):
        super().__init__(size=c.sizeof(type(self)), **values)
'''
SCALARS = {name: "c.c_" + name[:-2] for name in ("int8_t", "int16_t", "int32_t", "int64_t")}
SCALARS.update({"u" + name: f"c.c_u{name[:-2]}" for name in list(SCALARS)})
SCALARS.update({"int": "c.c_int", "double": "c.c_double", "size_t": "c.c_size_t", "char": "c.c_char",
                "ptrdiff_t": "c.c_ssize_t", "void": "None"})


def preprocessed():
    headers = sorted(path.name for path in (SOURCE / "include/dray").glob("*.h"))
    return headers, subprocess.run(
        [os.environ.get("CC", "cc"), "-E", "-P", "-I", SOURCE / "include", "-x", "c", "-"],
        input="".join(f"#include <dray/{name}>\n" for name in headers), text=True, check=True,
        capture_output=True).stdout


def constants(text, headers):
    """Of enums, and of macros that are numbers."""
    found = {}
    for body in re.findall(r"\benum\s*\w*\s*\{([^}]*)\}", text):
        if "DRAY_" not in body:
            continue
        value = -1
        for entry in filter(None, (e.strip() for e in body.split(","))):
            name, _, given = entry.partition("=")
            value = eval(given.strip(), {}, found) if given else value + 1
            found[name.strip()] = value
    for name in headers:
        for macro, number in re.findall(r"^#define (DRAY_\w+) \(?(?:\(\w+\))?(-?\d+)\)?$",
                                        (SOURCE / "include/dray" / name).read_text(), re.M):
            found[macro] = int(number)
    return found


def class_of(name):
    return "".join(part.capitalize() for part in name[len("dray_"):].split("_"))


class Types:
    def __init__(self, text, numbers):
        self.numbers = numbers
        bodies = re.findall(r"typedef struct (dray_\w+) \{(.*?)\} \1;", text, re.S)
        self.structs = {name: [f.strip() for f in body.split(";") if f.strip()] for name, body in bodies}
        self.enums = set(re.findall(r"typedef enum (dray_\w+) \{", text))
        self.callbacks = {name: (result, arguments) for result, name, arguments in
                          re.findall(r"typedef (\w+) \(\*(dray_\w+)\)\(([^;]*)\);", text)}

    def value(self, base, stars, typed):
        """The ctypes expression of a type. typed: pointers say to what, as ctypes does not convert
        what a struct's field, or a callback, is given."""
        if stars == 0:
            if base in self.structs:
                return class_of(base)
            if base in self.callbacks:
                return class_of(base) if typed else "c.c_void_p"
            return "c.c_int" if base in self.enums else SCALARS[base]
        if base == "char" and stars == 1:
            return "c.c_char_p"
        if not typed:
            return "c.c_void_p"
        if base == "char" or base not in SCALARS and stars == 2:
            return f"c.POINTER({'c.c_char_p' if base == 'char' else 'c.c_void_p'})"
        return f"c.POINTER({class_of(base)})" if base in self.structs else "c.c_void_p"

    def declarators(self, text):
        """[(name, base, stars, [dimensions])] of `const char *a, *b[4]`."""
        text = re.sub(r"\bconst\b|\bstruct\b", "", text)
        base, rest = re.match(r"\s*(\w+)\s*(.*)$", text, re.S).groups()
        for one in rest.split(",") if rest else [""]:
            stars = one.count("*")
            name, dimensions = re.match(r"[\s*]*(\w*)((?:\s*\[[^]]*\])*)", one).groups()
            yield name, base, stars, re.findall(r"\[([^]]*)\]", dimensions)

    def field(self, text):
        for name, base, stars, dimensions in self.declarators(text):
            kind = self.value(base, stars, True)
            for dimension in reversed(dimensions):
                kind += f" * {eval(dimension, {}, self.numbers)}"
            yield f'("{name}", {kind})'

    def arguments(self, text, typed=False):
        for one in [] if text.strip() == "void" else text.split(","):
            _, base, stars, dimensions = next(self.declarators(one))
            by_pointer = stars == 1 and base in self.structs
            yield base, self.value(base, stars + len(dimensions), typed or by_pointer)

    def needs(self, name):
        """Structs and callbacks that must be there before this one."""
        text = " ".join(self.structs[name] if name in self.structs else self.callbacks[name])
        return [word for word in re.findall(r"dray_\w+", text)
                if word != name and (word in self.structs or word in self.callbacks)]


def wrapped(head, items, tail, indent):
    """In lines of 100 characters, which end behind an item."""
    text = head + ", ".join(item.replace(" ", "\xa0") for item in items) + tail
    return textwrap.fill(text, 100, subsequent_indent=" " * indent, break_long_words=False,
                         break_on_hyphens=False).replace("\xa0", " ")


def made():
    headers, text = preprocessed()
    numbers = constants(text, headers)
    types, out, done = Types(text, numbers), [HEAD], set()
    out.append("\n" + "\n".join(f"{name[5:]} = {value}" for name, value in numbers.items()))

    def put(name):
        if name in done:
            return
        done.add(name)
        for other in types.needs(name):
            put(other)
        if name in types.callbacks:
            result, arguments = types.callbacks[name]
            kinds = [SCALARS[result]] + [kind for _, kind in types.arguments(arguments, True)]
            out.append(f"\n\n{class_of(name)} = c.CFUNCTYPE({', '.join(kinds)})")
            return
        fields = [one for field in types.structs[name] for one in types.field(field)]
        base = "Sized" if fields[0] == '("size", c.c_size_t)' else "c.Structure"
        out.append(f"\n\nclass {class_of(name)}({base}):\n" +
                   wrapped("    _fields_ = [", fields, "]", 16))

    for name in list(types.callbacks) + list(types.structs):
        put(name)
    out.append("\n\nFUNCTIONS = {")
    for result, stars, name, arguments in sorted(
            re.findall(r"^(?:const )?(\w+) (\**)(dray_\w+)\(([^;{]*)\);", text, re.M), key=lambda f: f[2]):
        kinds = list(types.arguments(arguments))
        code = result == "int" and kinds and kinds[-1][0] == "dray_error"
        returned = "CODE" if code else types.value(result, len(stars), False)
        kinds = [kind for _, kind in kinds[:-1 if code else None]]
        out.append(wrapped(f'    "{name}": ({returned}, [', kinds, "]),", 8))
    out.append("}\n")
    return "\n".join(out)


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE / "python/dray/_declared.py"
    where.write_text(made())
