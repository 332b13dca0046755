"""Results that can't come back."""

from __future__ import annotations

from tests.support import script


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
    assert "nbddp itself failed: RuntimeError: received 0 items of ancdata" in ended.stdout
