"""Analysis of stored runs: reading them, comparing conditions across seeds, and planning the number
of seeds.
"""
