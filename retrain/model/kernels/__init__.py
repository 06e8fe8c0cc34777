"""Fused kernels of a decoding step, each with the same function in torch's operators as its
reference and its substitute.

`model/step_kernels.py` says what the step needs, has the torch forms, and chooses. `model/probe.py`
compares the two. The files here are Triton, imported only where chosen.
"""
