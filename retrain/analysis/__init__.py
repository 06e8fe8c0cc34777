"""What is done with runs once they are there: reading them, comparing conditions across seeds, planning how many seeds to run."""
