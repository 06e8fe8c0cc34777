"""Run one training from its folder to its summary: the loop, the parts of the run, and the gate
before the first step.
"""
