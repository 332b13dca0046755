"""Results that are large, or can't come back."""

from tests.support import Cells, run, script


def test_a_report_that_finds_no_free_descriptor_ends_the_run() -> None:
    ended = script("""
        import os, resource, threading, time, nbddp
        def use_all():
            time.sleep(1)
            while True:
                try: held.append(os.open("/dev/null", os.O_RDONLY))
                except OSError: break
            os.close(held.pop())
            free.touch()
        def train(free):
            while not free.exists(): time.sleep(0.01)
            return [1, 2, 3]
        import pathlib, tempfile
        free, held = pathlib.Path(tempfile.mkdtemp()) / "free", []
        nbddp.run(print, nprocs=1, show=False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        threading.Thread(target=use_all).start()
        try: nbddp.run(train, (free,), nprocs=1, show=False)
        except nbddp.NbddpError as error: print(error)
        free.unlink(), free.parent.rmdir()
    """)
    assert "nbddp itself failed: RuntimeError: too many open files; raise the limit (ulimit -n)" in ended.stdout


def test_500_mb_come_back_without_deadlock(cell: Cells) -> None:
    """A queue's pipe holds 64 kB: a launcher that joins before it reads hangs."""
    names = cell("""
        import torch, numpy, nbddp
        def train():
            big = torch.full((125_000_000,), float(nbddp.rank() + 1))
            return (big, big[:10]) if nbddp.rank() == 0 else numpy.arange(1_000_000)
    """)
    done = run(names.train, timeout=120)
    big, part = done.values[0]
    assert (big.nbytes, big.device.type, bool((big == 1).all())) == (500_000_000, "cpu", True)
    part.fill_(7)
    assert big[9].item() == 7  # views still share storage
    assert done.values[1].sum() == 499_999_500_000
