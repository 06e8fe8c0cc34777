"""How often a reward errs: it is run on answers whose verdict is known, right ones in other forms
and wrong ones that look right.
"""
