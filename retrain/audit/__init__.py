"""How often a reward errs. It is run on answers with a known verdict: right ones in other forms,
and wrong ones that look right.
"""
