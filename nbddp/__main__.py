"""``python -m nbddp job.nbddp``: runs a job, as one rank of torchrun or as a single process."""

from nbddp.job.launched import main

if __name__ == "__main__":
    main()
