"""Fused kernels of a decoding step, each with the same function in torch's operators as its reference and its substitute.

`steps.py` says what the step needs, has the torch forms, and chooses. The other files are Triton, and are imported only where chosen.
"""
