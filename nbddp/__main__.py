"""Worker side. ``python -m nbddp job.nbddp``: a job file as one rank of torchrun's, srun's or nobody's."""

from nbddp.worker.alone import main

if __name__ == "__main__":
    main()
