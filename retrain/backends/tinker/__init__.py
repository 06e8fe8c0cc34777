"""The Tinker backend: a remote service samples and learns, and this process sends token ids and
advantages. No torch is imported here.
"""
