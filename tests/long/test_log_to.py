"""W&B's run and a logger of Lightning's as destinations, judged by what they have stored."""

import json
from pathlib import Path

from tests.support import script
from tests.wandb_file import stored_rows

TRACKED = """
    import json, time
    import nbddp, wandb
    from lightning_fabric.loggers import CSVLogger
    def train():
        for step in range(30): nbddp.log(loss=1 / (step + 1), mean=nbddp.rank() + step, step=step, reduce="mean")
    logger = CSVLogger(".", name="lightning")
    with wandb.init(project="trial", mode="offline") as run:
        run.log({"before": 1.0})
        began = time.time()
        nbddp.run(train, nprocs=2, device="cpu", log_to=[run, logger], show=False)
        print(json.dumps([began, time.time(), logger.log_dir]))
        run.log({"after": 1.0})
"""


def test_wandb_and_a_logger_of_lightnings_have_every_point(in_folder: Path) -> None:
    import pandas

    done = script(TRACKED, WANDB_SILENT="true", TMPDIR=str(in_folder))
    assert done.returncode == 0, done.stderr
    began, ended, log_dir = json.loads(done.stdout.splitlines()[-1])
    (path,) = in_folder.glob("wandb/offline-run-*/*.wandb")
    first, *rows, last = stored_rows(path)
    assert (first["before"], last["after"]) == (1.0, 1.0)
    assert [(row["step"], row["mean"], row["loss"]) for row in rows] == [(s, s + 0.5, 1 / (s + 1)) for s in range(30)]
    assert all(began < row["_timestamp"] < ended for row in rows)
    assert [*pandas.read_csv(in_folder / log_dir / "metrics.csv")["mean"]] == [step + 0.5 for step in range(30)]
