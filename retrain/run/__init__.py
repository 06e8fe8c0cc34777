"""One run, from its folder to its summary: the loop, what it is made of, and the gate that it must
pass.
"""
