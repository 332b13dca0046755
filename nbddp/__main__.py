"""``python -m nbddp job.nbddp``: runs a job file as one rank of torchrun or srun, or as a single process."""

from nbddp.job.rank import main

if __name__ == "__main__":
    main()
