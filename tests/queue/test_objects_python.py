"""Python's objects as bytes without pickle: they come back as they were, what is not kept is refused, and bytes that were
changed are refused or are another value."""
import random
import unittest

from begin import needs, seed as SEED

with needs:
    import numpy as np
    import torch
    from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from dray import objects
from dray.tensordicts import together

DRAW = random.Random(SEED)


class Own:
    """An object that only pickle keeps."""

    def __eq__(self, other):
        return isinstance(other, Own)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and all(map(same, a.reshape(-1).tolist(), b.reshape(-1).tolist()))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def drawn(depth=3):
    kinds = [lambda: None, lambda: DRAW.random() < 0.5, lambda: DRAW.randrange(-1 << 70, 1 << 70), lambda: DRAW.uniform(-1, 1),
             lambda: "".join(DRAW.choice('ab"$\\\n\u20ac') for _ in range(DRAW.randrange(5))), lambda: DRAW.randbytes(3),
             lambda: np.arange(DRAW.randrange(3)).astype(DRAW.choice(["f4", "i8", "?", "S3", "U2"])), lambda: np.float32(2.5),
             lambda: torch.arange(6, dtype=DRAW.choice([torch.bfloat16, torch.int16, torch.float64])).reshape(2, 3),
             lambda: torch.complex64, lambda: frozenset([1, "a"])]
    if depth:
        kinds += [lambda: [drawn(depth - 1) for _ in range(DRAW.randrange(4))], lambda: tuple(drawn(depth - 1) for _ in range(2)),
                  lambda: {DRAW.choice(["$", "a", 7, (1, 2)]): drawn(depth - 1) for _ in range(3)},
                  lambda: np.array([None, DRAW.choice(["a", 7, b"b"])], dtype=object)] * 2
    return DRAW.choice(kinds)()


class Objects(unittest.TestCase):
    def test_they_come_back(self):
        for _ in range(400):
            value = drawn()
            self.assertTrue(same(objects.loads(objects.dumps(value)), value), f"seed {SEED}: {value!r}")

    def test_times_of_every_unit_come_back(self):
        for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "25s"):
            for value in (np.datetime64(3, unit), np.arange(3).astype(f"m8[{unit}]")):
                with self.subTest(unit=unit, value=value):
                    self.assertTrue(same(objects.loads(objects.dumps(value)), value))

    def test_empty_strings_of_numpy_come_back(self):
        for value in (np.str_(""), np.bytes_(b""), np.array(["", "a"])[0], np.array(["", ""]), [np.str_(""), np.str_("a")]):
            with self.subTest(value=value):
                self.assertTrue(same(objects.loads(objects.dumps(value)), value))

    def test_masked_arrays_do_not_lose_their_mask(self):
        for value in (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, "a"], mask=[0, 1], dtype=object), np.ma.masked):
            with self.assertRaisesRegex(TypeError, "mask"):
                objects.dumps([value])
        back, = objects.loads(objects.dumps([np.ma.array([1, 2], mask=[0, 1])], pickle=True), pickle=True)
        self.assertEqual(back.mask.tolist(), [False, True])

    def test_what_comes_back_is_writable(self):
        array, tensor = objects.loads(objects.dumps([np.zeros(3), torch.zeros(3)]))
        array[0] = tensor[0] = 1

    def test_nested_tensors_come_back(self):
        rows = [torch.arange(3), torch.arange(5)]
        for layout in (torch.jagged, torch.strided):
            found = objects.loads(objects.dumps(torch.nested.as_nested_tensor(rows, layout=layout)))
            self.assertIs(found.layout, layout)
            self.assertTrue(all(map(torch.equal, found.unbind(), rows)))

    def test_what_is_no_tensor_comes_back_in_a_tensordict(self):
        for data in ("x", 7, True, None, [1, 2], (1, 2), {"k": 1}, np.arange(3), torch.arange(2), [[1], [2, 3]]):
            for batch in ([], [2]):
                with self.subTest(data=data, batch=batch):
                    given = TensorDict({"a": NonTensorData(data, batch_size=batch), "b": torch.zeros(batch)}, batch)
                    found = objects.loads(objects.dumps({"it": given}))["it"]
                    self.assertEqual((found.batch_size, set(found.keys())), (given.batch_size, {"a", "b"}))
                    self.assertIsInstance(found.get("a"), NonTensorData)
                    self.assertTrue(same(found.get("a").data, given.get("a").data))

    def test_a_value_a_row_comes_back_in_a_tensordict(self):
        for rows in ([1, 2], ["a", "b"], [[1, 2], [3]], [{"q": 1}, {"r": 2}], [None, 7]):
            with self.subTest(rows=rows):
                given = NonTensorStack(*map(NonTensorData, rows))
                found = objects.loads(objects.dumps(TensorDict({"a": given, "b": torch.zeros(2)}, [2])))
                self.assertIsInstance(found.get("a"), NonTensorStack)
                self.assertEqual([found[i].get("a").data for i in range(2)], rows)
                self.assertEqual(objects.loads(objects.dumps(given)), rows)
        deep = NonTensorStack(NonTensorStack(1, 2), NonTensorStack(3, 4))
        found = objects.loads(objects.dumps(TensorDict({"a": deep}, [2, 2]))).get("a")
        self.assertEqual((found.batch_size, found.tolist()), (deep.batch_size, [[1, 2], [3, 4]]))

    def test_stacked_tensordicts_come_back_with_the_fields_of_each(self):
        rows = [TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(3), "y": torch.zeros(1), "z": NonTensorData("s")})]
        found = objects.loads(objects.dumps(LazyStackedTensorDict(*rows)))
        self.assertIsInstance(found, LazyStackedTensorDict)
        for row, wanted in enumerate(rows):
            self.assertEqual(set(found[row].keys()), set(wanted.keys()))
            self.assertTrue(torch.equal(found[row]["x"], wanted["x"]))

    def test_changed_bytes_are_refused_or_another_value(self):
        for _ in range(300):
            data = bytearray(objects.dumps(drawn()))
            cut = bytes(data[:DRAW.randrange(len(data))])
            data[DRAW.randrange(len(data))] ^= 1 << DRAW.randrange(8)
            for broken in (bytes(data), cut):
                try:
                    objects.loads(broken)
                except ValueError:
                    pass

    def test_sizes_are_believed_only_as_far_as_there_are_bytes(self):
        data = objects.dumps(torch.zeros(2))
        for wrong in (b"[900000000000],0]", b"[3],8]", b"[2],9]"):
            with self.assertRaises(ValueError):
                tree = data[5:].split(b"}")[0].replace(b"[2],8]", wrong) + b"}"
                objects.loads(data[:1] + len(tree).to_bytes(4, "little") + tree + bytes(8))

    def test_what_is_not_kept_is_refused_with_its_name(self):
        for value in (Own(), [Own()], {"a": (1, {2: Own()})}, np.array([Own()], dtype=object)):
            with self.assertRaisesRegex(TypeError, "Own"):
                objects.dumps(value)

    def test_pickles_are_read_only_where_they_are_asked_for(self):
        data = objects.dumps([Own()], pickle=True)
        self.assertEqual(objects.loads(data, pickle=True), [Own()])
        with self.assertRaisesRegex(ValueError, "pickle"):
            objects.loads(data)
        self.assertEqual(objects.dumps([1], pickle=True), objects.dumps([1]))


class Together(unittest.TestCase):
    """Cells of a column of a TensorDict, one a row."""

    def test_of_several_dtypes_each_keeps_its_own(self):
        for cells in ([torch.tensor([1]), torch.tensor([0.5, 1.0])], [torch.tensor([0.5]), torch.tensor([2 ** 40 + 1])],
                      [torch.tensor(1), torch.tensor(0.5)], [torch.tensor([1]), torch.tensor([0.5])]):
            with self.subTest(cells=cells):
                self.assertTrue(same(together(cells).tolist(), cells))

    def test_of_one_dtype_they_are_a_tensor(self):
        for cells in ([torch.tensor([1]), torch.tensor([2, 3])], [torch.zeros(2, 3), torch.zeros(3, 4)]):
            found = together(cells)
            self.assertTrue(found.is_nested and all(map(torch.equal, found.unbind(), cells)))
        self.assertTrue(torch.equal(together([torch.tensor(1), torch.tensor(2)]), torch.tensor([1, 2])))


if __name__ == "__main__":
    print(f"seed {SEED}")
    unittest.main()
