"""Faults at random moments of random runs, from a seed: ``python -m tests.faults --count 500 --seed 1``.

cases.py      a seed's case: runs, fault, moment, and which ends of it are legal
programs.py   what the ranks do, and how to tell the right value
driver.py     a kernel for many cases: runs what it is told, looks at itself after
kernels.py    that kernel from outside; real Jupyter kernels
apply.py      does the harm
pace.py       how busy the machine is: limits stretch with that
suite.py      one case after the other, what is left of each, the table
"""
