"""Collectives of every dtype and shape."""

import pytest

from tests.support import Cells, run


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_collectives_of_every_dtype_and_shape_are_torchs_own(cell: Cells, seed: int) -> None:
    """To the bit on two ranks, judged by what torch gives for both ranks' tensors, which each rank makes."""
    names = cell("""
        import itertools, nbddp, torch
        floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
        dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *floats]
        shapes = [(), (0,), (5,), (3, 4), (2, 3, 300)]
        def made(dtype, shape, seed):
            generator = torch.Generator().manual_seed(seed)
            numbers = torch.randint(0, 2 if dtype is torch.bool else 100, (*shape, 2), generator=generator)
            numbers = numbers / 7 if dtype in floats else numbers
            x = torch.view_as_complex(numbers).conj() if dtype.is_complex else numbers[..., 0].to(dtype)
            return x.transpose(0, -1) if x.ndim > 1 else x
        def combined(every, op):
            both = torch.stack([x.resolve_conj() for x in every])
            if both.is_complex() and op in ("min", "max"): return None  # torch refuses it, but of no numbers at all
            wide = both.float() if both.dtype in floats[:2] else both
            try: total = getattr(wide, f"a{op}" if op in ("min", "max") else op)(0)
            except RuntimeError: return None
            return total.to(both.dtype) if both.dtype in floats else total
        def tried(x, op):
            try: return nbddp.all_reduce(x, op)
            except ValueError: return None
        def equal(a, b): return a is b is None or (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)
        def train(seed):
            ranks, wrong = range(nbddp.world_size()), []
            for dtype, shape in itertools.product(dtypes, shapes):
                every = [made(dtype, shape, 100 * seed + rank) for rank in ranks]
                mine, parts = every[nbddp.rank()], [x.reshape(-1)[:rank + 1] for rank, x in enumerate(every)]
                pairs = [(tried(mine, op), combined(every, op)) for op in ("sum", "mean", "min", "max")]
                pairs += zip(nbddp.all_gather(mine), every, strict=True)
                pairs += zip(nbddp.all_gather(parts[nbddp.rank()]), parts, strict=True)
                pairs += [(nbddp.broadcast(mine, src), every[src]) for src in ranks]
                wrong += [(dtype, shape, i) for i, (ours, theirs) in enumerate(pairs) if not equal(ours, theirs)]
            return wrong
    """)
    assert run(names.train, seed).values == [[], []]
