"""Measure how often a reward errs. The audit runs it on answers with a known verdict: right ones in
other forms, and wrong ones that look right.
"""
