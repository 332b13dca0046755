"""What nbddp costs beside what a user would pick instead; ``python -m tests.benchmarks`` prints the tables."""
